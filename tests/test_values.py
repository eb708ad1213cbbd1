"""Every value, read and written, against a recomputation from the weights."""

from __future__ import annotations

import nnsight
import pytest
import torch
from conftest import ATTENTION, CONFIGS, EXPERTS, half
from helpers import apart, assign, keys, read, read_all

from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny_module

DERIVED = ("next_token_probs", "input_size")


def edit(value: torch.Tensor, experts: int = 7) -> torch.Tensor:
    """Another value of the same sort: scaled and shifted floats, other ids, other experts."""
    if value.dtype.is_floating_point:
        return value * 0.5 + 0.25 * torch.linspace(-1, 1, value.shape[1])[(...,) + (None,) * (value.dim() - 2)]
    return (value + 1) % experts


def edit_mask(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[0, :3] = 0
    return value


def edit_of(key):
    return edit_mask if key == "attention_mask" else edit


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_equals_the_recomputation(build, ids, name, attention, experts):
    model = build(name, attention, experts)
    values = read_all(model, ids)
    want = forward(model._module, model.config, ids)
    assert torch.allclose(values.pop("next_token_probs"), want["logits"][:, -1].softmax(-1), atol=1e-6)
    missing = {key for key, _ in want.items()} - set(values)
    if attention == "eager":
        assert not missing
    else:
        assert {key[1] for key in missing} == {"self_attn.attention_scores", "self_attn.attention_probabilities"}
    for key, value in values.items():
        assert apart(value, want[key]) < 1e-5, key


@pytest.mark.parametrize("way", ["assigned", "in place"])
@pytest.mark.parametrize(
    ("attention", "experts"), [("eager", "eager"), ("eager", "grouped_mm"), ("sdpa", "batched_mm")]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_write_gives_the_logits_of_the_same_edit(build, ids, name, attention, experts, way):
    model = build(name, attention, experts)
    plain = forward(model._module, model.config, ids)["logits"]
    with torch.no_grad():
        for key in keys(model):
            if key in DERIVED:
                continue
            change = edit_of(key)
            with model.trace(ids):
                value = read(model, key)
                if way == "assigned":
                    assign(model, key, change(value.clone()))
                else:
                    value[:] = change(value.clone())
                got = model.logits.save()
            want = forward(model._module, model.config, ids, edits={key: change})["logits"]
            real = edit_mask(torch.ones_like(ids)).bool() if key == "attention_mask" else torch.ones_like(ids).bool()
            assert apart(got[real], want[real]) < 1e-5, key
            assert apart(got[real], plain[real]) > 1e-4, f"{key}: the edit did nothing"


def test_in_place_operators_reach_the_model(build, ids):
    model = build()

    def scale(value):
        value = value.clone()
        value[:, 3] *= 2
        return value

    with torch.no_grad():
        for key in [
            (0, "layer_mid"),
            (1, "self_attn.attention_keys"),
            (3, "mlp.expert_weights"),
            (2, "mlp.mlp_output"),
        ]:
            with model.trace(ids):
                read(model, key)[:, 1 if "keys" in key[1] else 3] *= 2
                one = model.logits.save()
            with model.trace(ids):
                assign(model, key, read(model, key) * 3)
                assigned = model.logits.save()
            host = model.layers[key[0]]
            path, _, name = key[1].rpartition(".")
            host = host.get(path) if path else host
            with model.trace(ids):
                value = getattr(host, name)
                value *= 3
                again = model.logits.save()

            def partly(value, at=1 if "keys" in key[1] else 3):
                value = value.clone()
                value[:, at] *= 2
                return value

            assert apart(one, forward(model._module, model.config, ids, edits={key: partly})["logits"]) < 1e-5
            tripled = forward(model._module, model.config, ids, edits={key: lambda value: value * 3})["logits"]
            assert apart(assigned, tripled) < 1e-5
            assert apart(again, tripled) < 1e-5


def test_augmented_assignment_on_the_host(build, ids):
    model = build()
    with torch.no_grad():
        with model.trace(ids):
            model.layers[2].layer_mid += 1.5
            model.layers[3].mlp.expert_weights *= 2
            got = model.logits.save()
    want = forward(
        model._module,
        model.config,
        ids,
        edits={(2, "layer_mid"): lambda value: value + 1.5, (3, "mlp.expert_weights"): lambda value: value * 2},
    )
    assert apart(got, want["logits"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_with_nothing_written_the_logits_are_the_bare_models_bit_for_bit(build, ids, attention, experts, dtype):
    from nnterp_afmoe import StandardizedTransformer

    both = {"attn_implementation": attention, "experts_implementation": experts}
    bare, wrapped = half(tiny_module(**both), dtype), StandardizedTransformer(half(tiny_module(**both), dtype))
    with torch.no_grad():
        want = bare(ids).logits
        assert torch.equal(wrapped._module(ids).logits, want)
        with wrapped.trace(ids):
            got = wrapped.logits.save()
        assert torch.equal(got, want)
        # Reading everything, recomputed and reshaped values included, changes nothing either.
        wanted = keys(wrapped)
        with wrapped.trace(ids):
            for key in wanted:
                read(wrapped, key)
            got = wrapped.logits.save()
        assert torch.equal(got, want)


def test_an_unedited_recomputed_value_leaves_the_models_own_tensor(build, ids):
    model = build("irregular", "eager", "eager")
    with torch.no_grad():
        with model.trace(ids):
            plain = model.layers[3].mlp.experts.output.clone().save()
        with model.trace(ids):
            model.layers[3].mlp.expert_outputs
            read_and_left = model.layers[3].mlp.experts.output.clone().save()
        with model.trace(ids):
            model.layers[3].mlp.expert_outputs[1, 4] = 0
            edited = model.layers[3].mlp.routed_output.clone().save()
    assert torch.equal(plain, read_and_left)
    assert (edited[1, 4] == 0).all()
    others = torch.ones(2, 13, dtype=torch.bool)
    others[1, 4] = False
    assert torch.equal(edited[others], plain.view(2, 13, -1)[others])


@pytest.mark.parametrize("experts", EXPERTS)
def test_an_expert_nobody_chose_is_an_ordinary_case(build, experts):
    model = build("irregular", "eager", experts)
    ids = torch.tensor([[5]])
    values = read_all(model, ids)
    want = forward(model._module, model.config, ids)
    for layer in (2, 3, 4):
        assert apart(values[layer, "mlp.expert_outputs"], want[layer, "mlp.expert_outputs"]) < 1e-5


def test_flex_attention_by_the_same_route(build, ids):
    model = build("irregular", "flex_attention")
    values = read_all(model, ids)
    want = forward(model._module, model.config, ids)
    for name in ("queries", "keys", "values", "head_outputs", "premix", "output"):
        for layer in range(5):
            key = (layer, f"self_attn.attention_{name}")
            assert apart(values[key], want[key]) < 1e-5, key


def test_a_bare_string_prompt(build):
    model = build()
    prompt = "The router chose"
    with torch.no_grad(), model.trace(prompt):
        ids, size = model.input_ids.save(), nnsight.save(model.input_size)
        logits, probs = model.logits.save(), model.next_token_probs.save()
    assert ids.tolist() == [model.tokenizer(prompt)["input_ids"]]
    assert size == (1, len(prompt))
    assert torch.allclose(probs, logits[:, -1].softmax(-1))
