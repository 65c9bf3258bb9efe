"""What a run writes as it goes, without a run."""

from types import SimpleNamespace

from swift_vlpack import PackingConfig
from swift_vlpack.host import run_events as module
from swift_vlpack.host.run_events import RunEvents
from swift_vlpack.rows.samples import PackRecord, SampleId
from swift_vlpack.runlog.events import read_events

FEED = SimpleNamespace(
    unpacked_batch_size=1, epoch=0, sources=(), config=PackingConfig(packing_length=10), is_decoded_ahead=False
)
PACK = PackRecord(epoch=0, number=0, sample_ids=(SampleId("a", 0),), lengths=(5,), num_images=0)


def test_time_of_evaluations_is_no_time_of_steps(tmp_path, monkeypatch):
    """REPORT-2: also of one inside another, and where a line is logged in the middle of it."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    run = RunEvents(FEED, str(tmp_path), rank=0)

    def pass_time(seconds):
        now[0] += seconds

    def train(step):
        run.trained(PACK)
        run.take_step(step)

    pass_time(3)
    train(1)
    with run.paused():
        pass_time(100)
        with run.paused():
            pass_time(100)
            run.note_steps(1)
        pass_time(100)
    pass_time(4)
    train(2)
    run.note_steps(2)
    assert run.note_steps(2) is None, "nothing was trained since"
    events = list(read_events(tmp_path / "vlpack" / "run.jsonl"))
    assert [(one["step"], one["milliseconds"], one["num_tokens"]) for one in events] == [(1, 3000, 5), (2, 4000, 5)]
    assert (run.of_run.num_steps, run.of_run.seconds, run.of_run.num_tokens) == (2, 7.0, 10)


def test_line_counts_all_that_was_noted_since_the_line_before(tmp_path):
    """TRAIN-7: an epoch's end or a checkpoint notes steps, and takes them from no line."""
    run = RunEvents(FEED, str(tmp_path), rank=0)
    assert run.since_line() is None
    for step in (1, 2, 3):
        run.trained(PACK)
        run.take_step(step)
        run.note_steps(step)
    line = run.since_line()
    assert (line.num_steps, line.num_tokens) == (3, 15)
    assert run.since_line() is None


def test_ranks_add_up_and_say_how_even_they_were(tmp_path, monkeypatch):
    """REPORT-2: the slowest rank of each step, and not the slowest of all steps."""
    ranks = [RunEvents(FEED, str(tmp_path), rank) for rank in range(2)]
    for step, lengths in enumerate(((5, 9), (8, 3), (0, 7)), 1):
        for rank, length in zip(ranks, lengths, strict=True):
            rank.trained(PackRecord(0, 0, (SampleId("a", 0),) * bool(length), (length,) * bool(length), 0))
            rank.take_step(step)
    of_ranks = [(one._since_event, one._tokens_of_steps) for one in ranks]
    monkeypatch.setattr(module, "gathered", lambda mine, what: of_ranks)
    total = ranks[0].note_steps(3)
    assert (total.num_steps, total.num_packs, total.num_tokens) == (3, 5, 32)
    assert total.num_tokens_slowest == 9 + 8 + 7


def test_step_counts_its_packs_and_what_they_would_be_unpacked(tmp_path):
    """REPORT-2 REPORT-3: a sequence without a sample is no pack; single-long ones do not count for the fill."""
    feed = SimpleNamespace(**{**vars(FEED), "unpacked_batch_size": 2, "config": PackingConfig(packing_length=100)})
    run = RunEvents(feed, str(tmp_path), rank=0)
    ids = tuple(SampleId(source, number) for number, source in enumerate("aabb"))
    run.trained(PackRecord(0, 0, ids[:3], (30, 50, 20), num_images=2, num_vision_tokens=40))
    run.trained(PackRecord(0, 1, (), (), 0))
    run.trained(PackRecord(0, 2, ids[3:], (120,), 0, single_long=True))
    records, counts = run.take_step(1)
    assert [record.number for record in records] == [0, 1, 2]
    assert (counts.num_packs, counts.num_packed, counts.num_tokens) == (2, 4, 220)
    assert (counts.num_images, counts.num_vision_tokens, counts.num_single_long) == (2, 40, 1)
    assert (counts.num_pack_tokens, counts.num_room) == (100, 100)
    of_sources = {name: (one.num_packed, one.num_tokens) for name, one in counts.sources.items()}
    assert of_sources == {"a": (2, 80), "b": (2, 140)}
    assert counts.num_tokens_unpacked == 2 * 50 + 2 * 120
    assert run.take_step(2)[0] == [], "a pack counts once"
