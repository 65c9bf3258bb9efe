"""Which rows share a prefix, found before training, and by real templates."""

import copy
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import ImageFile
from swift.model import get_model_processor
from swift.template import get_template

from swift_vlpack.comm import ALONE
from swift_vlpack.config import PackingConfig
from swift_vlpack.host import headers, length_pass
from swift_vlpack.lengths import prefixes as pass_of_prefixes
from swift_vlpack.lengths.cache_folder import remembered_in
from swift_vlpack.lengths.prefixes import SourceToShare, sharing_rows, with_prefixes
from swift_vlpack.lengths.rows_work import Encoders
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.fusion import FusionCaptionDataset
from swift_vlpack.rows.prefixes import how_prefixes_differ
from swift_vlpack.rows.randomness import RandomStream
from swift_vlpack.rows.samples import Address
from swift_vlpack.rows.shared import Alone
from swift_vlpack.rows.urls import Urls
from tests.data_rows import image_row, text_row
from tests.family_models import FAMILIES, own_ids
from tests.host.lengths.support import ARGS, dataset, source
from tests.images import photo
from tests.marks import quick_only
from tests.ranks_in_threads import on_ranks
from tests.videos import video

PACKING_LENGTH = 2048
pytestmark = pytest.mark.usefixtures("never_again")


def shared(template, sources, cache, packing_length=PACKING_LENGTH):
    """The sources with the prefixes that their rows share."""
    return length_pass.with_all_lengths(sources, RowEncoder(template), ARGS, str(cache), share_within=packing_length)


def questions(paths, each=3):
    return [image_row([path], f"question {number} of it?", "an answer") for path in paths for number in range(each)]


def test_rows_of_one_image_share_the_tokens_through_it(template, tmp_path):
    """SHARE-40"""
    paths = [photo(tmp_path, f"p{n}", 100 + 28 * n, 140, seed=n) for n in range(3)]
    rows = [*questions(paths), image_row([photo(tmp_path, "other", 90, 90)])]
    random.Random(0).shuffle(rows)
    (found,) = shared(template, [source(dataset(rows))], tmp_path / "cache")
    assert found.prefixes.num_sharing == 9
    encoder = RowEncoder(template)
    samples = [encoder.sample(found.row(n), found.sample_id(n)) for n in range(len(rows))]
    by_key = {}
    for n, (key, length) in enumerate(zip(found.prefixes.key.tolist(), found.prefixes.length.tolist(), strict=True)):
        assert (key == 0) == (length == 0) == (len(rows[n]["images"]) == 1 and "other" in rows[n]["images"][0])
        by_key.setdefault(key, []).append((n, length))
    del by_key[0]
    assert sorted(map(len, by_key.values())) == [3, 3, 3]
    end = template.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    for members in by_key.values():
        first, length = members[0]
        assert all(rows[n]["images"] == rows[first]["images"] for n, _ in members)
        assert all(how_prefixes_differ(samples[first], samples[n], length) is None for n, _ in members)
        assert samples[first]["input_ids"][length - 1] == end


def test_sources_share_with_each_other_if_their_settings_are_equal(template, tmp_path):
    """SHARE-46"""
    path = photo(tmp_path, "a", 300, 300)
    one, other = image_row([path], "who?"), image_row([path], "where?")
    sources = [
        source([one], "one"),
        source([other], "other"),
        source([one], "small", max_pixels=20000),
        source([one], "told", system="Be brief."),
    ]
    found = shared(template, sources, tmp_path / "cache")
    assert [one.prefixes.num_sharing for one in found] == [1, 1, 0, 0]
    assert found[0].prefixes.key[0] == found[1].prefixes.key[0]
    assert [(one.cause, one.num_rows) for one in found[2].prefixes.alone] == [(Alone.OTHER_TOKENS, 1)]


def test_rows_that_stay_alone_are_counted_by_cause_with_the_way_out(template, tmp_path, caplog):
    """SHARE-42: a medium after an answer, a tag too many and a row as long as a pack are of the third cause."""
    paths = [photo(tmp_path, name, 200, 200, seed=n) for n, name in enumerate("abcdefg")]
    later = {**text_row("hi"), "images": [paths[2]]}
    later["messages"] = [*later["messages"], *image_row([paths[2]])["messages"]]
    rows = [
        *questions(paths[:1], 2),
        {**text_row("look: <image>who?"), "images": [paths[1]]},
        {**text_row("who?<image>"), "images": [paths[1]]},
        image_row([paths[2]]),
        later,
        image_row([paths[3], paths[4]]),
        image_row([paths[4], paths[3]]),
        {**text_row("<image><image>who?"), "images": [paths[5]]},
        image_row([paths[5]]),
        image_row([paths[6]], "long " * 700),
        image_row([paths[6]]),
    ]
    with caplog.at_level("INFO", pass_of_prefixes.logger.name):
        (found,) = shared(template, [source(rows)], tmp_path / "cache", packing_length=600)
    assert found.prefixes.num_sharing == 2
    causes = {one.cause: (one.num_rows, one.example) for one in found.prefixes.alone}
    assert causes == {
        Alone.OTHER_TOKENS: (2, 2),
        Alone.OTHER_MEDIA: (2, 6),
        Alone.CANNOT: (3, 5),
    }
    said = caplog.text
    assert "source rows: 2 rows of 12 share 1 prefix, median 2 rows each" in said
    assert all(one.cause.text in said and one.cause.way_out in said for one in found.prefixes.alone)
    assert "rows row 3" in said


def drawing(template):
    own = copy.copy(template)
    load = template._load_image
    own._load_image = lambda image, load_images: (random.random(), load(image, load_images))[1]
    return own


def test_template_that_draws_shares_nothing(template, tmp_path, caplog):
    """SHARE-47"""
    rows = [*questions([photo(tmp_path, "a")]), *(text_row(str(n)) for n in range(2))]
    (found,) = shared(drawing(template), [source(rows)], tmp_path / "cache")
    assert found.prefixes.num_sharing == 0
    assert [(one.cause, one.num_rows) for one in found.prefixes.alone] == [(Alone.CANNOT, 3)]


def test_template_whose_rows_differ_after_all_shares_nothing(template, tmp_path):
    """SHARE-47: a column that only a template of one's own reads."""

    def turned(self, inputs):
        super(type(self), self)._preprocess_inputs(inputs)
        if inputs.extra_kwargs.get("mirror"):
            inputs.images = [image.transpose(0) for image in inputs.images]

    own = copy.copy(template)
    own.__class__ = type("Own", (type(template),), {"_preprocess_inputs": turned})
    path = photo(tmp_path, "a")
    rows = [{**image_row([path], f"{n}?"), "mirror": n == 1} for n in range(2)]
    (found,) = shared(own, [source(rows)], tmp_path / "cache")
    assert found.prefixes.num_sharing == 0
    assert [one.cause for one in found.prefixes.alone] == [Alone.CANNOT]


def test_second_start_encodes_nothing_to_find_prefixes(template, tmp_path, monkeypatch):
    """SHARE-48: and a changed image is looked at again."""
    paths = [photo(tmp_path, name, 320, 240, seed=n) for n, name in enumerate("abc")]
    rows = [*questions(paths), *(text_row(str(n)) for n in range(3))]
    (cold,) = shared(template, [source(rows)], tmp_path / "cache")
    assert cold.prefixes.num_sharing == 9
    with monkeypatch.context() as patched:
        for owner, name in ((pass_of_prefixes._GroupWork, "_length"), (pass_of_prefixes._PrefixPass, "_is_same")):
            patched.setattr(owner, name, lambda *_: pytest.fail("encoded"))
        (warm,) = shared(template, [source(rows)], tmp_path / "cache")
    assert (cold.prefixes.key == warm.prefixes.key).all()
    assert (cold.prefixes.length == warm.prefixes.length).all()
    photo(tmp_path, "a", 600, 600)
    (changed,) = shared(template, [source(rows)], tmp_path / "cache")
    assert changed.prefixes.length[0] > warm.prefixes.length[0]
    assert (changed.prefixes.length[3:] == warm.prefixes.length[3:]).all()


class OneAtATime(RandomStream):
    """Ranks are processes, which have random states of their own; threads share one."""

    lock = threading.Lock()

    def __enter__(self):
        self.lock.acquire()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.lock.release()

    @property
    def has_drawn(self):
        with self.lock:  # which begins the states of the process anew, to compare
            return super().has_drawn


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_agree_with_one_rank(num_ranks, template, tmp_path, monkeypatch):
    """SHARE-48"""
    monkeypatch.setattr(pass_of_prefixes, "RandomStream", OneAtATime)
    paths = [photo(tmp_path, name, 200, 100 + 40 * n, seed=n) for n, name in enumerate("abc")]
    rows = [*questions(paths, 2), {**text_row("who?<image>"), "images": paths[:1]}]
    rows += [text_row(str(n)) for n in range(3)]
    sources = [source(rows[::2], "one"), source(rows[1::2], "two")]
    measured = length_pass.with_all_lengths(sources, RowEncoder(template), ARGS, str(tmp_path / "lengths"))
    encoders = Encoders(by_header=RowEncoder(headers.pixel_free(template)), in_full=RowEncoder(template))

    def found(rank=ALONE):
        # A template of its own for each thread, as each rank is a process.
        by_header = RowEncoder(headers.pixel_free(template))
        given = [SourceToShare(one, replace(encoders, by_header=by_header)) for one in measured]
        made = with_prefixes(given, PACKING_LENGTH, rank)
        return [(one.prefixes.key.tolist(), one.prefixes.length.tolist(), one.prefixes.alone) for one in made]

    alone = found()
    assert sum(map(bool, alone[0][0])) > 2
    of_ranks = on_ranks(num_ranks, found)
    assert of_ranks == [alone] * num_ranks


def test_processes_find_what_one_process_finds(template, tmp_path, monkeypatch):
    """SHARE-48"""
    paths = [photo(tmp_path, name, 200, 100 + 40 * n, seed=n) for n, name in enumerate("abc")]
    rows = [*questions(paths), *(text_row(str(n)) for n in range(3))]
    (alone,) = shared(template, [source(rows)], tmp_path / "one")
    for name in ("_ROWS_OF_TASK", "_GROUPS_OF_TASK", "_NUM_ROWS_WORTH_A_PROCESS", "_NUM_GROUPS_WORTH_A_PROCESS"):
        monkeypatch.setattr(pass_of_prefixes, name, 1)
    several = SimpleNamespace(dataset_num_proc=3, strict=False)
    (found,) = length_pass.with_all_lengths(
        [source(rows)], RowEncoder(template), several, str(tmp_path / "several"), share_within=PACKING_LENGTH
    )
    assert found.prefixes.key.tolist() == alone.prefixes.key.tolist()
    assert found.prefixes.length.tolist() == alone.prefixes.length.tolist()


# -- branches without pixels -------------------------------------------------------------------------------------------


def fused_rows(template, sources):
    return FusionCaptionDataset(sources, headers.reading_urls(template, Urls()), pixel_free=headers.branch_template)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def assert_branches_equal_full_encodings(rows, pixels="pixel_values"):
    compared = 0
    for index, key in enumerate(rows.sources[0].prefixes.key.tolist()):
        if not key:
            continue
        full, branch = rows.encode(Address(0, index)), rows.encode_branch(Address(0, index))
        assert branch is not None
        assert {name for name in full if name not in branch} == {pixels}, "nothing else is missing"
        assert all(same(full[name], branch[name]) for name in branch)
        compared += 1
    assert compared


def decode_nothing(monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("family", quick_only(("qwen2_5_vl",), ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")))
def test_branches_have_all_but_their_pixels(family, tiny, tmp_path):
    """SHARE-45"""
    template = tiny(family).template
    paths = [photo(tmp_path, "a", 320, 240), photo(tmp_path, "b", 100, 700)]
    limited = [{**row, "chat_template_kwargs": {"max_pixels": 20000}} for row in questions(paths[:1])]
    boxes = [
        {
            **text_row(f"<image>where is <ref-object> in it, {n}?", "at <bbox>"),
            "images": paths[:1],
            "objects": {"ref": ["the tree"], "bbox": [[10, 10, 50, 50 + n]]},
        }
        for n in range(2)
    ]
    both = [image_row(paths, f"question {n}") for n in range(2)]
    rows = [*questions(paths), *both, *limited, *boxes]
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    assert found.prefixes.num_sharing == len(rows)
    assert_branches_equal_full_encodings(fused_rows(template, [found]))


def test_branches_decode_no_image_and_survive_pickling(template, tmp_path, monkeypatch):
    """SHARE-45: spawned workers get the data set by pickle."""
    rows = questions([photo(tmp_path, "a", 320, 240)])
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    model, template.model = template.model, None
    try:
        made = fused_rows(template, [found])
        made.encode_for(PackingConfig(packing_length=2048))
        unsized = made.with_sources([replace(one, sizes=None, prefixes=None) for one in made.sources])
        again = pickle.loads(pickle.dumps(unsized))
    finally:
        template.model = model
    full = made.encode(Address(0, 1))
    decode_nothing(monkeypatch)
    for one in (made, again):
        branch = one.encode_branch(Address(0, 1))
        assert all(same(full[name], branch[name]) for name in full if name != "pixel_values")
    with pytest.raises(Exception, match="decoded"):
        again.encode(Address(0, 1))


@pytest.mark.parametrize("family", quick_only(("qwen2_5_vl",), ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")))
def test_branches_of_videos_have_all_but_their_frames(family, tiny, tmp_path, monkeypatch):
    """SHARE-45: in threads too, of which others decode meanwhile; the frame that a size comes from is decoded."""
    decord = pytest.importorskip("decord", reason="has no wheel for this platform")
    template = tiny(family).template
    paths = [video(tmp_path / "a.mp4", 30, 160, 120), video(tmp_path / "b.mp4", 12, 98, 130)]
    rows = [{**text_row(f"<video>what happens, {n}?"), "videos": [path]} for path in paths for n in range(3)]
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    assert found.prefixes.num_sharing == len(rows)
    made = fused_rows(template, [found])
    assert_branches_equal_full_encodings(made, "pixel_values_videos")
    decoded, read, reader = [], decord.VideoReader.get_batch, decord.VideoReader
    monkeypatch.setattr(decord.VideoReader, "get_batch", lambda self, at: decoded.append(self) or read(self, at))
    encodes = [made.encode if number % 3 == 0 else made.encode_branch for number in range(len(rows))]
    with ThreadPoolExecutor(len(rows)) as threads:
        samples = list(threads.map(lambda number: encodes[number](Address(0, number)), range(len(rows))))
    assert len(decoded) == len(paths)
    assert ["pixel_values_videos" in sample for sample in samples] == [True, False, False] * 2
    assert decord.VideoReader is reader


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of ms-swift's InternVL
@pytest.mark.parametrize("name", ["GLM-4.1V", "InternVL (HF)"])
def test_branches_of_other_families_have_all_but_their_pixels(name, tmp_path):
    """SHARE-45"""
    family = FAMILIES[name]
    (tmp_path / "model").mkdir()
    family.build(tmp_path / "model")
    with own_ids(tmp_path / "model", family):
        _, processor = get_model_processor(
            str(tmp_path / "model"),
            model_type=family.model_type,
            torch_dtype=torch.float32,
            use_hf=True,
            load_model=False,
        )
        template = get_template(processor, template_type=family.template, max_length=4096)
        template.set_mode("train")
        paths = [photo(tmp_path, "a", 320, 240), photo(tmp_path, "b", 100, 300)]
        rows = [*questions(paths), *[image_row(paths, f"question {n}") for n in range(2)]]
        (found,) = shared(template, [source(rows)], tmp_path / "cache")
        assert found.prefixes.num_sharing == len(rows)
        assert_branches_equal_full_encodings(fused_rows(template, [found]))


# -- a trainer of one's own --------------------------------------------------------------------------------------------


def test_rows_without_a_length_pass_find_the_same_prefixes(template, tmp_path):
    """SHARE-40: from full encodings, as a trainer of one's own has them."""
    paths = [photo(tmp_path, name, 200, 150, seed=n) for n, name in enumerate("ab")]
    rows = [*questions(paths), text_row()]
    config = PackingConfig(packing_length=2048, packing_share="media")
    (expected,) = shared(template, [source(rows)], tmp_path / "cache")
    made = FusionCaptionDataset([source(rows)], template)
    made.encode_for(config)
    made.measure()
    (found,) = sharing_rows(made, config).sources
    assert found.prefixes.key.tolist() == expected.prefixes.key.tolist()
    assert found.prefixes.length.tolist() == expected.prefixes.length.tolist()
    assert sharing_rows(made, PackingConfig(packing_length=2048)) is made
    assert sharing_rows(made, config).encode_branch(Address(0, 0)) is None, "without headers it is encoded in full"


def test_files_of_prefixes_belong_to_the_cache(template, tmp_path):
    """SHARE-48: `vlpack cache` lists and clears them."""
    paths = [photo(tmp_path, name, 200, 150, seed=0) for name in "ab"]
    shared(template, [source(questions(paths))], tmp_path / "cache")
    (of_source,) = remembered_in(tmp_path / "cache")
    assert ".prefixes" in {path.suffix for path in of_source.files}
    assert {*of_source.files} == {*(tmp_path / "cache").iterdir()}


def test_videos_of_frames_are_shared_and_encoded_in_full(template, tmp_path):
    """SHARE-44, SHARE-45: the frames are images to their reader, so such a branch is encoded in full."""
    frames = [photo(tmp_path, f"f{n}", 112, 112, seed=n) for n in range(4)]
    rows = [{**text_row(f"<video>what, {n}?"), "videos": [frames]} for n in range(2)]
    rows.append({**text_row("<video>what?"), "videos": [frames[::-1]]})
    (found,) = shared(template, [source(rows)], tmp_path / "cache")
    assert [bool(key) for key in found.prefixes.key] == [True, True, False]
    made = fused_rows(template, [found])
    one, other = (made.encode(Address(0, n)) for n in range(2))
    assert how_prefixes_differ(one, other, int(found.prefixes.length[0])) is None
    assert made.encode_branch(Address(0, 1)) is None
