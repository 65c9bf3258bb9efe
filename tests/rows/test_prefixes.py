"""Which rows have equal beginnings, read from the rows alone."""

import base64
import os

import pytest
from PIL import Image

from swift_vlpack.errors import ConfigError
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.families import MediaTokens, refuse_sharing, text_config_of
from swift_vlpack.rows.prefixes import HeadReader, how_prefixes_differ, prefix_of
from tests.data_rows import text_row

URL, OTHER_URL = "https://a.b/1.jpg", "https://a.b/2.jpg"


def asked(text="<image>what?", images=(URL,), **more):
    return {**text_row(text), "images": list(images), **more}


def head(row, **options):
    return HeadReader(**options).head(row)


SAME = {
    "another question": asked("<image>how many are there?"),
    "another answer": {**text_row("<image>what?", "another answer"), "images": [URL]},
    "no tag": asked("what?"),
    "another channel": asked(channel="web"),
    "empty columns": asked(tools=None, videos=[], objects={}, chat_template_kwargs={"max_pixels": None}),
    "content": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": URL}, {"type": "text", "text": "who?"}]},
            {"role": "assistant", "content": "me"},
        ]
    },
    "image_url": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": URL}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "me"},
        ]
    },
    "further turns": {"messages": [*asked()["messages"], *text_row("and then?")["messages"]], "images": [URL]},
    "boxes in the answer": {**text_row("<image>where?", "<bbox>"), "images": [URL]},
}
OTHER = {
    "text before": asked("look: <image>what?"),
    "space before": asked(" <image>what?"),
    "question before": asked("what?<image>"),
    "another image": asked(images=[OTHER_URL]),
    "two images": asked("<image><image>what?", [URL, URL]),
    "another kind": {**text_row("<video>what?"), "videos": [URL]},
    "tools": asked(tools=[{"type": "function", "function": {"name": "look"}}]),
    "pixels": asked(chat_template_kwargs={"max_pixels": 40000}),
    "pixels of the image": asked(images=[{"url": URL, "max_pixels": 40000}]),
    "boxes": asked(objects={"ref": [], "bbox": [[1, 2, 3, 4]]}),
    "system": {**asked(), "messages": [{"role": "system", "content": "Be brief."}, *asked()["messages"]]},
    "trained question": {
        "messages": [{"role": "user", "content": "<image>what?", "loss": True}, asked()["messages"][1]],
        "images": [URL],
    },
    "turn before": {
        "messages": [{"role": "user", "content": "hello"}, *asked()["messages"]],
        "images": [URL],
    },
}


@pytest.mark.parametrize("kind", SAME)
def test_what_comes_after_the_medium_does_not_count(kind):
    """SHARE-41"""
    assert head(SAME[kind]) == head(asked())


@pytest.mark.parametrize("kind", OTHER)
def test_all_that_decides_the_tokens_through_the_medium_counts(kind):
    """SHARE-41"""
    assert head(OTHER[kind]).key not in (head(asked()).key, b"")


def test_settings_of_the_source_count():
    """SHARE-41"""
    plain, own = head(asked()), head(OTHER["system"])
    assert head(asked(), system="Be brief.") == own != plain
    assert head(asked(), max_pixels=40000) != plain


CANNOT = {
    "image in a later turn": {"messages": [*text_row("hi")["messages"], *asked()["messages"]], "images": [URL]},
    "image in an answer": {**text_row("draw", "<image>"), "images": [URL]},
    "document": {"messages": [{"role": "assistant", "content": "<image>a house"}], "images": [URL]},
    "more tags": asked("<image><image>what?"),
    "tag in the system": {
        "messages": [{"role": "system", "content": "<image>"}, *asked("x")["messages"]],
        "images": [URL],
    },
}
UNKNOWN = {
    "tagged path": text_row(f"<img>{__file__}</img>what?"),
    "missing file": asked(images=["gone.jpg"]),
    "tokens": {"messages": [{"role": "user", "content": [1, 2]}], "images": [URL]},
    "no messages": {"images": [URL]},
    "a text": text_row("one"),
    "a document": {"messages": [{"role": "assistant", "content": "a document"}]},
}


@pytest.mark.parametrize("kind", CANNOT)
def test_rows_that_cannot_share_name_their_media(kind):
    """SHARE-42: they are counted if another row has their medium."""
    assert head(CANNOT[kind]) == (b"", head(asked()).media)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_rows_of_other_forms_share_nothing(kind):
    """SHARE-41"""
    assert head(UNKNOWN[kind]) == (b"", ())


# -- media ------------------------------------------------------------------------------------------------------------


def test_file_is_one_medium_by_whatever_path_it_is_named(tmp_path, monkeypatch):
    """SHARE-44: a link, a way through another folder, a path from here; and not its copy, nor what it becomes."""
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    (tmp_path / "b.png").write_bytes(path.read_bytes())
    (tmp_path / "link.png").symlink_to(path)
    (tmp_path / "folder").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = ["a.png", "link.png", "folder/a.png", str(tmp_path / "folder" / "link.png"), f"file://{path}"]
    first = head(asked(images=[str(path)]))
    assert all(head(asked(images=[name])) == first for name in names)
    assert head(asked(images=["b.png"])) != first
    os.utime(path, ns=(1, 1))
    assert head(asked(images=[str(path)])) != first


def test_content_in_the_row_counts_by_its_bytes():
    """SHARE-44"""
    content = bytes(range(90))
    text = base64.b64encode(content).decode()
    assert head(asked(images=[{"bytes": content, "path": "a.jpg"}])) == head(asked(images=[{"bytes": content}]))
    assert head(asked(images=[content])) == head(asked(images=[{"bytes": content, "path": None}]))
    assert head(asked(images=[{"bytes": content[1:]}])) != head(asked(images=[content]))
    assert head(asked(images=[text])) == head(asked("<image>who?", images=[text]))
    assert head(asked(images=[text])) != head(asked(images=[text[:-4]]))


def test_video_of_frames_is_all_of_its_frames():
    """SHARE-44"""
    frames = {**text_row("<video>what?"), "videos": [[URL, OTHER_URL]]}
    assert head(frames) == head({**text_row("<video>who?"), "videos": [[URL, OTHER_URL]]})
    assert head(frames) != head({**text_row("<video><video>who?"), "videos": [URL, OTHER_URL]})


# -- models ----------------------------------------------------------------------------------------------------------


def config_of(kind, **text):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]()
    for name, value in text.items():
        setattr(text_config_of(made), name, value)
    return made


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("paligemma", "prefix-LM mask"),
        ("instructblip", "its vision tower reads the question"),
        ("blip-2", "its vision tower reads the question"),
        ("mllama", "cross-attention"),
        ("qwen3_5", "its layers of the kind linear_attention keep a state"),
        ("qwen3_next", "keep a state along the sequence"),
        ("lfm2", "keep a state along the sequence"),
        ("rwkv", "keep a state along the sequence"),
    ],
)
def test_models_whose_rows_cannot_share_are_refused_by_name(kind, why):
    """SHARE-49"""
    with pytest.raises(ConfigError, match=f"the model {kind}: .*{why}"):
        refuse_sharing(config_of(kind))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "glm4v", "gemma3", "llama"])
def test_other_models_are_not_refused(kind):
    """SHARE-49"""
    refuse_sharing(config_of(kind))
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.25"):
        refuse_sharing(config_of(kind, capacity_factor=1.25))


# -- encoded rows -----------------------------------------------------------------------------------------------------

S, P, E, Q, A = 1, 2, 3, 4, 5
TOKENS = MediaTokens(placeholders={"image": P}, starts=(S,), ends=(E,), merged=1)


def encoded(ids, first_target):
    import torch

    labels = [NO_LABEL] * first_target + ids[first_target:]
    grid = torch.tensor([[1, 1, ids.count(P)]])
    return {"input_ids": ids, "labels": labels, "image_grid_thw": grid}


@pytest.mark.parametrize(
    ("ids", "first_target", "expected"),
    [
        ([Q, S, P, P, E, Q, Q, A], 7, 5),
        ([S, P, P, E, Q, A], 5, 4),
        ([S, P, P, E, A, A], 4, 3),  # the closing token stays in the branch, whose first token is no target
        ([S, P, P, A, A, A], 3, 0),
        ([S, P, P, E], 4, 3),  # every branch has a token of its own
        ([S, P, P], 3, 0),
    ],
)
def test_prefix_ends_before_the_token_before_the_first_target(ids, first_target, expected):
    """SHARE-40"""
    found = prefix_of(encoded(ids, first_target), TOKENS)
    assert found == expected
    labels = encoded(ids, first_target)["labels"]
    assert set(labels[: found + bool(found)]) <= {NO_LABEL}


def test_prefix_ends_with_the_last_medium():
    """SHARE-40"""
    import torch

    ids = [S, P, P, E, Q, S, P, E, S, P, P, P, E, Q, A]
    grids = torch.tensor([[1, 1, n] for n in (2, 1, 3)])
    assert prefix_of({**encoded(ids, 14), "image_grid_thw": grids}, TOKENS) == 13


def test_family_that_is_not_known_to_divide_shares_nothing():
    """SHARE-42"""
    assert prefix_of({**encoded([S, P, P, E, Q, A], 5), "some_pixels": [1]}, TOKENS) == 0
    assert prefix_of({"input_ids": [Q, A], "labels": [NO_LABEL, A]}, TOKENS) == 0


def test_prefixes_are_compared_by_tokens_types_grids_and_pixels():
    """SHARE-8: pixels only if the row brings any, as a row without was encoded by the header of the same image."""
    import torch

    row = {**encoded([S, P, P, E, Q, A], 5), "pixel_values": torch.ones(2, 3), "token_type_ids": [0, 1, 1, 0, 0, 0]}
    assert how_prefixes_differ({**row, "input_ids": [S, P, P, E, A, Q]}, row, 4) is None
    others = {
        "tokens": {"input_ids": [Q, P, P, E, Q, A]},
        "token_type_ids": {"token_type_ids": [0, 1, 0, 0, 0, 0]},
        "image_grid_thw": {"image_grid_thw": torch.tensor([[1, 2, 1]])},
        "pixel_values": {"pixel_values": torch.zeros(2, 3)},
    }
    for name, other in others.items():
        assert how_prefixes_differ({**row, **other}, row, 4) == f"other {name}"
    without = {name: value for name, value in row.items() if name != "pixel_values"}
    assert how_prefixes_differ(without, {**row, **others["pixel_values"]}, 4) is None
    assert how_prefixes_differ(row, without, 4) == "other pixel_values"
