"""Several prompts in one trace: every value is that prompt's rows, and an edit stays in its prompt."""

from __future__ import annotations

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, assign, keys, read, read_all

from nnterp_afmoe.testing import tiny

PROMPTS = ("To be", "or not to be, that is", "a")


def alone(model, prompt):
    return read_all(model, prompt)


def per_prompt(model, key):
    """Whether a value has a row for every token of the padded prompt, where its own tokens can be compared."""
    return key not in ("input_ids", "attention_mask", "next_token_probs")


def own(value: torch.Tensor, key, width: int, tokens: int) -> torch.Tensor:
    """The last ``tokens`` positions of a left-padded value, along every token axis."""
    name = key if isinstance(key, str) else key[1].rpartition(".")[2]
    if name in ("attention_queries", "attention_keys", "attention_values"):
        return value[:, :, -tokens:]
    if name in ("attention_scores", "attention_probabilities"):
        return value[:, :, -tokens:, -tokens:]
    return value[:, -tokens:]


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_value_of_every_prompt_is_that_of_the_prompt_alone(build, attention, experts):
    model = build("irregular", attention, experts)
    wanted = keys(model)
    found: list[dict] = [{}, {}, {}]
    with model.trace() as tracer:
        with tracer.invoke(PROMPTS[0]):
            for key in wanted:
                found[0][key] = read(model, key).clone()
        with tracer.invoke(PROMPTS[1]):
            for key in wanted:
                found[1][key] = read(model, key).clone()
        with tracer.invoke(PROMPTS[2]):
            for key in wanted:
                found[2][key] = read(model, key).clone()
    width = max(map(len, PROMPTS))
    for prompt, values in zip(PROMPTS, found, strict=True):
        want = alone(model, prompt)
        for key in wanted:
            if key == "next_token_probs":
                assert apart(values[key], want[key]) < 1e-5
            elif key == "attention_mask":
                assert values[key].tolist() == [[0] * (width - len(prompt)) + [1] * len(prompt)]
            else:
                got = own(values[key], key, width, len(prompt))
                assert values[key].shape[0] == 1, key
                assert apart(got, want[key]) < 1e-5, (prompt, key)


def change(value):
    return value * 0.5 + 0.25 if value.dtype.is_floating_point else value.flip(-1)


@torch.no_grad()
@pytest.mark.parametrize("way", ["assigned", "in place"])
@pytest.mark.parametrize(
    ("attention", "experts"), [("eager", "eager"), ("sdpa", "grouped_mm"), ("eager", "batched_mm")]
)
def test_an_edit_stays_in_its_prompt(build, attention, experts, way):
    model = build("irregular", attention, experts)
    with model.trace(list(PROMPTS)):
        plain = model.logits.save()

    def write(key):
        if way == "assigned":
            assign(model, key, change(read(model, key).clone()))
        else:
            value = read(model, key)
            value[:] = change(value.clone())

    for key in keys(model):
        if key in ("next_token_probs", "attention_mask", "input_ids"):
            continue
        with model.trace(PROMPTS[1]):
            write(key)
            want = model.logits.save()
        with model.trace() as tracer:
            with tracer.invoke(PROMPTS[0]):
                first = model.logits.save()
            with tracer.invoke(PROMPTS[1]):
                write(key)
                edited = model.logits.save()
            with tracer.invoke(PROMPTS[2]):
                last = model.logits.save()
        assert apart(edited, want) < 1e-5, key
        # Not bit for bit: an edit may send its own tokens to other experts, and how many tokens an
        # expert gets decides in which order its products are summed.
        assert apart(first, plain[:1]) < 1e-5, key
        assert apart(last, plain[2:]) < 1e-5, key


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_two_invokes_reading_the_same_inner_value(build, experts):
    model = build("irregular", "eager", experts)
    with model.trace() as tracer:
        with tracer.invoke(PROMPTS[0]):
            a = model.layers[2].self_attn.attention_probabilities.save()
            b = model.layers[2].mlp.expert_outputs.save()
        with tracer.invoke(PROMPTS[1]):
            c = model.layers[2].self_attn.attention_probabilities.save()
            d = model.layers[2].mlp.expert_outputs.save()
    with model.trace(list(PROMPTS[:2])):
        pattern = model.layers[2].self_attn.attention_probabilities.save()
        slots = model.layers[2].mlp.expert_outputs.save()
    assert torch.equal(torch.cat([a, c]), pattern)
    assert apart(torch.cat([b, d]), slots) < 1e-6


@torch.no_grad()
def test_several_prompts_in_an_invoke_and_an_empty_one(build):
    model = build()
    with model.trace() as tracer:
        with tracer.invoke(list(PROMPTS[:2])):
            two = model.layers[3].mlp.expert_weights.save()
        with tracer.invoke(PROMPTS[2]):
            one = model.layers[3].mlp.expert_weights.save()
        with tracer.invoke():
            whole = model.layers[3].mlp.expert_weights.save()
            logits = model.logits.save()
    assert two.shape[0] == 2
    assert one.shape[0] == 1
    assert torch.equal(torch.cat([two, one]), whole)
    assert logits.shape[0] == 3


@torch.no_grad()
def test_values_shared_through_a_barrier(build):
    model = build()
    with model.trace(PROMPTS[1]):
        source = model.layers[2].mlp.routed_output.save()
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPTS[1]):
            taken = model.layers[2].mlp.routed_output
            barrier()
            first = model.logits.save()
        with tracer.invoke("or not to be, that isn't"):
            barrier()
            model.layers[2].mlp.routed_output[:, -1] = taken[:, -1]
            there = model.layers[2].mlp.routed_output.clone().save()
            second = model.logits.save()
    with model.trace("or not to be, that isn't"):
        model.layers[2].mlp.routed_output[:, -1] = source[:, -1]
        want = model.logits.save()
    assert apart(there[:, -1], source[:, -1]) < 1e-6
    assert apart(second, want) < 1e-5
    with model.trace(PROMPTS[1]):
        alone_logits = model.logits.save()
    assert apart(first[:, -len(PROMPTS[1]) :], alone_logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_one_token_prompts(build, experts, rows):
    """Where rows and tokens are as many, and as many as experts are."""
    model = build("irregular", "eager", experts)
    ids = torch.arange(3, 3 + 2 * rows)[:, None]
    whole, first, second = read_all(model, ids), {}, {}
    with model.trace() as tracer:
        with tracer.invoke(ids[:rows]):
            for key in keys(model):
                first[key] = read(model, key).clone()
        with tracer.invoke(ids[rows:]):
            for key in keys(model):
                second[key] = read(model, key).clone()
    for key, value in whole.items():
        assert first[key].shape[0] == rows, key
        assert apart(torch.cat([first[key], second[key]]), value) < 1e-5, key
    with model.trace() as tracer:
        with tracer.invoke(ids[:rows]):
            left = model.logits.save()
        with tracer.invoke(ids[rows:]):
            model.layers[3].mlp.expert_outputs[:, :, 0] = 0
    assert torch.equal(left, whole["logits"][:rows])


@torch.no_grad()
def test_as_many_experts_as_tokens():
    """A bias of ``num_experts`` entries is not a batch of tokens, though it is as long."""
    model = tiny(num_experts=6, num_experts_per_tok=2)
    ids = torch.randint(3, 261, (2, 3), generator=torch.Generator().manual_seed(0))
    with model.trace(ids):
        want = model.layers[3].mlp.expert_indices.save()
    with model.trace() as tracer:
        with tracer.invoke(ids[:1]):
            first = model.layers[3].mlp.expert_indices.save()
        with tracer.invoke(ids[1:]):
            second = model.layers[3].mlp.expert_indices.save()
    assert torch.equal(torch.cat([first, second]), want)


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS)
def test_decode_steps_under_several_invokes(build, experts):
    model = build("irregular", "eager", experts)
    singles = []
    for prompt in PROMPTS[:2]:
        steps = []
        with model.generate(prompt, max_new_tokens=3, do_sample=False) as tracer:
            for _ in tracer.iter[:3]:
                weights = model.layers[3].mlp.expert_weights.clone()
                slots = model.layers[3].mlp.expert_outputs.clone()
                steps.append((weights, slots, model.logits.clone()))
        singles.append(steps)
    together: list[list] = [[], []]
    with model.generate(max_new_tokens=3, do_sample=False) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:3]:
                weights = model.layers[3].mlp.expert_weights.clone()
                slots = model.layers[3].mlp.expert_outputs.clone()
                together[0].append((weights, slots, model.logits.clone()))
        with tracer.invoke(PROMPTS[1]):
            for _ in tracer.iter[:3]:
                weights = model.layers[3].mlp.expert_weights.clone()
                slots = model.layers[3].mlp.expert_outputs.clone()
                together[1].append((weights, slots, model.logits.clone()))
    for prompt, one, both in zip(PROMPTS, singles, together, strict=False):
        for step, (want, got) in enumerate(zip(one, both, strict=True)):
            for a, b in zip(want, got, strict=True):
                b = b[:, -len(prompt) :] if step == 0 and b.shape[1] > 1 else b
                a = a[:, -b.shape[1] :]
                assert apart(b, a) < 1e-5, (prompt, step)
