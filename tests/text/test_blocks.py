"""Documents become blocks: literal cases, and laws over seeded corpora."""

import inspect
import logging
import pickle
import random
from collections import Counter
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import pytest

from swift_vlpack import register_strategy
from swift_vlpack.errors import ConfigError, DataError, StrategyError
from swift_vlpack.plan import registry
from swift_vlpack.plan.strategies import STRATEGIES
from swift_vlpack.text import block_report, block_tokenize
from tests.text.vocabularies import BOS, EOS, corpus, qwen, text, words

NAMES = (*STRATEGIES, "greedy_uncut", "window")
BARE = {"add_bos": False, "add_eos": False}


def blocks(texts, tokenizer, **options):
    made = block_tokenize({"text": texts}, tokenizer=tokenizer, **options)
    assert len({len(column) for column in made.values()}) == 1, "as many of every column"
    return made


def documents_in(made):
    """The pieces of all blocks, in order."""
    return [
        tuple(ids[start:end])
        for ids, starts in zip(made["input_ids"], made["document_starts"], strict=True)
        for start, end in pairwise([*starts, len(ids)])
    ]


def totals(made):
    added = Counter()
    for counts in made["block_counts"]:
        added.update({name: count for name, count in counts.items() if name != "max_length"})
    return +added


def test_signature_is_the_contract():
    """TEXT-1"""
    parameters = inspect.signature(block_tokenize).parameters
    assert [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY] == ["features"]
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    assert defaults == {
        "feature": "text", "packed": True, "packing_strategy": "greedy", "overflow": True, "stride": 0, "min_len": 1,
        "max_len": None, "add_bos": True, "add_eos": True, "bos_on_pieces": False, "shuffle_output": False,
        "seed": None,
    }  # fmt: skip
    assert set(parameters) - set(defaults) == {"features", "tokenizer", "max_length"}


def test_three_documents_by_hand(tokenizer):
    """TEXT-1 TEXT-2"""
    texts = [text(0, 1), text(2), text(3, 4, 5)]
    made = blocks(texts, tokenizer, max_length=8)
    assert made["input_ids"] == [[BOS, 4, 5, EOS, BOS, 6, EOS, BOS], [7, 8, 9, EOS]]
    assert made["document_starts"] == [[0, 4, 7], [0]]
    assert set(made) == {"input_ids", "document_starts", "block_counts"}
    assert totals(made) == {"documents": 3, "cut_documents": 1}
    for uncut in ({"packing_strategy": "greedy_uncut"}, {"overflow": False}):
        made = blocks(texts, tokenizer, max_length=8, **uncut)
        assert made["input_ids"] == [[BOS, 4, 5, EOS, BOS, 6, EOS], [BOS, 7, 8, 9, EOS]]
        assert made["document_starts"] == [[0, 4], [0]]
        assert totals(made) == {"documents": 3}
    made = blocks(texts, tokenizer, max_length=8, min_len=2)
    assert made["input_ids"][1] == [BOS, 7, 8, 9, EOS], "a block with less room than min_len is full"


def test_greedy_fills_blocks_by_going_on_in_the_next_one(tokenizer):
    """TEXT-2 TEXT-9: hundreds of documents of 4 to 400 tokens, of which few fit what the one before left free."""
    rng = random.Random(3)
    texts = [text(*(rng.randrange(500) for _ in range(rng.randrange(4, 400)))) for _ in range(400)]
    num_blocks, used = {}, {}
    for strategy in ("greedy", "greedy_uncut"):
        made = blocks(texts, tokenizer, max_length=512, packing_strategy=strategy, min_len=4)
        num_blocks[strategy] = len(made["input_ids"])
        used[strategy] = sum(map(len, made["input_ids"])) / (512 * num_blocks[strategy])
    assert used["greedy"] > 0.99
    assert used["greedy_uncut"] < 0.85
    assert num_blocks["greedy"] < num_blocks["greedy_uncut"]


def test_greedy_repeats_a_stride_by_hand(tokenizer):
    """TEXT-3: context is of the same document, and no more than it has."""
    made = blocks([text(0, 1, 2), text(*range(10, 16)), text(20)], tokenizer, max_length=4, stride=2, **BARE)
    assert made["input_ids"] == [[4, 5, 6, 14], [14, 15, 16, 17], [16, 17, 18, 19], [24]]
    assert made["labels"] == [[4, 5, 6, 14], [-100, 15, 16, 17], [-100, -100, 18, 19], [24]]
    assert made["document_starts"] == [[0, 3], [0], [0], [0]]
    assert totals(made) == {"documents": 3, "cut_documents": 1, "repeated_tokens": 3}
    short = blocks([text(1, 2)], tokenizer, max_length=4, stride=2, **BARE)
    assert short["labels"] == short["input_ids"] == [[5, 6]], "the column is there for every batch of a map"


@pytest.mark.parametrize("strategy", ["greedy", "best_fit"])
def test_bos_on_later_pieces_by_hand(tokenizer, strategy):
    """TEXT-3: BOS of a later piece is no target, and counted with what is repeated."""
    options = {"max_length": 5, "bos_on_pieces": True, "packing_strategy": strategy, "add_eos": False}
    made = blocks([text(*range(8))], tokenizer, **options)
    assert made["input_ids"] == [[BOS, 4, 5, 6, 7], [BOS, 8, 9, 10, 11]]
    assert made["labels"] == [[BOS, 4, 5, 6, 7], [-100, 8, 9, 10, 11]]
    assert totals(made) == {"documents": 1, "cut_documents": 1, "repeated_tokens": 1}
    made = blocks([text(*range(8))], tokenizer, stride=2, **options)
    assert made["input_ids"] == [[BOS, 4, 5, 6, 7], [BOS, 6, 7, 8, 9], [BOS, 8, 9, 10, 11]]
    assert made["labels"][1:] == [[-100, -100, -100, 8, 9], [-100, -100, -100, 10, 11]]
    assert "labels" not in blocks([text(*range(8))], words(bos=False), **options), "a tokenizer without BOS"


def test_the_last_block_of_greedy_keeps_to_min_len(tokenizer):
    """TEXT-5"""
    made = blocks([text(*range(6))], tokenizer, max_length=4, min_len=3, **BARE)
    assert made["input_ids"] == [[4, 5, 6, 7]]
    assert totals(made) == {"documents": 1, "too_short_pieces": 1, "too_short_tokens": 2}


def test_a_long_document_is_cut_and_its_rest_shares_a_block(tokenizer):
    """TEXT-2"""
    made = blocks([text(*range(7)), text(9)], tokenizer, max_length=4, **BARE)
    assert made["input_ids"] == [[4, 5, 6, 7], [8, 9, 10, 13]]
    assert made["document_starts"] == [[0], [0, 3]]
    assert totals(made) == {"documents": 2, "cut_documents": 1}
    assert "labels" not in made


def test_without_overflow_documents_are_truncated_and_counted(tokenizer):
    """TEXT-4"""
    made = blocks([text(*range(10)), text(1)], tokenizer, max_length=5, overflow=False)
    assert made["input_ids"] == [[BOS, 4, 5, 6, 7], [BOS, 5, EOS]]
    assert totals(made) == {"documents": 2, "truncated_documents": 1, "truncated_tokens": 7}


def test_what_is_dropped_is_counted_by_reason(tokenizer):
    """TEXT-5"""
    texts = [text(*range(11)), text(1), None, text(*range(20)), "", text(1, 2, 3)]
    made = blocks(texts, tokenizer, max_length=4, min_len=4, max_len=12, **BARE)
    assert made["input_ids"] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert totals(made) == {
        "documents": 1, "cut_documents": 1, "too_short_pieces": 3, "too_short_tokens": 3 + 1 + 3,
        "dropped_documents": 5, "too_long_pieces": 1, "too_long_tokens": 20, "empty_document_pieces": 2,
    }  # fmt: skip
    assert made["block_counts"][1]["too_short_pieces"] == 0, "what is in no block goes with the first"


@pytest.mark.parametrize("strategy", ["greedy", "window"])
def test_an_empty_document_is_not_its_bos_and_eos(tokenizer, strategy):
    """TEXT-5: whatever its edges are, nothing is between them; the lengths that limits mean have BOS and EOS."""
    texts = ["", text(0), None, "  ", text(1, 2)]
    made = blocks(texts, tokenizer, max_length=8, packing_strategy=strategy)
    assert made["input_ids"] == [[BOS, 4, EOS, BOS, 5, 6, EOS]]
    assert totals(made) == {"documents": 2, "dropped_documents": 3, "empty_document_pieces": 3}
    assert blocks(texts, tokenizer, max_length=8, min_len=4)["input_ids"] == [[BOS, 5, 6, EOS]]
    assert blocks(texts, tokenizer, max_length=8, max_len=3)["input_ids"] == [[BOS, 4, EOS]]


def test_windows_leave_out_short_documents_and_no_pieces(tokenizer):
    """TEXT-5: a window is cut wherever it is full, so its pieces have no least length, and documents may be longer."""
    texts = [text(*range(5)), text(9), text(*range(10, 13))]
    made = blocks(texts, tokenizer, max_length=4, min_len=3, packing_strategy="window", **BARE)
    assert documents_in(made) == [(4, 5, 6, 7), (8,), (14, 15, 16)]
    assert totals(made) == {
        "documents": 2, "cut_documents": 1, "dropped_documents": 1, "too_short_pieces": 1, "too_short_tokens": 1,
    }  # fmt: skip
    longer = blocks(texts, tokenizer, max_length=4, min_len=5, packing_strategy="window", **BARE)
    assert longer["input_ids"] == [[4, 5, 6, 7], [8]]


def test_a_batch_of_which_nothing_is_left_is_told(tokenizer, caplog):
    """TEXT-5"""
    made = blocks([text(1), text(2)], tokenizer, max_length=4, min_len=2, **BARE)
    assert all(column == [] for column in made.values())
    assert "a call made no block of its documents" in caplog.text
    assert "'too_short_pieces': 2" in caplog.text
    assert blocks([], tokenizer, max_length=4)["input_ids"] == []


def test_bos_is_switched_off_with_one_warning(caplog):
    """TEXT-6"""
    tokenizer = words(bos=False)
    for _ in range(3):
        made = blocks([text(0), text(1)], tokenizer, max_length=9)
    assert made["input_ids"] == [[4, EOS, 5, EOS]]
    said = [record.getMessage() for record in caplog.records if "BOS" in record.getMessage()]
    assert said == ["the tokenizer has no BOS token, so add_bos has no effect"]
    caplog.clear()
    blocks([text(0)], words(bos=False), max_length=9, add_bos=False)
    assert "BOS" not in caplog.text
    tokenizer.eos_token = None
    assert blocks([text(0)], tokenizer, max_length=9)["input_ids"] == [[4]]


def test_conversations_of_qwen_stay_whole(caplog):
    """TEXT-6: `<|im_end|>` is Qwen's EOS and ends every turn; boundaries come from the documents, not from it."""
    tokenizer = qwen()
    end = tokenizer.eos_token_id
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhow are you<|im_end|>\n"
    with caplog.at_level(logging.WARNING):
        made = blocks([chat, chat, "a small house " * 300], tokenizer, max_length=64)
    first = tokenizer(chat)["input_ids"]
    assert documents_in(made)[:2] == [(*first, end), (*first, end)]
    assert first.count(end) == 2
    assert "longer than the specified maximum" not in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_every_document_is_in_exactly_one_place(tokenizer, name):
    """TEXT-2 TEXT-9"""
    for seed in range(12):
        texts, max_length = [one for one in corpus(seed, 40) if one], random.Random(seed).choice((5, 16, 50))
        made = blocks(texts, tokenizer, max_length=max_length, packing_strategy=name)
        wanted = Counter(token for one in texts for token in [BOS, *tokenizer(one)["input_ids"], EOS])
        assert Counter(token for ids in made["input_ids"] for token in ids) == wanted
        assert all(0 < len(ids) <= max_length for ids in made["input_ids"])
        for ids, starts in zip(made["input_ids"], made["document_starts"], strict=True):
            assert starts[0] == 0
            assert starts == sorted(set(starts))
            assert starts[-1] < len(ids)
        assert sum(counts["documents"] for counts in made["block_counts"]) == len(texts)
        if name in ("greedy", "greedy_uncut", "window"):
            flat = [token for ids in made["input_ids"] for token in ids]
            assert flat == [token for one in texts for token in [BOS, *tokenizer(one)["input_ids"], EOS]]


@pytest.mark.parametrize(
    ("strategy", "stride", "overflow", "limits"),
    list(
        product(
            ("greedy", "greedy_uncut", "best_fit", "exact"),
            (0, 3),
            (True, False),
            ((1, None), (4, None), (1, 20), (4, 20)),
        )
    ),
)
def test_the_account_closes_under_all_options(tokenizer, strategy, stride, overflow, limits):
    """TEXT-3 TEXT-5: read = in blocks - repeated + dropped + truncated, and every kept token is a target once."""
    if stride and not overflow:
        return
    options = {"stride": stride, "overflow": overflow, "min_len": limits[0], "max_len": limits[1]}
    options["bos_on_pieces"] = stride > 0 and limits[0] > 1
    for seed in range(4):
        texts = [*corpus(seed, 30), None]
        made = blocks(texts, tokenizer, max_length=11, packing_strategy=strategy, **options)
        counts = totals(made)
        num_read = sum(len(tokenizer(one)["input_ids"]) + 2 for one in texts if one)
        num_kept = sum(len(ids) for ids in made["input_ids"]) - counts["repeated_tokens"]
        dropped = sum(counts[f"{reason}_tokens"] for reason in ("too_short", "too_long", "empty_document"))
        assert counts["empty_document_pieces"] == sum(not one for one in texts) > 1
        assert num_read == num_kept + dropped + counts["truncated_tokens"]
        if stride:
            targets = [token for labels in made["labels"] for token in labels if token != -100]
            assert len(targets) == num_kept
            assert all(
                label in (-100, token)
                for labels, ids in zip(made["labels"], made["input_ids"], strict=True)
                for label, token in zip(labels, ids, strict=True)
            )


def test_unpacked_every_piece_has_a_block(tokenizer):
    """TEXT-1"""
    made = blocks([text(0), text(*range(5))], tokenizer, max_length=4, packed=False, **BARE)
    assert made["input_ids"] == [[4], [4, 5, 6, 7], [8]]
    assert made["document_starts"] == [[0], [0], [0]]


def test_order_and_shuffle(tokenizer):
    """TEXT-7"""
    texts = [text(number) for number in range(40)]
    plain = blocks(texts, tokenizer, max_length=3)["input_ids"]
    assert plain == [[BOS, 4 + number, EOS] for number in range(40)]
    seeded = [blocks(texts, tokenizer, max_length=3, shuffle_output=True, seed=7)["input_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1] != plain
    assert sorted(seeded[0]) == plain
    assert blocks(texts, tokenizer, max_length=3, shuffle_output=True, seed=8)["input_ids"] != seeded[0]
    fresh = [blocks(texts, tokenizer, max_length=3, shuffle_output=True)["input_ids"] for _ in range(2)]
    assert fresh[0] != fresh[1]
    mixed = blocks(texts, tokenizer, max_length=3, shuffle_output=True, seed=7)
    assert all(starts == [0] for starts in mixed["document_starts"])


def test_a_function_groups_the_pieces_and_is_checked(tokenizer, monkeypatch):
    """TEXT-9 STRAT-8 STRAT-10"""
    monkeypatch.setattr(registry, "_registered", {})
    texts = [text(0), text(1, 2), text(3)]

    def reverse(lengths, capacity):
        return [[index] for index in reversed(range(len(lengths)))]

    made = blocks(texts, tokenizer, max_length=9, packing_strategy=reverse, **BARE)
    assert made["input_ids"] == [[7], [5, 6], [4]]
    register_strategy("reverse", reverse)
    named = blocks(texts, tokenizer, max_length=9, packing_strategy="reverse", **BARE)
    assert sorted(named["input_ids"]) == sorted(made["input_ids"])
    with pytest.raises(StrategyError, match=r"lambda.*: index 0 is in no group.*\(a batch of 3 pieces\)"):
        blocks(texts, tokenizer, max_length=9, packing_strategy=lambda lengths, capacity: [[1], [2]])
    best = "swift_vlpack.plan.strategies:best_fit"
    assert len(blocks(texts, tokenizer, max_length=9, packing_strategy=best, **BARE)["input_ids"]) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"max_length": "8"}, "max_length must be a whole number, got '8'"),
        ({"max_length": None}, "max_length must be a whole number, got None"),
        ({"max_length": 8, "stride": 0.5}, "stride must be a whole number"),
        ({"max_length": 8, "stride": -1}, "stride must be at least 0"),
        ({"max_length": 8, "min_len": 9}, "min_len=9 is more than max_length=8"),
        ({"max_length": 8, "max_len": 0}, "max_len must be at least 1"),
        ({"max_length": 8, "stride": 8}, "stride must be from 0 to 7"),
        ({"max_length": 8, "stride": 2, "overflow": False}, "overflow=False makes none"),
        (
            {"max_length": 8, "packing_strategy": "window", "stride": 2},
            "without overlap: leave stride and bos_on_pieces out",
        ),
        (
            {"max_length": 8, "stride": 7, "bos_on_pieces": True},
            r"stride must be from 0 to 6 \(max_length - 1, and a BOS",
        ),
        ({"max_length": 8, "overflow": False, "bos_on_pieces": True}, "bos_on_pieces is for later pieces"),
        ({"max_length": 8, "add_bos": False, "bos_on_pieces": True}, "set add_bos"),
        ({"max_length": 8, "packing_strategy": "window", "bos_on_pieces": True}, "leave stride and bos_on_pieces out"),
        ({"max_length": 8, "packing_strategy": "window", "overflow": False}, "truncates nothing: leave overflow=False"),
        ({"max_length": 8, "packing_strategy": "magic"}, "packing_strategy must be one of"),
        ({"max_length": 8, "packing_strategy": "magic", "packed": False}, "packing_strategy must be one of"),
    ],
)
def test_impossible_options_are_refused(tokenizer, options, said):
    """TEXT-1"""
    with pytest.raises(ConfigError, match=said):
        blocks([text(1)], tokenizer, **options)


def test_tokenizer_of_any_class_is_told_once_of(caplog):
    """TEXT-6: one without a hash, as a dataclass or a namespace is; none at all is refused."""
    ids = SimpleNamespace(bos_token_id=None, eos_token_id=1)

    class Plain(SimpleNamespace):
        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[5] * len(one) for one in texts]}

    for _ in range(2):
        assert blocks(["ab"], Plain(**vars(ids)), max_length=9)["input_ids"] == [[5, 5, 1]]
    assert caplog.text.count("has no BOS token") == 1
    with pytest.raises(ConfigError, match="there is no tokenizer; give one of transformers, or 'byte'"):
        blocks(["ab"], None, max_length=9)


def test_rows_that_are_no_texts_are_refused_by_name(tokenizer):
    """TEXT-1"""
    with pytest.raises(DataError, match="the rows have no 'content'; they have text"):
        blocks([text(1)], tokenizer, max_length=8, feature="content")
    with pytest.raises(DataError, match="row 2: text must be a text, got int"):
        blocks([text(1), 3], tokenizer, max_length=8)
    with pytest.raises(DataError, match="batched=True"):
        block_tokenize({"text": "w1 w2"}, tokenizer=tokenizer, max_length=8)


@pytest.fixture(scope="module")
def rows():
    return {"text": [None, text(*range(200)), *corpus(5, 298)], "source": ["x"] * 300}


def mapped(rows, tokenizer, num_proc=None, **options):
    from datasets import Dataset

    function = partial(block_tokenize, tokenizer=tokenizer, max_length=32, **options)
    assert pickle.loads(pickle.dumps(function)).keywords["max_length"] == 32
    return Dataset.from_dict(rows).map(
        function, batched=True, batch_size=100, remove_columns=["text", "source"], num_proc=num_proc,
        load_from_cache_file=False,
    )  # fmt: skip


def test_map_in_two_processes_makes_what_one_makes(rows, tokenizer):
    """TEXT-1 TEXT-8"""
    options = {"packing_strategy": "best_fit", "stride": 4, "min_len": 3, "max_len": 150}
    one, two = mapped(rows, tokenizer, **options), mapped(rows, tokenizer, num_proc=2, **options)
    # 300 rows in batches of 100, and in two shards of 150: not the same blocks, but the same account.
    again = mapped(rows, tokenizer, num_proc=2, **options)
    assert two.to_dict() == again.to_dict()
    for made in (one, two):
        report = block_report(made, num_documents=300)
        assert report["documents"] + report["dropped_documents"] == 300
        assert report["uncounted_documents"] == 0
        assert report["dropped"]["too_long"] == {"pieces": 1, "tokens": 202}
        assert report["dropped"]["empty_document"]["pieces"] == sum(not one for one in rows["text"])
    read = sum(len(tokenizer(one)["input_ids"]) + 2 for one in rows["text"] if one)
    for made in (one, two):
        report = block_report(made)
        assert "uncounted_documents" not in report
        assert read == report["tokens"] - report["repeated_tokens"] + report["dropped_tokens"]


def test_report_by_hand(tokenizer, capsys):
    """TEXT-8"""
    texts = [text(*range(11)), text(1), None, text(*range(20)), text(1, 2, 3)]
    made = blocks(texts, tokenizer, max_length=4, min_len=2, max_len=12, **BARE)
    report = block_report(made)
    assert report == {
        "blocks": 4, "documents": 2, "pieces": 4, "tokens": 14, "max_length": 4, "utilisation": 14 / 16,
        "cut_documents": 1, "repeated_tokens": 0, "truncated_documents": 0, "truncated_tokens": 0,
        "dropped_documents": 3, "dropped_tokens": 21,
        "dropped": {
            "too_short": {"pieces": 1, "tokens": 1}, "too_long": {"pieces": 1, "tokens": 20},
            "empty_document": {"pieces": 1, "tokens": 0},
        },
    }  # fmt: skip
    printed = capsys.readouterr().out
    for part in (
        "4 of 4 tokens, 87.50% used",
        "2 in 4 pieces",
        "3 documents and 21 tokens (too_short 1, too_long 1",
    ):
        assert part in printed


def test_documents_of_a_call_that_leaves_no_block_are_uncounted_not_forgotten(tokenizer, capsys):
    """TEXT-8: the last batch of a map may be two rows."""
    rows = {"text": [text(*range(9))] * 100 + [text(1), None], "source": ["x"] * 102}
    report = block_report(mapped(rows, tokenizer, min_len=5), num_documents=102)
    assert (report["documents"], report["dropped_documents"], report["uncounted_documents"]) == (100, 0, 2)
    assert "uncounted    2 documents" in capsys.readouterr().out


def test_report_of_blocks_without_counts_and_of_no_blocks(capsys):
    """TEXT-8"""
    rows = [{"input_ids": [1, 2, 3], "document_starts": [0, 2]}, {"input_ids": [1]}]
    report = block_report(rows)
    assert (report["documents"], report["max_length"], report["utilisation"]) == (3, 3, 4 / 6)
    assert block_report(rows, max_length=4)["utilisation"] == 0.5
    with pytest.raises(DataError, match="no blocks"):
        block_report([])
    with pytest.raises(DataError, match="several data sets"):
        block_report({"train": rows})
