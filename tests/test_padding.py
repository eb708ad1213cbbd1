"""Padded batches: real positions are those of the prompt alone, whichever side the padding is on."""

from __future__ import annotations

import pytest
import torch
from conftest import EXPERTS
from helpers import apart, read_all

SIDES = ("left", "right")


def batch(side: str, width: int = 21, lengths: tuple[int, ...] = (21, 5, 12)):
    """Rows of several lengths, the padding longer than the window of eight."""
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place] = torch.randint(3, 261, (length,), generator=generator)
        mask[row, place] = 1
    return ids, mask


def real(value: torch.Tensor, key, row: int, mask: torch.Tensor) -> torch.Tensor:
    """A row's real positions, along every token axis."""
    name = key if isinstance(key, str) else key[1].rpartition(".")[2]
    keep = mask[row].bool()
    value = value[row : row + 1]
    if name in ("attention_queries", "attention_keys", "attention_values"):
        return value[:, :, keep]
    if name in ("attention_scores", "attention_probabilities"):
        return value[:, :, keep][..., keep]
    return value[:, keep] if name != "next_token_probs" else value


@torch.no_grad()
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_real_positions_are_those_of_the_prompt_alone(build, attention, experts, side):
    model = build("irregular", attention, experts)
    ids, mask = batch(side)
    values = read_all(model, ids, attention_mask=mask)
    for row in range(len(ids)):
        want = read_all(model, ids[row][mask[row].bool()][None])
        for key, value in values.items():
            got = real(value, key, row, mask)
            if got.dtype.is_floating_point:
                assert got.isfinite().all(), key
            assert apart(got, want[key]) < 1e-5, (row, key)


@torch.no_grad()
@pytest.mark.parametrize("side", SIDES)
def test_next_token_probs_is_the_last_real_tokens(build, side):
    model = build()
    ids, mask = batch(side)
    with model.trace(ids, attention_mask=mask):
        probs = model.next_token_probs.save()
    for row in range(len(ids)):
        with model.trace(ids[row][mask[row].bool()][None]):
            want = model.logits.save()
        assert apart(probs[row], want[0, -1].softmax(-1)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", SIDES)
def test_next_token_probs_under_several_invokes(build, side):
    model = build()
    ids, mask = batch(side)
    with model.trace(ids, attention_mask=mask):
        want = model.next_token_probs.save()
    with model.trace() as tracer:
        with tracer.invoke(input_ids=ids[:1], attention_mask=mask[:1]):
            first = model.next_token_probs.save()
        with tracer.invoke(input_ids=ids[1:], attention_mask=mask[1:]):
            second = model.next_token_probs.save()
    assert apart(torch.cat([first, second]), want) < 1e-5


@torch.no_grad()
def test_left_padded_strings(build):
    model = build("irregular", "sdpa")
    prompts = ["A much longer prompt than the window", "short", "of middling length"]
    with model.trace(prompts):
        together = model.logits.save()
        probs = model.next_token_probs.save()
    for row, prompt in enumerate(prompts):
        with model.trace(prompt):
            alone = model.logits.save()
        assert apart(together[row : row + 1, -len(prompt) :], alone) < 1e-5
        assert apart(probs[row], alone[0, -1].softmax(-1)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", SIDES)
def test_an_edit_of_the_padding_reaches_no_real_position(build, side):
    model = build()
    ids, mask = batch(side)
    with model.trace(ids, attention_mask=mask):
        plain = model.logits.save()
    with model.trace(ids, attention_mask=mask):
        model.layers[2].layer_output[mask == 0] += 1
        edited = model.logits.save()
    assert apart(edited[mask.bool()], plain[mask.bool()]) < 1e-5
