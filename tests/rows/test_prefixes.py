"""Which rows have equal beginnings, read from the rows alone."""

import base64
import random

import pytest
from PIL import Image

from swift_vlpack.errors import ConfigError
from swift_vlpack.lengths.cache_folder import MEDIA_DIGESTS
from swift_vlpack.lengths.media_digests import identities
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.families import MediaTokens, refuse_sharing, text_config_of
from swift_vlpack.rows.prefixes import (
    CannotBeDivided,
    FirstMedia,
    HeadReader,
    Prefix,
    first_media_of,
    media_in_prefix,
    path_of,
    prefix_of,
    prefix_of_system,
    shared_media,
)
from swift_vlpack.rows.shared import Alone
from tests.data_rows import image_row, text_row
from tests.ranks_in_threads import on_ranks

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
    found = head(OTHER[kind])
    assert found.digest
    assert (found.digest, found.media) != (head(asked()).digest, head(asked()).media)


def beginnings(row, **options):
    """What a row begins with, as the head of a row that has no more media."""
    found = head(row, **options)
    assert tuple(first_media_of(b"".join(one.to_bytes() for one in found.first))) == found.first
    return [(one.digest, tuple(one.of(found.media))) for one in found.first]


def as_head(row, **options):
    return head(row, **options)[:2]


def test_row_with_several_media_begins_as_rows_with_fewer():
    """SHARE-13, SHARE-41: through each of its media but the last, which its head counts."""
    three = asked("<image><image>which of <image>?", [URL, OTHER_URL, URL])
    assert beginnings(three) == [as_head(asked()), as_head(asked("<image><image>which?", [URL, OTHER_URL]))]
    assert beginnings(asked("which?", [URL, OTHER_URL])) == [as_head(asked())], "tags are added"
    assert beginnings(asked()) == beginnings(text_row()) == beginnings(asked("<image><image>?")) == []
    assert beginnings(asked("<image> and <image>?", [URL, OTHER_URL], tools=[{"name": "look"}])) == [
        as_head(asked(tools=[{"name": "look"}]))
    ]
    assert beginnings(three, system="Be brief.") != beginnings(three)
    other_order = asked("<image><image>which?", [OTHER_URL, URL])
    assert not {*beginnings(other_order)} & {*beginnings(three)}


def test_media_after_an_answer_are_no_beginning():
    """SHARE-13: those before it are, also the last of them."""
    later = {"messages": [*asked()["messages"], *asked()["messages"]], "images": [URL, OTHER_URL]}
    assert head(later).cause is Alone.AFTER_ANSWER
    assert beginnings(later) == [as_head(asked())]
    hello = {"messages": [*text_row("hi")["messages"], *asked()["messages"]], "images": [URL]}
    assert beginnings(hello) == []


def test_beginnings_follow_the_order_of_the_text():
    """SHARE-13: a video, then an image; and the other way round. The first of two images has no text after it."""
    both = {**text_row("<video>what? <image>and?"), "videos": [OTHER_URL], "images": [URL]}
    assert beginnings(both) == [as_head({**text_row("<video>who?"), "videos": [OTHER_URL]})]
    frames = {**text_row("<image>what? <video>and?"), "videos": [[URL, URL]], "images": [OTHER_URL]}
    assert beginnings(frames) == [as_head(asked(images=[OTHER_URL]))]
    turns = {"messages": [{"role": "user", "content": "<image>"}, *asked()["messages"]], "images": [URL, OTHER_URL]}
    assert beginnings(turns) == [as_head(asked("<image>", [URL]))] != [as_head(asked())]


def test_settings_of_the_source_count():
    """SHARE-41"""
    plain, own = head(asked()), head(OTHER["system"])
    assert head(asked(), system="Be brief.") == own != plain
    assert head(asked(), max_pixels=40000) != plain


ALONE = {
    "image in a later turn": (
        {"messages": [*text_row("hi")["messages"], *asked()["messages"]], "images": [URL]},
        Alone.AFTER_ANSWER,
    ),
    "image in an answer": ({**text_row("draw", "<image>"), "images": [URL]}, Alone.AFTER_ANSWER),
    "document": (
        {"messages": [{"role": "assistant", "content": "<image>a house"}], "images": [URL]},
        Alone.NO_TOKEN_BETWEEN,
    ),
    "more tags": (asked("<image><image>what?"), Alone.TAGS),
    "tag in the system": (
        {"messages": [{"role": "system", "content": "<image>"}, *asked("x")["messages"]], "images": [URL]},
        Alone.TAGS,
    ),
    "tagged path": (text_row(f"<img>{__file__}</img>what?"), Alone.NOTHING_SHARED),
    "missing file": (asked(images=["gone.jpg"]), Alone.NOTHING_SHARED),
    "tokens": ({"messages": [{"role": "user", "content": [1, 2]}], "images": [URL]}, Alone.NOTHING_SHARED),
    "no messages": ({"images": [URL]}, Alone.NOTHING_SHARED),
}


@pytest.mark.parametrize("kind", ALONE)
def test_rows_of_other_forms_share_nothing(kind):
    """SHARE-42: with a cause where there is one to name."""
    row, cause = ALONE[kind]
    assert (head(row).digest, head(row).cause) == (b"", cause)


def test_rows_without_media_share_by_their_system_turn():
    """SHARE-43"""
    plain = head(text_row("one"))
    assert plain.digest
    assert plain.media == ()
    assert head(text_row("another", "answer")) == plain
    assert head(text_row("one"), system="Be brief.").digest not in (plain.digest, b"")
    assert head({**text_row("one"), "tools": [{"name": "look"}]}).digest not in (plain.digest, b"")
    assert head({"messages": [{"role": "assistant", "content": "a document"}]}).digest == b""


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_files_with_the_same_bytes_are_one_image(tmp_path, monkeypatch):
    """SHARE-44: against a comparison of all bytes, and with as little reading as possible."""
    rng = random.Random(0)
    contents = {}
    for n in range(60):
        content = bytearray(rng.choice([50, 9000, 20_000, 20_001]))
        content[rng.randrange(len(content))] = rng.choice([0, 1])
        contents[str(tmp_path / f"{n}.jpg")] = bytes(content)
    contents[str(tmp_path / "alone.jpg")] = bytes(77)
    reader = HeadReader()
    for path, content in contents.items():
        with open(path, "wb") as file:
            file.write(content)
        (name,) = reader.head(asked(images=[path])).media
        assert path_of(name) == path
    found = identities(reader.files, tmp_path)
    for one, content in contents.items():
        for other, further in contents.items():
            if one != other:
                assert (found.get(one, one) == found.get(other, other)) == (content == further)
    of_ranks = on_ranks(3, lambda rank: identities(reader.files, None, rank))
    assert of_ranks == [found] * 3
    monkeypatch.setattr("builtins.open", lambda *args, **options: pytest.fail(f"opened {args}"))
    assert str(tmp_path / "alone.jpg") not in found
    assert identities(reader.files, tmp_path) == found, "remembered"
    assert (tmp_path / MEDIA_DIGESTS).exists()


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
        ([Q, S, P, P, E, Q, Q, A], 7, Prefix(5)),
        ([S, P, P, E, Q, A], 5, Prefix(4)),
        ([S, P, P, E, A, A], 4, Prefix(3)),  # the closing token stays in the branch, whose first token is no target
        ([S, P, P, A, A, A], 3, Prefix(0, Alone.NO_TOKEN_BETWEEN)),
        ([S, P, P, E], 4, Prefix(3)),  # every branch has a token of its own
        ([S, P, P], 3, Prefix(0, Alone.NO_TOKEN_BETWEEN)),
    ],
)
def test_prefix_ends_before_the_token_before_the_first_target(ids, first_target, expected):
    """SHARE-40"""
    found = prefix_of(encoded(ids, first_target), TOKENS)
    assert found == expected
    labels = encoded(ids, first_target)["labels"]
    assert set(labels[: found.length + bool(found.length)]) <= {NO_LABEL}


def test_prefix_ends_with_the_last_medium_that_is_shared():
    """SHARE-40, SHARE-13: with the images and patches up to there, and not further media."""
    import torch

    ids = [S, P, P, E, Q, S, P, E, S, P, P, P, E, Q, A]
    sample = {
        "input_ids": ids,
        "labels": [NO_LABEL] * 14 + [A],
        "image_grid_thw": torch.tensor([[1, 1, n] for n in (2, 1, 3)]),
    }
    first, two = (FirstMedia(b"", ((0, num),), num, 3) for num in (1, 2))
    assert prefix_of(sample, TOKENS, first) == Prefix(4, images=1, patches=2)
    assert prefix_of(sample, TOKENS, two) == Prefix(8, images=2, patches=3)
    assert prefix_of(sample, TOKENS) == Prefix(13)
    of_four = first._replace(num_of_row=4)
    assert prefix_of(sample, TOKENS, of_four) == Prefix(0, Alone.FAMILY_UNKNOWN), "two of them are one run of tokens"
    sample["pixel_values"] = torch.arange(6.0)[:, None]
    inside = media_in_prefix(sample, 8, TOKENS)
    assert inside == (2, {"image_grid_thw": 2, "pixel_values": 3})
    assert {name: value.tolist() for name, value in shared_media(sample, inside).items()} == {
        "image_grid_thw": [[1, 1, 2], [1, 1, 1]],
        "pixel_values": [[0.0], [1.0], [2.0]],
    }
    assert media_in_prefix(sample, 13, TOKENS) is None
    sample["pixel_values"] = torch.zeros(7, 1)
    with pytest.raises(CannotBeDivided, match="7 rows of pixel_values for 6"):
        media_in_prefix(sample, 8, TOKENS)


def test_family_that_is_not_known_to_divide_shares_nothing():
    """SHARE-42"""
    sample = {**encoded([S, P, P, E, Q, A], 5), "some_pixels": [1]}
    assert prefix_of(sample, TOKENS) == Prefix(0, Alone.FAMILY_UNKNOWN)
    assert prefix_of({"input_ids": [Q, A], "labels": [NO_LABEL, A]}, TOKENS) == Prefix(0)


def test_system_turn_ends_where_conversations_differ():
    """SHARE-43"""

    def talk(*ids, target=2):
        return {"input_ids": list(ids), "labels": [NO_LABEL] * (len(ids) - target) + list(ids[-target:])}

    assert prefix_of_system([talk(1, 2, 3, 7, 9, 9), talk(1, 2, 3, 8, 9, 9)]) == Prefix(3)
    assert prefix_of_system([talk(1, 2, 9, 9), talk(1, 2, 9, 9)]) == Prefix(1), "no branch begins with a target"


def test_photo_is_read_by_its_name(tmp_path):
    """SHARE-44: the same file by two paths has one key once its bytes are compared."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    reader = HeadReader()
    heads = [reader.head(image_row([str(tmp_path / name)])) for name in ("a.png", "b.png")]
    assert heads[0].digest == heads[1].digest
    assert len({*identities(reader.files).values()}) == 1
