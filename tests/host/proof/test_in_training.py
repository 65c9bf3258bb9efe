"""The proof on the first batch that trains: by the trainer's own path, in real runs of tiny models."""

import json
import logging
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import AttentionInterface
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from swift_vlpack.attention import attention
from swift_vlpack.errors import IsolationError
from swift_vlpack.feed.collate import Collator, batch_of
from swift_vlpack.host import proof
from swift_vlpack.host.proof import prove_batch
from swift_vlpack.host.trainer import PackingTrainer
from swift_vlpack.plan.boundaries import ROOT
from swift_vlpack.proof import reference, runner
from swift_vlpack.proof.first_batch import FirstSequence
from swift_vlpack.rows import streams
from swift_vlpack.rows.samples import PackRecord
from tests.data_rows import image_row, text_row, write_jsonl
from tests.environment import packing_options
from tests.host.proof import sabotage as s
from tests.host.proof import sabotage_branches as b
from tests.host.runs import packed_argv, train
from tests.images import photo
from tests.marks import telling

FAMILY = "qwen2_5_vl"
LORA = {"tuner_type": "lora", "target_modules": "all-linear"}
VERIFIED = re.compile(
    "isolation (verified in training:|in training: no sample sees another in) the first batch of the "
)


@pytest.fixture(autouse=True)
def environment():
    packing_options(packing_drop_last="false")


@pytest.fixture
def run(small_folder, data, tmp_path, caplog):
    """Train two steps; the losses, and what the proof said of the first batch."""

    def trained(folder=None, **options):
        caplog.clear()
        settings = {"dataset": data, "max_steps": 2, "split_dataset_ratio": 0, **options}
        with caplog.at_level(logging.INFO):
            result = train(packed_argv(folder or small_folder(FAMILY), FAMILY, tmp_path / "run", **settings))
        said = [record.getMessage() for record in caplog.records if VERIFIED.match(record.getMessage())]
        return [
            (line["loss"], line["grad_norm"], line["token_acc"]) for line in result["log_history"] if "loss" in line
        ], said

    return trained


@pytest.fixture
def with_dropout(small_folder, tmp_path):
    """A model with dropout in its attention."""
    shutil.copytree(small_folder(FAMILY), folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def attending(monkeypatch):
    """Train with another attention."""

    def put(attend):
        monkeypatch.setattr(attention, "segmented_attention", attend)
        AttentionInterface.register(attention.NAME, attend)

    yield put
    monkeypatch.undo()
    attention.register()


# -- it holds, and changes nothing ------------------------------------------------------------------------------------

RIGHT = {
    "defaults of the host": {**LORA, "dataloader_num_workers": 1, "torch_dtype": "bfloat16"},
    "noise": {**LORA, "neftune_noise_alpha": 5, "gradient_accumulation_steps": 2},
    "no checkpointing": {**LORA, "gradient_checkpointing": "false", "label_smoothing_factor": 0.1},
    "vision": {"freeze_vit": "false", "freeze_aligner": "false"},
}


@pytest.mark.parametrize("name", ["defaults of the host", *map(telling, list(RIGHT)[1:])])
def test_first_batch_is_verified_and_training_goes_on_as_without(name, run):
    """ISO-21 ISO-23: no batch is used up, no number drawn, no gradient and no metric left."""
    # One kernel for both runs: `auto` takes the fastest, which may be another one each time on a busy machine.
    packing_options(packing_drop_last="false", packing_attention="segments")
    options = RIGHT[name]
    proved, (line,) = run(**options)
    draws = "with all that is drawn at random" if "tuner_type" in options else "nothing is drawn at random"
    assert draws in line
    assert ("layers run again in the backward" in line) == ("gradient_checkpointing" not in options)
    assert "other neighbours move hidden states by 0.0e+00, gradients by 0.0e+00" in line
    equal = r"in it equals? the model's own attention within \S+ of the largest hidden state, gradients within "
    assert re.search(equal, line)
    assert "isolation verified in training" in line
    assert bool(re.search(r"; in bfloat16 \d+ samples? in it .* and \S+ and \S+ would be refused", line)) == (
        "torch_dtype" in options
    )
    packing_options(packing_drop_last="false", packing_attention="segments", packing_verify="false")
    plain, said = run(**options)
    assert said == []
    assert proved == plain


# -- what is wrong in training alone ----------------------------------------------------------------------------------


def is_run_again_by_the_reentrant_form():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def test_layers_that_forget_boundaries_when_they_are_run_again_are_stopped(run, attending):
    """ISO-21: by the form of checkpointing that trains."""

    @s.if_packed
    def forgetting(right, args, ends, options):
        return s.whole_row(*args, **options) if is_run_again_by_the_reentrant_form() else right()

    attending(forgetting)
    with pytest.raises(IsolationError, match=r"layer that is run again otherwise \(gradient checkpointing\)"):
        run(**LORA)


@pytest.mark.parametrize("options", [{}, telling(LORA)])
def test_dropout_of_attention_that_leaks_is_stopped(options, run, attending, with_dropout):
    """ISO-21"""

    @s.if_packed
    def leaking(right, args, ends, options):
        return s.whole_row(*args, **options) if options.get("dropout") else right()

    attending(leaking)
    said = r"what is drawn at random mixes samples.*moved the hidden states of others.*With nothing drawn, .* right"
    with pytest.raises(IsolationError, match=said):
        run(with_dropout, **options)


def test_dropout_of_an_adapter_that_mixes_is_stopped(run, monkeypatch):
    """ISO-21: its second matrix is 0 at the first step, so it shows in the gradient of parameters alone."""
    right = torch.nn.Dropout.forward

    def mixing(self, states):
        made = right(self, states)
        return made + made.mean(dim=1, keepdim=True) if self.training and self.p > 0 and states.dim() == 3 else made

    monkeypatch.setattr(torch.nn.Dropout, "forward", mixing)
    said = r"what is drawn at random mixes samples.*changed the gradient that samples give to parameters"
    with pytest.raises(IsolationError, match=said):
        run(**LORA)


def test_noise_by_the_length_of_the_row_is_stopped(run, monkeypatch):
    """ISO-21"""
    from swift_vlpack.host import callback

    monkeypatch.setattr(callback, "noise_by_sample", lambda trainer: None)
    with pytest.raises(
        IsolationError, match=r"noise on embeddings .*scaled by the length of the sequence.*0\.\d+ times"
    ):
        run(neftune_noise_alpha=5)


def test_backward_that_is_wrong_in_full_rows_is_stopped(run, attending):
    """ISO-21: the proof before has gradients of its short samples only."""
    packing_options(packing_drop_last="false", packing_length="900")

    @s.if_packed
    def wrong(right, args, ends, options):
        return s.with_a_wrong_backward(*args, cu_seq_lens_q=ends, **options) if ends[-1] > 600 else right()

    attending(wrong)
    with pytest.raises(IsolationError, match=r"the backward of a sequence is not that of its samples"):
        run(max_length=900)


class Rolled(torch.autograd.Function):
    """Nothing forwards; backwards each token gets the gradient of the one before it."""

    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.roll(1, dims=1)


def test_gradient_that_reaches_other_embeddings_is_stopped(run, data, tmp_path, monkeypatch):
    """ISO-21: between embeddings and layers, of which no norm and no matrix of the layers has a gradient."""
    right = Qwen2_5_VLModel.forward

    def forward(self, *args, inputs_embeds=None, cu_seq_lens_q=None, **options):
        if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
            inputs_embeds = Rolled.apply(inputs_embeds)
        return right(self, *args, inputs_embeds=inputs_embeds, cu_seq_lens_q=cu_seq_lens_q, **options)

    monkeypatch.setattr(Qwen2_5_VLModel, "forward", forward)
    texts = write_jsonl(tmp_path / "texts.jsonl", [text_row(f"question {n}", "answer " * 40) for n in range(12)])
    with pytest.raises(IsolationError, match=r"the backward of a sequence is not that of its samples"):
        run(dataset=texts)


def test_loss_is_taken_of_a_few_targets_of_each_watched_sample():
    """ISO-21: the first, the last and some between, none of those with a weight of 0; of many samples fewer."""
    labels, weights = torch.full((1, 300), 7), torch.ones(1, 300)
    labels[0, [0, 100]], weights[0, 100:150] = -100, 0
    record = PackRecord(0, 0, (), (100, 200), 0)
    sequence = FirstSequence({"labels": labels, "loss_scale": weights}, record, "", None)
    places = sequence.is_learnt.nonzero().flatten().tolist()
    assert len(places) == 8
    assert (places[0], places[-1]) == (150, 299)
    lengths = (10,) * 600
    many = FirstSequence({"labels": torch.full((1, 6000), 7)}, replace(record, lengths=lengths), "", None)
    assert int(many.is_learnt.sum()) == 2 * 300


def test_no_logits_of_a_target_that_is_not_taken_are_computed(run, monkeypatch):
    """ISO-21: those of a whole vocabulary are the largest tensors of a step."""
    nums, right = [], PackingTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **options):
        nums.append(int((inputs["labels"] != -100).sum()))
        return right(self, model, inputs, *args, **options)

    def prove(*args, **options):
        monkeypatch.setattr(PackingTrainer, "compute_loss", compute_loss)
        said = prove_batch(*args, **options)
        monkeypatch.setattr(PackingTrainer, "compute_loss", right)
        return said

    monkeypatch.setattr("swift_vlpack.host.proof.prove_batch", prove)
    _, (line,) = run()
    assert max(nums) <= 8 * int(re.search(r"(\d+) samples? in it equal", line)[1])


# -- batches ----------------------------------------------------------------------------------------------------------


def rolled(inputs, record):
    labels = inputs["labels"].roll(1, dims=-1)
    labels[:, 0] = -100
    return {"labels": labels}


def lost(inputs, record):
    ends = inputs["cu_seq_lens_q"]
    kept = torch.cat([ends[:2], ends[3:]])
    return {"cu_seq_lens_q": kept, "cu_seq_lens_k": kept}


def other_positions(inputs, record):
    positions = inputs["position_ids"].clone()
    positions[1:, :, record.lengths[0] :] += 1
    return {"position_ids": positions}


def exchanged(inputs, record):
    return {"pixel_values": inputs["pixel_values"].flip(0)} if "pixel_values" in inputs else {}


def other_tokens(inputs, record):
    return {"input_ids": inputs["input_ids"].roll(1, dims=-1)}


WRONG = {
    "labels": (rolled, "labels of train:"),
    "boundary": (lost, r"the boundary before sample 3 of the sequence is lost"),
    "positions": (other_positions, "positions of train:"),
    "pixels": (exchanged, "pixel_values of the sequence are not those of its samples"),
    "tokens": (other_tokens, "input_ids of train:"),
}


def changing(monkeypatch, change, *, is_in_workers_only):
    right = Collator.sequence

    def sequence(self, pack):
        made = right(self, pack)
        if (is_in_workers_only and get_worker_info() is None) or made.record is None or len(made.record.lengths) < 3:
            return made
        return batch_of({**made, **change(made, made.record)}, made.record, made.beside)

    monkeypatch.setattr(Collator, "sequence", sequence)


@pytest.mark.parametrize("name", ["labels", "positions", *map(telling, ("boundary", "pixels", "tokens"))])
def test_batches_that_workers_make_wrongly_are_stopped(name, run, monkeypatch):
    """ISO-22: the process that proves makes them rightly."""
    change, said = WRONG[name]
    changing(monkeypatch, change, is_in_workers_only=True)
    with pytest.raises(IsolationError, match=rf"the collator, or a dataloader worker, .*{said}"):
        run(dataloader_num_workers=1)


def test_boundary_that_the_collator_loses_is_stopped(run, monkeypatch):
    """ISO-22"""
    changing(monkeypatch, lost, is_in_workers_only=False)
    with pytest.raises(IsolationError, match=r"the boundary before sample 3 of the sequence is lost"):
        run()


def test_batches_of_streams_are_those_of_their_rows(run):
    """ISO-22: the rows are read again; every worker has others."""
    _, (line,) = run(streaming="true", dataloader_num_workers=2)
    assert "is what its samples are when they are encoded anew; " in line
    assert "not looked at" not in line


@pytest.mark.parametrize("pad_to", ["none", "length"])
def test_sequence_without_a_sample_is_no_mistake(pad_to, run, monkeypatch):
    """ISO-22: a rank that is dry at the first step takes part in it, and so does a pack of which no row can be read."""
    lines = []

    def also_empty(trainer, batches, num_items, *where, **options):
        lines.append(prove_batch(trainer, trainer.feed.fill_up(1), num_items))
        return prove_batch(trainer, batches, num_items, *where, **options)

    monkeypatch.setattr("swift_vlpack.host.proof.prove_batch", also_empty)
    packing_options(packing_drop_last="false", packing_pad_to=pad_to)
    _, (line,) = run(streaming="true")
    assert lines[0].startswith("isolation in training: no sample sees another in the first batch of the trainer (0 sam")
    assert line.startswith("isolation verified in training")


def test_samples_too_long_for_a_matrix_of_all_their_tokens_are_compared_with_what_is_equal(run, monkeypatch):
    """ISO-21 ISO-23"""
    monkeypatch.setattr(reference, "longest_for_own", lambda model, is_trained=False: 70)
    _, (line,) = run()
    assert "not looked at" not in line
    assert " in it equal the model's own attention within " in line


def test_model_whose_layers_cannot_be_looked_into_trains_all_the_same(run, monkeypatch, caplog):
    """ISO-23: as one of a class of its own making may be."""
    monkeypatch.setattr(runner, "_layers_of", lambda model: torch.nn.Identity())
    assert run()[1] == []
    assert "only tokens, labels and boundaries are verified (Identity gives no hidden states)" in caplog.text


def test_line_says_what_was_not_looked_at(run, monkeypatch):
    """ISO-23: a stream that has been read far."""
    monkeypatch.setattr(streams, "FARTHEST_ROW", -1)
    _, (line,) = run(streaming="true")
    assert "encoded anew; " not in line
    assert (
        "; not looked at: its samples encoded anew and alone, other media beside them (the stream would have to be read"
        in line
    )
    assert "other neighbours move hidden states by 0.0e+00, gradients by 0.0e+00" in line


def test_labels_of_a_stream_that_cannot_be_encoded_again_are_its_tokens(run, monkeypatch):
    """ISO-22"""
    monkeypatch.setattr(streams, "FARTHEST_ROW", -1)
    changing(monkeypatch, rolled, is_in_workers_only=False)
    with pytest.raises(IsolationError, match="labels are not the tokens at their places"):
        run(streaming="true")


def of_the_second_worker(inputs, record):
    worker = get_worker_info()
    return rolled(inputs, record) if worker is not None and worker.id == 1 else {}


def test_batches_of_every_worker_are_looked_at(run, monkeypatch):
    """ISO-25: the labels of the second worker are wrong, and its first batch trains in the second step."""
    changing(monkeypatch, of_the_second_worker, is_in_workers_only=True)
    with pytest.raises(IsolationError, match=r"the collator, or a dataloader worker, .*labels of train:"):
        run(dataloader_num_workers=2, gradient_accumulation_steps=1)


def test_what_no_batch_had_is_said(run, monkeypatch, caplog):
    """ISO-25: of a run whose rows never fill a sequence."""
    packing_options(packing_drop_last="false", packing_length="3000")
    monkeypatch.setattr(proof, "MOST_STEPS", 2)
    run(max_length=3000)
    assert "not looked at in 2 steps: a sequence of several samples that is 90 % full" in caplog.text


# -- prefixes that rows share -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Rows about images of one size, several an image, and texts."""
    folder = tmp_path_factory.mktemp("questions")
    images = [photo(folder, str(number), 84, 112, seed=number) for number in range(4)]
    rows = [image_row([one], f"question {n} " * (1 + n), f"answer {n} " * (3 + n)) for n in range(4) for one in images]
    return write_jsonl(folder / "train.jsonl", rows + [text_row(f"question {n}", "answer " * 20) for n in range(6)])


SHARING = {"packing_drop_last": "false", "packing_share": "media", "packing_attention": "segments"}


@pytest.mark.parametrize("name", ["vision", *map(telling, ("defaults of the host", "no checkpointing"))])
def test_first_batch_with_prefixes_is_verified_and_training_goes_on_as_without(name, run, questions):
    """SHARE-63: in the loss of the trainer, with its checkpointing and with all that is drawn."""
    options = {name: value for name, value in RIGHT[name].items() if name != "neftune_noise_alpha"}
    packing_options(**SHARING)
    proved, (line,) = run(dataset=questions, **options)
    assert re.search(r"tokens, \d+ branches of \d shared prefix", line)
    assert "which is what its samples are when they are encoded anew" in line
    assert "not looked at" not in line
    assert "other neighbours move hidden states by 0.0e+00, gradients by 0.0e+00" in line
    assert re.search(r"in it equal the model's own attention within \S+ of the largest hidden state, gradients w", line)
    packing_options(**SHARING, packing_verify="false")
    assert run(dataset=questions, **options) == (proved, [])


def forks(record):
    """The first token of each branch that follows another one."""
    boundaries = record.boundaries
    return [
        start
        for start, parent, before in zip(
            boundaries.document_starts[1:], boundaries.parents[1:], boundaries.parents, strict=False
        )
        if parent == before != ROOT
    ]


def learnt_at_forks(inputs, record):
    labels = inputs["labels"].clone()
    labels[:, forks(record)] = inputs["input_ids"][:, forks(record)]
    return {"labels": labels}


def later_positions(inputs, record):
    positions = inputs["position_ids"].clone()
    positions[..., forks(record)[0] :] += 1
    return {"position_ids": positions}


def second_line_lost(inputs, record):
    ends = inputs["cu_seq_lens_q"][0].contiguous()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def longest_of_all(inputs, record):
    return {"max_length_q": inputs["max_length_q"] + 1}


WRONG_FORKS = {
    "labels": (learnt_at_forks, "train:.* has a target directly after its prefix"),
    "positions": (later_positions, "positions of train:"),
    "pixels": (exchanged, "pixel_values of the sequence are not those of its samples"),
    "boundaries": (second_line_lost, "a prefix is lost or another one: segment"),
    "longest": (longest_of_all, "max_length_q of the batch is"),
}


@pytest.mark.parametrize("name", ["labels", *map(telling, ("positions", "pixels", "boundaries", "longest"))])
def test_batches_with_prefixes_that_workers_make_wrongly_are_stopped(name, run, questions, monkeypatch):
    """SHARE-63"""
    packing_options(**SHARING)
    change, said = WRONG_FORKS[name]
    changing(monkeypatch, change, is_in_workers_only=True)
    with pytest.raises(IsolationError, match=rf"the collator, or a dataloader worker, .*{said}"):
        run(dataset=questions, dataloader_num_workers=1)


IN_TRAINING = {
    "siblings": (b.seeing_siblings, "what is drawn at random mixes samples.*moved the hidden states of others"),
    "lost prefixes": (b.not_seeing_prefixes, "a branch does not see its prefix"),
}


@pytest.mark.parametrize("name", ["siblings", telling("lost prefixes")])
def test_prefixes_that_are_wrong_in_training_only_are_stopped(name, run, questions, with_dropout, attending):
    """SHARE-63: a kernel that is taken where something is drawn."""
    packing_options(**SHARING)
    wrong, said = IN_TRAINING[name]

    def attend(*args, dropout=0.0, **options):
        use = wrong if dropout else s.segmented_attention
        return use(*args, dropout=dropout, **options)

    attending(attend)
    with pytest.raises(IsolationError, match=said):
        run(with_dropout, dataset=questions)


@pytest.mark.slow
@pytest.mark.telling
def test_gradient_of_a_prefix_that_is_not_the_sum_over_its_branches_is_stopped(run, questions, attending):
    """SHARE-63: in whole sequences only, of which the proof before it takes no gradient."""
    packing_options(**SHARING)

    def attend(*args, cu_seq_lens_q=None, **options):
        is_long = cu_seq_lens_q is not None and cu_seq_lens_q.max() > 600
        use = b.leaving_later_branches_out_of_the_backward if is_long else s.segmented_attention
        return use(*args, cu_seq_lens_q=cu_seq_lens_q, **options)

    attending(attend)
    with pytest.raises(IsolationError, match=r"the backward of a sequence is not that of its samples"):
        run(dataset=questions, max_length=900)
