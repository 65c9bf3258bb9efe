import random

import pytest

from swift_vlpack import Boundaries
from swift_vlpack.errors import BoundaryError
from swift_vlpack.plan.boundaries import ROOT


def test_everything_is_derived_from_the_lengths():
    """BOUND-1"""
    pack = Boundaries((3, 1, 2))
    assert pack.document_starts == (0, 3, 4)
    assert pack.cu_seqlens == (0, 3, 4, 6)
    assert pack.position_ids == (0, 1, 2, 0, 0, 1)
    assert pack.segment_ids() == (1, 1, 1, 2, 3, 3)
    assert pack.segment_ids(num_tokens=8) == (1, 1, 1, 2, 3, 3, 0, 0)
    assert pack.num_tokens == 6


def test_row_too_short_and_empty_sample_are_refused():
    """BOUND-1"""
    with pytest.raises(BoundaryError, match="sequence of 5 tokens cannot hold the 6"):
        Boundaries((3, 3)).segment_ids(num_tokens=5)
    with pytest.raises(BoundaryError, match="sample 2 of the pack has length 0"):
        Boundaries((3, 0))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ((0, 1, 2, 3, 4), "token 3 has position 3; in its sample alone it has 0"),
        ((0, 1, 0, 0, 1), "token 2 has position 0; in its sample alone it has 2"),
        ((0, 1, 2, 0), "4 positions for a pack of 5"),
        ((0, 1, 3, 0, 1), "token 2 has position 3"),
        ((1, 2, 3, 0, 1), "token 0 has position 1"),
    ],
)
def test_wrong_positions_are_found(positions, message):
    """BOUND-2"""
    Boundaries((3, 2)).check_positions((0, 1, 2, 0, 1))
    with pytest.raises(BoundaryError, match=message):
        Boundaries((3, 2)).check_positions(positions)


def test_random_packs_accept_their_own_positions_and_no_others():
    """BOUND-2"""
    rng = random.Random(0)
    for _ in range(200):
        lengths = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 6)))
        pack = Boundaries(lengths)
        positions = list(pack.position_ids)
        pack.check_positions(positions)
        positions[rng.randrange(len(positions))] += 1
        with pytest.raises(BoundaryError):
            pack.check_positions(positions)


def test_branches_are_their_rows_with_the_prefix_once():
    """SHARE-1: against rows laid out one by one, which shares no code with the forest."""
    rng = random.Random(1)
    for _ in range(200):
        lengths, shared, tokens, positions, of_rows = [], [], [], [], []
        for _ in range(rng.randint(1, 4)):
            prefix, num_rows = rng.randint(1, 5), rng.randint(1, 4)
            start = len(tokens)
            if num_rows > 1:
                tokens += [None] * prefix
                positions += range(prefix)
            for number in range(num_rows):
                own = rng.randint(1, 5)
                lengths.append(prefix + own)
                shared.append(prefix if number else 0)
                here = range(len(tokens), len(tokens) + (own if num_rows > 1 else prefix + own))
                of_rows.append([*range(start, start + prefix), *here] if num_rows > 1 else [*here])
                positions += range(prefix if num_rows > 1 else 0, prefix + own)
                tokens += [None] * len(here)
        pack = Boundaries.of_samples(lengths, shared)
        assert pack.num_tokens == len(tokens) == sum(lengths) - sum(shared)
        assert list(pack.position_ids) == positions
        assert [[token for part in row for token in range(*part)] for row in pack.samples] == of_rows
        assert (ROOT in pack.parents) if any(shared) else pack.parents == ()
        pack.check_positions(positions)
        with pytest.raises(BoundaryError):
            pack.check_positions([*positions[:-1], positions[-1] + 1])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((ROOT, 0), "2 parents for 3 segments"),
        ((ROOT, ROOT, 0), "segment 2 does not follow its prefix, segment 0"),
        ((ROOT, 0, 1), "the prefix of segment 2, segment 1, is itself a branch"),
        ((0, ROOT, ROOT), "segment 0 does not follow its prefix"),
    ],
)
def test_forests_of_another_shape_are_refused(parents, message):
    """SHARE-1"""
    with pytest.raises(BoundaryError, match=message):
        Boundaries((2, 2, 2), parents)


E, P, B = 2, 0, 1


@pytest.mark.parametrize(
    ("tokens", "ids", "lengths"),
    [
        ([5, 6, E, 7, E], {"eos_id": E}, (3, 2)),
        ([5, 6, E, 7, 8], {"eos_id": E}, (3, 2)),  # the last sample was cut and has no EOS
        ([5, 6, E, 7, E, P, P], {"eos_id": E, "pad_id": P}, (3, 2)),
        ([5, 6, E, 7, E, E, E], {"eos_id": E, "pad_id": E}, (3, 2)),  # pad is EOS
        ([5, 6, E, 7, 8, 9], {"eos_id": E, "pad_id": E}, (3, 3)),
        ([B, 5, B, 6, 7], {"bos_id": B}, (2, 3)),
        ([B, 5, B, 6, P, P], {"bos_id": B, "pad_id": P}, (2, 2)),
        ([5, E, E, 7, E], {"eos_id": E}, (2, 1, 2)),  # a sample that is nothing but EOS, inside the row
        ([P, P], {"eos_id": E, "pad_id": P}, ()),
        ([E, E], {"eos_id": E, "pad_id": E}, ()),
        ([], {"eos_id": E}, ()),
    ],
)
def test_boundaries_from_tokens(tokens, ids, lengths):
    """BOUND-3"""
    assert Boundaries.from_tokens(tokens, **ids).lengths == lengths


def test_random_packs_are_recovered_from_their_tokens():
    """BOUND-3"""
    rng = random.Random(1)
    for _ in range(200):
        lengths = tuple(rng.randint(2, 9) for _ in range(rng.randint(1, 6)))
        padding = rng.randint(0, 4)
        with_eos = [t for length in lengths for t in [*([7] * (length - 1)), E]] + [E] * padding
        assert Boundaries.from_tokens(with_eos, eos_id=E, pad_id=E).lengths == lengths
        with_bos = [t for length in lengths for t in [B, *([7] * (length - 1))]] + [P] * padding
        assert Boundaries.from_tokens(with_bos, bos_id=B, pad_id=P).lengths == lengths


@pytest.mark.parametrize(
    ("tokens", "ids", "message"),
    [
        ([P, P, 5, E], {"eos_id": E, "pad_id": P}, "starts with the pad token 0"),
        ([5, B, 6], {"bos_id": B}, "not with the BOS token 1"),
        ([5, E], {}, "either eos_id or bos_id"),
        ([5, E], {"eos_id": E, "bos_id": B}, "either eos_id or bos_id"),
    ],
)
def test_rows_that_cannot_start_so_are_refused(tokens, ids, message):
    """BOUND-4"""
    with pytest.raises(BoundaryError, match=message):
        Boundaries.from_tokens(tokens, **ids)
