"""What `--external_plugins` loads so that a sample changes the gradient of parameters that another one gives."""

import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from tests.host.proof.sabotage import SeesAll


def forward(self, hidden):
    """As the norm of the language model, whose weight gets another gradient."""
    wide = hidden.float()
    states = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
    states = states.to(hidden.dtype)
    return SeesAll.apply(states, self.weight) if hidden.dim() == 3 else self.weight * states


modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm.forward = forward
