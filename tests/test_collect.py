"""`collect`, and nnterp's interventions."""

from __future__ import annotations

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, read_all

from nnterp_afmoe import Unavailable
from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny, tiny_module


@pytest.mark.parametrize("experts", EXPERTS)
def test_any_values_in_any_order(build, ids, experts):
    model = build("irregular", "eager", experts)
    names = [
        "logits",
        "layer_output",
        "mlp.expert_outputs",
        "self_attn.attention_scores",
        "token_embeddings",
        "mlp.mlp_neurons",
    ]
    found = model.collect(ids, names)
    want = read_all(model, ids)
    assert list(found) == names
    assert set(found["layer_output"]) == {0, 1, 2, 3, 4}
    assert set(found["mlp.expert_outputs"]) == {2, 3, 4}
    assert set(found["mlp.mlp_neurons"]) == {0, 1}
    for name in names:
        pairs = found[name].items() if isinstance(found[name], dict) else [(None, found[name])]
        for layer, value in pairs:
            assert torch.equal(value, want[name if layer is None else (layer, name)]), (name, layer)
            assert not value.requires_grad


def test_what_comes_with_it(build):
    model = build()
    found = model.collect(["A prompt", "another one"], "mlp.expert_weights", layers=[-1, 2])
    assert list(found["mlp.expert_weights"]) == [2, 4]
    assert found.dims["mlp.expert_weights"] == ("batch", "seq", "top_k")
    assert found.mask.sum(1).tolist() == [8, 11]
    assert found.tokens[0][3:] == model.tokenizer.tokenize("A prompt")
    assert found.input_ids.shape == (2, 11)
    assert "mlp.expert_weights: [batch=2 seq=11 top_k=3] on layers 2, 4" in repr(found)
    with pytest.raises(KeyError, match="was not collected"):
        found["layer_output"]


def test_the_forward_is_stopped_after_the_last_value_wanted(build, ids):
    model = build()
    ran = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(model._module.model.layers)
    ]
    model.collect(ids, ["layer_mid"], layers=[0, 2])
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1]


def test_embeddings_have_no_ids(build):
    model = build()
    found = model.collect({"inputs_embeds": torch.randn(1, 4, 40)}, "layer_output", layers=0)
    assert found.input_ids is None
    assert found.tokens is None
    assert found["layer_output"][0].shape == (1, 4, 40)


def test_what_collect_refuses(build, ids):
    model = build("irregular", "sdpa")
    with pytest.raises(
        KeyError, match="'layer_outptu' is not a value of the model or its blocks; near names: layer_output"
    ):
        model.collect(ids, "layer_outptu")
    with pytest.raises(
        Unavailable, match=r"layers\[1\].mlp.expert_weights is unavailable.*a dense block has no router"
    ):
        model.collect(ids, "mlp.expert_weights", layers=[1, 2])
    with pytest.raises(Unavailable, match=r"self_attn.attention_scores is unavailable on every layer: sdpa"):
        model.collect(ids, "self_attn.attention_scores")
    with pytest.raises(IndexError, match=r"layers=\[7\]: the model has 5 layers"):
        model.collect(ids, "layer_output", layers=[7])


@torch.no_grad()
def test_skip_layers(build, ids):
    model = build()
    with model.trace(ids):
        model.skip_layers(1, 3)
        got = model.logits.save()
    entering = forward(model._module, model.config, ids)[1, "layer_input"]
    want = forward(model._module, model.config, ids, edits={(3, "layer_output"): lambda _: entering})["logits"]
    assert apart(got, want) < 1e-5
    with model.trace(ids):
        model.skip_layer(-1, torch.ones(2, 13, 40))
        got = model.logits.save()
    want = forward(model._module, model.config, ids, edits={(4, "layer_output"): lambda v: torch.ones_like(v)})[
        "logits"
    ]
    assert apart(got, want) < 1e-5


def test_skip_layers_refuses(build, ids):
    model = build()
    for call, error, words in [
        (lambda: model.skip_layers(3, 1), ValueError, "no layers from 3 to 1"),
        (lambda: model.skip_layers(0, 5), IndexError, "the model has 5 layers, 0 to 4"),
        (lambda: model.skip_layers(0, 1, layer_returns_tuple=True), ValueError, "return a tensor"),
    ]:
        with pytest.raises(error, match=words), model.trace(ids):
            call()


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({}, (slice(None), slice(None))),
        ({"token_positions": -1}, (slice(None), -1)),
        ({"positions": [0, 3]}, (slice(None), [0, 3])),
        ({"batch_index": 1}, (1,)),
        ({"batch_index": [0, 1], "token_positions": [2, 5]}, ([0, 1], [2, 5])),
        ({"token_positions": torch.tensor([1, 2])}, (slice(None), torch.tensor([1, 2]))),
    ],
)
def test_steer(build, ids, options, index):
    model = build()
    vector = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def steered(value):
        value = value.clone()
        value[index] += 2.5 * vector.float()
        return value

    with model.trace(ids):
        model.steer([3, 1], vector, factor=2.5, **options)
        got = model.logits.save()
    edits = {(layer, "layer_output"): steered for layer in (1, 3)}
    assert apart(got, forward(model._module, model.config, ids, edits=edits)["logits"]) < 1e-5


def test_steer_refuses(build, ids):
    model = build()
    with pytest.raises(
        ValueError, match=r"shape \[41\], which does not add to \[2, 13, 40\].*layers\[1\].layer_output"
    ):
        with model.trace(ids):
            model.steer(1, torch.zeros(41))
    with pytest.raises(ValueError, match="older name of token_positions"):
        with model.trace(ids):
            model.steer(1, torch.zeros(40), positions=1, token_positions=2)
    with pytest.raises(IndexError):
        with model.trace(ids):
            model.steer(9, torch.zeros(40))


@torch.no_grad()
def test_project_on_vocab(build, ids, tmp_path):
    model = build()
    values = read_all(model, ids)
    stream = values[4, "layer_output"]
    assert torch.equal(model.project_on_vocab(stream), values["logits"])
    with model.trace(ids):
        inside = model.project_on_vocab(model.layers[4].layer_output).save()
    assert torch.equal(inside, values["logits"])
    with pytest.raises(ValueError, match="the last axis is 41 long; hidden_size is 40"):
        model.project_on_vocab(torch.zeros(41))
    tiny(tmp_path)
    from nnterp_afmoe import StandardizedTransformer

    lazy = StandardizedTransformer(str(tmp_path))
    assert torch.equal(lazy.project_on_vocab(stream), values["logits"])


@torch.no_grad()
def test_get_topk_closest_tokens(build, ids):
    model = build()
    stream = read_all(model, ids)[4, "layer_output"][:, -1]
    rows = model.get_topk_closest_tokens(stream, k=3)
    probs = model.project_on_vocab(stream).softmax(-1)
    for row, prob in zip(rows, probs, strict=True):
        assert list(row.values()) == pytest.approx(prob.topk(3).values.tolist())
        assert list(row) == model.tokenizer.convert_ids_to_tokens(prob.topk(3).indices.tolist())
    assert model.get_topk_closest_tokens(stream[0], 3) == pytest.approx(rows[0])
    with pytest.raises(ValueError, match="has 3 axes"):
        model.get_topk_closest_tokens(stream[None])
    from nnterp_afmoe import StandardizedTransformer

    with pytest.raises(ValueError, match="no tokenizer"):
        StandardizedTransformer(tiny_module()).get_topk_closest_tokens(stream)


@torch.no_grad()
def test_an_edit_that_lies_after_the_last_value_wanted():
    model = tiny()
    with model.edit() as (_, edited):
        edited.layers[4].mlp.routed_output[:] = 0
        edited.logits[:] = 0
    plain, found = (
        each.collect("A prompt", ["layer_mid", "mlp.expert_weights"], layers=[2]) for each in (model, edited)
    )
    assert torch.equal(plain["layer_mid"][2], found["layer_mid"][2])
    assert not edited.collect("A prompt", "logits")["logits"].any()


@pytest.mark.parametrize("prompt", ["", torch.zeros(1, 0, dtype=torch.long)])
def test_a_prompt_without_tokens(prompt):
    with pytest.raises(ValueError, match="collect needs a prompt"):
        tiny().collect(prompt, "layer_output")


def test_a_layer_that_lacks_it_says_why():
    with pytest.raises(
        Unavailable, match=r"^layers\[0\].mlp.router_logits is unavailable: a dense block has no router"
    ):
        tiny().collect("A prompt", "mlp.router_logits", layers=[2, 0])
