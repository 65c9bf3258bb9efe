"""Evaluation of a packed run: `eval_loss` is that of `swift sft` without packing; of packs it is a mean over tokens."""

import json
import multiprocessing
import os
from itertools import combinations

import pytest

from swift_vlpack.errors import ConfigError
from tests.data_rows import mixed_rows, rows_about_images, text_row, write_jsonl
from tests.e2e.ranks import free_port
from tests.environment import packing_options
from tests.host.runs import argv, packed_argv, train
from tests.marks import telling

FAMILY = "qwen2_5_vl"
NUM_ROWS = 7
"""No multiple of the batch size, so the last batch is smaller."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = mixed_rows(folder / "images", NUM_ROWS, seed=1, largest=100)
    return write_jsonl(folder / "val.jsonl", [{**row, "channel": "ab"[n % 2]} for n, row in enumerate(rows)])


BEFORE_STEP_1 = {
    "split_dataset_ratio": 0, "eval_on_start": "true", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1,
    "learning_rate": 0,
}  # fmt: skip


def evaluated(flags):
    """The log line of the first evaluation."""
    return next(line for line in train(flags)["log_history"] if "eval_loss" in line)


@pytest.fixture
def evaluation(small_folder, data, tmp_path):
    """`evaluation(packed=True, options={...}, **flags)`: the log line of an evaluation before step 1."""

    def run(*, packed, options=None, **flags):
        packing_options(packing_verify="false", packing_strategy="exact", **(options or {}))
        make = packed_argv if packed else argv
        flags = {**BEFORE_STEP_1, "max_length": 256, "per_device_eval_batch_size": 3, **flags}
        return evaluated(
            make(small_folder(FAMILY), FAMILY, tmp_path / str(packed), dataset=data, val_dataset=data, **flags)
        )

    return run


@pytest.mark.parametrize(
    "flags",
    [
        {},
        telling({"label_smoothing_factor": 0.1}),
        telling({"loss_scale": "all", "is_binary_loss_scale": "false", "enable_dft_loss": "true"}),
        telling({"loss_type": "cross_entropy", "enable_channel_loss": "true"}),
        telling({"use_logits_to_keep": "false", "dataloader_drop_last": "true"}),
    ],
    ids=lambda flags: " ".join(flags) or "default",
)
def test_packed_evaluation_is_a_mean_over_tokens(flags, evaluation):
    """TRAIN-6: as of all rows in one batch, whatever the batch size and the packs."""
    plain = evaluation(packed=False, **{"per_device_eval_batch_size": NUM_ROWS, **flags})
    packed = evaluation(packed=True, options={"eval_packing": "true"}, **flags)
    assert packed["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    if "dataloader_drop_last" not in flags:  # whose rows are counted in packs
        same = [name for name in plain if "acc" in name or "loss_" in name]
        assert {name: packed[name] for name in same} == pytest.approx({name: plain[name] for name in same}, rel=1e-5)
    assert plain["eval_samples_per_second"] * plain["eval_runtime"] == pytest.approx(NUM_ROWS, abs=0.1)
    assert packed["eval_samples_per_second"] * packed["eval_runtime"] == pytest.approx(NUM_ROWS, abs=0.1)


def eval_loss_of_rank(rank, port, flags, file):
    """Train as one of two ranks, in a process that was forked after the imports, and write down its `eval_loss`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    history = train(flags)["log_history"]
    file.write_text(json.dumps([line["eval_loss"] for line in history if "eval_loss" in line][:1]))
    os._exit(0)  # without the end of Python: it is that of pytest


def eval_loss_on_two_ranks(flags, folder):
    folder.mkdir()
    context, port = multiprocessing.get_context("fork"), free_port()
    files = [folder / f"{rank}.json" for rank in range(2)]
    flags = [*flags, "--ddp_backend", "gloo", "--use_cpu", "true"]
    ranks = [
        context.Process(target=eval_loss_of_rank, args=(rank, port, flags, file)) for rank, file in enumerate(files)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0, [rank.kill() for rank in ranks]
    [[loss], [same]] = [json.loads(file.read_text()) for file in files]
    assert loss == same
    return loss


@pytest.mark.parametrize(
    "flags",
    [{}, {"loss_scale": "all", "is_binary_loss_scale": "false"}, telling({"label_smoothing_factor": 0.1})],
    ids=["", "weighted", "smoothed"],
)
def test_mean_over_tokens_is_the_same_on_any_number_of_ranks(flags, small_folder, tmp_path):
    """TRAIN-6: three packs of 90, 14 and 3 targets; the second rank evaluates one of them a second time."""
    rows = [text_row("one", "word " * 90), text_row("two", "word " * 14), text_row("three", "word " * 3)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {**BEFORE_STEP_1, "dataset": data, "val_dataset": data, "max_length": 128, **flags}
    options = {"packing_strategy": "exact", "packing_max_samples": 1, "packing_drop_last": "false"}
    packing_options()
    model, output = small_folder(FAMILY), tmp_path / "out"
    expected = evaluated(argv(model, FAMILY, output, **flags, per_device_eval_batch_size=3))["eval_loss"]
    packing_options(**options, packing_verify="false", eval_packing="true")
    packed = packed_argv(model, FAMILY, output, **flags)
    assert evaluated(packed)["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert eval_loss_on_two_ranks(packed, tmp_path / "ranks") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("flags", [{}, telling({"use_logits_to_keep": "false"})])
def test_evaluation_beside_rows_that_share_is_that_of_rows(flags, small_folder, tmp_path):
    """TRAIN-5 SHARE-9: validation rows share nothing."""
    rows = [row for of_image in rows_about_images(tmp_path, 3, 4, seed=2) for row in of_image]
    data = write_jsonl(tmp_path / "vqa.jsonl", rows)
    losses = []
    for eval_packing in ("false", "true"):
        packing_options(
            packing_verify="false", packing_strategy="exact", packing_share="media", eval_packing=eval_packing
        )
        given = {**BEFORE_STEP_1, "max_length": 256, "per_device_eval_batch_size": len(rows), **flags}
        run = packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path / eval_packing, dataset=data, val_dataset=data, **given
        )
        losses.append(evaluated(run)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_packs_are_evaluated_with_a_model_on_several_devices(evaluation, monkeypatch):
    """TRAIN-6: there ms-swift keeps a number of last logits, and no mask of those with a target."""
    plain = evaluation(packed=False, per_device_eval_batch_size=NUM_ROWS)
    monkeypatch.setattr("swift.trainers.mixin.is_mp", lambda: True)
    packed = evaluation(packed=True, options={"eval_packing": "true"})
    assert packed["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"predict_with_generate": "true", "eval_metric": "acc"},
            r"--predict_with_generate true with eval_packing",
        ),
        ({"eval_metric": "acc"}, r"--eval_metric acc with eval_packing"),
    ],
    ids=["predict_with_generate", "eval_metric"],
)
def test_what_packs_cannot_be_evaluated_for_is_refused_at_the_start(flags, message, evaluation, caplog):
    """TRAIN-5 TRAIN-6: not after an epoch, at the first evaluation."""
    with pytest.raises(ConfigError, match=f"{message} cannot be used"):
        evaluation(packed=True, options={"eval_packing": "true"}, **flags)
    assert "plan of epoch" not in caplog.text


OURS = {
    "packing_strategy": ("exact", "greedy"),
    "packing_mode": ("auto", "plan", "buffer"),
    "packing_overflow": ("keep", "split"),
    "packing_pad_to": ("none", "length"),
    "packing_max_samples": ("none", "2"),
    "packing_loss": ("token", "sample"),
    "packing_drop_last": ("true", "false"),
    "mask_boundary_loss": ("true", "false"),
    "train_on_eos": ("true", "false"),
    "eval_packing": ("false", "true"),
}
EVALUATION = {
    "eval_strategy": ("steps", "epoch", "no"),
    "per_device_eval_batch_size": ("3", "1"),
    "eval_on_start": ("false", "true"),
    "predict_with_generate": ("false", "true"),
    "prediction_loss_only": ("false", "true"),
    "label_smoothing_factor": ("0", "0.1"),
    "eval_metric": ("none", "counted"),
    "batch_eval_metrics": ("false", "true"),
    "eval_accumulation_steps": ("none", "2"),
    "acc_strategy": ("token", "seq"),
    "loss_type": ("none", "cross_entropy"),
    "enable_channel_loss": ("false", "true"),
    "use_logits_to_keep": ("true", "false"),
    "dataloader_drop_last": ("false", "true"),
    "dataloader_num_workers": ("0", "1"),
    "streaming": ("false", "true"),
}
"""Options with values that are tried; the first is the default."""


def runs_over_all_pairs(options):
    """Choose values for runs, so that every two values of two options are in one of them; greedily, in a fixed order.

    A value that the host itself refuses beside another is still in a run with each of ours.
    """
    names = list(options)
    values = [(name, value) for name in names for value in options[name]]
    missing = {(one, other) for one, other in combinations(values, 2) if one[0] != other[0]}
    while missing:
        run = dict(min(missing))
        for name in names:
            if name not in run:
                run[name] = max(
                    options[name],
                    key=lambda value, name=name: sum(
                        ((name, value), given) in missing or (given, (name, value)) in missing for given in run.items()
                    ),
                )
        missing -= {pair for pair in missing if all(run[name] == value for name, value in pair)}
        yield {name: run[name] for name in names}


RUNS = list(runs_over_all_pairs(OURS | EVALUATION))


@pytest.fixture
def own_metric(monkeypatch):
    """A metric as a user registers one; ms-swift's own knows no `batch_eval_metrics`, or needs further packages."""
    from swift.metrics import eval_metrics_map
    from swift.metrics.base import EvalMetrics

    class Counted(EvalMetrics):
        def compute_metrics(self, eval_prediction, compute_result=True):
            return {"counted": float(len(eval_prediction.label_ids))}

        def preprocess_logits_for_metrics(self, logits, labels):
            return labels

    monkeypatch.setitem(eval_metrics_map, "counted", Counted)


def named_in(message, run):
    """The options of a run, other than defaults, that an error names."""
    defaults = {name: values[0] for name, values in (OURS | EVALUATION).items()}
    return [name for name, value in run.items() if value != defaults[name] and name in message]


@pytest.mark.parametrize("number", [telling(n) if n else n for n in range(len(RUNS))])
def test_every_pair_of_options_evaluates_or_is_refused_at_the_start(number, small_folder, tmp_path, own_metric, caplog):
    """TRAIN-5 TRAIN-6: a refusal names both options, and the run goes on without one of them."""
    run, defaults = dict(RUNS[number]), {name: values[0] for name, values in (OURS | EVALUATION).items()}
    if run["predict_with_generate"] == "true":  # which fails beside these in ms-swift too
        run |= {"enable_channel_loss": "false", "prediction_loss_only": "false", "eval_accumulation_steps": "none"}
    channel = {"channel": "a"} if run["enable_channel_loss"] == "true" else {}
    rows = [{**text_row(f"question {n}", "word " * (3 + n)), **channel} for n in range(NUM_ROWS)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    while True:
        given = {name: value for name, value in run.items() if value != "none"}
        flags = {name: given[name] for name in EVALUATION if name in given}
        if run["predict_with_generate"] == "true":
            flags |= {"eval_metric": "counted", "metric_for_best_model": "counted", "max_new_tokens": 2}
        packing_options(packing_verify="false", **{name: given[name] for name in OURS if name in given})
        caplog.clear()
        refusal = ""
        try:
            history = train(
                packed_argv(
                    small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=data, val_dataset=data,
                    split_dataset_ratio=0, eval_steps=1, max_steps=1, max_length=64,
                    dataloader_persistent_workers="false", **flags,
                )
            )["log_history"]  # fmt: skip
        except ConfigError as error:
            refusal = str(error)
        if not refusal:
            break
        named = named_in(refusal, run)
        assert len(named) > 1, f"the error names no two options: {refusal}"
        assert "plan of epoch" not in caplog.text, refusal
        run[named[-1]] = defaults[named[-1]]
    lines = [line for line in history if "eval_runtime" in line]
    assert bool(lines) == (run["eval_on_start"] == "true" or run["eval_strategy"] != "no")
    for line in lines:
        if run["predict_with_generate"] == "true":
            assert line["eval_counted"] > 0
        else:
            assert 0 < line["eval_loss"] < 20, (line, run)
