"""The order of the forward pass: one trace reads everything in it, and `rank` sorts anything into it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from conftest import CONFIGS, EXPERTS
from helpers import keys, read, read_all

from nnterp_afmoe import OutOfOrder, Unavailable


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_everything_in_one_trace(build, ids, name, experts):
    model = build(name, "eager", experts)
    assert len(read_all(model, ids)) == len(keys(model))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("experts", EXPERTS)
def test_shuffled_and_sorted_by_rank(build, ids, experts, seed):
    model = build("irregular", "eager", experts)
    wanted = keys(model)
    random.Random(seed).shuffle(wanted)
    wanted.sort(key=lambda key: model.rank(key) if isinstance(key, str) else model.rank(key[1], key[0]))
    got, want = {}, read_all(model, ids)
    with torch.no_grad(), model.trace(ids):
        for key in wanted:
            got[key] = read(model, key).clone()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_against_the_order_it_raises(build, ids):
    model = build()
    for layer in (1, 3):
        names = model.order(layer)
        for first, second in itertools.pairwise(names):
            if model.rank(first, layer) == model.rank(second, layer):
                continue  # read at one place, in either order
            with pytest.raises(OutOfOrder), torch.no_grad(), model.trace(ids):
                read(model, (layer, second))
                read(model, (layer, first))


def test_the_order_of_the_vocabulary(build):
    model = build("irregular", "eager", "batched_mm")
    assert model.order() == [
        "input_ids", "attention_mask", "input_size", "token_embeddings",
        "final_norm_output", "lm_head_output", "logits", "next_token_probs",
    ]  # fmt: skip
    attention = "queries keys values scores probabilities head_outputs premix output"
    start = ["layer_input", "attention_norm_output", *(f"self_attn.attention_{name}" for name in attention.split())]
    middle = ["layer_mid", "mlp_norm_output", "mlp_input"]
    assert model.order(0) == [
        *start,
        *middle,
        "mlp.mlp_activation",
        "mlp.mlp_neurons",
        "mlp.mlp_output",
        "layer_output",
    ]
    assert model.order(2) == [
        *start, *middle, "mlp.router_logits", "mlp.shared_experts.mlp_activation", "mlp.shared_experts.mlp_neurons",
        "mlp.shared_expert_output", "mlp.expert_weights", "mlp.expert_indices", "mlp.expert_outputs",
        "mlp.routed_output", "mlp.mlp_output", "layer_output",
    ]  # fmt: skip


def test_rank_says_what_is_wrong(build):
    model = build("irregular", "sdpa")
    assert model.rank("layer_output", -1) == model.rank("layer_output", 4)
    assert model.rank("token_embeddings") < model.rank("layer_input", 0) < model.rank("layer_mid", 0)
    assert model.rank("layer_output", 4) < model.rank("final_norm_output") < model.rank("logits")
    with pytest.raises(KeyError, match="'layer_mdi' is not a value of a block; near names: layer_mid"):
        model.rank("layer_mdi", 0)
    with pytest.raises(KeyError, match="is not a value of the root; near names: logits"):
        model.rank("logit")
    with pytest.raises(Unavailable, match=r"layers\[2\].self_attn.attention_scores is unavailable, so it has no rank"):
        model.rank("self_attn.attention_scores", 2)
    with pytest.raises(IndexError):
        model.rank("layer_mid", 5)
