"""What is known when training begins: for the summary in the log, and for the notes of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_vlpack.feed.data_report import data_report, size_of_step
from swift_vlpack.feed.packs import epoch_plan_of
from swift_vlpack.host.ranks import versions
from swift_vlpack.plan.epoch import EpochPlan
from swift_vlpack.plan.report import plan_report
from swift_vlpack.plan.resume_schedule import num_steps
from swift_vlpack.rows.families import merge_size


def facts_of(trainer: Any, *, attention: str, proof: str | None) -> dict[str, Any]:
    """Plain numbers and texts; `plan` and `data` are None where rows come as they come. On the first rank."""
    feed, args, state = trainer.feed, trainer.args, trainer.state
    plan = epoch_plan_of(feed)
    checkpoint = trainer.checkpoint_resumed
    return {
        "versions": versions(),
        "output_dir": args.output_dir,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": state.global_step,
        "num_steps": state.max_steps,
        "num_epochs": state.num_train_epochs,
        "epoch": feed.epoch,
        "num_ranks": feed.num_ranks,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_workers": args.dataloader_num_workers,
        "unpacked_batch_size": feed.unpacked_batch_size,
        "mode": feed.kind,
        "packing_length": feed.config.packing_length,
        "packing_strategy": feed.config.packing_strategy,
        "attention": attention,
        "proof": proof,
        "plan": None if plan is None else _plan_facts(plan, args.gradient_accumulation_steps),
        "data": None if plan is None else _data_facts(plan, feed.dataset, trainer.template),
    }


def noted(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What of the facts is kept with the run."""
    kept = {name: value for name, value in facts.items() if name not in ("checkpoint", "step", "output_dir", "data")}
    sources = facts["data"]["sources"] if facts["data"] else {}
    kept["sources"] = {
        name: {"rows": source["rows"], "ratio": source["asked_ratio"], "asked_share": source["asked_share"]}
        for name, source in sources.items()
    }
    kept["num_remembered"] = facts["data"]["num_remembered"] if facts["data"] else None
    kept["ratio_by"] = facts["data"]["ratio_by"] if facts["data"] else None
    return kept


def _plan_facts(plan: EpochPlan, accumulation: int) -> dict[str, Any]:
    report = plan_report(plan.unshared, plan.packs, num_rows=plan.num_rows, seconds=0.0)
    return {
        **report,
        "packs_per_epoch": len(plan),
        "steps_per_epoch": num_steps(plan.packs.num_packs_per_rank, accumulation),
        "step": size_of_step(plan, accumulation=accumulation).as_json(),
    }


def _data_facts(plan: EpochPlan, dataset: Any, template: Any) -> dict[str, Any]:
    remembered = sum(source.sizes.num_remembered for source in dataset.sources if source.sizes is not None)
    report = data_report(plan, dataset, merge_size(template))
    return {**report, "num_remembered": remembered, "ratio_by": dataset.mix.ratio_by}
