"""Break things and watch the checks catch them, by value and block."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import ATTENTION, CONFIGS, EXPERTS, half

from nnterp_afmoe import StandardizedTransformer, families
from nnterp_afmoe.check import TOLERANCES, plan
from nnterp_afmoe.layouts import Residual
from nnterp_afmoe.places import parse
from nnterp_afmoe.testing import byte_tokenizer, tiny, tiny_module
from nnterp_afmoe.values import Value


def broken(report) -> set[tuple[str, int | None]]:
    return {(failure.value, failure.block) for failure in report.failures}


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_unbroken_model_has_no_failure(build, name, attention, experts):
    report = build(name, attention, experts).check(progress=False)
    assert report.ok, report
    assert not report.failures
    assert len(report.outcomes) > 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("norms", [False, True])
def test_half_precision_has_its_own_tolerance(attention, dtype, norms):
    module = half(tiny_module(attn_implementation=attention), dtype, norms)
    model = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    report = model.check(progress=False)
    assert report.ok, report
    assert report.tolerance == TOLERANCES[dtype] == 2 * torch.finfo(dtype).eps


def test_padding_and_batches(ids):
    assert tiny(attn_implementation="eager").check(ids, progress=False).ok


def test_some_layers(build):
    report = build().check(layers=[1, -1], progress=False)
    assert report.ok, report
    assert {check.block for check in report.outcomes} == {None, 1, 4}
    with pytest.raises(IndexError, match=r"layers=\[5\]: the model has 5 layers, 0 to 4"):
        build().check(layers=[5])


def test_the_plan_is_what_is_checked(build):
    model = build()
    assert list(plan(model)) == list(model.check(progress=False).outcomes)


def test_the_report(build):
    report = build().check(progress=False)
    assert "everything holds" in str(report)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"]
    assert plain["checks"] == len(report.outcomes)


# -- planted faults --------------------------------------------------------------------


@pytest.fixture
def module():
    return tiny_module(attn_implementation="eager")


def checked(module, **options):
    report = StandardizedTransformer(module, tokenizer=byte_tokenizer()).check(progress=False, **options)
    assert not report.ok
    assert "do not hold" in str(report)
    return report


def test_a_nan_in_one_expert(module):
    with torch.no_grad():
        module.model.layers[2].mlp.experts.down_proj[4, 3, 2] = torch.nan
    report = checked(module)
    assert ("mlp.experts.down_proj[4]", 2) in broken(report)
    assert ("mlp.expert_outputs", 2) in broken(report)
    assert not {block for value, block in broken(report) if block in (0, 1)}
    assert report.to_dict()["failures"][0]["by"] is None
    first = next(failure for failure in report.failures if failure.check == "equation" and failure.block == 2)
    assert (first.value, first.got) == ("mlp.expert_outputs", "NaN or infinity, first at layers[2].mlp.expert_outputs")


def test_a_norm_weight_changed_after_load(module):
    model = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    module.model.layers[1].post_mlp_layernorm.weight.data[3] *= 1.01
    report = model.check(progress=False)
    assert {("post_mlp_layernorm.weight", 1), ("parameters", 1)} == broken(report)
    assert "another: it was changed since" in str(report)
    assert model.check(progress=False, since_load=False).ok


def test_a_norm_whose_weight_is_not_applied(module):
    norm = module.model.layers[3].post_attention_layernorm
    norm.register_forward_hook(lambda norm, args, out: out / norm.weight)
    # The value is read where the module returns; what the block adds is another tensor.
    assert ("layer_mid", 3) in broken(checked(module))


def test_the_gate_forgotten(module):
    module.model.layers[1].self_attn.gate_proj.register_forward_hook(lambda *_: torch.full_like(_[2], 100.0))
    assert ("self_attn.attention_premix", 1) in broken(checked(module))


def test_the_rotary_on_a_full_block(module):
    module.model.layers[1].self_attn.is_local_attention = True
    assert {("self_attn.attention_queries", 1), ("self_attn.attention_keys", 1)} <= broken(checked(module))


def test_no_rotary_on_a_sliding_block(module):
    module.model.layers[2].self_attn.is_local_attention = False
    assert {("self_attn.attention_queries", 2), ("self_attn.attention_keys", 2)} <= broken(checked(module))


def test_the_bias_added_to_the_weights(module):
    router, mlp = module.model.layers[4].mlp.router, module.model.layers[4].mlp

    def forward(hidden, bias):
        logits, _, chosen = type(router).forward(router, hidden, bias)
        weights = (logits.sigmoid() + mlp.expert_bias).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * router.route_scale, chosen

    router.forward = forward
    assert broken(checked(module)) & {("mlp.expert_weights", 4)}


def test_the_route_scale_dropped(module):
    module.model.layers[3].mlp.router.route_scale = 1.0
    report = checked(module)
    assert ("mlp.expert_weights", 3) in broken(report)
    failure = next(f for f in report.failures if f.value == "mlp.expert_weights")
    assert float(failure.expected.split()[0]) == pytest.approx(2.826 * float(failure.got), rel=1e-4)


def test_keys_of_the_wrong_kv_head(module):
    module.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, args, out: out.roll(12, -1))
    assert broken(checked(module)) & {("self_attn.attention_keys", 0)}


def test_heads_grouped_wrongly(module, monkeypatch):
    from transformers.models.afmoe import modeling_afmoe

    monkeypatch.setattr(modeling_afmoe, "repeat_kv", lambda states, times: states.repeat(1, times, 1, 1))
    assert ("self_attn.attention_scores", 0) in broken(checked(module))


def test_the_window_forgotten(module, monkeypatch):
    from transformers.models.afmoe import modeling_afmoe

    monkeypatch.setattr(modeling_afmoe, "create_sliding_window_causal_mask", modeling_afmoe.create_causal_mask)
    found = broken(checked(module))
    assert {("self_attn.attention_scores", layer) for layer in (0, 2, 3)} <= found
    assert ("self_attn.attention_scores", 1) not in found


def test_the_mup_factor_missing(module):
    module.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] / 40**0.5, *args[1:]))
    assert ("layer_input", 0) in broken(checked(module))


def test_the_shared_expert_dropped(module):
    module.model.layers[2].mlp.shared_experts.register_forward_hook(lambda *_: torch.zeros_like(_[2]))
    assert ("mlp.mlp_output", 2) in broken(checked(module))


def test_an_infinity(module):
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[2, 2] = torch.inf
    report = checked(module)
    assert ("mlp.up_proj.weight", 1) in broken(report)
    assert ("mlp.mlp_neurons", 1) in broken(report)


def test_a_value_served_before_its_norm(module, monkeypatch):
    monkeypatch.setattr(families.Dense.mlp_output, "place", parse("mlp.output"))
    found = broken(checked(module))
    assert {("mlp.mlp_output", 0), ("mlp.mlp_output", 1)} <= found
    assert ("mlp.mlp_output", 2) not in found


def test_a_value_that_no_row_lists(module, monkeypatch):
    listed = {name: value for name, value in families.Attention.values().items() if name != "attention_premix"}
    monkeypatch.setattr(families.Attention, "values", classmethod(lambda cls: listed))
    found = broken(checked(module))
    assert {("self_attn.attention_premix", layer) for layer in range(5)} <= found


def test_a_row_that_no_equation_has(module, monkeypatch):
    extra = Value(Residual, "output", "made up")
    extra.__set_name__(families.Block, "layer_extra")
    monkeypatch.setattr(families.Block, "layer_extra", extra, raising=False)
    assert {("layer_extra", layer) for layer in range(5)} <= broken(checked(module))


def test_a_flat_mixture_tensor(module, monkeypatch):
    monkeypatch.setattr(families.Mixture.expert_weights, "_outward", None)
    monkeypatch.setattr(families.Mixture.expert_weights, "_inward", None)
    report = checked(module)
    failure = next(f for f in report.failures if f.value == "mlp.expert_weights")
    assert failure.block == 2
    assert failure.expected.startswith("shape [1, 51, 3]")
    assert failure.got == "shape [51, 3]"


def test_a_write_that_reaches_one_branch_only(module, monkeypatch):
    monkeypatch.setattr(families.Block.layer_mid, "place", parse("pre_mlp_layernorm.input[0]"))
    failures = [failure for failure in checked(module).failures if failure.value == "layer_mid"]
    # It reads what it should; only an assignment shows that the residual does not get it.
    assert {failure.check for failure in failures} == {"write"}


def test_a_write_that_goes_nowhere(module, monkeypatch):
    monkeypatch.setattr(families.Attention.attention_keys, "_put_back", lambda access, raw, view: raw)
    found = {(f.value, f.block) for f in checked(module).failures if f.check == "write"}
    assert any(value == "self_attn.attention_keys" for value, _ in found)


def test_a_place_that_the_model_never_comes_to(module, monkeypatch):
    # rotary_emb is a module of the model, not of a block: the name resolves and no block calls it.
    module.model.layers[3].idle = torch.nn.Identity()
    for layer in module.model.layers:
        layer.idle = torch.nn.Identity()
    monkeypatch.setattr(families.Block.layer_output, "place", parse("idle.output"))
    report = checked(module)
    assert any(failure.value == "layer_output" for failure in report.failures)


def test_a_name_that_has_moved_costs_its_own_value_only(module, monkeypatch):
    import transformers

    monkeypatch.setattr(families.Attention.attention_premix, "place", parse("self_attn.out_proj.input[0]"))
    with pytest.warns(UserWarning, match=r"self_attn.attention_premix: AfmoeAttention has no module 'out_proj'"):
        model = StandardizedTransformer(module, tokenizer=byte_tokenizer())
    missing = model.support()["self_attn.attention_premix"]
    assert set(missing) == set(range(5))
    assert f"AfmoeAttention has no module 'out_proj', in transformers {transformers.__version__}" in missing[0]
    others = {name: reason for name, reason in model.support().items() if name != "self_attn.attention_premix"}
    assert others["self_attn.attention_head_outputs"] is None
    assert model.check(progress=False).ok
