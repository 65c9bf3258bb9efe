"""The shell of pages: data that cannot break out, nothing from a network."""

import json
from html.parser import HTMLParser

import pytest

from swift_vlpack.pages.page import asset, data, page


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
