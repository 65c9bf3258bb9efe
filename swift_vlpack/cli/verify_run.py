"""`vlpack verify`: the proof and the lengths of a run, up to its first step, by the functions of its training."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from swift.callbacks import TrainerCallback

from swift_vlpack.attention.sequence_effects import noise_by_sample
from swift_vlpack.cli.verify_text import verify_text
from swift_vlpack.errors import AttentionError, BoundaryError, DataError, VLPackError
from swift_vlpack.host.callback import PackingCallback
from swift_vlpack.host.losses import add_up
from swift_vlpack.host.proof import attention_of, prove_first_batch, prove_isolation
from swift_vlpack.host.run import TrainableRun, run_of
from swift_vlpack.host.use_attention import choose_for
from swift_vlpack.lengths.true_lengths import SourceLengths, checked_lengths
from swift_vlpack.proof.isolation import IsolationError, Proof

EXIT_DOES_NOT_HOLD, EXIT_NOT_VERIFIED = 1, 2


def main(settings: Mapping[str, Any], command: str, options: Sequence[str]) -> int:
    """Verify and write the report, as JSON or text, to the file of that number."""
    try:
        report = verified(options, command=command)
    except VLPackError:
        raise
    except Exception:  # a bug, or a device that gave up: by itself Python would leave with the code of a refutation
        traceback.print_exc()
        return EXIT_NOT_VERIFIED
    with open(settings["report"], "w", encoding="utf-8") as file:
        file.write((json.dumps(report) if settings["form"] == "json" else verify_text(report)) + "\n")
    return 0 if report["holds"] else EXIT_DOES_NOT_HOLD


def verified(argv: Sequence[str], *, command: str = "sft") -> dict[str, Any]:
    """What holds of the run that ms-swift's command with these options would be."""
    start = time.perf_counter()
    with run_of(argv, num_ranks=1, command=command, kind=VerifiedRun) as run:
        run.run()
    args, isolation = run.args, run.isolation
    lengths = {"holds": not any(source.differing for source in run.lengths), "sources": list(map(_told, run.lengths))}
    return {
        "holds": isolation["holds"] and lengths["holds"],
        "command": command,
        "model": args.model,
        "device": str(run.device),
        "dtype": str(args.torch_dtype).removeprefix("torch."),
        "packing_length": run.packing_length,
        "attention": run.attention,
        "isolation": isolation,
        "lengths": lengths,
        "seconds": round(time.perf_counter() - start, 2),
    }


class VerifiedRun(TrainableRun):
    """The run of ms-swift's command, to the point where its first step would be taken."""

    lengths: list[SourceLengths]
    isolation: dict[str, Any]
    attention: dict[str, str]
    device: torch.device
    packing_length: int

    def train(self, trainer: Any) -> None:
        """Check lengths; then let the trainer prepare the model as for training, and prove it there."""
        self.lengths = checked_lengths(trainer.feed.dataset)
        self.device, self.packing_length = trainer.args.device, trainer.feed.config.packing_length
        verifier = _Verifier(trainer.args, trainer)
        handler = trainer.callback_handler
        handler.callbacks = [verifier if isinstance(one, PackingCallback) else one for one in handler.callbacks]
        try:
            trainer.train()
        except _Verified:
            self.attention, self.isolation = verifier.attention, verifier.isolation


class _Verified(Exception):
    """All is known; not a step is taken."""


class _Verifier(TrainerCallback):
    """In the place of the callback that proves the model before it trains."""

    attention: dict[str, str]
    isolation: dict[str, Any]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the checks of a training run before step 1, in the same order. Raises `_Verified` at the end."""
        name = attention_of(self.trainer)
        self.attention = {"name": name, "chosen": f"attention {name}: nothing is chosen for rows that are wrong"}
        proof = None
        try:
            self.attention["chosen"] = choose_for(self.trainer)
            proof = prove_isolation(self.trainer)
            add_up(self.trainer)
            noise_by_sample(self.trainer)
            in_training = self._proved_in_training()
        except (IsolationError, AttentionError, BoundaryError) as error:
            self.isolation = _refuted(error, proof)
        else:
            said = {"said": proof.line(name), "in_training": in_training, "cause": None}
            self.isolation = {"holds": True, **said, **_numbers(proof)}
        raise _Verified

    def _proved_in_training(self) -> str:
        """Prove isolation on the first batch, which is loaded but not trained. Returns the line for the report."""
        trainer, args = self.trainer, self.trainer.args
        trainer.is_first_batch_proved = True  # proved below, whatever `packing_verify` says
        loaded = iter(trainer.callback_handler.train_dataloader)
        batches, num_items = trainer.get_batch_samples(loaded, args.gradient_accumulation_steps, args.device)
        if not batches:
            raise DataError("there is no batch to verify: the epoch has no pack")
        return prove_first_batch(trainer, batches, num_items)


def _refuted(error: VLPackError, proof: Proof | None) -> dict[str, Any]:
    cause = getattr(error, "cause", "") or str(error)
    numbers = _numbers(proof or getattr(error, "measured", None))
    return {"holds": False, "said": str(error), "in_training": None, "cause": cause, **numbers}


def _numbers(proof: Proof | None) -> dict[str, Any]:
    """Return the measured differences and their limits, in units of the logits; null if nothing was measured."""
    if proof is None:
        return {"measured": None, "limits": None}
    limits = proof.limits
    return {
        "num_samples": proof.num_samples,
        "num_samples_in_rows_of_plan": proof.num_more,
        "num_rows_left_out": proof.num_rows_left_out,
        "measured": _finite(
            {
                "moved_by_others": proof.moved,
                "packed_to_alone": proof.alone,
                "gradient": proof.gradient,
                "largest_logit": proof.largest_logit,
            }
        ),
        "limits": None
        if limits is None
        else _finite({"moved_by_others": limits.moved, "packed_to_alone": limits.alone, "gradient": limits.gradient}),
    }


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: number if number is not None and math.isfinite(number) else None for name, number in numbers.items()}


def _told(source: SourceLengths) -> dict[str, Any]:
    return {
        "source": source.source,
        "check": source.check,
        "num_rows": source.num_rows if source.is_planned else None,
        "num_compared": source.num_compared,
        "differing": list(map(str, source.differing)),
        "unreadable": list(source.unreadable),
        "without_headers": source.without_headers,
    }
