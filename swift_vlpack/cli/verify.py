"""`vlpack verify`: prove isolation and lengths of a run on its own model and data, without training.

The run is set up by the functions of training, up to the point where its first step would be taken.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift_vlpack.cli.command import Command, add_packing_flags, add_run_flags
from swift_vlpack.cli.in_run import in_run
from swift_vlpack.errors import AttentionError, BoundaryError, DataError, IsolationError, VLPackError
from swift_vlpack.json_lines import with_numbers
from swift_vlpack.lines import labelled, listed
from swift_vlpack.words import counted

if TYPE_CHECKING:
    from swift_vlpack.lengths.audit import SourceLengths
    from swift_vlpack.proof.verdict import Proof

EXIT_DOES_NOT_HOLD, EXIT_NOT_VERIFIED = 1, 2
_IN_WORDS = {
    "equal": "the lengths that packs are planned by are those of the full encoding",
    "fallback": "image headers are not used, every row was encoded to measure it",
    "differing": "rows differ from what packs are planned by",
    "as read": "nothing is planned, every row is measured as it is read",
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser, num_ranks=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    add_packing_flags(parser, packing_length="the run's --max_length")


def _run(args: argparse.Namespace) -> int:
    with in_run(args, needs_gpu=True) as (run, out):
        try:
            report = verified(run.flags, command=run.command)
        except VLPackError:
            raise
        except Exception:  # a bug or a failed device. Python would exit with 1, which means "does not hold" here
            traceback.print_exc()
            return EXIT_NOT_VERIFIED
        print(json.dumps(report) if args.json else verify_text(report), file=out)
    return 0 if report["holds"] else EXIT_DOES_NOT_HOLD


def verified(flags: Sequence[str], *, command: str = "sft") -> dict[str, Any]:
    """Check lengths and isolation of the run that `swift sft` or `swift pt` with these flags would start."""
    from swift_vlpack.host.run import TrainableRun, prepare_to_train, run_of
    from swift_vlpack.lengths.audit import checked_lengths

    start = time.perf_counter()
    found: dict[str, Any] = {}

    def look(trainer: Any) -> None:
        sources = checked_lengths(trainer.feed.dataset)
        found["lengths"] = {"holds": not any(one.differing for one in sources), "sources": list(map(_lengths, sources))}
        found["device"] = str(trainer.args.device)
        found["packing_length"] = trainer.feed.config.packing_length
        prepare_to_train(trainer, lambda: found.update(_proved(trainer)))

    with run_of(flags, num_ranks=1, command=command, kind=TrainableRun) as run:
        run.at_training = look
        run.run()
    return {
        "holds": found["isolation"]["holds"] and found["lengths"]["holds"],
        "command": command,
        "model": run.args.model,
        "device": found["device"],
        "dtype": str(run.args.torch_dtype).removeprefix("torch."),
        "packing_length": found["packing_length"],
        "attention": found["attention"],
        "isolation": found["isolation"],
        "lengths": found["lengths"],
        "seconds": round(time.perf_counter() - start, 2),
    }


def _proved(trainer: Any) -> dict[str, Any]:
    """Run the checks of a training run before step 1, in the same order, and describe what they found."""
    from swift_vlpack.attention.sequence_effects import noise_by_sample
    from swift_vlpack.host.losses import add_up
    from swift_vlpack.host.proof import attention_of, prove_isolation
    from swift_vlpack.host.use_attention import choose_for

    name = attention_of(trainer)
    attention = {"name": name, "chosen": f"attention {name}: nothing is chosen for wrong sequences"}
    proof = None
    try:
        attention["chosen"] = choose_for(trainer)
        proof = prove_isolation(trainer)
        add_up(trainer)
        noise_by_sample(trainer)
        in_training = _first_batch_proved(trainer)
    except (IsolationError, AttentionError, BoundaryError) as error:
        cause = getattr(error, "cause", "") or str(error)
        isolation = {"holds": False, "said": str(error), "in_training": None, "cause": cause}
        proof = proof or getattr(error, "measured", None)
    else:
        isolation = {"holds": True, "said": proof.line(name), "in_training": in_training, "cause": None}
    return {"attention": attention, "isolation": {**isolation, **_numbers(proof)}}


def _first_batch_proved(trainer: Any) -> str:
    """Prove isolation on the first batch, which is loaded but not trained. Returns the line for the report."""
    from swift_vlpack.host.proof import prove_batch

    args = trainer.args
    loaded = iter(trainer.callback_handler.train_dataloader)
    num_batches = next(trainer.feed.sequences_of_steps(), args.gradient_accumulation_steps)
    batches, num_items = trainer.weighed_batches(loaded, num_batches, args.device)
    if not batches:
        raise DataError("there is no batch to verify: the epoch has no pack")
    return prove_batch(trainer, batches, num_items)


def _numbers(proof: Proof | None) -> dict[str, Any]:
    """Return the measured differences, and the limits of the data type that trains; null if nothing was measured.

    Hidden states are in shares of the largest, gradients in shares of their length.
    """
    if proof is None:
        return {"measured": None, "limits": None}
    differences = [
        {"packed_to_alone": proof.off(in_float32=is_float32), "gradient": proof.gradient(in_float32=is_float32)}
        for is_float32 in (True, not proof.is_coarse)
    ]
    measured = {"moved_by_others": proof.moved, **differences[1], "in_float32": differences[0]}
    return {
        "num_samples": proof.num_samples,
        "not_compared": list(proof.left_out),
        "measured": with_numbers(measured),
        "limits": with_numbers({"packed_to_alone": proof.limits.states, "gradient": proof.limits.gradient}),
    }


def _lengths(source: SourceLengths) -> dict[str, Any]:
    return {
        "source": source.source,
        "check": source.check,
        "num_rows": source.num_rows,
        "num_compared": source.num_compared,
        "differing": list(source.differing),
        "unreadable": list(source.unreadable),
        "without_headers": source.without_headers,
    }


def verify_text(report: dict[str, Any]) -> str:
    """Write the report for a reader."""
    lines = [
        ("model", f"{report['model']}, {report['dtype']} on {report['device']}"),
        ("attention", report["attention"]["chosen"]),
        ("isolation", report["isolation"]["said"]),
        *([("", in_training)] if (in_training := report["isolation"]["in_training"]) else []),
        *_about_lengths(report["lengths"]["sources"]),
        ("result", _result(report)),
    ]
    return labelled(lines)


def _about_lengths(sources: list[dict[str, Any]]) -> list[tuple[str, str]]:
    lines = []
    for source in sources:
        compared = f" ({counted(source['num_compared'], 'row')} of {source['num_rows']} compared)"
        said = f"{source['source']}: {source['check']}: {_IN_WORDS[source['check']]}"
        lines.append(said + (compared if source["num_compared"] else ""))
        if source["without_headers"]:
            lines.append(f"  because {source['without_headers']}")
        for rows, what in ((source["differing"], "other sizes"), (source["unreadable"], "left out by training")):
            if rows:
                lines += [f"  {counted(len(rows), 'row')}, {what}:", *(f"  {row}" for row in rows)]
    return listed("lengths", lines)


def _result(report: dict[str, Any]) -> str:
    if report["holds"]:
        return f"holds ({report['seconds']:.1f} s)"
    failed = [what for what in ("isolation", "lengths") if not report[what]["holds"]]
    return f"DOES NOT HOLD: {' and '.join(failed)}; do not train on these packs ({report['seconds']:.1f} s)"


VERIFY = Command(
    name="verify",
    text="prove isolation and lengths on a run's model and data, without training",
    usage="vlpack verify [sft|pt] [--config CONFIG.yaml] [packing options] [any option of swift sft] [--json]",
    description=(
        "Prove what a run relies on, with its own file, flags and environment, its weights, device and data type, and "
        "train nothing: that samples of a pack do not see each other and give the logits, labels and gradients that "
        "they give alone, and that the lengths that packs are planned by are those of the full encoding, on some rows "
        "of every source. Exit code 0: it holds; 1: it does not; 2: the run cannot be made (an option, a file, the "
        "model). One process on one GPU stands for all ranks: deepspeed and fsdp are left out."
    ),
    add_flags=_add_flags,
    run=_run,
    takes_run_flags=True,
)
