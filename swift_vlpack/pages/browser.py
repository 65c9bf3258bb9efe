"""Write the pack browser: one page with packs, their samples, masks and small images, and filters over them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from swift_vlpack.pages.page import asset, data, page, subject
from swift_vlpack.pages.safe_text import visible, without_home
from swift_vlpack.pages.terminal import step_headline, tokens_text
from swift_vlpack.pages.values import KINDS, Member, PackShown, SharedPrefix, StepShown

_MB = 1e6


def browser(
    packs: Iterable[PackShown],
    overview: Mapping[str, Any] | None = None,
    steps: Sequence[StepShown] = (),
    *,
    most_mb: float,
    num_packs: int | None = None,
    model: str | None = None,
) -> tuple[str, str]:
    """Make the page. Returns (page, a line that says how many packs it has).

    Packs are taken until their data reaches `most_mb`, but at least one: a page of 20 MB still opens on a phone. The
    title names `model` and the sources.
    """
    taken: list[dict[str, Any]] = []
    num_bytes, is_full = 0, False
    for pack in packs:
        made = _as_data(pack)
        size = len(json.dumps(made, ensure_ascii=False).encode(errors="replace"))
        is_full = bool(taken) and num_bytes + size > most_mb * _MB
        if is_full:
            break
        num_bytes += size
        taken.append(made)
    said = _said(len(taken), num_packs, most_mb, is_full=is_full)
    content = {"kinds": KINDS, "packs": taken}
    body = "\n".join(
        (_summary(overview, said), _steps(steps), asset("browser.html") if taken else "", data("data", content))
    )
    script = asset("browser.js") if taken else ""
    name = subject(model, _sources(overview, steps, taken))
    title = _title(overview, steps) + (f": {name}" if name else "")
    return page(title, body, asset("browser.css"), script), said


def _said(num_shown: int, num_packs: int | None, most_mb: float, *, is_full: bool) -> str:
    of = "" if num_packs is None or num_packs == num_shown else f" of {num_packs}"
    why = f"; the page is limited to {most_mb:g} MB, --html_mb sets another limit" if is_full else ""
    return f"{num_shown}{of} pack{'s' * ((num_packs or num_shown) != 1)}{why}"


def _title(overview: Mapping[str, Any] | None, steps: Sequence[StepShown]) -> str:
    if overview is not None:
        return f"Packs of epoch {overview['epoch']}"
    return f"Packs of step {steps[0].step}" if len(steps) == 1 else "Packs of steps" if steps else "Packs"


def _sources(
    overview: Mapping[str, Any] | None, steps: Sequence[StepShown], packs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Name the sources of a page: all of the epoch, or those of the shown packs and steps."""
    if overview is not None:
        return list(overview["sources"])
    of_packs = {member["source"] for pack in packs for member in pack["members"]}
    of_steps = {sample_id.rpartition(":")[0] for step in steps for pack in step.packs for sample_id in pack.ids}
    return sorted({*of_packs, *of_steps} - {""})


def _summary(overview: Mapping[str, Any] | None, said: str) -> str:
    facts = ""
    if overview is not None:
        facts = (
            f"Epoch {overview['epoch']}: {overview['num_packs']} packs of {overview['packing_length']} tokens for "
            f"{overview['num_ranks']} rank{'s' * (overview['num_ranks'] > 1)}, {overview['num_samples']} samples, mean "
            f"fill {overview['mean_fill']:.1%}. "
        )
        if shared := overview.get("shared"):
            facts += (
                f"Shared: {shared['num_in_units']} samples in {shared['num_units']} units, "
                f"{shared['num_tokens']} of {shared['num_tokens_alone']} tokens computed. "
            )
    return (
        f'<p id="said">{escape(facts)}On this page: {escape(said)}.</p><noscript>This page needs JavaScript.</noscript>'
    )


def _steps(steps: Sequence[StepShown]) -> str:
    return "\n".join(map(_step, steps))


def _step(step: StepShown) -> str:
    rows = "".join(
        f'<tr><td class="n">{pack.rank}</td><td class="n">{pack.epoch}</td><td class="n">{pack.number}</td>'
        f'<td class="n">{tokens_text(pack, at)}</td><td>{escape(visible(name))}</td>'
        f'<td class="muted">{escape(visible(without_home(pack.where[at])))}</td></tr>'
        for pack in step.packs
        for at, name in enumerate(pack.ids)
    )
    head = "".join(f'<th class="n" scope="col">{name}</th>' for name in ("rank", "epoch", "pack", "tokens"))
    return (
        f"<h2>{escape(step_headline(step))}</h2>"
        f'<div class="scroll steps" tabindex="0" role="region" aria-label="rows of step {step.step}"><table><thead><tr>'
        f'{head}<th scope="col">id</th><th scope="col">where</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _as_data(pack: PackShown) -> dict[str, Any]:
    """Collect only what `browser.js` shows of a pack, because every byte counts against `--html_mb`."""
    return {
        "epoch": pack.epoch,
        "number": pack.number,
        "rank": pack.rank,
        "step": pack.step,
        "capacity": pack.packing_length,
        "tokens": pack.num_tokens,
        "fill": round(pack.fill, 4),
        "supervised": pack.num_supervised,
        "vision": pack.num_vision,
        "left_out": [without_home(f"{one['id']}: {one['reason']}: {one['error']}") for one in pack.left_out],
        "members": [_member(member) for member in pack.members],
        "prefixes": [_prefix(prefix) for prefix in pack.prefixes],
        "alone": pack.num_tokens_alone,
    }


def _member(member: Member) -> dict[str, Any]:
    return {
        "id": member.id,
        "where": without_home(member.where),
        "source": member.source,
        "start": member.start,
        "tokens": member.num_tokens,
        "supervised": member.num_supervised,
        "vision": member.num_vision,
        "prefix": member.prefix,
        **_content(member),
    }


def _prefix(prefix: SharedPrefix) -> dict[str, Any]:
    return {
        "members": list(prefix.members),
        "start": prefix.start,
        "tokens": prefix.num_tokens,
        "vision": prefix.num_vision,
        **_content(prefix),
    }


def _content(one: Member | SharedPrefix) -> dict[str, Any]:
    return {
        "positions": [f"{axis} {low}-{high}" for axis, (low, high) in one.positions.items()],
        "pictures": [
            {"text": str(picture), "name": without_home(picture.name), "thumbnail": picture.thumbnail}
            for picture in one.pictures
        ],
        "pieces": [[KINDS.index(piece.kind), piece.num_tokens, piece.text] for piece in one.pieces],
    }
