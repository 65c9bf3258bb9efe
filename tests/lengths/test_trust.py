"""What is trusted: the ends of a source, and the file of kinds that agreed."""

import numpy as np
import pytest

from swift_vlpack.lengths import trust
from swift_vlpack.lengths.length_file import SIZE
from swift_vlpack.lengths.trust import Trust


def test_extremes_are_the_ends_of_every_column():
    """LEN-3"""
    sizes = np.zeros(40, SIZE)
    sizes["length"] = np.roll(np.arange(40), 7)  # row 7 has none
    sizes["patches"] = np.roll(np.arange(40), 20)
    sizes["aspect"] = np.roll(np.arange(40), 30)
    assert set(trust.extremes(sizes).tolist()) == {8, 6, 20, 19, 30, 29}
    assert len(trust.extremes(np.zeros(5, SIZE))) == 0
    sizes["length"], sizes["patches"], sizes["aspect"] = 9, 9, 1
    assert len(trust.extremes(sizes)) == 0, "where all are equal there is no end"


def test_trust_is_added_behind_a_line_that_a_killed_process_left_unfinished(tmp_path):
    """LEN-16"""
    path = tmp_path / "kinds.trust"
    path.write_bytes(b'{"agreed": {"a": 2}}\n{"agre')
    added = Trust(path)
    added.add(["b"])
    added.save()
    assert Trust(path).remembered() == {"a": 2, "b": 1}


@pytest.mark.parametrize("num_bytes", [5, 13, 30])
def test_half_a_line_of_a_difference_ends_the_trust(num_bytes, tmp_path):
    """LEN-16: a process was killed while it wrote it down."""
    path = tmp_path / "kinds.trust"
    path.write_bytes(b'{"agreed": {"a": 2}}\n' + b'{"differs": "rows:1 has 5 tokens"}'[:num_bytes])
    assert Trust(path).is_revoked
    assert not Trust(path).remembered()
