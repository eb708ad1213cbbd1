"""Checked by pyright, never run: what an editor knows of a model."""

from __future__ import annotations

from nnsight import Object
from typing_extensions import assert_type

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.families import Attention, Block, Mixture, SharedExpert
from nnterp_afmoe.values import Value

model = StandardizedTransformer("arcee-ai/Trinity-Nano-Base")
block = model.layers[0]
assert_type(block, Block)
assert_type(block.self_attn, Attention)
assert_type(block.mlp, Mixture)
assert_type(block.mlp.shared_experts, SharedExpert)
assert_type(block.layer_output, Object)
assert_type(block.self_attn.attention_keys, Object)
assert_type(Attention.attention_keys, Value)
assert_type(block.mlp.num_experts, int)
block.layer_output = block.layer_output * 2
for each in model.layers:
    assert_type(each, Block)
