"""Values at every step of a generation, edits from a step on, and reads out of order."""

from __future__ import annotations

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, keys, read

from nnterp_afmoe import OutOfOrder
from nnterp_afmoe.reference import forward

STEPS = 4


def prompt(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    return torch.randint(3, 261, (rows, tokens), generator=torch.Generator().manual_seed(2))


def last(value: torch.Tensor, key) -> torch.Tensor:
    """The last token's part of a value."""
    name = key if isinstance(key, str) else key[1].rpartition(".")[2]
    if name in (
        "attention_queries",
        "attention_keys",
        "attention_values",
        "attention_scores",
        "attention_probabilities",
    ):
        return value[:, :, -1:]
    return value[:, -1:]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_value_at_every_step_is_that_of_the_full_forward(build, attention, experts):
    model = build("irregular", attention, experts)
    wanted = [key for key in keys(model) if key not in ("next_token_probs", "attention_mask")]
    steps: list[dict] = []
    with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
        for _ in tracer.iter[:STEPS]:
            values = {}
            for key in wanted:
                values[key] = read(model, key).clone()
            steps.append(values)
        ids = tracer.result.save()
    assert len(steps) == STEPS
    whole = forward(model._module, model.config, ids[:, :-1])
    window = model.config.sliding_window
    for step, values in enumerate(steps):
        seen = 11 + step
        for key, got in values.items():
            name = key if isinstance(key, str) else key[1].rpartition(".")[2]
            want = whole[key]
            if name in ("attention_keys", "attention_values"):
                # Every token so far; on a sliding block those that can still be looked at.
                kept = min(seen, window) if step and model.config.layer_types[key[0]] == "sliding_attention" else seen
                assert got.shape[2] == kept
                want = want[:, :, seen - kept : seen]
            elif name in ("attention_scores", "attention_probabilities"):
                kept = got.shape[-1]
                want = want[:, :, seen - got.shape[2] : seen, seen - kept : seen]
            elif name in ("attention_queries",):
                want = want[:, :, seen - got.shape[2] : seen]
            else:
                want = want[:, seen - got.shape[1] : seen]
            assert apart(got, want) < 1e-5, (step, key)


@torch.no_grad()
@pytest.mark.parametrize(
    "key",
    [
        (0, "layer_mid"), (1, "self_attn.attention_head_outputs"), (2, "mlp.expert_outputs"), (3, "mlp.expert_weights"),
        (4, "layer_output"), (2, "self_attn.attention_values"), (3, "self_attn.attention_scores"), (0, "mlp.mlp_neurons"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["assigned", "in place"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_an_edit_at_a_step_changes_that_step_on(build, key, way, experts):
    model = build("irregular", "eager", experts)
    from helpers import assign

    def run(at: int | None):
        logits = []
        with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
            for step in tracer.iter[:STEPS]:
                if step == at:
                    value = read(model, key)
                    if way == "assigned":
                        assign(model, key, value * 3 + 1)
                    else:
                        value[:] = value * 3 + 1
                logits.append(model.logits[:, -1].clone())
        return logits

    plain, edited = run(None), run(2)
    assert torch.equal(plain[0], edited[0])
    assert torch.equal(plain[1], edited[1])
    assert apart(edited[2], plain[2]) > 1e-3


@torch.no_grad()
def test_an_edit_of_keys_is_not_kept_in_the_cache(build):
    """In place or assigned, it is this step's attention that is edited, not the cache."""
    model = build()
    found = {}
    for way in ("assigned", "in place"):
        with model.generate(prompt(), max_new_tokens=3, do_sample=False, eos_token_id=None) as tracer:
            for step in tracer.iter[:3]:
                keys_now = model.layers[1].self_attn.attention_keys
                if step == 1:
                    before = keys_now.clone()
                    if way == "assigned":
                        model.layers[1].self_attn.attention_keys = keys_now * 0
                    else:
                        keys_now[:] = 0
                if step == 2:
                    after = keys_now.clone()
                    found[way] = (before, after)
    for before, after in found.values():
        assert torch.equal(after[:, :, : before.shape[2]], before)


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_value_first_read_at_a_later_step(build, experts):
    """The functions inside are instrumented when first asked; the steps before are counted in."""
    model = build("irregular", "eager", experts)
    late, always = {}, {}
    for found, first in ((always, 0), (late, 2)):
        with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
            for step in tracer.iter[:STEPS]:
                if step >= first:
                    scores = model.layers[1].self_attn.attention_scores.clone()
                    slots = model.layers[3].mlp.expert_outputs.clone()
                    found[step] = (scores, slots)
                else:
                    model.layers[0].layer_output
    for step in (2, 3):
        for a, b in zip(late[step], always[step], strict=True):
            assert torch.equal(a, b)


@torch.no_grad()
def test_an_earlier_value_after_a_later_one_raises(build):
    model = build()
    words = r"layers\[1\].layer_output was asked for after layers\[3\].layer_output, but .* model.order\(\).*model.rank"
    for step in range(STEPS):
        with pytest.raises(OutOfOrder, match=words):
            with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
                for now in tracer.iter[:STEPS]:
                    model.layers[3].layer_output
                    if now == step:
                        model.layers[1].layer_output
    with pytest.raises(OutOfOrder, match="attention_scores was asked for after"):
        with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
            for _ in tracer.iter[1:]:
                model.layers[1].self_attn.attention_head_outputs
                model.layers[1].self_attn.attention_scores
    with pytest.raises(OutOfOrder, match=r"layers\[0\].layer_mid was asked for after .*Assign it earlier"):
        with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
            for _ in tracer.iter[2]:
                model.layers[2].mlp.expert_weights
                model.layers[0].layer_mid = torch.zeros(2, 1, 40)


@torch.no_grad()
def test_the_stream_of_tokens_between_values(build):
    """Reading another of nnsight's values in a step is no reason to raise."""
    model = build()
    shapes = []
    with model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None) as tracer:
        for _ in tracer.iter[:STEPS]:
            model.model.layers[0].output
            model.layers[1].mlp.down_proj.input
            shapes.append(tuple(model.layers[1].layer_output.shape))
            model.layers[2].layer_mid
    assert shapes == [(2, 11, 40), *[(2, 1, 40)] * (STEPS - 1)]


@torch.no_grad()
def test_an_end_before_the_last_asked_step(build):
    model = build()
    with model.generate(prompt(1), max_new_tokens=2, do_sample=False, eos_token_id=None) as tracer:
        ids = tracer.result.save()
    end = ids[0, -1].item()
    seen = []
    with pytest.warns(UserWarning, match="was never reached: the loop asked for a step the run did not make"):
        with model.generate(prompt(1), max_new_tokens=6, do_sample=False, eos_token_id=end) as tracer:
            for _ in tracer.iter[:6]:
                seen.append(model.layers[2].mlp.expert_indices.shape)
    assert len(seen) == 2


@torch.no_grad()
def test_an_unknown_keyword_is_refused(build, ids):
    model = build()
    with pytest.raises(TypeError, match=r"'max_new_token'.*near names: max_new_tokens"):
        with model.generate(ids, max_new_token=3):
            model.logits
    with pytest.raises(TypeError, match=r"'attention_maks'.*near names: attention_mask"):
        with model.trace(ids, attention_maks=torch.ones_like(ids)):
            model.logits
    with model.trace(ids, use_cache=False, output_hidden_states=True):
        model.logits.save()
    with model.trace("Some text", return_dict=True):
        model.logits.save()


@torch.no_grad()
def test_beams_and_samples(build):
    model = build()
    with model.generate(prompt(), max_new_tokens=2, num_beams=3, eos_token_id=None) as tracer:
        for _ in tracer.iter[:2]:
            weights = model.layers[3].mlp.expert_weights.save()
    assert weights.shape == (6, 1, 3)
    with pytest.raises(ValueError, match="so several invokes can't be told apart: generate from one prompt at a time"):
        with model.generate(max_new_tokens=2, num_beams=3) as tracer:
            with tracer.invoke("a"):
                model.layers[3].mlp.expert_weights.save()
            with tracer.invoke("b"):
                model.layers[3].mlp.expert_weights.save()
