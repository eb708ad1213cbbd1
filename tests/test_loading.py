"""Names, folders and models in hand; undispatched and dispatched."""

from __future__ import annotations

import pytest
import torch
from helpers import apart

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import byte_tokenizer, randomize, tiny, tiny_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder)
    return folder


def logits(model, prompt="A prompt"):
    with torch.no_grad(), model.trace(prompt):
        found = model.logits.save()
    return found


def test_a_folder_is_loaded_when_it_first_runs(folder):
    model = StandardizedTransformer(folder)
    assert not model.dispatched
    assert next(model._module.parameters()).is_meta
    got = logits(model)
    assert model.dispatched
    ids = torch.tensor([model.tokenizer("A prompt")["input_ids"]])
    assert apart(got, forward(tiny_module(), model.config, ids)["logits"]) < 1e-5


def test_dispatch_keeps_the_implementations_switched_to(folder):
    model = StandardizedTransformer(str(folder), experts_implementation="batched_mm")
    model.set_attn_implementation("eager")
    with torch.no_grad(), model.trace("A prompt"):
        model.layers[1].self_attn.attention_scores.save()
    assert model.dispatched
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "batched_mm"
    model.set_attn_implementation("sdpa")
    assert model.support()["self_attn.attention_scores"] is not None


def test_what_from_pretrained_takes(folder):
    with pytest.warns(
        UserWarning, match=r"expert_bias.* are torch.bfloat16 after this load, and AFMoE keeps them in float32"
    ):
        model = StandardizedTransformer(
            str(folder),
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.bfloat16,
            dispatch=True,
        )
    assert model.dispatched
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "eager")
    assert model.embed_tokens._module.weight.dtype is torch.bfloat16
    overridden = StandardizedTransformer(str(folder), sliding_window=3, local_files_only=True, revision="main")
    assert overridden.config.sliding_window == 3


def test_a_model_in_hand(folder):
    module = tiny_module()
    model = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    assert model.dispatched
    assert model._module is module
    assert torch.equal(logits(model), logits(StandardizedTransformer(str(folder))))


def test_a_reloaded_model_in_hand_finds_its_tokenizer(folder):
    from transformers import AfmoeForCausalLM

    model = StandardizedTransformer(AfmoeForCausalLM.from_pretrained(folder))
    assert model.tokenizer is not None
    assert logits(model).shape == (1, 8, 261)


def test_wrapping_twice(folder):
    module = tiny_module()
    first = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    second = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    assert torch.equal(logits(first), logits(second))
    with torch.no_grad(), first.trace("A prompt"):
        a = first.layers[2].mlp.expert_weights.save()
    with torch.no_grad(), second.trace("A prompt"):
        b = second.layers[2].mlp.expert_weights.save()
    assert torch.equal(a, b)


def test_tiny_has_nothing_at_zero():
    model = tiny(num_hidden_layers=3, num_experts=5)
    assert (model.num_layers, model.num_experts) == (3, 5)
    for name, parameter in model._module.named_parameters():
        assert (parameter != 0).all(), name
        assert parameter.std() > 0, name
    assert model.layers[2].mlp._module.expert_bias.dtype is torch.float32


def test_tiny_leaves_the_random_state_and_follows_its_seed():
    state = torch.get_rng_state()
    one, two = tiny_module(seed=1), tiny_module(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert torch.equal(one.lm_head.weight, tiny_module(seed=1).lm_head.weight)


def test_randomize_returns_the_module():
    layer = torch.nn.Linear(3, 3)
    assert randomize(layer) is layer


def test_the_byte_tokenizer_knows_every_string():
    tokenizer = byte_tokenizer()
    for text in ("Paris, été", "naïve \n\t", "漢字"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
