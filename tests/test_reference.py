"""The reference against transformers: long prompts, padding, a cache, half precision."""

from __future__ import annotations

import pytest
import torch
from conftest import ATTENTION, CONFIGS
from helpers import apart

from nnterp_afmoe.reference import forward
from nnterp_afmoe.testing import tiny_module


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 261, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_three_windows_of_tokens_left_padded_past_the_window(name, attention):
    module = tiny_module(attn_implementation=attention, **CONFIGS[name])
    ids = prompt(3, 3 * module.config.sliding_window)
    mask = torch.ones_like(ids)
    mask[0, : module.config.sliding_window + 3] = 0
    mask[2, :2] = 0
    want = module(ids, attention_mask=mask).logits
    got = forward(module, module.config, ids, mask)["logits"]
    assert apart(got[mask.bool()], want[mask.bool()]) < 1e-5
    # A padded row is the prompt alone.
    alone = forward(module, module.config, ids[:1, module.config.sliding_window + 3 :])["logits"]
    assert apart(got[:1, module.config.sliding_window + 3 :], alone) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_prefill_and_steps(name):
    module = tiny_module(**CONFIGS[name])
    ids = prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    whole = forward(module, module.config, ids, mask)
    cache, theirs = None, None
    for start, end in ((0, 12), (12, 13), (13, 15), (15, 20)):
        part = forward(module, module.config, ids[:, start:end], mask[:, :end], cache=cache)
        out = module(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=theirs, use_cache=True)
        real = mask[:, start:end].bool()
        assert apart(part["logits"][real], out.logits[real]) < 1e-5
        assert apart(part["logits"][real], whole["logits"][:, start:end][real]) < 1e-5
        cache, theirs = part.cache, out.past_key_values


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@torch.no_grad()
def test_half_precision_within_stated_bounds(dtype, bound):
    module = tiny_module().to(dtype)
    ids = prompt(2, 20)
    want = module(ids).logits.float()
    got = forward(module, module.config, ids)["logits"].float()
    # Near-tied experts may be chosen otherwise after a rounding; most tokens are not near a tie.
    off = (got - want).abs().amax(-1) / want.abs().max()
    assert off.median() < bound
    assert (off < bound).float().mean() > 0.9


@torch.no_grad()
def test_a_state_dict_does():
    module = tiny_module()
    ids = prompt(1, 9)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert torch.equal(forward(state, module.config, ids)["logits"], forward(module, module.config, ids)["logits"])


@torch.no_grad()
def test_an_edit_of_a_value_that_is_not_there():
    module = tiny_module()
    with pytest.raises(KeyError, match="no such value in this pass"):
        forward(module, module.config, prompt(1, 4), edits={(0, "mlp.router_logits"): lambda value: value})


def test_what_the_equations_do_not_have():
    module = tiny_module()
    module.config.hidden_act = "gelu"
    with pytest.raises(NotImplementedError, match="hidden_act='gelu'"):
        forward(module, module.config, prompt(1, 4))
    module.config.hidden_act = "silu"
    module.config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(NotImplementedError, match="rope_type='yarn'"):
        forward(module, module.config, prompt(1, 4))
