"""The examples in docstrings of the proof run as they are shown."""

import doctest
from types import SimpleNamespace

import pytest
import torch
import transformers

from swift_vlpack.attention import attention
from swift_vlpack.proof import explain, perturb, prove, same_inputs
from swift_vlpack.proof.verify import verify
from swift_vlpack.text import PackedCollator


def tiny_llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2, **options))


@pytest.mark.parametrize("module", [explain, perturb, same_inputs])
def test_examples_of_pure_functions(module):
    """ISO-10 ISO-13"""
    assert doctest.testmod(module).failed == 0


def test_proof_holds_with_our_attention_and_names_the_cause_with_another():
    """ISO-5 ISO-15"""
    attention.register()
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    collator = PackedCollator(tokenizer, cu_seqlens=True)
    names = {"tiny_llama": tiny_llama, "verify": verify, "collator": collator}
    assert doctest.testmod(prove, extraglobs=names).failed == 0
