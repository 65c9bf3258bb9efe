"""`packing_loss`: one optimizer step over packs against un-packed rows, one a step, that are weighted by hand."""

import math

import pytest
import torch

from swift_vlpack.errors import ConfigError
from swift_vlpack.feed import sequence_loss
from swift_vlpack.host import trainer
from swift_vlpack.host.losses import LossNotAdditive
from swift_vlpack.rows.contents import NO_LABEL
from tests.data_rows import image_row, text_row, write_jsonl
from tests.e2e.ranks import Run
from tests.environment import packing_options
from tests.host.runs import (
    SMALL_VOCABULARY,
    argv,
    assert_same_gradients,
    gradients_of_steps,
    log_lines,
    packed_argv,
    train,
)
from tests.images import photo

FAMILY = "qwen2_5_vl"
COMMON = {
    "split_dataset_ratio": 0, "num_train_epochs": 1, "learning_rate": 0, "max_length": 192, "max_grad_norm": 1e9,
}  # fmt: skip
SCALED = {"loss_scale": "default", "is_binary_loss_scale": "false"}
WEIGHTS = {"token": lambda n: n, "sample": lambda n: 1, "sqrt": math.sqrt}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of 4 to 120 targets, two of them with images, half of them of half the scale."""
    folder = tmp_path_factory.mktemp("images")
    made = [text_row(f"question {n}", "word " * (n * n + 2)) for n in range(1, 10, 2)]
    made += [image_row([photo(folder, str(n), 90, 60, seed=n)], answer="red " * (4 * n + 1)) for n in range(2)]
    for n, row in enumerate(made):
        row["messages"][-1]["loss_scale"] = 0.5 if n % 2 else 2.0
    return made


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def num_targets(rows, small_folder):
    from swift.model import get_processor
    from swift.template import get_template

    processor = get_processor(str(small_folder(FAMILY)), model_type=FAMILY)
    template = get_template(processor, template_type=FAMILY)
    template.set_mode("train")
    return [sum(label != NO_LABEL for label in template.encode(row)["labels"]) for row in rows]


@pytest.fixture(scope="module")
def steps():
    with gradients_of_steps() as found:
        yield found


@pytest.fixture(scope="module")
def unpacked(small_folder, data, rows, steps, tmp_path_factory):
    """Of every row alone, in plain ms-swift: the mean loss over its targets, and the gradients of it."""
    made = {}
    for name, flags in {"plain": {}, "scaled": SCALED}.items():
        steps.clear()
        output = tmp_path_factory.mktemp(name)
        in_order = {"dataset_shuffle": "false", "train_dataloader_shuffle": "false", "callbacks": "gradients"}
        history = train(argv(small_folder(FAMILY), FAMILY, output, dataset=data, **COMMON, **in_order, **flags))
        losses = [line["loss"] for line in history["log_history"] if "loss" in line]
        assert len(losses) == len(steps) == len(rows)
        made[name] = losses, list(steps)
    return made


def weighted(unpacked, num_targets, kind):
    """The mean over rows by hand: its loss and its gradients."""
    losses, gradients = unpacked
    weights = [WEIGHTS[kind](n) for n in num_targets]
    loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    names = {name for one in gradients for name in one}
    return loss, {
        name: sum(weight * one[name] for weight, one in zip(weights, gradients, strict=True) if name in one)
        / sum(weights)
        for name in names
    }


@pytest.mark.parametrize(
    ("kind", "scale", "flags"),
    [
        ("sample", "plain", {}),
        ("sqrt", "scaled", SCALED),
        pytest.param("sample", "scaled", {**SCALED, "use_logits_to_keep": "true"}, marks=pytest.mark.slow),
        pytest.param("sqrt", "plain", {"streaming": "true", "max_steps": 1}, marks=pytest.mark.slow),
        pytest.param("token", "scaled", SCALED, marks=pytest.mark.slow),
    ],
)
def test_step_is_the_weighted_mean_of_unpacked_rows(  # noqa: PLR0913
    kind, scale, flags, small_folder, data, num_targets, unpacked, steps, tmp_path
):
    """LOSS-9: all rows in one step of several packs; loss and every gradient."""
    packing_options(packing_strategy="exact", packing_drop_last="false", packing_verify="false", packing_loss=kind)
    steps.clear()
    options = {**COMMON, "gradient_accumulation_steps": 8, "callbacks": "gradients", **flags}
    history = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=data, **options))["log_history"]
    loss, gradients = weighted(unpacked[scale], num_targets, kind)
    assert next(line["loss"] for line in history if "loss" in line) == pytest.approx(loss, rel=1e-5)
    [found] = steps
    assert_same_gradients(found, gradients)
    others = [weighted(unpacked[scale], num_targets, other)[0] for other in WEIGHTS if other != kind]
    assert all(abs(other - loss) > 1e-3 for other in others), "so another weight would be seen"


@pytest.mark.slow
@pytest.mark.telling
def test_step_of_two_ranks_is_the_same(small_folder, data, num_targets, unpacked, tmp_path):
    """LOSS-9: over gloo; packs of unlike weight on each rank."""
    flags = argv(
        small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=data, external_plugins=SMALL_VOCABULARY,
        **{**COMMON, **SCALED, "gradient_accumulation_steps": 4},
    )  # fmt: skip
    options = {"packing_strategy": "exact", "packing_drop_last": "false", "packing_loss": "sample"}
    run = Run(flags, tmp_path / "log", num_ranks=2, **options)
    assert run.wait() == 0, run.output[-3000:]
    loss, gradients = weighted(unpacked["scaled"], num_targets, "sample")
    [line] = [line for line in log_lines(tmp_path / "out") if "loss" in line]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients.values()))
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("flags", [{"label_smoothing_factor": 0.1}, {"loss_type": "cross_entropy"}])
def test_loss_that_does_not_see_weights_is_refused(flags, small_folder, data, tmp_path):
    """LOSS-9"""
    packing_options(packing_loss="sqrt")
    with pytest.raises(ConfigError, match="packing_loss=sqrt weighs samples by loss_scale, which"):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=data, **{**COMMON, **flags}))


@pytest.mark.parametrize("kind", ["sample", "sqrt"])
def test_weights_of_other_samples_stop_before_step_1(kind, small_folder, data, tmp_path, monkeypatch):
    """LOSS-9: each sample of a row gets the weights of the one on the other side."""
    right = sequence_loss.weigh_samples

    def reversed_weights(batches, *args):
        right(batches, *args)
        for batch in batches:
            lengths = batch.record.lengths_in_sequence
            batch["loss_scale"] = torch.cat(batch["loss_scale"].split(lengths, dim=1)[::-1], dim=1)

    monkeypatch.setattr(trainer, "weigh_samples", reversed_weights)
    packing_options(packing_loss=kind)
    with pytest.raises(
        LossNotAdditive, match=rf"packing_loss={kind}: sample [12] of a sequence of two, .* should weigh"
    ):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=data, **{**COMMON, "max_steps": 1}))
