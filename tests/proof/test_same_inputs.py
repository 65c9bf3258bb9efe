import pytest
import torch

from swift_vlpack.proof.same_inputs import wrong_media

GRIDS = torch.tensor([[1, 4, 6], [1, 2, 8], [1, 6, 4]])
LENGTHS = torch.tensor([30, 12])


@pytest.mark.parametrize(
    ("packed", "alone", "wrong"),
    [
        ({"image_grid_thw": GRIDS}, [{"image_grid_thw": GRIDS[:1]}, {}, {"image_grid_thw": GRIDS[1:]}], None),
        ({"image_grid_thw": GRIDS}, [{"image_grid_thw": GRIDS[1:]}, {"image_grid_thw": GRIDS[:1]}], "image_grid_thw"),
        ({"audio_lengths": LENGTHS.flip(0)}, [{"audio_lengths": one[None]} for one in LENGTHS], "audio_lengths"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, [{"position_ids": torch.tensor([[0, 1]])}] * 2, None),
        (  # two samples, and two tokens of padding after them
            {"cu_seq_lens_q": torch.tensor([0, 3, 8, 10])},
            [{"cu_seq_lens_q": torch.tensor([0, 3])}, {"cu_seq_lens_q": torch.tensor([0, 5])}],
            None,
        ),
    ],
    ids=["in order", "exchanged", "sounds exchanged", "one a token", "boundaries"],
)
def test_media_of_a_sequence_are_those_of_its_samples_one_after_the_other(packed, alone, wrong):
    """ISO-13: boundaries are none of them."""
    assert wrong_media(packed, alone) == wrong
