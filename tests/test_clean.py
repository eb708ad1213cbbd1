"""Nothing is left behind: not by a trace that raised, not by an import, not by two hundred traces."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import read_all

from nnterp_afmoe import NnterpError, StandardizedTransformer
from nnterp_afmoe.testing import byte_tokenizer, tiny, tiny_module


def raising(model, ids, where):
    """A trace that raises at one of several places."""
    if where == "before the model":
        with model.trace(ids):
            model.layers[0].mlp.router_logits
    elif where == "at a read":
        with model.trace(ids):
            model.layers[3].mlp.expert_weights
            raise ZeroDivisionError
    elif where == "inside a call":
        with model.trace(ids):
            model.layers[3].self_attn.attention_scores
            raise ZeroDivisionError
    elif where == "with a view out":
        with model.trace(ids):
            model.layers[3].mlp.expert_outputs[:] = 0
            raise ZeroDivisionError
    elif where == "at a write":
        with model.trace(ids):
            model.layers[2].layer_mid = torch.zeros(1)
    elif where == "out of order":
        with model.trace(ids):
            model.layers[2].layer_mid
            model.layers[1].layer_mid
    elif where == "in the model":
        with model.trace(ids + 1000):
            model.layers[2].layer_mid
    elif where == "in a generation":
        with model.generate(ids, max_new_tokens=3) as tracer:
            for step in tracer.iter[:3]:
                model.layers[3].mlp.expert_weights
                if step == 1:
                    raise ZeroDivisionError
    elif where == "at an invoke":
        with model.trace() as tracer:
            with tracer.invoke(ids[:1]):
                model.layers[3].mlp.expert_outputs
            with tracer.invoke(ids[1:]):
                model.layers[3].mlp.expert_outputs[:] = 0
                raise ZeroDivisionError


@torch.no_grad()
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    "where",
    [
        "before the model", "at a read", "inside a call", "with a view out", "at a write", "out of order",
        "in the model", "in a generation", "at an invoke",
    ],
)  # fmt: skip
def test_after_a_trace_that_raised(ids, where, experts):
    model = tiny(attn_implementation="eager", experts_implementation=experts)
    before = model._module(ids).logits
    values = read_all(model, ids)
    with pytest.raises((ZeroDivisionError, NnterpError, IndexError)):
        raising(model, ids, where)
    assert torch.equal(model._module(ids).logits, before)
    again = read_all(model, ids)
    assert all(torch.equal(again[key], value) for key, value in values.items())


def test_no_module_of_torch_or_transformers_is_changed():
    code = """
import torch, transformers, importlib, types
import nnsight  # what nnsight changes is its own affair
from nnsight.modeling.transformers import TransformersModel
names = ["transformers.models.afmoe.modeling_afmoe", "transformers.integrations.moe", "transformers.modeling_utils",
         "transformers.masking_utils", "transformers.cache_utils", "torch.nn.functional", "torch.nn.modules.module", "torch"]
modules = [importlib.import_module(name) for name in names]
def state():
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            found[module.__name__, name] = id(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, member in vars(value).items():
                    if not attribute.endswith("_cached_value"):
                        found[module.__name__, name, attribute] = id(member)
    return found
from nnterp_afmoe.testing import byte_tokenizer, tiny_module
module = tiny_module()  # what transformers changes to build a model is its own as well
before = state()
from nnterp_afmoe import StandardizedTransformer
model = StandardizedTransformer(module, tokenizer=byte_tokenizer())
with torch.no_grad(), model.trace("A prompt"):
    model.layers[3].mlp.expert_outputs.save()
after = state()
changed = [key for key in before if after.get(key) != before[key]]
new = [key for key in after if key not in before and not key[-1].startswith("__")]
assert not changed, changed
assert all(key[0] == "torch" for key in new), new
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_callers_model_is_changed_by_nnsights_controllers_only():
    bare, module = tiny_module(), tiny_module()
    StandardizedTransformer(module, tokenizer=byte_tokenizer())
    for (name, a), (_, b) in zip(bare.named_modules(), module.named_modules(), strict=True):
        assert set(vars(b)) - set(vars(a)) <= {"forward", "__nnsight__"}, name
        assert not b._forward_hooks
        assert not b._forward_pre_hooks
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])
    assert bare.config.to_dict() == module.config.to_dict()


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@torch.no_grad()
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_two_hundred_traces_leave_nothing(ids, experts):
    model = tiny(attn_implementation="eager", experts_implementation=experts)

    def once():
        with model.trace(ids):
            model.layers[1].self_attn.attention_scores
            model.layers[3].mlp.expert_outputs[:, 0] = 0
            kept = model.logits.save()
        return kept.sum().item()

    for _ in range(20):
        once()
    live, memory = tensors(), resident()
    for _ in range(200):
        once()
    assert tensors() <= live
    assert resident() - memory < 8 * 2**20


def test_deleting_the_wrapper_frees_the_model(ids):
    model = tiny()

    def use(model):
        # In a function of its own: CPython keeps a copy of the locals of a frame that nnsight has
        # read them of, until that frame ends.
        with torch.no_grad(), model.trace(ids):
            model.layers[3].mlp.expert_outputs.save()

    use(model)
    model.check(progress=False)
    module, weight = weakref.ref(model._module), weakref.ref(model._module.lm_head.weight)
    del model
    gc.collect()
    assert module() is None
    assert weight() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_are_honoured(ids, mode):
    model = tiny(attn_implementation="eager")
    with mode():
        with model.trace(ids):
            model.layers[1].self_attn.attention_keys[:] *= 2
            stream = model.layers[2].layer_output.save()
            model.layers[3].mlp.expert_weights[:, 0] = 0
            logits = model.logits.save()
    assert not stream.requires_grad
    assert not logits.requires_grad
    assert stream.is_inference() == (mode is torch.inference_mode)
    with model.trace(ids):
        with_graph = model.layers[2].layer_output.save()
    assert with_graph.requires_grad


@torch.no_grad()
def test_a_switch_between_two_traces(ids):
    model = tiny()
    want = read_all(tiny(attn_implementation="eager"), ids)
    for attention in ("sdpa", "eager", "sdpa", "flex_attention", "eager"):
        for experts in ("grouped_mm", "eager", "batched_mm"):
            model.set_attn_implementation(attention)
            model.set_experts_implementation(experts)
            got = read_all(model, ids)
            assert all(torch.allclose(value, want[key], atol=1e-5) for key, value in got.items())
