"""Buffer mode through ms-swift's own pipeline, in process: one rank."""

import json
import shutil

import pytest

from swift_vlpack.envelope import signed
from swift_vlpack.errors import ConfigError, DataError, StateMismatch
from swift_vlpack.host.same_on_ranks import RanksDiffer
from swift_vlpack.host.state import FILE, RANK_FILE
from tests.data_rows import mixed_rows, text_row, write_jsonl
from tests.host.runs import epoch_report, packed_argv, train
from tests.marks import telling

FAMILY = "qwen2_5_vl"


@pytest.fixture(autouse=True)
def options(options):
    """The shared fixture; packs come fast and the proof is left out."""
    options(packing_buffer=4, packing_strategy="best_fit", packing_verify="false", packing_drop_last="false")
    return options


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [
        write_jsonl(folder / f"{n}.jsonl", mixed_rows(folder / str(n), size, seed=n, largest=120))
        for n, size in enumerate((13, 4))
    ]


@pytest.fixture
def trained(monkeypatch):
    """The records of the packs that were trained, in order, with the step."""
    from swift_vlpack.host.run_events import RunEvents

    seen, take_step = [], RunEvents.take_step

    def noting(self, step):
        records, counts = take_step(self, step)
        seen.extend((step - 1, record) for record in records)
        return records, counts

    monkeypatch.setattr(RunEvents, "take_step", noting)
    return seen


def losses(result):
    return [line["loss"] for line in result["log_history"] if "loss" in line]


@pytest.mark.parametrize("workers", [0, 1, telling(3)])
def test_every_row_of_a_stream_is_trained_once_an_epoch(workers, small_folder, files, tmp_path, trained):
    """STREAM-7 STREAM-3: ms-swift would allow one worker; persistent ones see the next epoch."""
    train(
        packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path, dataset=files, streaming="true", max_steps=12,
            dataloader_num_workers=workers, dataloader_persistent_workers="true" if workers else "false",
        )
    )  # fmt: skip
    for epoch in (0, 1):
        ids = [sample_id for _, record in trained if record.epoch == epoch for sample_id in record.sample_ids]
        assert len(ids) == len(set(ids)) == 17
        report = epoch_report(tmp_path, epoch)
        assert (report["num_read"], report["num_samples"], report["is_closed"]) == (17, 17, True)
    assert all(record.sample_ids for _, record in trained)


def test_stream_is_interleaved_as_ms_swift_does_it(small_folder, files, tmp_path, trained):
    """CLI-32: by chance from both, until one has no more."""
    from swift.dataset import load_dataset

    flags = {"dataset": files, "streaming": "true", "interleave_prob": [0.5, 0.5], "dataset_shuffle": "false"}
    train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, max_steps=4, learning_rate=0, **flags))
    plain, _ = load_dataset(list(map(str, files)), streaming=True, interleave_prob=[0.5, 0.5], seed=42)
    num_rows = len(list(plain))
    assert 4 < num_rows < 17, "all rows of one file, some of the other"
    first = [sample_id.row for _, record in trained if record.epoch == 0 for sample_id in record.sample_ids]
    assert sorted(first) == list(range(num_rows))


def test_incomplete_accumulation_at_the_end_of_an_epoch_is_completed_without_loss(
    small_folder, files, tmp_path, trained
):
    """STREAM-4: its step has the loss of the packs that it has, and the next epoch begins with a step of its own."""
    common = {"dataset": files[0], "streaming": "true", "learning_rate": 0, "dataset_shuffle": "false"}
    one = train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path / "one", max_steps=8, **common))
    num_packs = sum(record.epoch == 0 for _, record in trained)
    accumulation = num_packs - 1
    assert accumulation > 1
    trained.clear()
    grouped = train(
        packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path / "grouped", max_steps=4, gradient_accumulation_steps=accumulation,
            **common,
        )
    )  # fmt: skip
    steps = [[len(record.sample_ids) > 0 for step, record in trained if step == n] for n in range(4)]
    assert steps == [[True] * accumulation, [True] + [False] * (accumulation - 1)] * 2
    assert losses(grouped)[1] == pytest.approx(losses(one)[num_packs - 1], abs=1e-5)
    assert min(losses(one)[: num_packs - 1]) < losses(grouped)[0] < max(losses(one)[: num_packs - 1])


def test_sized_data_is_buffered_when_asked(small_folder, files, tmp_path, trained, options):
    """STREAM-7 DATA-5: mixed anew in every epoch, carried over inside one, ids are rows of the file."""
    options(packing_mode="buffer")
    train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=files, max_steps=12))
    orders = [[r.sample_ids for _, r in trained if r.epoch == epoch] for epoch in (0, 1)]
    for order in orders:
        assert sorted(str(i) for ids in order for i in ids) == sorted(
            f"{s}:{n}" for s, k in ((0, 13), (1, 4)) for n in range(k)
        )
    assert orders[0] != orders[1]


def test_share_in_which_nothing_can_be_read_costs_no_step(small_folder, tmp_path, trained):
    """STREAM-3 TRAIN-8: what it left out is told by another pack, and counted."""
    rows = [
        text_row(f"row {n}", "word " * 40) if n % 2 else {**text_row(f"<image>{n}"), "images": ["/no.jpg"]}
        for n in range(12)
    ]
    train(
        packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path / "out", dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
            streaming="true", max_steps=3, dataset_shuffle="false", dataloader_num_workers=2,
        )
    )  # fmt: skip
    assert all(record.sample_ids for _, record in trained)
    report = epoch_report(tmp_path / "out")
    assert (report["num_read"], report["num_samples"], report["is_closed"]) == (12, 6, True)
    assert report["num_dropped"] == {"file_missing": 6}


def test_too_few_shards_are_said_with_the_way_out(tiny, files, caplog):
    """STREAM-2"""
    from datasets import load_dataset

    from swift_vlpack import PackingConfig
    from swift_vlpack.feed.collate import Collator
    from tests.feeds import loader_over, streamed_feed

    rows = load_dataset("json", data_files=files, split="train", streaming=True)
    template = tiny(FAMILY).template
    feed = streamed_feed(rows, template, PackingConfig(packing_length=512))
    for num_workers in (0, 2, 3):
        loader_over(feed, num_workers=num_workers, collate_fn=Collator(template, for_model=False))
    (warning,) = [record.getMessage() for record in caplog.records if "shards" in record.getMessage()]
    assert "2 shards for 3 readers" in warning
    assert "at least 3 files" in warning


@pytest.mark.parametrize(
    ("flags", "variables", "messages"),
    [
        ({"streaming": "true"}, {}, ("set --max_steps", "packing_mode=plan without --streaming")),
        ({}, {"packing_mode": "buffer"}, ("set --max_steps", "packing_mode=plan without --streaming")),
        ({"streaming": "true", "max_steps": 3}, {"packing_mode": "plan"}, ("set packing_mode=buffer",)),
        ({"streaming": "true", "max_steps": 3}, {"fusion_config": "mix"}, ("leave --streaming out", "--dataset")),
    ],
)
def test_what_a_stream_cannot_have_is_refused_with_the_ways_out(  # noqa: PLR0913
    flags, variables, messages, small_folder, files, tmp_path, options
):
    """STREAM-6"""
    (tmp_path / "mix.yaml").write_text(f"sources:\n  - dataset: {files[0]}\n")
    if "fusion_config" in variables:
        variables = {"fusion_config": tmp_path / "mix.yaml"}
    else:
        flags = {**flags, "dataset": files}
    options(**variables)
    with pytest.raises(ConfigError) as caught:
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, **flags))
    assert all(message in str(caught.value) for message in messages)


# -- resume -----------------------------------------------------------------------------------------------------------


def notes(output, rank=0):
    """Packs as they were trained: (step, epoch, ids)."""
    path = output / "vlpack" / f"packs_rank{rank}.jsonl"
    return [(line["step"], line["epoch"], line["ids"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def resumable(small_folder, files, options, monkeypatch):
    """`resumable(output, ...)` trains two epochs and more, with a checkpoint at every step; packs are on record."""
    monkeypatch.setenv("VLPACK_RECORD_PACKS", "true")
    options(packing_drop_last="true")

    def run(output, **more):
        flags = {
            "dataset": files, "streaming": "true", "max_steps": 7, "gradient_accumulation_steps": 2,
            "save_strategy": "steps", "save_steps": 1, "tuner_type": "lora", **more,
        }  # fmt: skip
        history = train(packed_argv(small_folder(FAMILY), FAMILY, output, **flags))["log_history"]
        return {line["step"]: line["loss"] for line in history if "loss" in line}

    return run


@pytest.mark.parametrize(("form", "workers"), [telling("stream", 2), telling("sized", 0)])
def test_resumed_run_is_the_rest_of_the_uninterrupted_one(form, workers, resumable, options, tmp_path):
    """STREAM-9 STREAM-8: inside the first epoch, at its end, in the second; packs, losses and reports are the same."""
    more = {"dataloader_num_workers": workers}
    if form == "sized":
        options(packing_mode="buffer")
        more["streaming"] = "false"
    expected = resumable(tmp_path / "whole", **more)
    packs = notes(tmp_path / "whole")
    end = max(step for step, epoch, _ in packs if epoch == 0)
    assert 2 <= end < 6
    for step in {1, end, end + 1}:
        output = tmp_path / f"from{step}"
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        resumed = resumable(output, resume_from_checkpoint=checkpoint, **more)
        assert resumed == pytest.approx(expected, abs=1e-6)
        assert notes(output) == [pack for pack in packs if pack[0] > step]
        for epoch in (0, 1):
            if epoch == 1 or step <= end:
                assert epoch_report(output, epoch) == epoch_report(tmp_path / "whole", epoch)


@pytest.mark.slow
@pytest.mark.telling
def test_state_that_does_not_fit_is_refused_with_the_remedy(resumable, options, files, tmp_path, monkeypatch):
    """STREAM-10"""
    resumable(tmp_path / "whole", dataloader_num_workers=2, max_steps=2)
    checkpoint = tmp_path / "whole" / "checkpoint-1"

    def refused(message, **more):
        more = {"dataloader_num_workers": 2, "resume_from_checkpoint": checkpoint, **more}
        with pytest.raises(StateMismatch, match=rf"{message}.*(VLPACK_RESUME_DATA=restart|--resume_from_checkpoint)"):
            resumable(tmp_path / "again", **more)

    refused(r"another num_workers \(2, now 3\)", dataloader_num_workers=3)
    refused(r"another data \(.*\), num_shards \(2, now 1\)", dataset=files[1])
    refused(r"another data .* seed \(42, now 7\)", data_seed=7)
    options(packing_buffer=5)
    refused(r"another packing_buffer \(4, now 5\)")
    options(packing_buffer=4)
    state = json.loads((checkpoint / FILE).read_text())
    state["fingerprint"]["num_ranks"] = 4
    shutil.copytree(checkpoint, tmp_path / "four")
    (tmp_path / "four" / FILE).write_text(json.dumps(signed(state)))
    refused(r"another num_ranks \(4, now 1\)", resume_from_checkpoint=tmp_path / "four")
    (checkpoint / RANK_FILE.format(0)).unlink()
    with pytest.raises(StateMismatch, match=r"vlpack_state_rank0.json is missing\. Resume from an earlier checkpoint"):
        resumable(tmp_path / "again", dataloader_num_workers=2, resume_from_checkpoint=checkpoint)
    monkeypatch.setenv("VLPACK_RESUME_FILES", "replaced")
    refused("has no vlpack_state_rank0.json: every rank writes one")


def test_stream_is_evaluated_on_the_validation_rows(small_folder, files, tmp_path):
    """STREAM-11"""
    result = train(
        packed_argv(
            small_folder(FAMILY), FAMILY, tmp_path, dataset=files[0], val_dataset=files[1], streaming="true",
            max_steps=2, eval_strategy="steps", eval_steps=1, dataloader_persistent_workers="false",
        )
    )  # fmt: skip
    assert len([line for line in result["log_history"] if line.get("eval_loss", 0) > 0]) == 2


@pytest.mark.parametrize("verify", ["true", "false"])
def test_stream_of_which_nothing_can_be_read_is_one_clear_error(verify, small_folder, tmp_path, options):
    """STREAM-12"""
    rows = [{**text_row("<image>what?"), "images": [str(tmp_path / f"gone{n}.jpg")]} for n in range(4)]
    options(packing_verify=verify)
    with pytest.raises(
        DataError,
        match=r"not one row could be encoded|found no row that it can use|epoch 0 has no pack; .*: file_missing 4",
    ):
        train(
            packed_argv(
                small_folder(FAMILY), FAMILY, tmp_path, dataset=write_jsonl(tmp_path / "rows.jsonl", rows),
                streaming="true", max_steps=2,
            )
        )  # fmt: skip


FEEDS = {"streamed": {"streaming": "true"}, "buffered": {}, "planned": {}}


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize("what", ["settings that rows are encoded by", telling("values of the model's config")])
def test_ranks_compare_settings_for_every_kind_of_feed(kind, what, small_folder, files, tmp_path, monkeypatch):
    """RANKS-20"""
    name = {"s": "processor.image_processor.image_mean", "v": "text_config.rms_norm_eps"}[what[0]]

    def gathered_with_another(mine, of):
        return [mine, {**mine, name: 7}] if of == what else [mine]

    monkeypatch.setenv("VLPACK_PACKING_MODE", "buffer" if kind == "buffered" else "auto")
    monkeypatch.setattr("swift_vlpack.host.same_on_ranks.gathered", gathered_with_another)
    with pytest.raises(RanksDiffer, match=rf"do not agree on the {what}: {name}: .* and 7"):
        train(packed_argv(small_folder(FAMILY), FAMILY, tmp_path, dataset=files, max_steps=2, **FEEDS[kind]))
