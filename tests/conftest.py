from __future__ import annotations

import functools

import pytest
import torch

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.testing import tiny

torch.set_num_threads(1)

#: Odd shapes, each away from what a round config would hide.
CONFIGS: dict[str, dict] = {
    "irregular": {},
    "one expert, two shared": {
        "num_experts_per_tok": 1,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 4,
    },
    "tied, biased, no muP": {"tie_word_embeddings": True, "attention_bias": True, "mup_enabled": False},
    "all dense": {"num_dense_layers": 5},
    "all mixture": {"num_dense_layers": 0},
    "MHA": {"num_key_value_heads": 6, "head_dim": 10, "num_hidden_layers": 4, "num_dense_layers": 1},
}

#: Every pair the value tests run under.
ATTENTION = ("eager", "sdpa")
EXPERTS = ("eager", "batched_mm", "grouped_mm")


def half(module: torch.nn.Module, dtype: torch.dtype, norms: bool = False) -> torch.nn.Module:
    """The module in half precision with the selection bias, and ``norms`` if asked, left in float32."""
    module.to(dtype)
    for name, parameter in module.named_parameters():
        if name.endswith("expert_bias") or (norms and "norm" in name):
            parameter.data = parameter.data.float()
    return module


@functools.cache
def model_of(name: str) -> StandardizedTransformer:
    return tiny(**CONFIGS[name])


@pytest.fixture
def build():
    """A config's model under the implementations asked for; one model a config, switched."""

    def get(name: str = "irregular", attention: str = "eager", experts: str = "grouped_mm") -> StandardizedTransformer:
        model = model_of(name)
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        return model

    return get


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of thirteen tokens, more than the window of eight."""
    return torch.randint(3, 261, (2, 13), generator=torch.Generator().manual_seed(1))
