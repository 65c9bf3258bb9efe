"""The collator's batch and the decoders of vision-language models on CUDA tensors that are fake."""

import pytest
import torch
from accelerate.utils import send_to_device
from swift.utils import to_device
from transformers import AutoModelForImageTextToText

from swift_vlpack import Collator, PackingConfig, PackingDataset
from swift_vlpack.attention.kernels import KERNELS
from swift_vlpack.attention.linear_attention import restart_at_boundaries
from swift_vlpack.attention.packed_sequence import boundaries_of
from tests.data_rows import rows_about_images
from tests.fake_cuda import on_cuda, rehearsal, use_watched
from tests.host.feed.test_batch import a_trainer

CUDA = torch.device("cuda")


def by_trainer(batch):
    trainer = a_trainer()
    trainer.args.device = CUDA
    return trainer._prepare_input(batch)


MOVERS = {
    "ms-swift": lambda batch: to_device(batch, CUDA),
    "accelerate": lambda batch: send_to_device(batch, CUDA),
    "transformers": by_trainer,
    "batch": lambda batch: batch.to(CUDA, non_blocking=True),
    "twice": lambda batch: by_trainer(to_device(batch, CUDA)),
}


@pytest.fixture
def pack(tiny, tmp_path):
    """`pack(family, share)` is the batch of a pack of images with questions."""

    def batch(family, share):
        template = tiny(family).template
        rows = [row for rows in rows_about_images(tmp_path, 3, 3, seed=0) for row in rows]
        config = PackingConfig(packing_length=600, packing_drop_last=False, packing_share=share)
        return Collator(template)([PackingDataset(rows, template, config)[0]])

    return batch


@pytest.mark.parametrize("mover", MOVERS)
def test_boundaries_stay_on_the_host_whoever_moves_the_batch(pack, mover):
    """ATTN-11 TRAIN-31"""
    batch = pack("qwen2_5_vl", "media")
    expected = boundaries_of(batch["cu_seq_lens_q"])
    assert len(expected.ends) > 3
    with rehearsal():
        moved = MOVERS[mover](batch)
        assert all(one.device.type == "cuda" for one in moved.values() if isinstance(one, torch.Tensor))
        assert moved["cu_seq_lens_q"].dtype == torch.int32
        assert boundaries_of(moved["cu_seq_lens_q"]) == expected


@pytest.mark.parametrize(
    ("family", "share", "kernel"),
    [
        ("qwen2_5_vl", "media", "varlen"),
        ("qwen2_5_vl", "media", "segments"),
        ("qwen2_5_vl", "media", "grouped"),
        ("qwen3_vl", "none", "varlen"),
        ("qwen3_5", "none", "segments"),
    ],
)
def test_decoder_of_a_vision_language_model_runs_on_the_device(pack, tiny, family, share, kernel):
    """ATTN-11: on the positions, types and boundaries of the collator; the tower asks the device by itself."""
    batch, config = pack(family, share), tiny(family).model.config
    assert bool(batch.bounds.parents) == (share == "media")
    with rehearsal() as waited_for:
        model = on_cuda(AutoModelForImageTextToText, config)
        restart_at_boundaries(model)
        decoder = model.model.language_model.train()
        computed = use_watched(model, KERNELS[kernel])
        moved = to_device(batch, CUDA)
        waited_for.clear()
        embeddings = model.get_input_embeddings()(moved["input_ids"])
        names = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        states = decoder(
            inputs_embeds=embeddings, use_cache=False, **{name: moved[name] for name in names}
        ).last_hidden_state
        assert (states.device.type, states.dtype, states.shape) == ("cuda", torch.bfloat16, embeddings.shape)
        assert len(computed) == (1 if family == "qwen3_5" else 2)
        assert not waited_for
