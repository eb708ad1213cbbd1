"""Gradients at every float value, against autograd on the reference; edits of gradients land."""

from __future__ import annotations

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, keys, read

from nnterp_afmoe.reference import forward


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """A loss that no value is symmetric in."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    return (logits * weights).sum()


def wanted(model, keep: str = ""):
    """Every float value between the tokens and the logits."""
    integers = ("input_ids", "attention_mask", "next_token_probs")
    return [key for key in keys(model) if key not in integers and "indices" not in str(key)]


def reference_gradients(model, ids):
    """Each value's gradient, by adding a leaf of zeros to it."""
    leaves: dict = {}

    def at(key):
        def edit(value):
            leaves[key] = torch.zeros_like(value, requires_grad=True)
            return value + leaves[key]

        return edit

    result = forward(model._module, model.config, ids, edits={key: at(key) for key in wanted(model)})
    loss_of(result["logits"]).backward()
    return {key: leaf.grad for key, leaf in leaves.items()}


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_gradient_is_the_references(build, ids, attention, experts):
    model = build("irregular", attention, experts)
    want = reference_gradients(model, ids)
    got: dict = {}
    order = wanted(model)
    with model.trace(ids):
        values = {key: read(model, key) for key in order}
        loss = loss_of(model.logits)
        with loss.backward():
            for key in reversed(order):
                if key != "logits":
                    got[key] = values[key].grad.clone()
    for key in order:
        # The model gives one tensor two names: its gradient is the sum of what reaches either.
        same = {"mlp_norm_output": "mlp_input"}.get(key[1]) if not isinstance(key, str) else None
        if key == "logits" or same:
            continue
        assert apart(got[key], want[key]) < 1e-4, key


@pytest.mark.parametrize("experts", EXPERTS)
def test_an_edited_gradient_lands(build, ids, experts):
    model = build("irregular", "eager", experts)
    for key in [
        (3, "mlp.expert_weights"),
        (2, "mlp.expert_outputs"),
        (1, "self_attn.attention_premix"),
        (3, "layer_mid"),
    ]:
        grads = {}
        for factor in (1.0, 0.0):
            with model.trace(ids):
                early = model.layers[0].layer_input
                value = read(model, key)
                loss = loss_of(model.logits)
                with loss.backward():
                    value.grad = value.grad * factor
                    grads[factor] = early.grad.clone()
        assert apart(grads[0.0], grads[1.0]) > 1e-4, key


def test_the_expert_weights_carry_gradient_to_the_router(build, ids):
    model = build()
    with model.trace(ids):
        logits = model.layers[3].mlp.router_logits
        weights = model.layers[3].mlp.expert_weights
        loss = model.layers[3].mlp.expert_outputs.square().sum()
        with loss.backward():
            through_weights = weights.grad.save()
            to_router = logits.grad.save()
    assert (through_weights != 0).all()
    chosen = (to_router != 0).sum(-1)
    assert (chosen == model.top_k).all()


def test_the_integer_values_say_why_they_have_none(build, ids):
    model = build()
    assert "has no gradient" in model.support().notes["mlp.expert_indices"]
    assert "expert_weights" in model.support().notes["mlp.expert_indices"]
    assert "has no gradient" in type(model.layers[3].mlp).expert_indices.__doc__
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        with model.trace(ids):
            indices = model.layers[3].mlp.expert_indices
            loss = model.logits.sum()
            with loss.backward():
                indices.grad.save()


def test_gradients_under_several_invokes(build):
    model = build()
    prompts = ("To be", "or not to be")
    singles = []
    for prompt in prompts:
        with model.trace(prompt):
            mid = model.layers[2].layer_mid
            weights = model.layers[3].mlp.expert_weights
            loss = model.logits[:, -1].square().sum()
            with loss.backward():
                b = weights.grad.save()
                a = mid.grad.save()
        singles.append((a, b))
    found: list = []
    with model.trace() as tracer:
        with tracer.invoke(prompts[0]):
            mid = model.layers[2].layer_mid
            weights = model.layers[3].mlp.expert_weights
            loss = model.logits[:, -1].square().sum()
            with loss.backward(retain_graph=True):
                b = weights.grad.clone()
                a = mid.grad.clone()
                found.append((a, b))
        with tracer.invoke(prompts[1]):
            mid = model.layers[2].layer_mid
            weights = model.layers[3].mlp.expert_weights
            loss = model.logits[:, -1].square().sum()
            with loss.backward():
                b = weights.grad.clone()
                a = mid.grad.clone()
                found.append((a, b))
    for prompt, one, both in zip(prompts, singles, found, strict=True):
        for want, got in zip(one, both, strict=True):
            assert apart(got[:, -len(prompt) :], want) < 1e-4


def test_gradient_of_a_parameter_is_the_bare_models(build, ids):
    model = build()
    model._module.zero_grad()
    loss_of(model._module(ids).logits).backward()
    want = {name: p.grad.clone() for name, p in model._module.named_parameters() if p.grad is not None}
    model._module.zero_grad()
    with model.trace(ids):
        for key in wanted(model):
            read(model, key)
        loss_of(model.logits).backward()
    got = {name: p.grad.clone() for name, p in model._module.named_parameters() if p.grad is not None}
    model._module.zero_grad()
    assert set(got) == set(want)
    for name, grad in want.items():
        assert apart(got[name], grad) < 1e-5, name
