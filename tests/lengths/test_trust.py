"""Which rows are encoded both ways."""

import numpy as np

from swift_vlpack.lengths import trust
from swift_vlpack.lengths.length_file import SIZE


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
