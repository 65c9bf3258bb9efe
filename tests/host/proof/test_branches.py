"""The proof on prefixes and their branches: it holds, and every way to train them wrongly is stopped by its name."""

from contextlib import nullcontext

import pytest
import torch

from swift_vlpack.attention.attention import NAME
from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.branches import PREFIX, as_planned, as_trained, marked, shared_of, units_in
from swift_vlpack.proof.compare import compare
from swift_vlpack.proof.perturb import replaced
from swift_vlpack.proof.prove import run_proof
from swift_vlpack.rows.contents import media_spans
from swift_vlpack.rows.encoder import RowEncoder
from swift_vlpack.rows.families import MediaTokens
from swift_vlpack.rows.samples import SampleId
from tests.data_rows import image_row, text_row
from tests.host.proof import sabotage as s
from tests.host.proof import sabotage_branches as b
from tests.host.proof.runners import IGNORED, text_samples, text_units
from tests.images import photo
from tests.marks import quick_only

QWEN = "qwen2_5_vl"
QUESTIONS = ("what is it", "how many are there, and of which colour", "is it old", "who made it")


@pytest.fixture
def units(tmp_path):
    """Two images of one size with three questions each, encoded and marked, and a text between them."""

    def make(template):
        encoder, tokens = RowEncoder(template), MediaTokens.of(template)
        made = []
        for number in range(2):
            image = photo(tmp_path, str(number), 84, 112, seed=number)
            rows = [image_row([image], ask, f"it is {ask}, and {number}") for ask in QUESTIONS[number:][:3]]
            samples = [encoder.sample(row, SampleId(f"image{number}", at), strict=True) for at, row in enumerate(rows)]
            prefix = media_spans(samples[0], tokens)[-1].stop
            made += [as_planned(samples, (0, prefix, prefix))]
            text = encoder.sample(
                text_row(QUESTIONS[number], "nothing is known"), SampleId("text", number), strict=True
            )
            made += [[text]]
        return [sample for unit in made for sample in unit]

    return make


# -- it holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", quick_only([QWEN], ["qwen2_vl", QWEN, "qwen3_vl"]))
def test_proof_of_units_holds_and_says_so(proof_model, units, family):
    """SHARE-60, SHARE-64: branches equal their rows alone; the line counts them."""
    right = proof_model(family)
    samples = units(right.batches.template)
    proof = run_proof(right, samples, [samples[::-1]])
    assert proof.num_samples == 8
    assert proof.moved == 0
    assert 0 < proof.off(in_float32=True) < 1e-4
    assert 0 < proof.gradient(in_float32=True) < 1e-4
    assert "12 branches of 4 shared prefixes among them" in proof.line(NAME)


@pytest.mark.parametrize("make", [s.llama, s.gemma2, s.gpt_oss, b.mistral])
def test_proof_of_text_units_holds(make):
    """SHARE-60: with windows, soft caps and sinks, as each row alone has them."""
    samples = [*text_units(20, (9, 14, 7), (5, 30)), *text_samples(24, 9)]
    proof = run_proof(make(), samples, [text_units(30, [6] * 8)])
    assert proof.moved == 0
    assert proof.off(in_float32=True) < 1e-4
    assert proof.gradient(in_float32=True) < 1e-4


def test_branches_are_changed_and_no_other_moves(proof_model, units):
    """SHARE-61"""
    right = proof_model(QWEN)
    with torch.no_grad():
        swapped = compare(right, units(right.batches.template), swaps=True, runs_alone=False).swapped
    assert swapped.num_changed == 8
    assert sorted(swapped.moved) == list(range(8))
    assert max(gap.most for gap in swapped.moved.values()) == 0


def test_replaced_branch_keeps_its_prefix(proof_model, units):
    """SHARE-61"""
    right = proof_model(QWEN)
    one, *_ = units(right.batches.template)
    num = one[PREFIX].num_tokens
    changed = replaced(one, right.is_ordinary)["input_ids"]
    assert changed[:num] == one["input_ids"][:num]
    assert changed[num:] != one["input_ids"][num:]


def test_only_neighbours_of_one_mark_share():
    """SHARE-60: however samples are chosen, turned round or left out."""
    one, two, three, *_ = text_units(5, (3, 3, 3), (4, 4))
    assert shared_of([one, two, three]) == shared_of([three, two, one]) == (0, 5, 5)
    (alone,) = text_samples(9)
    assert shared_of([one, alone, two, three]) == (0, 0, 0, 5)
    assert units_in([one, alone, two, three]) == [[2, 3]]


def test_row_that_differs_is_whole_in_the_proof_as_in_the_run(proof_model, units):
    """SHARE-60: and it does not come between the others of its unit."""
    right = proof_model(QWEN)
    one, two, three, *_ = units(right.batches.template)
    num = one[PREFIX].num_tokens
    rows = [{name: value for name, value in row.items() if name != PREFIX} for row in (one, two, three)]
    rows[1] = {**rows[1], "pixel_values": rows[1]["pixel_values"] + 1}
    planned = as_planned([*rows, None], (0, num, num, num))
    assert [row["sample_id"] for row in planned] == [one["sample_id"], three["sample_id"], two["sample_id"]]
    assert shared_of(planned) == (0, num, 0)
    assert ["pixel_values" in row for row in as_trained(planned)] == [True, False, True]
    assert shared_of(as_planned([None, *rows[1:]], (0, num, num))) == (0, 0), "other pixels, once more"


# -- it is stopped ----------------------------------------------------------------------------------------------------

SIBLINGS = "branches of one prefix see each other"
OF_ATTENTION = {
    "branches see siblings": (s.llama, b.seeing_siblings, SIBLINGS),
    "branches do not see their prefix": (s.llama, b.not_seeing_prefixes, "model.s own: samples differ from token 20"),
    "a prefix counts twice": (s.llama, b.counting_prefixes_twice, "model.s own: samples differ from token 2\\d on"),
    "a window over siblings": (b.mistral, b.windows_over_siblings, "model.s own: samples differ from token"),
    "backward of the first branch only": (
        s.llama, b.leaving_later_branches_out_of_the_backward, "the backward of a sequence is not that of its samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_attention_that_is_wrong_with_prefixes_is_stopped(name):
    """SHARE-62"""
    make, attend, cause = OF_ATTENTION[name]
    samples = [*text_units(20, (9, 14, 7), (5, 30)), *text_samples(24, 9)]
    stopped(s.attending(make(), attend), samples, cause)
    with s.attending(make(), attend) as proof_model:
        run_proof(proof_model, text_samples(24, 9, 14, 20))  # without prefixes nothing is wrong


OF_SEQUENCES = {
    "positions over siblings": (b.positions_over_siblings, r"positions of image0:1 in the sequence are not those that"),
    "positions one late": (b.branches_one_late, r"positions of image0:0 in the sequence are not those that it has"),
    "targets at forks": (b.targets_at_forks, r"image0:0 has a target directly after its prefix"),
    "pixels of another unit": (s.media_exchanged, r"pixel_values of the sequence are not those of its samples"),
    "prefix of another unit": (b.prefix_of_another, r"the sequence is not its samples.*does not follow its prefix"),
    "prefixes lost": (b.prefixes_lost, r"a prefix is lost or another one: segment 2 of the sequence has segment 1"),
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_sequences_with_prefixes_made_wrongly_are_stopped(name, proof_model, units):
    """SHARE-62"""
    change, cause = OF_SEQUENCES[name]
    right = proof_model(QWEN)
    stopped(nullcontext(s.batches_changed(right, change)), units(right.batches.template), cause)


@pytest.mark.parametrize(("token", "place"), [(20, "directly after its prefix"), (7, "in the prefix that it shares")])
def test_rows_with_a_target_where_they_share_are_stopped(token, place):
    """SHARE-62: labels are those of the row alone, and it would be trained otherwise all the same."""
    samples = text_units(20, (9, 14, 7))
    for sample in samples:
        sample["labels"] = [*sample["labels"][:token], sample["input_ids"][token], *sample["labels"][token + 1 :]]
    assert samples[0]["labels"][token] != IGNORED
    stopped(nullcontext(s.llama()), samples, rf"unit 0:0 has a target {place}, at its token {token}")


def test_prefix_that_is_there_twice_is_stopped():
    """SHARE-62: where a branch brings the prefix again, its tokens and positions are not those of the row."""
    right = s.llama()

    def twice(row, samples):
        if not any(shared_of(samples)):
            return row
        ids = row.inputs["input_ids"].clone()
        ids[0, 20:29] = ids[0, :9]
        return b.with_inputs(row, input_ids=ids)

    changed = s.batches_changed(right, twice)
    stopped(nullcontext(changed), text_units(20, (9, 14, 7)), "input_ids of unit 0:0 in the sequence are not those")


def test_units_that_are_wrong_in_full_sequences_only_are_stopped():
    """SHARE-62: the few branches of the pack are right, a sequence of the plan is not."""

    def lost(row, samples):
        return b.prefixes_lost(row, samples) if len(samples) > 6 else row

    samples = [*text_units(20, (9, 14)), *text_samples(24)]
    wrong = s.batches_changed(s.llama(), lost)
    stopped(nullcontext(wrong), samples, "a prefix is lost", [text_units(30, [6] * 8)])


def test_sibling_that_is_seen_is_found_in_16_bits():
    """SHARE-62: a unit is among the few samples that are compared in float32."""
    right = s.llama()
    right.model.to(torch.bfloat16)
    samples = [*text_samples(12, 9), *text_units(20, (9, 14, 7))]
    proof = run_proof(right, samples)
    assert proof.off(in_float32=True) < 1e-4
    stopped(s.attending(right, b.counting_prefixes_twice), samples, r"model.s own: .*\(float32\)")


def stopped(broken, samples, cause, sequences=()):
    with broken as proof_model, pytest.raises(IsolationError, match=cause) as caught:
        run_proof(proof_model, samples, sequences)
    print(caught.value)


def test_marks_follow_what_a_record_says():
    """SHARE-63"""
    rows = text_samples(9, 9, 9, 9)
    assert shared_of(marked(rows, (0, 5, 0, 3))) == (0, 5, 0, 3)
    assert marked(rows, ()) == rows
