"""What a part has of a sample's labels and weights, by hand; real templates are in tests/host/parts/test_cut.py."""

import pytest
import torch

from swift_vlpack.plan.parts import Span
from swift_vlpack.rows.contents import NO_LABEL
from swift_vlpack.rows.cutting import cut_sample

LABELS = [NO_LABEL, 11, 12, 13, 14, 15]
WEIGHTS = [0.0, 0.5, 2.0, 0.5, 2.0, 0.5]


@pytest.mark.parametrize("made_as", [list, torch.tensor])
@pytest.mark.parametrize(
    ("span", "labels", "weights"),
    [
        (Span(0, 0, 3), [NO_LABEL, 11, 12], [0.0, 0.5, 2.0]),
        (Span(1, 3, 6), [NO_LABEL, 14, 15], [0.0, 2.0, 0.5]),
        (Span(1, 2, 6, num_repeated=2), [NO_LABEL, NO_LABEL, 14, 15], [0.0, 0.0, 2.0, 0.5]),
    ],
)
def test_what_begins_a_part_has_neither_label_nor_weight(made_as, span, labels, weights):
    """CUT-3 CUT-10: and the row, of which other parts are still to be cut, stays as it is."""
    row = {"input_ids": list(range(10, 16)), "labels": made_as(LABELS), "loss_scale": made_as(WEIGHTS), "length": 6}
    part = cut_sample(row, span, [])
    assert isinstance(part["loss_scale"], type(row["loss_scale"]))
    assert list(part["labels"]) == labels
    assert list(part["loss_scale"]) == weights
    assert list(row["labels"]) == LABELS
    assert list(row["loss_scale"]) == WEIGHTS
