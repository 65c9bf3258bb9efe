"""The pack browser: what is in the page, and what Chromium shows of it."""

import json
from dataclasses import replace

from swift_vlpack.pages.browser import browser
from swift_vlpack.pages.values import Picture
from tests.browser import measured, needs_chromium
from tests.pages.test_page import Elements
from tests.pages.test_terminal import member, pack, unit

HOME = "/home/jane/pictures/a.jpg"
NASTY = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> & <b>x</b>"


def packs(num_packs=5):
    first = [member(f"photos:{n}", tokens=30 + 10 * n) for n in range(num_packs)]
    return [pack(one, member("chat:1", tokens=30, start=one.num_tokens), number=n) for n, one in enumerate(first)]


def content(page):
    return json.loads(Elements(page).inside["data"])


def test_page_has_the_json_of_its_packs_as_far_as_its_size_allows():
    """SEE-2 SEE-8"""
    everything, said = browser(packs())
    assert said == "5 packs"
    assert content(everything) == [{**json.loads(json.dumps(one.as_json())), "row": None} for one in packs()]
    size = len(json.dumps(content(everything)[0], ensure_ascii=False))
    limited, said = browser(packs(), num_packs=5, most_bytes=int(2.5 * size))
    assert len(content(limited)) == 2
    assert said.startswith("2 of 5 packs; the page is limited to ")
    assert said in limited
    assert len(content(browser(packs(), most_bytes=1)[0])) == 1, "one is there always"


def test_page_names_model_and_data_and_no_home():
    """SEE-10"""
    one = replace(member("photos:1"), where="/home/jane/data/a.jsonl:2", pictures=[Picture("image", 12, name=HOME)])
    gone = {"id": "photos:9", "reason": "file_missing", "error": f"No such file: '{HOME}'"}
    page, _ = browser([replace(pack(one), left_out=[gone])], model="/models/tiny")
    assert Elements(page).inside["title"].strip() == "Packs: tiny on photos"
    assert "jane" not in page
    assert page.count("~/data/a.jsonl:2") == page.count("~/pictures/a.jpg'") == 1


@needs_chromium
def test_hostile_texts_are_shown_and_do_nothing():
    """SEE-6"""
    page, _ = browser([pack(member(name=NASTY, text=NASTY))])
    found = measured(
        page, "[view.document.title, root.innerText, root.querySelectorAll('img, b, article script').length]"
    )
    title, text, num_made = found
    assert title.startswith("Packs: </script><script>")
    assert text.count(NASTY) > 1
    assert num_made == 0


FILTERED = """((by) => {
  const choose = (id, value) => { by(id).value = value; by('filters').dispatchEvent(new view.Event('input')); };
  const seen = () => [by('count').textContent, by('headline').textContent];
  const all = seen();
  choose('find', 'photos:3');
  const found = seen();
  choose('find', ''); choose('fill', '0.95,1.00001'); choose('source', 'photos');
  return [all, found, seen(), root.scrollWidth];
})((id) => view.document.getElementById(id))"""


@needs_chromium
def test_packs_are_filtered_and_nothing_is_wider_than_a_phone():
    """SEE-8"""
    shown = [*packs(), pack(*(member(f"{'long' * 20}:{n}", tokens=30, start=30 * n) for n in range(9)), number=5)]
    all_packs, found, filtered, width = measured(browser(shown)[0], FILTERED, width=390)
    assert all_packs == ["6 of 6 packs", "Epoch 1, pack 0"]
    assert found == ["1 of 6 packs", "Epoch 1, pack 3"]
    assert filtered == ["1 of 6 packs", "Epoch 1, pack 4"]
    assert width == 390


@needs_chromium
def test_branches_are_drawn_after_their_prefix():
    """SHARE-83: to scale in the bar, under it in the table, around both in full; hostile texts do nothing."""
    prefix, branches = unit(text=NASTY)
    page, _ = browser([replace(pack(*branches, member("chat:1", tokens=10, start=90)), prefixes=[prefix])])
    found = measured(
        page,
        """((all) => ({
            bar: all('.bar a').map((one) => [one.title, Math.round(one.getBoundingClientRect().width)]),
            lines: all('.members tbody tr').map((one) => one.innerText.trim().split(/\\s+/).join(' ')),
            units: all('.unit').map((one) => [...one.querySelectorAll('h3')].map((h) => h.textContent)),
            others: all('#pack > .sample').length,
            text: all('.unit .prefix .text')[0].textContent,
            nasty: all('.unit .text b').length,
        }))((what) => [...root.querySelectorAll(what)])""",
    )
    names, widths = zip(*found["bar"], strict=True)
    assert names == ("prefix of 2 rows: 20 tokens", "vqa:3: 30 tokens", "vqa:4: 40 tokens", "chat:1: 10 tokens")
    assert [round(width / widths[-1]) for width in widths] == [2, 3, 4, 1]
    assert found["lines"][0].startswith("prefix of 2 rows 20 0 60% image 640x480")
    assert [line[:12] for line in found["lines"][1:3]] == ["vqa:3 + 30 1", "vqa:4 + 40 1"]
    assert found["units"] == [["Prefix of 2 rows, computed once", "vqa:3", "vqa:4"]]
    assert (found["others"], found["nasty"]) == (1, 0)
    assert NASTY in found["text"]
