"""nnsight's own powers over standard names: edits, sessions, caches, skips, stops, remote runs, adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nnsight
import pytest
import torch
from helpers import apart, read_all

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny, tiny_module

KINDS = [0, 1, 3, 4]  # dense and mixture, sliding and full


@pytest.fixture
def model():
    return tiny(attn_implementation="eager")


@torch.no_grad()
@pytest.mark.parametrize("layer", KINDS)
def test_an_edit_that_is_kept_on_a_copy(model, ids, layer):
    with model.edit() as (_, edited):
        edited.layers[layer].layer_mid = edited.layers[layer].layer_mid * 2
        edited.layers[4].mlp.expert_weights[:] = 0
    with edited.trace(ids):
        got = edited.logits.save()
    with model.trace(ids):
        plain = model.logits.save()
    edits = {(layer, "layer_mid"): lambda v: v * 2, (4, "mlp.expert_weights"): lambda v: v * 0}
    assert apart(got, forward(model._module, model.config, ids, edits=edits)["logits"]) < 1e-5
    assert apart(plain, forward(model._module, model.config, ids)["logits"]) < 1e-5


@torch.no_grad()
def test_an_edit_in_place_and_cleared(model, ids):
    with model.edit(inplace=True):
        model.layers[2].self_attn.attention_head_outputs[:, :, 1] = 0
    with model.trace(ids):
        edited = model.logits.save()
    model.clear_edits()
    with model.trace(ids):
        plain = model.logits.save()

    def one_head(value):
        value = value.clone()
        value[:, :, 1] = 0
        return value

    want = forward(model._module, model.config, ids, edits={(2, "self_attn.attention_head_outputs"): one_head})
    assert apart(edited, want["logits"]) < 1e-5
    assert apart(plain, forward(model._module, model.config, ids)["logits"]) < 1e-5


@torch.no_grad()
def test_a_session(model, ids):
    with model.session():
        with model.trace(ids):
            taken = model.layers[3].mlp.routed_output
        with model.trace(ids.flip(1)):
            model.layers[3].mlp.routed_output = taken
            got = model.logits.save()
    source = forward(model._module, model.config, ids)[3, "mlp.routed_output"]
    want = forward(model._module, model.config, ids.flip(1), edits={(3, "mlp.routed_output"): lambda _: source})
    assert apart(got, want["logits"]) < 1e-5


@torch.no_grad()
def test_a_cache_addressed_by_standard_names(model, ids):
    with model.trace(ids) as tracer:
        cache = tracer.cache(modules=[model.layers[2], model.layers[3].mlp, model.norm], include_inputs=True)
    want = read_all(model, ids)
    assert torch.equal(cache.layers[2].output, want[2, "layer_output"])
    assert torch.equal(cache.layers[2].input, want[2, "layer_input"])
    assert torch.equal(cache.layers[3].mlp.input, want[3, "mlp_input"])
    assert torch.equal(cache.norm.output, want["final_norm_output"])


@torch.no_grad()
@pytest.mark.parametrize("layer", KINDS)
def test_skip_and_stop_and_result(model, ids, layer):
    with model.trace(ids) as tracer:
        block = model.layers[layer]
        block.skip(block.layer_input)
        out = block.layer_output.save()
        result = tracer.result.save()
    want = read_all(model, ids)
    assert torch.equal(out, want[layer, "layer_input"])
    edits = {(layer, "layer_output"): lambda _: want[layer, "layer_input"]}
    assert apart(result.logits, forward(model._module, model.config, ids, edits=edits)["logits"]) < 1e-5
    ran = []
    hook = model._module.lm_head.register_forward_hook(lambda *_: ran.append(1))
    with model.trace(ids) as tracer:
        stopped = model.layers[layer].layer_output.save()
        tracer.stop()
    hook.remove()
    assert not ran
    assert torch.equal(stopped, want[layer, "layer_output"])


REMOTE = """
import sys, torch
from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny

tiny(sys.argv[1])
torch.set_grad_enabled(False)
model = StandardizedTransformer(sys.argv[1], attn_implementation="eager", dispatch=True)
ids = torch.tensor([model.tokenizer("A prompt")["input_ids"]])
want = forward(model._module, model.config, ids)
block = model.layers[3]

with model.trace("A prompt", remote="local"):
    got = {}
    got[0, "layer_mid"] = model.layers[0].layer_mid
    got[1, "self_attn.attention_scores"] = model.layers[1].self_attn.attention_scores
    got[1, "mlp.mlp_neurons"] = model.layers[1].mlp.mlp_neurons
    got[3, "mlp.shared_experts.mlp_neurons"] = block.mlp.shared_experts.mlp_neurons
    got[3, "mlp.expert_weights"] = block.mlp.expert_weights
    got[3, "mlp.expert_outputs"] = block.mlp.expert_outputs
    got["logits"] = model.logits
    got = got.save()
for key, value in got.items():
    assert torch.allclose(value, want[key], atol=1e-5), key

with model.trace("A prompt", remote="local"):
    model.layers[0].layer_mid += 1
    model.layers[1].self_attn.attention_keys[:] = 0
    model.layers[1].mlp.mlp_neurons *= 2
    model.layers[3].mlp.shared_experts.mlp_neurons *= 2
    block.mlp.expert_weights *= 0.5
    logits = model.logits.save()
edits = {
    (0, "layer_mid"): lambda v: v + 1,
    (1, "self_attn.attention_keys"): lambda v: v * 0,
    (1, "mlp.mlp_neurons"): lambda v: v * 2,
    (3, "mlp.shared_experts.mlp_neurons"): lambda v: v * 2,
    (3, "mlp.expert_weights"): lambda v: v * 0.5,
}
assert torch.allclose(logits, forward(model._module, model.config, ids, edits=edits)["logits"], atol=1e-4)
print("as here")
"""


def test_remote_local_reads_and_writes_of_every_host(tmp_path):
    """Installed, as a server has it: the simulated server can't see a checkout."""
    installed, root = tmp_path / "site-packages", Path(__file__).parent.parent
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", installed]
    subprocess.run([*install, root], check=True, capture_output=True)
    script = tmp_path / "remote.py"
    script.write_text(REMOTE)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, script, tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.strip() == "as here", done.stderr


def test_adapters(tmp_path):
    from peft import LoraConfig, get_peft_model

    tiny(tmp_path / "base")
    module = tiny_module()
    torch.manual_seed(0)
    adapted = get_peft_model(module, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    model = StandardizedTransformer(str(tmp_path / "base"), attn_implementation="eager", peft=str(tmp_path / "adapter"))
    ids = torch.tensor([model.tokenizer("A prompt")["input_ids"]])
    with torch.no_grad():
        want = adapted(ids).logits
        values = read_all(model, "A prompt")
        assert apart(values["logits"], want) < 1e-5
        for layer in range(5):
            total = values[layer, "layer_input"] + values[layer, "self_attn.attention_output"]
            assert apart(total, values[layer, "layer_mid"]) < 1e-6
        with model.trace("A prompt"):
            model.layers[1].self_attn.attention_head_outputs[:, :, 0] = 0
            edited = model.logits.save()
        assert apart(edited, want) > 1e-4


@torch.no_grad()
def test_every_kind_of_container_is_saved(model, ids):
    with model.trace(ids):
        streams = nnsight.save([model.layers[layer].layer_output for layer in range(3)])
        named = nnsight.save({"weights": model.layers[3].mlp.expert_weights})
    want = read_all(model, ids)
    assert torch.equal(streams[2], want[2, "layer_output"])
    assert torch.equal(named["weights"], want[3, "mlp.expert_weights"])


def test_nothing_saved_is_nnsights_own_error(model, ids):
    with model.trace(ids):
        stream = model.layers[0].layer_output
    with pytest.raises(UnboundLocalError, match="stream"):
        stream.shape
    with model.trace(ids):
        found = [model.layers[0].layer_output]
    with pytest.raises(UnboundLocalError, match="found"):
        found[0]


@torch.no_grad()
def test_a_module_called_out_of_its_place(model, ids):
    with model.trace(ids):
        early = model.layers[1].layer_output
        lens = model.lm_head(model.norm(early)).save()
        later = model.layers[3].layer_output.save()
    want = read_all(model, ids)
    assert torch.equal(later, want[3, "layer_output"])
    assert torch.equal(lens, model._module.lm_head(model._module.model.norm(want[1, "layer_output"])))


@torch.no_grad()
def test_standard_and_native_names_together(model, ids):
    with model.trace(ids):
        a = model.layers[3].mlp.router.output
        native = a[2].clone().save()
        standard = model.layers[3].mlp.expert_indices.save()
        out = model.model.layers[3].output.save()
        same = model.layers[3].layer_output.save()
    assert torch.equal(native.view_as(standard), standard)
    assert torch.equal(out, same)
