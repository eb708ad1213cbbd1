"""The identities of the vocabulary, on both kinds of block, as a user would check them."""

from __future__ import annotations

import pytest
import torch
from helpers import apart, read_all

DENSE, MIXTURE = 1, 3  # full and sliding as well


@pytest.fixture
def values(build, ids):
    model = build()
    return model, read_all(model, ids)


@pytest.mark.parametrize("layer", range(5))
def test_block_sums(values, layer):
    _, v = values
    assert torch.equal(v[layer, "layer_input"] + v[layer, "self_attn.attention_output"], v[layer, "layer_mid"])
    assert torch.equal(v[layer, "layer_mid"] + v[layer, "mlp.mlp_output"], v[layer, "layer_output"])


@pytest.mark.parametrize("layer", range(5))
def test_the_gate(values, layer):
    model, v = values
    gate = model.layers[layer].self_attn._module.gate_proj(v[layer, "attention_norm_output"])
    gated = v[layer, "self_attn.attention_head_outputs"] * gate.sigmoid().view(2, 13, 6, 12)
    assert apart(v[layer, "self_attn.attention_premix"], gated) < 1e-6


@pytest.mark.parametrize("layer", range(5))
def test_the_pattern_mixes_the_values(values, layer):
    _, v = values
    pattern = v[layer, "self_attn.attention_probabilities"]
    assert torch.allclose(v[layer, "self_attn.attention_scores"].softmax(-1), pattern)
    mixed = pattern @ v[layer, "self_attn.attention_values"].repeat_interleave(3, 1)
    assert apart(v[layer, "self_attn.attention_head_outputs"], mixed.transpose(1, 2)) < 1e-6


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_routing(values, layer):
    model, v = values
    bias = model.layers[layer].mlp._module.expert_bias
    scores = v[layer, "mlp.router_logits"].float().sigmoid()
    chosen = v[layer, "mlp.expert_indices"]
    assert torch.equal(chosen, (scores + bias).topk(3).indices)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * model.config.route_scale
    assert torch.allclose(v[layer, "mlp.expert_weights"], weights)
    assert torch.allclose(v[layer, "mlp.expert_weights"].sum(-1), torch.tensor(model.config.route_scale))
    assert v[layer, "mlp.expert_weights"].dtype is torch.float32
    assert chosen.dtype is torch.int64


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_the_mixture_sums(build, ids, values, layer):
    model, v = values
    assert apart(v[layer, "mlp.expert_outputs"].sum(2), v[layer, "mlp.routed_output"]) < 1e-6
    with torch.no_grad(), model.trace(ids):
        whole = model.layers[layer].mlp.output.save()
        added = model.layers[layer].mlp.mlp_output.save()
    assert apart(v[layer, "mlp.routed_output"] + v[layer, "mlp.shared_expert_output"], whole) < 1e-6
    assert torch.equal(model.layers[layer]._module.post_mlp_layernorm(whole), added)


def test_the_head(values):
    model, v = values
    assert torch.equal(model._module.lm_head(model._module.model.norm(v[4, "layer_output"])), v["logits"])
    assert torch.equal(v["logits"], v["lm_head_output"])


def test_positions(values):
    model, v = values
    for layer, types in enumerate(model.config.layer_types):
        attention = model.layers[layer].self_attn._module
        plain = attention.q_norm(attention.q_proj(v[layer, "attention_norm_output"]).view(2, 13, 6, 12)).transpose(1, 2)
        same = apart(v[layer, "self_attn.attention_queries"], plain) < 1e-6
        assert same == (types == "full_attention")
        # Position zero is not rotated on any block.
        assert torch.allclose(v[layer, "self_attn.attention_queries"][:, :, 0], plain[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
def test_scaling_mlp_output_halves_what_the_block_adds_and_scaling_its_input_does_not(build, ids, layer):
    model = build()
    block = model.layers[layer]

    with torch.no_grad():
        with model.trace(ids):
            mid, out = block.layer_mid.save(), block.layer_output.save()
        with model.trace(ids):
            block.mlp.mlp_output *= 0.5
            halved = block.layer_output.save()
        with model.trace(ids):
            block.mlp.output = block.mlp.output * 0.5
            same = block.layer_output.save()
    assert torch.allclose(halved - mid, (out - mid) * 0.5, atol=1e-6)
    assert apart(same, out) < 1e-4  # up to the norm's epsilon


@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
def test_a_write_to_layer_mid_reaches_both_branches(build, ids, layer):
    model = build()
    block = model.layers[layer]
    with torch.no_grad():
        with model.trace(ids):
            block.layer_mid = block.layer_mid + 1
            norm, added, out = block.mlp_norm_output.save(), block.mlp.mlp_output.save(), block.layer_output.save()
            mid = None
        with model.trace(ids):
            mid = block.layer_mid.save()
    assert torch.allclose(out - added, mid + 1, atol=1e-6)
    assert torch.allclose(norm, block._module.pre_mlp_layernorm(mid + 1), atol=1e-6)


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_an_ablated_expert_changes_the_tokens_that_chose_it(build, ids, layer):
    model = build()
    mlp = model.layers[layer].mlp
    with torch.no_grad():
        with model.trace(ids):
            chosen = mlp.expert_indices.save()
            before = mlp.routed_output.clone().save()
        expert = chosen.flatten().mode().values.item()
        with model.trace(ids):
            here = mlp.expert_indices == expert
            mlp.expert_outputs[here] = 0
            after = mlp.routed_output.clone().save()
    changed = (before != after).any(-1)
    assert torch.equal(changed, (chosen == expert).any(-1))
    assert changed.any()
    assert not changed.all()


@pytest.mark.parametrize("layer", [2, 4])
def test_a_written_bias_moves_the_choice_only(build, ids, layer):
    model = build()
    mlp = model.layers[layer].mlp
    with torch.no_grad():
        with model.trace(ids):
            logits, indices = mlp.router_logits.save(), mlp.expert_indices.save()
        never = indices[0, 0, 0].item()
        with model.trace(ids):
            args, _ = mlp.router.inputs
            bias = args[1].clone()
            bias[never] = -10
            mlp.router.inputs = ((args[0], bias), {})
            moved_logits = mlp.router_logits.save()
            weights, moved = mlp.expert_weights.save(), mlp.expert_indices.save()
    assert torch.equal(logits, moved_logits)
    assert (indices == never).any()
    assert not (moved == never).any()
    scores = logits.sigmoid().gather(-1, moved)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True) * model.config.route_scale)
