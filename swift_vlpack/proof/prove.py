"""Prove that a packed sample is trained as it is alone, on the very model, with real samples.

>>> model = tiny_llama(attn_implementation="vlpack")  # any causal model of transformers
>>> row = {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13], "document_starts": [0, 4]}
>>> print(verify(model, collator, [row]))  # doctest: +ELLIPSIS
isolation verified: max difference 0.0 over 2 samples, attention vlpack (packed equals the model's own attention ...)
>>> verify(tiny_llama(attn_implementation="sdpa"), collator, [row])  # doctest: +ELLIPSIS
Traceback (most recent call last):
swift_vlpack.errors.IsolationError: isolation could not be verified with attention sdpa: positions begin again ...

One function measures (`compare.compare`), and is asked of three things: a few short samples of every kind, sequences of
the plan, and the trainer's own first batch, there with the trainer's loss, wrappers, random draws and checkpointing:

    choose_samples, first_batch  ->  compare (passes of a `Runner`)  ->  verdict  ->  a line for the log

The short samples and one sequence are compared in float32, on the same weights, within fixed limits; and all is
compared in the data type that trains, within what its rounding does to this model. If a proof fails, `explain` finds
which sample moved which, at which tokens and first in which module, and names the likeliest cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from swift_vlpack.attention import attention
from swift_vlpack.attention.prepare import unwrapped
from swift_vlpack.comm import ALONE, OfAll
from swift_vlpack.errors import BoundaryError, DataError, IsolationError, VLPackError
from swift_vlpack.feed.packs import Packs
from swift_vlpack.feed.waiting import is_of_collective
from swift_vlpack.proof.branches import units_in
from swift_vlpack.proof.choose_samples import chosen_samples, sequences_of_plan, short_of_each_kind, short_samples
from swift_vlpack.proof.compare import Compared, compare, gap_of, worst
from swift_vlpack.proof.explain import OF_A_STATE, explain
from swift_vlpack.proof.first_batch import FirstSequence
from swift_vlpack.proof.gradients import Parameters, added, difference, is_checkpointed
from swift_vlpack.proof.perturb import can_be_replaced
from swift_vlpack.proof.reference import (
    QUICK,
    in_float32,
    is_coarse,
    own_attention,
    reference_for,
    repeatable_training,
    untouched,
    why_not_in_float32,
)
from swift_vlpack.proof.runner import Ran, Runner, TemplateBatches, length_of, random_states
from swift_vlpack.proof.shards import is_sharded
from swift_vlpack.proof.verdict import COARSE, SHARP, SHORT, Finding, Judged, Limits, Proof, line_in_training
from swift_vlpack.rows.contents import num_supervised
from swift_vlpack.rows.samples import Encoded
from swift_vlpack.words import counted

TOKENS_ALLOWED = 16_384
"""Most tokens of sequences of the plan that are compared; the shortest sequence is compared in any case."""
SECONDS_IN_FLOAT32 = 60
"""Most seconds that a sequence of the plan may take in float32, by what the short samples took."""
_PLAN = "sequences of the plan"
FIRST_BATCH = "the first batch of the trainer"
_RUN_AGAIN = (
    "a layer that is run again in the backward (gradient checkpointing) does something else than in the forward: what "
    "it looks at, such as boundaries, is gone by then. The backward of a pack is not that of its samples one by one"
)

_NOT_ON_ALL = (
    "a rank found it and another did not, or other numbers; parameters are sharded, so the cause cannot be looked for"
)


def prove(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> str:
    """Prove on real samples of `packs` that the model trains them packed as it does alone. Returns a line for the log.

    Raises `IsolationError` with the likeliest cause. The model may be wrapped (all ranks must call this function then),
    and is left as it was. `forward_context` makes the context in which the trainer runs a forward, such as autocast.
    """
    proof = proof_of(model, template, packs, forward_context=forward_context)
    return proof.line(attention.name_of(unwrapped(model).config))


def proof_of(
    model: Any,
    template: Any,
    packs: Packs,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    results_of_all: OfAll = ALONE.results_of_all,
) -> Proof:
    """Run `prove` and return its numbers. Ranks whose parameters are sharded agree by `results_of_all`."""
    batches = TemplateBatches(template, packs.config.sequence_multiple)
    runner = Runner(unwrapped(model), batches, is_ordinary_token(template.tokenizer), forward_context)
    sequences = sequences_of_plan(packs)
    samples = chosen_samples(
        packs, lambda sample: num_supervised(sample) > 0 and can_be_replaced(sample, runner.is_ordinary), sequences
    )
    if not samples:
        readable = short_samples(packs)  # raises if no row can be read
        if packs.epoch_plan is None and not any(map(num_supervised, readable)):  # a plan has some, or is refused
            raise DataError(
                "there is nothing to train: none of the first rows has a label, all are -100, such as those of "
                f"{readable[0].get('sample_id')}. Give rows with answers"
            )
        raise DataError(
            f"the isolation proof found no row that it can use, one with a label and two different tokens of text; "
            f"one that it cannot is {readable[0].get('sample_id')}. Set packing_verify=false to train without a proof"
        )
    try:
        return run_proof(runner, samples, sequences, results_of_all=results_of_all)
    except VLPackError:
        raise
    except Exception as error:
        if is_of_collective(error) or isinstance(error, torch.OutOfMemoryError):
            raise  # a failure of the run, not of isolation: it would fail without the proof, too
        raise IsolationError(
            f"the isolation proof could not be run ({type(error).__name__}: {error}); repair that, or set "
            "packing_verify=false to train without a proof"
        ) from error


def is_ordinary_token(tokenizer: Any) -> Callable[[int], bool]:
    """Make a function that tells whether a token is plain text: replacing it moves neither images nor turns."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return lambda token: token not in special


def run_proof(
    runner: Runner,
    samples: Sequence[Encoded],
    sequences: Sequence[Sequence[Encoded]] = (),
    *,
    what: str = _PLAN,
    results_of_all: OfAll = ALONE.results_of_all,
) -> Proof:
    """Prove isolation on one pack of these short samples and on sequences of the plan.

    Raises `IsolationError` with the likeliest cause. `what` names the sequences in the line.
    """
    proof = None
    try:
        with untouched(runner.model), repeatable_training(runner.model):
            proof = _measured(runner, samples, sequences, what, results_of_all)
        finding = _agreed(runner, proof.finding(), results_of_all)
        if finding is None:
            return proof
        finding = _explained(finding)
    except BoundaryError as error:
        positions, other = "positions are not restarted at the boundaries", "the sequence is not its samples"
        finding = Finding(str(error), positions if "position" in str(error) else other)
    except ImportError as error:
        finding = Finding(str(error), OF_A_STATE)
    except CheckpointError as error:
        finding = Finding(str(error).strip().splitlines()[0], _RUN_AGAIN)
    said = f"isolation could not be verified with attention {attention.name_of(runner.model.config)}: {finding.cause}"
    raise IsolationError(f"{said}. ({finding.said})", cause=finding.cause, measured=proof)


def _explained(finding: Finding) -> Finding:
    """Return a finding with its cause. If it has none, run the model again to look for it."""
    if finding.judged is None:
        return finding
    compared = finding.judged.compared
    cause, seen = explain(compared.runner, compared.samples, finding.judged.limits)
    return Finding("; ".join(filter(None, (finding.said, seen))), cause)


def _measured(
    runner: Runner,
    samples: Sequence[Encoded],
    sequences: Sequence[Sequence[Encoded]],
    what: str,
    results_of_all: OfAll,
) -> Proof:
    """Compare in the data type that trains, then in float32 if that is another one.

    The number of forwards does not depend on their results, because ranks that wait for each other in a forward must
    run equally many.
    """
    reference_of = reference_for(runner, samples, is_trained=not is_checkpointed(runner.model))
    by_length = sorted(samples, key=length_of)
    known = [one for one in samples if reference_of(one) is not None]
    samples = known if len(known) > 1 else by_length[:2]
    # Reversed, the pack has equal length but other boundaries, so a cache of boundaries by length gives wrong ones. The
    # one with a backward comes first: some kernels are used only with or only without.
    turned = compare(runner, samples[::-1], parameters=Parameters(runner.model), keeps=True)
    pack = compare(runner, samples, swaps=True, known=turned.alone)
    left, kept = TOKENS_ALLOWED, list[Sequence[Encoded]]()
    for sequence in sequences:
        num_tokens = sum(map(length_of, sequence))
        if not kept or num_tokens <= left:
            kept.append(sequence)
            left -= num_tokens
    of_plan = [compare(runner, sequence, keeps=number == 0) for number, sequence in enumerate(kept)]
    left_out = []
    if (num := len(sequences) - len(kept)) > 0:
        left_out.append(f"{counted(num, 'long sequence')} of the plan")
    left_out += filter(None, [_without(sum(one.num_without for one in of_plan))])
    own = [(pack, SHORT), (turned, SHORT), *((one, what) for one in of_plan)]
    if not is_coarse(runner.model, pack.dtype):
        return Proof([Judged(one, SHARP, said) for one, said in own], SHARP, left_out)
    judged, limits, why_not = _in_float32(runner, samples, kept[:1], [turned, *of_plan[:1]], what, results_of_all)
    left_out += [why_not] if why_not else []
    return Proof([*judged, *(Judged(one, limits, said, is_float32=False) for one, said in own)], limits, left_out)


def _without(number: int) -> str:
    return f"{counted(number, 'sample')} too long for the model's own attention" if number else ""


def _in_float32(
    runner: Runner,
    samples: Sequence[Encoded],
    sequences: Sequence[Sequence[Encoded]],
    own: Sequence[Compared],
    what: str,
    results_of_all: OfAll,
) -> tuple[list[Judged], Limits, str]:
    """Compare a short sample of each kind and one sequence in float32, if all ranks can.

    `own` compared both in the data type that trains. Returns the comparisons in float32, the limits of that data type,
    and the reason why something was not compared.
    """
    few = short_of_each_kind(samples)
    if why_not := _first(results_of_all(lambda: why_not_in_float32(runner.model))):
        return [], COARSE, f"float32 ({why_not})"
    with in_float32(runner) as (again, parameters):
        short = _tried(lambda: compare(again, few, parameters=parameters, keeps=True), results_of_all)
        if isinstance(short, str):
            alone = _tried(lambda: _alone_in_float32(again, few), results_of_all)
            return [], COARSE if isinstance(alone, str) else _rounding(own[:1], [alone]), f"float32 ({short})"
        judged, said = [Judged(short, SHARP, SHORT)], "" if parameters is not None else "gradients in float32 (memory)"
        for sequence in sequences:
            estimate = max(results_of_all(partial(_estimate, own, short)))
            if estimate > SECONDS_IN_FLOAT32:
                said = f"{what} in float32 (it would take {estimate:.0f} s)"
                continue
            full = _tried(partial(compare, again, sequence, keeps=True), results_of_all)
            said = f"{what} in float32 ({full})" if isinstance(full, str) else said
            judged += [] if isinstance(full, str) else [Judged(full, SHARP, what)]
    return judged, _rounding(own, [one.compared.alone for one in judged]), said


def _estimate(own: Sequence[Compared], short: Compared) -> float:
    """Return the seconds that a sequence would take in float32: its own, times what float32 takes longer."""
    times, in_own_type = (one.seconds / max(1, one.num_tokens) for one in (short, own[0]))
    return own[-1].seconds * times / max(in_own_type, 1e-9)


def _alone_in_float32(runner: Runner, samples: Sequence[Encoded]) -> dict[int, Ran]:
    """Run samples alone, for a kernel that knows 16 bits only: the model's own attention knows both."""
    reference_of = reference_for(runner, samples, is_trained=False)
    made = {}
    for sample in samples:
        with own_attention(runner.model, reference_of(sample) or QUICK):
            made[id(sample)] = runner.run([sample], packed=False)
    return made


def _rounding(own: Sequence[Compared], in_float32: Sequence[Mapping[int, Ran]]) -> Limits:
    """Return limits by how far samples alone are from themselves in float32, both by the model's own attention."""
    sizes: list[float] = []
    gradient: list[float] = []
    for one, others in zip(own, in_float32, strict=False):
        pairs = [(one.alone[key], other) for key, other in others.items() if key in one.alone]
        gaps = [gap_of(ran.of(0), other.of(0), one.largest, ran.rerouted(0, other, 0)) for ran, other in pairs]
        sizes += map(one.size, gaps)
        if pairs and all(ran.gradient and other.gradient for ran, other in pairs):
            off = difference(*(added([pair[side].gradient for pair in pairs]) for side in (0, 1)))
            gradient.append(worst(list(off.values())))
    return Limits.of_rounding(worst(sizes), worst(gradient) if gradient else None)


def _tried(work: Callable[[], Any], results_of_all: OfAll) -> Any:
    """Return the result of the work, or the reason why it failed on some rank: a kernel of 16 bits, or memory."""
    result: Any = None
    try:
        result, said = work(), ""
    except Exception as error:
        if is_of_collective(error):
            raise
        said = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    return _first(results_of_all(lambda: said)) or result


def _first(said: Sequence[str]) -> str:
    return next(filter(None, said), "")


def _agreed(runner: Runner, finding: Finding | None, results_of_all: OfAll) -> Finding | None:
    """Return the same finding on all ranks if parameters are sharded, because naming its cause runs forwards."""
    if not is_sharded(runner.model):
        return finding
    said = results_of_all(lambda: None if finding is None else finding.said)
    return finding if len(set(said)) == 1 else Finding(_first(said), _NOT_ON_ALL)


def compared_in_training(
    runner: Runner,
    sequence: FirstSequence,
    parameters: Parameters,
    on_all: Callable[..., list[Any]],
    *,
    runs_alone: bool = True,
) -> Compared:
    """Compare a sequence of the trainer, as it will train. All ranks must call it.

    If parameters are sharded, every pass is a collective. A rank that fails in one raises at once, because the others
    wait for it in the middle of a forward, where it cannot send them a message.
    """
    made: list[Compared] = []

    def work() -> None:
        with untouched(runner.model), torch.enable_grad():
            runner.model.train()
            made.append(
                compare(
                    runner,
                    sequence.samples,
                    parameters=parameters,
                    watched=sequence.watched,
                    swaps=True,
                    runs_alone=runs_alone and not isinstance(sequence.encoded, str),
                    agree=lambda facts: on_all(lambda: facts),
                )
            )

    on_all(work, is_collective=is_sharded(runner.model))
    return made[0]


def wrong_draws(runner: Runner, sequence: FirstSequence) -> str:
    """Say that a forward sets a seed, so that every step draws the same numbers; empty if it does not.

    All ranks must call it, if one of them draws at random. Random states are compared and not results, which draws need
    not change: those of an adapter that is still zero do not.
    """
    ends = []
    with untouched(runner.model), torch.no_grad():
        runner.model.train()
        for seed in (1, 2):
            runner.run(sequence.samples, packed=True, seed=seed)
            ends.append(random_states())
    is_equal = all(map(torch.equal, *ends))
    return "two random states draw the same numbers: something sets a seed" if is_equal else ""


def line_of_first_batch(
    compared: Compared,
    limits: Limits | None,
    sequence: FirstSequence,
    parameters: Parameters,
    not_looked_at: Sequence[str] = (),
    where: str = FIRST_BATCH,
) -> str:
    """Judge what was compared on the first batch. Returns a line for the log, or raises `IsolationError`.

    `limits` are those of the proof before training, which measured rounding on this model; None if it did not run.
    """
    coarse, is_encoded_again = is_coarse(compared.runner.model, compared.dtype), not isinstance(sequence.encoded, str)
    limits = SHARP if not coarse else COARSE if limits is None else limits
    proof = Proof([Judged(compared, limits, "the first batch", is_float32=not coarse)], limits)
    if (finding := proof.finding()) is not None:
        if is_encoded_again and not is_sharded(compared.runner.model):  # the others run no forwards with this rank
            finding = _explained(finding)
        raise wrong_batch(where, finding.cause or (_LEAK if compared.moved > 0 else _IN_TRAINING), finding.said)
    said, swapped = list(not_looked_at), compared.swapped
    if swapped is not None and swapped.moved and not swapped.num_changed:
        said.append("other neighbours, whose tokens could not be changed so that they move themselves")
    if compared.has_drawn and is_sharded(compared.runner.model):
        said.append("how large drawn noise is (parameters are sharded)")
    if not is_encoded_again:
        said.append(f"its samples encoded anew and alone, other media beside them ({sequence.encoded})")
        said += ["which prefix each branch sees"] if units_in(sequence.samples) else []
    said += filter(None, [parameters.left_out, _without(compared.num_without)])
    return line_in_training(proof, where, is_encoded_again=is_encoded_again, not_looked_at=said)


_LEAK = "samples of the trainer's own sequence see each other"
_IN_TRAINING = "samples in the trainer's own sequence do not give what they give alone"


def wrong_batch(where: str, cause: str, said: str) -> IsolationError:
    """Make the error of a failed proof on a batch of the trainer."""
    return IsolationError(f"isolation does not hold in {where}: {cause}. ({said})", cause=cause)
