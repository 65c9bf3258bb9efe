"""The pack browser, opened in Chromium: by keyboard, with hostile texts, without a network."""

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from swift_vlpack.pages.browser import browser
from swift_vlpack.pages.page import asset
from swift_vlpack.pages.values import Picture, StepShown, TrainedPack
from tests.browser import CHROMIUM, measured, needs_chromium
from tests.pages.test_page import Elements, contrast
from tests.pages.test_terminal import member, pack, unit

HOME = "/home/jane/pictures/a.jpg"
NASTY = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> & <b>x</b>"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


class Shown(HTMLParser):
    """The text of a page beside its scripts, and the attributes of its elements."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.elements, self._inside = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._inside):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def packs(num_packs=5):
    first = [member(f"photos:{n}", tokens=30 + 10 * n) for n in range(num_packs)]
    return [pack(one, member("chat:1", tokens=30, start=one.num_tokens), number=n) for n, one in enumerate(first)]


def made(shown=None, most_mb=20.0, **options):
    return browser(packs() if shown is None else shown, most_mb=most_mb, **options)


def opened(page, tmp_path, script="", *, width=1200, height=900):
    """What Chromium makes of it, after a script of the test."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{height}"]
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True)
    return Shown(done.stdout)


def test_size_is_limited_and_the_page_says_so():
    """SEE-8"""
    everything, said = made()
    assert said == "5 packs"
    size = len(json.dumps(content(everything)["packs"][0], ensure_ascii=False))
    limited, said = made(most_mb=2.5 * size / 1e6, num_packs=5)
    assert len(content(limited)["packs"]) == 2
    assert said == f"2 of 5 packs; the page is limited to {2.5 * size / 1e6:g} MB, --html_mb sets another limit"
    assert said in Shown(limited).text
    assert len(content(made(most_mb=1e-6)[0])["packs"]) == 1, "one is there always"


def content(page):
    return json.loads(Elements(page).inside["data"])


def test_page_without_a_pack_says_so():
    """SEE-8"""
    step = StepShown(
        step=3,
        packs=[TrainedPack(rank=0, epoch=0, number=1, ids=[NASTY], where=[NASTY], lengths=[1])],
        known_from="record",
    )
    page, said = made([], steps=[step])
    assert said == "0 packs"
    assert NASTY in "".join(Shown(page).texts)
    assert "<b>x</b>" not in page


def test_page_names_model_and_data_and_no_home():
    """SEE-10: of packs, and of steps."""
    one = replace(member("photos:1"), where="/home/jane/data/a.jsonl:2", pictures=[Picture("image", 12, name=HOME)])
    gone = {"id": "photos:9", "reason": "file_missing", "error": f"No such file: '{HOME}'"}
    page, _ = made([replace(pack(one), left_out=[gone])], model="/models/tiny")
    assert Elements(page).inside["title"].strip() == "Packs: tiny on photos"
    assert "jane" not in page
    assert page.count("~/data/a.jsonl:2") == page.count("~/pictures/a.jpg'") == 1
    trained = TrainedPack(rank=0, epoch=0, number=1, ids=["chat:1"], where=["/home/jane/data/a.jsonl:2"], lengths=[1])
    page, _ = made([], steps=[StepShown(step=3, packs=[trained], known_from="record")])
    assert Elements(page).inside["title"].strip() == "Packs of step 3: chat"
    assert "jane" not in page


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_masks_can_be_read_on_their_grounds(theme):
    """SEE-7"""
    colours = {name: both for name, *both in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css())}
    for name in ("supervised", "masked", "vision"):
        assert contrast(colours[name][theme], colours[f"{name}-bg"][theme]) >= 4.5, name


def css():
    return asset("browser.css")


@needs_chromium
def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    """SEE-6"""
    page, _ = made([pack(member(name=NASTY, text=NASTY))])
    shown = opened(page, tmp_path)
    assert next(text for text in shown.texts if text.startswith("Pack")).startswith("Packs: </script><script>")
    assert "Packs" in shown.text
    assert NASTY in "".join(shown.texts)
    assert [attrs for tag, attrs in shown.elements if tag in ("img", "b")] == []


DRIVE = """
    const by = (id) => document.getElementById(id), seen = [];
    const press = (key) => document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
    const choose = (id, value) => { by(id).value = value; by('filters').dispatchEvent(new Event('input')); };
    const note = () => seen.push({
        count: by('count').textContent, headline: by('headline').textContent, scrolled: scrollY,
        current: [...document.querySelectorAll('[aria-current=true]')].map((one) => one.dataset.key),
        focus: document.activeElement.id,
    });
    note();
    for (const key of ['ArrowRight', 'j', 'ArrowLeft']) press(key);
    note();
    choose('find', 'photos:3');
    note();
    choose('find', ''); choose('fill', '0.95,1.00001'); choose('source', 'photos');
    note();
    press('/');
    note();
    document.title = JSON.stringify(seen);
"""


@needs_chromium
def test_packs_are_browsed_by_keyboard_and_filtered(tmp_path):
    """SEE-8: in a window in which the list does not fit, and which stays where the reader is."""
    shown = opened(made()[0], tmp_path, DRIVE, width=500, height=300)
    first, moved, found, filtered, focused = json.loads(next(text for text in shown.texts if text.startswith("[{")))
    assert (first["count"], first["headline"], first["current"]) == ("5 of 5 packs", "Epoch 1, pack 0", ["1/0"])
    assert (moved["headline"], moved["current"], moved["scrolled"]) == ("Epoch 1, pack 1", ["1/1"], 0)
    assert (found["count"], found["headline"]) == ("1 of 5 packs", "Epoch 1, pack 3")
    assert (filtered["count"], filtered["headline"]) == ("1 of 5 packs", "Epoch 1, pack 4")
    assert focused["focus"] == "find"


@needs_chromium
def test_nothing_is_wider_than_a_phone(tmp_path):
    """SEE-8"""
    page, _ = made([pack(*(member(f"{'long' * 20}:{n}", tokens=30, start=30 * n) for n in range(9)))])
    # Chromium has no window of less than 500 pixels; a body can have any width, and what sticks out of it is seen.
    measure = """
        document.body.style.width = '390px';
        const apart = [...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll > *, option'));
        document.title = 'edge ' + Math.max(...apart.map((one) => Math.ceil(one.getBoundingClientRect().right)));
    """
    shown = opened(page, tmp_path, measure, width=500, height=844)
    edge = int(re.search(r"edge (\d+)", shown.text)[1])
    assert 300 < edge <= 390


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_branches_are_drawn_after_their_prefix(theme, tmp_path):
    """SHARE-83: to scale in the bar, under it in the table, around both in full; hostile texts do nothing."""
    prefix, branches = unit(text=NASTY)
    page, _ = made([replace(pack(*branches, member("chat:1", tokens=10, start=90)), prefixes=[prefix])])
    found = measured(
        page,
        """((all) => ({
            bar: all('.bar a').map((one) => [one.title, Math.round(one.getBoundingClientRect().width)]),
            lines: all('.members tbody tr').map((one) => one.innerText.trim().split(/\\s+/).join(' ')),
            units: all('.unit').map((one) => [...one.querySelectorAll('h3')].map((h) => h.textContent)),
            others: all('#pack > .sample').length,
            found: all('#p0, #s0, #s1, #s2').length,
            text: all('.unit .prefix .text')[0].textContent,
            nasty: all('.unit .text b').length,
            ground: view.getComputedStyle(all('.unit')[0]).backgroundColor,
        }))((what) => [...root.querySelectorAll(what)])""",
        theme=theme,
    )
    names, widths = zip(*found["bar"], strict=True)
    assert names == ("prefix of 2 rows: 20 tokens", "vqa:3: 30 tokens", "vqa:4: 40 tokens", "chat:1: 10 tokens")
    assert [round(width / widths[-1]) for width in widths] == [2, 3, 4, 1]
    assert found["lines"][0].startswith("prefix of 2 rows 20 0 60% image 640x480")
    assert [line[:12] for line in found["lines"][1:3]] == ["vqa:3 + 30 1", "vqa:4 + 40 1"]
    assert found["units"] == [["Prefix of 2 rows, computed once", "vqa:3", "vqa:4"]]
    assert (found["others"], found["found"], found["nasty"]) == (1, 4, 0)
    assert NASTY in found["text"]
    assert found["ground"] != "rgba(0, 0, 0, 0)"
