"""Random blocks of code: whatever is read, edited and assigned, alone or beside another prompt, the equations say the same."""

from __future__ import annotations

import torch
from conftest import model_of
from helpers import apart, keys, place
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnterp_afmoe.reference import forward

FIRST, SECOND = "The gate", "of every head, yes"
OPERATIONS = ("read", "in place", "assigned", "in place later", "read twice", "assigned twice", "part in place")


def change(value: torch.Tensor) -> torch.Tensor:
    """Another value of the same sort. Half, not more by something: beside another prompt there is padding, whose pattern is to stay at zero."""
    return value * 0.5 if value.dtype.is_floating_point else (value + 1) % 7


def part(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[:, -1] = change(value[:, -1])
    return value


#: What the equations are to do for what an operation does.
MEANS = {
    "read": None,
    "in place": change,
    "assigned": change,
    "in place later": change,
    "read twice": change,
    "assigned twice": lambda value: change(change(value)),
    "part in place": part,
}


def run(model, program) -> None:
    """One block of code: each value in the order of the forward pass, each with its operation."""
    later = []
    for key, operation in program:
        host, name = place(model, key)
        # An edit put off is made before the model has gone on from where the value was read.
        if later and model.rank(*reversed(key)) != later[0][0]:
            flush(later)
        if operation == "assigned":
            setattr(host, name, change(getattr(host, name).clone()))
        elif operation == "assigned twice":
            setattr(host, name, change(getattr(host, name).clone()))
            setattr(host, name, change(getattr(host, name).clone()))
        else:
            value = getattr(host, name)
            if operation == "in place":
                value[:] = change(value.clone())
            elif operation == "part in place":
                value[:, -1] = change(value[:, -1].clone())
            elif operation == "read twice":
                again = getattr(host, name)
                again[:] = change(value.clone())
            elif operation == "in place later":
                later.append((model.rank(*reversed(key)), value))
    flush(later)


def flush(later: list) -> None:
    for _, value in later:
        value[:] = change(value.clone())
    later.clear()


@st.composite
def programs(draw):
    """The implementations, and a block of code for each of two prompts."""
    model = model_of("irregular")
    experts = draw(st.sampled_from(["eager", "batched_mm", "grouped_mm"]))
    attention = draw(st.sampled_from(["eager", "sdpa"]))
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    known = [key for key in keys(model) if not isinstance(key, str)]

    def program(least: int):
        chosen = sorted(draw(st.sets(st.integers(0, len(known) - 1), min_size=least, max_size=8)))
        return [(known[index], draw(st.sampled_from(OPERATIONS))) for index in chosen]

    return experts, attention, program(1), program(0)


def meant(model, prompt: str, program) -> torch.Tensor:
    """The prompt's logits as the equations have them, given what the block of code does."""
    ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
    edits = {key: MEANS[operation] for key, operation in program if MEANS[operation] is not None}
    with torch.no_grad():
        return forward(model._module, model.config, ids, edits=edits)["logits"]


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.booleans(), st.booleans())
def test_a_random_block_of_code(case, grad, beside):
    experts, attention, program, another = case
    model = model_of("irregular")
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    with torch.set_grad_enabled(grad):
        if not beside:
            with model.trace(FIRST):
                run(model, program)
                got = model.logits.save()
        else:
            with model.trace() as tracer:
                with tracer.invoke(FIRST):
                    run(model, program)
                    got = model.logits.save()
                with tracer.invoke(SECOND):
                    run(model, another)
                    second = model.logits.save()
            assert apart(second.detach()[:, -len(SECOND) :], meant(model, SECOND, another)) < 1e-4
    assert apart(got.detach()[:, -len(FIRST) :], meant(model, FIRST, program)) < 1e-4
