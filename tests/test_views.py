"""Views of values: several held at once, at one place and at several, by several blocks of code."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, read_all

from nnterp_afmoe import NoSuchName, OutOfOrder, ReadOnly, Unavailable, WriteError
from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny

FIRST, SECOND = "The Eiffel Tower", "Rome is in it, yes"


def both(model, intervene):
    """The first prompt's logits under an intervention, alone and beside another prompt."""
    with model.trace(FIRST):
        intervene()
        alone = model.logits.save()
    with model.trace() as tracer:
        with tracer.invoke(FIRST):
            intervene()
            beside = model.logits.save()
        with tracer.invoke(SECOND):
            model.layers[0].layer_output
    with model.trace(FIRST):
        plain = model.logits.save()
    assert apart(alone, plain) > 1e-3
    return alone, beside[:, -len(FIRST) :]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("experts", EXPERTS)
def test_an_edit_after_another_value_was_asked_for(build, experts, grad):
    model = build("irregular", "eager", experts)
    mlp, attention = model.layers[2].mlp, model.layers[2].self_attn

    def mask_on_the_line():
        mlp.expert_weights[mlp.expert_indices == 3] = 0

    def three_at_one_place():
        q, k, v = attention.attention_queries, attention.attention_keys, attention.attention_values
        q[:] *= 0.5
        k[:] *= -1
        v[:] *= 2

    def assigned_between():
        q = attention.attention_queries
        attention.attention_keys = attention.attention_keys * -1
        q[:] *= 0.5

    with torch.set_grad_enabled(grad):
        for intervene in (mask_on_the_line, three_at_one_place, assigned_between):
            alone, beside = both(model, intervene)
            assert apart(beside, alone) < 1e-5, intervene.__name__


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_an_edit_of_a_value_that_is_still_in_use(build, experts):
    model = build("irregular", "eager", experts)
    mlp = model.layers[2].mlp

    def later():
        shared = mlp.shared_expert_output
        mlp.routed_output
        shared[:] = 0

    alone, beside = both(model, later)
    assert apart(beside, alone) < 1e-5
    ids = torch.tensor([model.tokenizer(FIRST)["input_ids"]])
    want = forward(model._module, model.config, ids, edits={(2, "mlp.shared_expert_output"): lambda v: v * 0})
    assert apart(alone, want["logits"]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_two_writers_of_the_slots(build, ids, experts):
    model = build("irregular", "eager", experts)

    def first_two(value):
        value = value.clone()
        value[:, :, :2] = 0
        return value

    want = forward(model._module, model.config, ids, edits={(2, "mlp.expert_outputs"): first_two})["logits"]
    with model.edit() as (_, edited):
        edited.layers[2].mlp.expert_outputs[:, :, :1] = 0
    with edited.trace(ids):
        slots = edited.layers[2].mlp.expert_outputs
        seen = slots[:, :, 0].abs().max().save()
        slots[:, :, 1:2] = 0
        got = edited.logits.save()
    assert seen == 0
    assert apart(got, want) < 1e-5
    with model.trace() as tracer:
        with tracer.invoke(ids[:1]):
            model.layers[2].mlp.expert_outputs[:, :, :1] = 0
        with tracer.invoke(ids[1:]):
            model.layers[2].mlp.expert_outputs[:, :, :1] = 0
        with tracer.invoke():
            model.layers[2].mlp.expert_outputs[:, :, 1:2] = 0
            got = model.logits.save()
    assert apart(got, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_what_was_assigned_is_read_back(build, ids, experts):
    model = build("irregular", "eager", experts)
    mlp = model.layers[2].mlp
    with model.trace(ids):
        mlp.expert_outputs = mlp.expert_outputs * 0 + 2
        back = mlp.expert_outputs.clone().save()
        routed = mlp.routed_output.clone().save()
    assert (back == 2).all()
    assert (routed == 6).all()
    with model.trace(ids):
        mlp.expert_weights = torch.ones(2, 13, 3)
        back = mlp.expert_weights.clone().save()
    assert (back == 1).all()


@torch.no_grad()
def test_the_arguments_after_the_slots(build, ids):
    """Under eager the slots follow from the arguments, which are still at hand; grouped, they have gone by."""
    model = build("irregular", "eager", "eager")
    want = read_all(model, ids)
    with model.trace(ids):
        slots = model.layers[2].mlp.expert_outputs.save()
        weights = model.layers[2].mlp.expert_weights.save()
    assert torch.equal(weights, want[2, "mlp.expert_weights"])
    assert torch.equal(slots, want[2, "mlp.expert_outputs"])
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(OutOfOrder, match="expert_weights was asked for after layers"), model.trace(ids):
        model.layers[2].mlp.expert_outputs
        model.layers[2].mlp.expert_weights


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_gradients_of_one_prompt_of_two(build, attention, experts):
    model = build("irregular", attention, experts)
    keys = [
        (layer, name)
        for layer in (1, 2)
        for name in model.order(layer)
        if "indices" not in name and name not in ("mlp_norm_output", "layer_input")
    ]

    def hosts(key):
        path, _, name = key[1].rpartition(".")
        block = model.layers[key[0]]
        return (block.get(path) if path else block), name

    def gradients(together):
        found = {}
        if not together:
            with model.trace(FIRST):
                values = {key: getattr(*hosts(key)) for key in keys}
                loss = model.logits[:, -1].logsumexp(-1).sum()
                with loss.backward():
                    for key in reversed(keys):
                        found[key] = values[key].grad.clone()
            return found
        with model.trace() as tracer:
            with tracer.invoke(FIRST):
                values = {key: getattr(*hosts(key)) for key in keys}
                loss = model.logits[:, -1].logsumexp(-1).sum()
                with loss.backward():
                    for key in reversed(keys):
                        found[key] = values[key].grad.clone()
            with tracer.invoke(SECOND):
                model.layers[0].layer_output
        return found

    alone, beside = gradients(False), gradients(True)
    length = len(FIRST)
    for key in keys:
        got, name = beside[key], key[1].rpartition(".")[2]
        if name in ("attention_queries", "attention_keys", "attention_values"):
            got = got[:, :, -length:]
        elif name in ("attention_scores", "attention_probabilities"):
            got = got[:, :, -length:, -length:]
        else:
            got = got[:, -length:]
        assert apart(got, alone[key]) < 1e-4, key


@torch.no_grad()
def test_out_of_order_after_a_barrier(build):
    model = build()
    with pytest.raises(OutOfOrder, match=r"layers\[1\].layer_output was asked for"):
        with model.generate(max_new_tokens=4, min_new_tokens=4, do_sample=False) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(FIRST):
                for _ in tracer.iter[1:4]:
                    model.layers[3].layer_output.clone()
                    barrier()
                    model.layers[1].layer_output.clone()
            with tracer.invoke(SECOND):
                for _ in tracer.iter[1:4]:
                    model.layers[3].layer_output.clone()
                    barrier()
    later = []
    with model.generate(max_new_tokens=3, min_new_tokens=3, do_sample=False) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(FIRST):
            for _ in tracer.iter[:3]:
                model.layers[1].layer_output.clone()
                barrier()
                later.append(model.layers[3].layer_output.shape)
        with tracer.invoke(SECOND):
            for _ in tracer.iter[:3]:
                model.layers[1].layer_output.clone()
                barrier()
    assert len(later) == 3


@torch.no_grad()
def test_next_token_probs_where_not_every_logit_is_kept(build):
    model = build()
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    mask = (ids != 0).long()
    with model.trace(ids, attention_mask=mask):
        want = model.next_token_probs.save()
    with model.trace(ids, attention_mask=mask, logits_to_keep=4):
        got = model.next_token_probs.save()
    assert apart(got, want) < 1e-5
    with pytest.raises(Unavailable, match="the last real token's logits were not kept"):
        with model.trace(ids, attention_mask=mask, logits_to_keep=1):
            model.next_token_probs.save()
    with pytest.raises(Unavailable, match="logits_to_keep chose positions of its own"):
        with model.trace(ids, attention_mask=mask, logits_to_keep=torch.tensor([4, 3, 2, 1, 0])):
            model.next_token_probs.save()


@torch.no_grad()
def test_an_in_place_edit_of_a_derived_value(build, ids):
    model = build()
    with pytest.raises(ReadOnly, match="next_token_probs was edited in place, which reaches nothing"):
        with model.trace(ids):
            model.next_token_probs[:, 5] = 1
    with model.trace(ids):
        probs = model.next_token_probs.save()
    probs[:] = 0  # After the run it is the reader's own.


@torch.no_grad()
def test_an_assignment_in_the_wrong_place(build, ids):
    model = build()
    stream = torch.zeros(2, 13, 40)
    for assign, words in [
        (
            lambda: setattr(model.layers, "layer_output", stream),
            r"model.model.layers \(ModuleList\) has nothing to assign at",
        ),
        (
            lambda: setattr(model.norm, "final_norm_output", stream),
            r"model.model.norm \(AfmoeRMSNorm\) has nothing to assign",
        ),
        (lambda: setattr(model.model, "logits", stream), r"model.model \(AfmoeModel\) has nothing to assign at"),
        (
            lambda: setattr(model.layers[2].mlp.experts, "expert_outputs", stream),
            "has nothing to assign at 'expert_outputs'",
        ),
        (lambda: setattr(model.layers[2], "mlp", stream), "mlp is a module"),
        (lambda: setattr(model.layers[2], "skip", stream), "skip is not a value"),
        (lambda: setattr(model, "lm_head", stream), "lm_head is a module"),
    ]:
        with pytest.raises(NoSuchName, match=words), model.trace(ids):
            assign()
    with pytest.raises(Unavailable, match="a dense block has no router"), model.trace(ids):
        model.layers[0].mlp.router_logits = stream
    assert model.layers[2].mlp.path == "model.model.layers.2.mlp"


@torch.no_grad()
def test_numbers_that_name_no_expert_or_token(build, ids):
    model = build()
    with pytest.raises(WriteError, match=r"each from 0 to 6 \(num_experts\); what was written has 0 to 7"):
        with model.trace(ids):
            wrong = model.layers[3].mlp.expert_indices * 0
            wrong[0, 0, 0] = 7
            model.layers[3].mlp.expert_indices = wrong
    with pytest.raises(WriteError, match=r"each from 0 to 260 \(vocab_size\)"), model.trace(ids):
        model.input_ids = ids + 1000
    eager = tiny(experts_implementation="eager")
    with eager.trace(ids):
        arguments, _ = eager.layers[3].mlp.experts.inputs
        arguments[1][0, 0] = 7  # transformers' own mark of a slot that is left out
        left_out = eager.layers[3].mlp.expert_outputs[0, 0, 0].save()
    assert (left_out == 0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("wrong", [-1, 7, 99])
def test_in_place_numbers_that_name_no_expert_or_token(build, ids, wrong, mode):
    """Some experts kernels take them and answer with garbage."""
    model = build()
    with mode():
        with pytest.raises(WriteError, match=rf"layers\[3\].*each from 0 to 6 \(num_experts\); .* has .*{wrong}"):
            with model.trace(ids):
                model.layers[3].mlp.expert_indices[:, -1] = wrong
                model.logits.save()
        with pytest.raises(WriteError, match=r"each from 0 to 6"), model.trace() as tracer:
            with tracer.invoke(ids[:1]):
                model.layers[3].mlp.expert_indices[:] = wrong
            with tracer.invoke(ids[1:]):
                model.logits.save()
        with pytest.raises(WriteError, match=r"input_ids is .*each from 0 to 260"), model.trace(ids):
            model.input_ids[:] = wrong * 1000
            model.logits.save()
        with model.trace(ids):
            model.layers[3].mlp.expert_indices[:] = torch.tensor([6, 0, 3])
            weights = model.layers[3].mlp.expert_weights.save()
            edited = model.layers[3].mlp.routed_output.save()
        assert weights.shape == (2, 13, 3)
        assert edited.isfinite().all()


@torch.no_grad()
def test_a_deep_copy_runs_on_its_own(ids):
    model = tiny(attn_implementation="eager")
    before = read_all(model, ids)
    twin = copy.deepcopy(model)
    twin._module.lm_head.weight.zero_()
    twin.set_attn_implementation("sdpa")
    assert twin.support()["self_attn.attention_scores"] is not None
    assert model.support()["self_attn.attention_scores"] is None
    with twin.trace(ids):
        weights = twin.layers[3].mlp.expert_weights.save()
        zero = twin.logits.save()
    assert apart(weights, before[3, "mlp.expert_weights"]) < 1e-5
    assert (zero == 0).all()
    after = read_all(model, ids)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_checks_of_odd_models_and_odd_use(build):
    for fields in (
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"route_scale": 0.0},
        {"sliding_window": 1},
        {"num_hidden_layers": 1, "num_dense_layers": 0},
    ):
        report = tiny(**fields).check(progress=False)
        assert report.ok, (fields, report)
    model = tiny()
    assert model.check(torch.tensor([[5]]), layers=3, progress=False).ok
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        model.check("")
    with pytest.raises(ValueError, match="integers from 0 to 260"):
        model.check(torch.tensor([[5, 600]]))
    model._module.train()
    with pytest.raises(ValueError, match=r"in training mode.*model.eval\(\)"):
        model.check()
    with pytest.raises(NotImplementedError, match="hidden_act='gelu'"):
        tiny(hidden_act="gelu").check()


def test_odd_layers(build, ids):
    model = build()
    assert model.support(layer=torch.tensor(3)) == model.support(layer=3)
    for call in (lambda: model.support(99), lambda: model.order(99), lambda: model.rank("layer_mid", -6)):
        with pytest.raises(IndexError, match="the model has 5 layers, 0 to 4"):
            call()
    with pytest.raises(TypeError, match="layers='2': give a layer's index or several, not text"):
        model.collect(ids, "layer_output", layers="2")  # pyright: ignore
    with pytest.raises(ValueError, match="experts_implementation='bogus' is not known here"):
        model.support(layer=0, experts_implementation="bogus")
    with pytest.raises(ValueError, match="this one is empty"):
        model.collect([], "layer_output")
    assert list(model.collect(ids, "layer_output", layers=slice(1, 3))["layer_output"]) == [1, 2]  # pyright: ignore
    assert "on no layer" in repr(model.collect(ids, "layer_output", layers=[]))
    assert "input_size: torch.Size([2, 13])" in repr(model.collect(ids, "input_size"))
    with pytest.raises(RuntimeError, match="call it outside the trace"), model.trace(ids):
        model.collect(ids, "layer_output")
