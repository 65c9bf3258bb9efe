"""The attention kernel is chosen among those that are equal to the reference on this device."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from swift_vlpack.attention import attention, choose_kernel, kernels
from swift_vlpack.attention.attention import NAME, recorded_calls
from swift_vlpack.attention.choose_kernel import (
    LENGTHS,
    LayerKind,
    choose,
    layer_kinds,
    reference,
    results,
)
from swift_vlpack.attention.kernels import (
    BYTES_OF_CALL,
    KERNELS,
    CannotDo,
    by_flex,
    by_lengths,
    grouped,
    saves_calls,
    segments,
)
from swift_vlpack.errors import ConfigError
from tests.attention.one_by_one import built, compared, packed, run, samples_of
from tests.attention.test_honours import deepseek, gemma2, gemma3_vision, gpt_oss, llama4, mistral


def forward_of(model):
    model.set_attn_implementation(NAME)
    return lambda: run(model, packed(samples_of((5, 7))), lambda name: True)


def calls_of(model):
    forward = forward_of(model)
    with torch.no_grad(), recorded_calls() as calls:
        forward()
    return calls


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [gpt_oss, gemma2, mistral, llama4, deepseek])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (9, 9, 9), (50, 1, 20, 1)])
def test_every_kernel_that_runs_here_gives_what_the_reference_gives(config, lengths):
    """ATTN-8: also of windows, chunks, sinks and soft cap, and their gradients."""
    for kind in layer_kinds(calls_of(built(config()))):
        sequence = kind.random(lengths, 16)
        expected = results(sequence, reference)
        for kernel in (segments, grouped):
            for made, right in zip(results(sequence, kernel), expected, strict=True):
                torch.testing.assert_close(made.double(), right.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("config", [gpt_oss, gemma2, mistral])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_result_of_flex_is_that_of_the_reference(config):
    """ATTN-8: compiled, and backward, it runs on CUDA only; its window, soft cap and sinks are the same code."""
    for kind in layer_kinds(calls_of(built(config()))):
        sequence = kind.random(LENGTHS, 16)
        for states in (sequence.query, sequence.key, sequence.value):
            states.requires_grad_(False)
        with torch.no_grad():
            torch.testing.assert_close(
                by_flex(sequence, flex_attention).double(), reference(sequence), atol=2e-5, rtol=2e-5
            )


def test_chunks_are_not_for_flex():
    """ATTN-8"""
    sequences = [kind.random(LENGTHS, 16) for kind in layer_kinds(calls_of(built(llama4())))]
    with pytest.raises(CannotDo, match="knows causal masks"):
        [by_flex(sequence, flex_attention) for sequence in sequences]


@pytest.mark.parametrize("config", [gpt_oss, gemma2, llama4])
def test_grouped_rows_equal_one_by_one(config):
    """ATTN-1 ATTN-8"""
    model = built(config())
    attention.use_kernel(model, grouped)
    assert max(compared(model, samples_of((23, 1, 40, 20, 21, 39)))) < 1e-5


class Written(TorchDispatchMode):
    """Numbers that are written by all operations inside of it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.count += sum(one.numel() for one in torch.utils._pytree.tree_leaves(made) if torch.is_tensor(one))
        return made


@pytest.mark.parametrize("kernel", [segments, grouped])
def test_what_is_copied_does_not_grow_with_the_number_of_samples(kernel):
    """ATTN-10: the gradient of a slice is as long as the sequence, so nothing is sliced sample by sample."""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    written = []
    for lengths in ((512,) * 2, (8, 16, 24, 32, 48) * 8):
        sequence = kind.random(lengths, 1024)
        with Written() as writes:
            results(sequence, kernel)
        written.append(writes.count)
    assert written[1] < 1.2 * written[0]


def test_what_a_kernel_cannot_do_segments_do():
    """ATTN-8: images see themselves in both directions, so padding would be seen."""
    model = built(gemma3_vision())
    attention.use_kernel(model, grouped)
    samples = samples_of((23, 30, 24))
    for number, sample in enumerate(samples):
        sample["token_type_ids"] = torch.zeros_like(sample["input_ids"])
        sample["token_type_ids"][:, 3 + 4 * number : 9 + 4 * number] = 1
    assert max(compared(model, samples, taken=lambda name: True)) < 1e-5


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "taken"),
    [
        ({"segments", "grouped", "varlen"}, "varlen, equal to the reference"),
        ({"segments", "varlen"}, "varlen, equal to the reference"),
        ({"segments", "grouped"}, "segments or grouped, by the lengths of each sequence"),
        ({"segments"}, "segments, equal to the reference"),
    ],
)
def test_first_that_is_right_is_taken(right, taken):
    """ATTN-8 ATTN-9: by its name, not by the clock; `flex` is not even tried."""
    model = built(mistral())
    kernels = {name: segments if name in right else ignores_boundaries for name in ("segments", "grouped", "varlen")}
    line = choose(model, forward_of(model), kernels={**kernels, "flex": lambda sequence: pytest.fail("tried")})
    assert line.startswith(f"attention vlpack: {taken}")
    assert {name for name in kernels if f"{name} differs" in line} == {*kernels} - right


def test_kernel_that_is_wrong_in_float32_only_is_not_taken():
    """ATTN-9: limits of 16 bits would hide it. A kernel that refuses float32 is judged in 16 bits alone."""

    def scaled(sequence):
        return segments(replace(sequence, query=sequence.query * 1.01))

    def of_16_bits(sequence):
        if sequence.query.dtype is torch.float32:
            raise RuntimeError("expected fp16 or bf16")
        return scaled(sequence)

    model = built(mistral()).to(torch.bfloat16)
    line = choose(model, forward_of(model), kernels={"segments": segments, "varlen": scaled})
    assert line.startswith("attention vlpack: segments, equal to the reference (varlen differs")
    assert "in float32" in line
    line = choose(model, forward_of(model), kernels={"segments": segments, "varlen": of_16_bits})
    assert line == "attention vlpack: varlen, equal to the reference"


def test_lengths_tell_segments_from_grouped(monkeypatch):
    """ATTN-9: both are tried, and every sequence takes the one that its own lengths ask for."""
    model = built(gpt_oss())
    line = choose(model, forward_of(model))
    assert line.startswith("attention vlpack: segments or grouped, by the lengths of each sequence (varlen needs CUDA")
    assert {*attention._kernels.values()} >= {by_lengths}
    used = []
    for name in ("segments", "grouped"):
        kernel = KERNELS[name]
        monkeypatch.setattr(kernels, name, lambda *of, name=name, kernel=kernel: used.append(name) or kernel(*of))
    (kind, *_) = layer_kinds(calls_of(model))
    for lengths, quicker in (((8,) * 40, "grouped"), ((300, 200, 90, 100, 400), "segments"), ((7,), "segments")):
        by_lengths(kind.random(lengths, 16))
        assert used.pop() == quicker


def test_a_device_where_calls_are_launches_groups_longer_samples():
    """ATTN-9: on a CPU a call costs little more than what it computes."""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    for lengths, is_quicker in (((500,) * 16, True), ((500, 300, 100), False)):
        sequence = kind.random(lengths, 16)
        assert (saves_calls(sequence), saves_calls(sequence, 10e6)) == (False, is_quicker)


@pytest.fixture
def on_device(monkeypatch):
    """As on a device other than a CPU, as far as the choice is concerned."""
    monkeypatch.setattr(LayerKind, "is_on_device", True)


def test_price_of_a_call_is_measured_on_a_device(on_device):
    """ATTN-9: the same on all ranks, by the highest of their measurements."""
    (kind, *_) = layer_kinds(calls_of(built(mistral())))
    price = choose_kernel.bytes_of_call(kind)
    assert BYTES_OF_CALL / 30 < price < 30 * BYTES_OF_CALL, "on the CPU that measured the constant, about as much"
    model = built(mistral())

    def of_both(work):
        found = work()
        return [found, 2**23] if isinstance(found, float) else [found, found]

    line = choose(model, forward_of(model), results_of_all=of_both)
    assert line.startswith(
        "attention vlpack: segments or grouped, by the lengths of each sequence, where a call costs what copying 8 MiB "
        "costs (varlen needs CUDA"
    )
    assert attention._kernels[model].keywords == {"bytes_of_call": 2**23}


def no_sinks(sequence):
    if sequence.args.sinks is not None:
        raise CannotDo("knows no sinks")
    return segments(sequence)


def test_layers_that_varlen_does_not_support_are_computed_in_groups(on_device, monkeypatch):
    """ATTN-9 ATTN-12: and not sample by sample, if some layers of a model ask for more than others."""
    model = built(gemma2())
    kinds = layer_kinds(calls_of(model))
    with_sinks = replace(kinds[0].call, args=replace(kinds[0].call.args, sinks=torch.zeros(4)))
    monkeypatch.setattr(choose_kernel, "layer_kinds", lambda calls: [LayerKind(with_sinks), *kinds[1:]])
    monkeypatch.setattr(choose_kernel, "bytes_of_call", lambda kind: 2.0**30)
    line = choose(model, forward_of(model), kernels={**KERNELS, "varlen": no_sinks})
    assert line.startswith("attention vlpack: varlen, equal to the reference")
    assert "for every sample" not in line
    used = []
    monkeypatch.setattr(kernels, "grouped", lambda *of: used.append("grouped") or grouped(*of))
    attention._kernels[model](LayerKind(with_sinks).random(LENGTHS, 16))
    assert used == ["grouped"]
    attention._kernels[model](kinds[1].random(LENGTHS, 16))
    assert used == ["grouped"]


def test_start_says_which_layers_launch_for_every_sample(on_device, monkeypatch):
    """ATTN-12: and the way out; on a CPU it costs little."""
    model = built(gemma3_vision())
    samples = samples_of((23, 30))
    for sample in samples:
        sample["token_type_ids"] = torch.zeros_like(sample["input_ids"])
        sample["token_type_ids"][:, 3:9] = 1
    model.set_attn_implementation(NAME)

    def forward():
        run(model, packed(samples), lambda name: True)

    said = (
        "; all layers launch their kernels for every sample: pack longer samples, or train with --attn_impl flash_attn "
        "where the model has it"
    )
    line = choose(model, forward)
    assert line.startswith("attention vlpack: segments, equal to the reference (grouped the mask is not causal")
    assert line.endswith(said)
    line = choose(model, forward, kernels={"segments": segments, "grouped": grouped, "varlen": segments_but_one(model)})
    assert "; some layers launch their kernels for every sample (knows windows only): pack longer samples" in line
    monkeypatch.undo()
    assert "for every sample" not in choose(model, forward)


def segments_but_one(model):
    """A kernel that supports the layers with a window."""

    def kernel(sequence):
        if sequence.window is None and "sliding" not in str(sequence.mask.signature):
            raise CannotDo("knows windows only")
        return segments(sequence)

    return kernel


def test_grouped_is_not_taken_where_it_is_wrong():
    """ATTN-9: lengths do not matter then."""
    model = built(gpt_oss())
    line = choose(model, forward_of(model), kernels={"segments": segments, "grouped": ignores_boundaries})
    assert line.startswith("attention vlpack: segments, equal to the reference (grouped differs")
    assert attention._kernels[model] is segments


def ignores_boundaries(sequence):
    return segments(replace(sequence, ends=(0, sequence.ends[-1])))


def ignores_window(sequence):
    return segments(replace(sequence, mask=None, window=None))


def wrong_backward(sequence):
    return segments(sequence) * 0.5 + segments(sequence).detach() * 0.5


def not_a_number(sequence):
    return segments(sequence) * torch.nan


@pytest.mark.parametrize("wrong", [ignores_boundaries, ignores_window, wrong_backward, not_a_number])
def test_wrong_kernel_is_never_chosen(wrong):
    """ATTN-9"""
    model = built(mistral())
    kernels = {"segments": segments, "varlen": wrong, "wrong": wrong}
    line = choose(model, forward_of(model), kernels=kernels)
    assert line.startswith("attention vlpack: segments, ")
    assert "varlen differs from the reference by" in line
    with pytest.raises(ConfigError, match=r"packing_attention=wrong: the kernel differs .* set packing_attention=auto"):
        choose(model, forward_of(model), wanted="wrong", kernels=kernels)


def test_kernel_that_breaks_is_skipped_with_its_reason():
    """ATTN-9"""

    def broken(sequence):
        raise RuntimeError("no such device\nand much more")

    model = built(mistral())
    line = choose(model, forward_of(model), kernels={"segments": segments, "varlen": broken})
    assert "varlen breaks with RuntimeError: no such device)" in line
    assert line.startswith("attention vlpack: segments, ")


def test_kernel_that_knows_no_dropout_is_not_chosen_for_a_model_that_trains_with_it():
    """ATTN-9: another one would train."""

    def without_dropout(sequence):
        if sequence.args.dropout:
            raise CannotDo("knows no dropout")
        return segments(sequence)

    kernels = {"segments": segments, "varlen": without_dropout}
    for rate, chosen in ((0.0, "varlen"), (0.1, "segments")):
        config = mistral()
        config.attention_dropout = rate
        model = built(config)
        state = torch.get_rng_state()
        line = choose(model, forward_of(model), kernels=kernels)
        assert line.startswith(f"attention vlpack: {chosen}, ")
        assert ("varlen knows no dropout" in line) == bool(rate)
        assert torch.equal(torch.get_rng_state(), state), "training draws as without"
        assert not any(module.training for module in model.modules())


def test_kernels_of_cuda_say_why_they_are_not_used():
    """ATTN-9"""
    model = built(mistral())
    line = choose(model, forward_of(model))
    assert "varlen needs CUDA, the sequence is on cpu" in line
    for name in ("varlen", "flex"):
        with pytest.raises(
            ConfigError, match=f"packing_attention={name}: the kernel .* cpu; set packing_attention=auto"
        ):
            choose(model, forward_of(model), wanted=name)


def test_kernel_that_is_asked_for_is_used():
    """ATTN-9"""
    model = built(mistral())
    line = choose(model, forward_of(model), wanted="grouped")
    assert line == "attention vlpack: grouped, as asked for"
    assert {*attention._kernels.values()} >= {grouped}
    assert choose(model, forward_of(model), wanted="segments") == "attention vlpack: segments, as asked for"
    assert attention._kernels[model] is segments


def test_all_ranks_choose_the_same():
    """ATTN-9: a kernel that one rank cannot use is used by none."""
    model = built(mistral())

    def of_both(work):
        return [work(), {**work(), "grouped": choose_kernel.Tried("breaks")}]

    line = choose(model, forward_of(model), results_of_all=of_both)
    assert line.startswith("attention vlpack: segments, equal to the reference (grouped breaks; varlen needs CUDA")


def test_model_is_left_as_it_was():
    """ATTN-9"""
    model = built(gemma2()).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    choose(model, forward_of(model))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_that_does_not_call_it_is_refused():
    """ATTN-9"""
    model = built(mistral())
    forward = forward_of(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="no layer of the model calls the attention vlpack"):
        choose(model, forward)
