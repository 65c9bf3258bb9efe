"""The notes of a run, without a run."""

from types import SimpleNamespace

from swift_vlpack.host import journal as module
from swift_vlpack.host.journal import Journal
from swift_vlpack.rows.samples import PackRecord, SampleId
from swift_vlpack.runlog.run_log import events


def test_time_of_evaluations_is_no_time_of_steps(tmp_path, monkeypatch):
    """REPORT-2: also of one inside another, and where a line is logged in the middle of it."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    journal = Journal(SimpleNamespace(unpacked_batch_size=1, epoch=0), str(tmp_path))
    pack = PackRecord(epoch=0, number=0, sample_ids=(SampleId("a", 0),), lengths=(5,), num_images=0)

    def pass_time(seconds):
        now[0] += seconds

    pass_time(3)
    journal.trained([pack])
    with journal.paused():
        pass_time(100)
        with journal.paused():
            pass_time(100)
            journal.note_steps(1)
        pass_time(100)
    pass_time(4)
    journal.trained([pack])
    journal.note_steps(2)
    journal.note_steps(2)
    notes = list(events(tmp_path / "vlpack" / "run.jsonl"))
    assert [(note["step"], note["seconds"], note["num_tokens"]) for note in notes] == [(1, 3.0, 5), (2, 4.0, 5)]
