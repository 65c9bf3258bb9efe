"""The trainer's own sequence: what only its loss, its head or its embeddings do wrongly is stopped and named."""

from types import MethodType

import pytest
import torch

from swift_vlpack.errors import IsolationError
from swift_vlpack.proof.compare import compare
from swift_vlpack.proof.gradients import Parameters
from swift_vlpack.proof.prove import compared_in_training, line_of_first_batch
from swift_vlpack.proof.runner import Runner
from swift_vlpack.proof.verdict import SHARP, Judged, first_finding
from tests.host.proof import sabotage as s
from tests.host.proof.runners import text_samples
from tests.host.proof.test_ranks import LENGTHS, first_batch


def line_of(right, compute_loss=None, limits=None):
    """The line of the proof on a first batch of texts."""

    def loss(inputs, packed):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        if compute_loss is not None:
            return compute_loss(right.model, inputs, labels, packed)
        return cross_entropy(right.model(**inputs).logits, labels)

    sequence = first_batch(text_samples(*LENGTHS), right)
    right.model.train()
    parameters = Parameters(right.model, all_trained=True, tokens=sequence.inputs["input_ids"])
    runner = Runner(right.model, sequence, right.is_ordinary, loss=loss)
    compared = compared_in_training(runner, sequence, parameters, lambda work, is_collective=False: [work()])
    return line_of_first_batch(compared, limits, sequence, parameters)


def cross_entropy(logits, labels):
    logits = logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class HalfOfARow(torch.autograd.Function):
    """A fused head whose weight learns from the first half of a row only. All else is right."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        kept = gradient.clone()
        kept[:, hidden.shape[1] // 2 :] *= hidden.shape[1] < 50
        return gradient @ weight, torch.einsum("bto,bth->oh", kept, hidden)


class Written(torch.autograd.Function):
    """Embeddings whose backward writes where it should add."""

    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids, weight)
        return weight[ids]

    @staticmethod
    def backward(ctx, gradient):
        ids, weight = ctx.saved_tensors
        of_weight = torch.zeros_like(weight)
        of_weight[ids.flatten()] = gradient.flatten(0, 1)
        return None, of_weight


def with_half_a_head(model):
    head = model.get_output_embeddings()
    head.forward = MethodType(lambda self, hidden: HalfOfARow.apply(hidden, self.weight), head)


def with_written_embeddings(model):
    embed = model.get_input_embeddings()
    embed.forward = MethodType(lambda self, ids: Written.apply(ids, self.weight), embed)


OF_VOCABULARY = {
    "head": (with_half_a_head, r"the head, or a loss .*the gradient of head is off by"),
    "embeddings": (with_written_embeddings, r"the backward of the embeddings .*the gradient of embeddings is off by"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_VOCABULARY)
def test_head_and_embeddings_that_learn_from_a_part_are_stopped(name, dtype):
    """ISO-21: hidden states, and the gradients of all tokens and of all layers, are right."""
    change, said = OF_VOCABULARY[name]
    right = s.llama(vocab_size=512)
    right.model.to(dtype)
    assert "verified in training" in line_of(right)
    change(right.model)
    with pytest.raises(IsolationError, match=said):
        line_of(right)


def test_head_that_is_frozen_is_not_compared():
    """ISO-21: as with adapters; its gradient would take as much memory as the head."""
    right = s.llama()
    right.model.lm_head.weight.requires_grad_(False)
    with_half_a_head(right.model)
    assert "verified in training" in line_of(right)


def test_loss_that_begins_one_target_late_in_a_sequence_is_told_as_the_loss():
    """ISO-21: as of logits that are kept one late; neither layers nor checkpointing are blamed."""

    def one_late(model, inputs, labels, packed):
        logits = model(**inputs).logits
        return cross_entropy(logits.roll(-1, dims=1) if packed else logits, labels)

    right = s.llama()
    right.model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(IsolationError, match="the trainer's loss of a sequence is not that of its samples"):
        line_of(right, one_late)


def test_row_that_is_weighted_by_the_channel_of_its_first_sample_is_told_as_the_loss():
    """ISO-21: every sample alone has the weight of its own channel."""

    def by_channel(model, inputs, labels, packed):
        is_first = packed or inputs["input_ids"].shape[1] == LENGTHS[0]
        return cross_entropy(model(**inputs).logits, labels) * (3.0 if is_first else 1.0)

    with pytest.raises(IsolationError, match="the trainer's loss of a sequence is not that of its samples"):
        line_of(s.llama(), by_channel)


def test_leak_in_the_first_batch_names_module_and_sample():
    """ISO-15 ISO-21: the cause is looked for as before training."""
    with (
        s.attending(s.llama(), s.ignoring_boundaries) as broken,
        pytest.raises(IsolationError, match=r"attention is causal and has no boundaries.*text:1.*layers\.0\.self_attn"),
    ):
        line_of(broken)


class FiveTokensBack(torch.autograd.Function):
    """Adds, in the backward, gradient to the values of the five tokens before each boundary."""

    @staticmethod
    def forward(ctx, made, values, ends):
        ctx.num_heads, ctx.num_tokens, ctx.ends = values.shape[1], values.shape[2], ends
        return made.clone()

    @staticmethod
    def backward(ctx, gradient):
        of_values = gradient.transpose(1, 2).unflatten(1, (ctx.num_heads, -1)).sum(2)
        extra = torch.zeros_like(of_values)
        for end in ctx.ends[1:-1]:
            extra[:, :, end - 5 : end] = of_values[:, :, end : end + 5]
        return gradient, extra, None


@s.if_packed
def leaks_back(right, args, ends, options):
    return FiveTokensBack.apply(right()[0], args[2], ends.tolist()), None


@pytest.mark.parametrize("runs_alone", [True, False])
def test_gradient_at_samples_without_a_loss_is_seen_without_parameters(runs_alone):
    """ISO-9 ISO-24: on some shards no gradient of a parameter can be compared."""
    samples = text_samples(12, 17, 14, 19)
    for at, sample in enumerate(samples):
        sample["labels"] = list(sample["input_ids"]) if at in (1, 3) else [-100] * len(sample["labels"])

    def finding(attend):
        with s.attending(s.llama(), attend) as runner:
            parameters = Parameters(runner.model, all_trained=True)
            parameters.of_forward = {}
            one = compare(runner, samples, parameters=parameters, watched=[1, 3], swaps=True, runs_alone=runs_alone)
            return first_finding([Judged(one, SHARP, "the sequence")])

    assert finding(s.segmented_attention) is None
    assert finding(leaks_back).cause == "the backward of attention crosses the boundaries of samples"
