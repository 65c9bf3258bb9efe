"""The shell of pages: colours that can be read, data that cannot break out, nothing from a network."""

import json
import re
from html.parser import HTMLParser
from itertools import product

import pytest

from swift_vlpack.pages.page import asset, data, page

TEXTS = ("fg", "muted", "accent", "good", "warn", "bad")
SERIES = tuple(f"c{number}" for number in range(1, 9))


class Elements(HTMLParser):
    """What a parser of HTML makes of a page."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inside = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found:
            name = self.found[-1][1].get("id", self.found[-1][0])
            self.inside[name] = self.inside.get(name, "") + data


def colours():
    """Of each name, the colour in light and in dark."""
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", asset("page.css"))
    return {name: both for name, *both in found}


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """As WCAG counts it, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_series_stand_out_from_the_background(theme):
    """SEE-7: 4.5 to 1 for text, 3 to 1 for what is drawn."""
    known = {name: both[theme] for name, both in colours().items()}
    too_faint = {
        (name, on): round(contrast(known[name], known[on]), 2)
        for least, names in ((4.5, TEXTS), (3.0, SERIES))
        for name, on in product(names, ("bg", "card"))
        if contrast(known[name], known[on]) < least
    }
    assert too_faint == {}


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "a & b > c", "\u2028 \u2029", "]]>", '"\\u003c']
)
def test_no_text_of_the_data_becomes_part_of_the_page(text):
    """SEE-6"""
    made = page("t", data("rows", {"text": text, text: 1}))
    elements = Elements(made)
    assert [tag for tag, _ in elements.found].count("script") == 2  # the data, and the page's own
    assert json.loads(elements.inside["rows"]) == {"text": text, text: 1}
    assert "<script>alert" not in made


def test_title_is_escaped():
    """SEE-6"""
    assert "<title>&lt;b&gt;</title>" in page("<b>", "")


def test_page_asks_no_network_for_anything():
    """SEE-6"""
    elements = Elements(page("t", "<p>x</p>", ".x { color: var(--c1) }", "document.title;"))
    assert not [attrs for _, attrs in elements.found if {"src", "href"} & set(attrs)]
    policy = next(attrs["content"] for _, attrs in elements.found if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "url(" not in asset("page.css")
