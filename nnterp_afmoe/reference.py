r"""The Trinity forward pass from its equations, one short function an equation, in torch and einops.

It reads a model's weights and calls nothing of its forward, so it can contradict it: the value
tests and `StandardizedTransformer.check` compare every named value with what is computed here.
`forward` gives every value by name and can rewrite any of them on the way, which makes it an
oracle for writes too.

Read from the top: `forward` is the model, `Pass.block` a block, `attention` and `mixture` its branches.
``h0 = E[token] * sqrt(d)``; per block ``m = h + N2(attention(N1(h)))`` and ``h' = m + N4(mlp(N3(m)))``;
``logits = W_head N(h_L)``.

Computed in the dtype of the weights, with float32 where the model has it: inside the norms, the
softmax, the router's scores, and the expert weights. In bfloat16 and float16 results differ from
the model's by rounding, since sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor

__all__ = ["Edit", "Pass", "Result", "Visit", "forward"]

#: How a value is rewritten: given what it is, what it shall be.
Edit = Callable[[Tensor], Tensor]


@dataclass
class Result:
    """What `forward` computed.

    Attributes:
        root: The model's values by name, ``"logits"``, ``"token_embeddings"``, ...
        blocks: Each block's values by dotted name, ``"self_attn.attention_keys"``, ...
        cache: Each block's keys and values of all tokens so far, to continue from.
    """

    root: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[dict[str, Tensor]] = field(default_factory=list)
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __getitem__(self, key: str | tuple[int, str]) -> Tensor:
        """``result["logits"]``, ``result[3, "mlp.router_logits"]``."""
        return self.root[key] if isinstance(key, str) else self.blocks[key[0]][key[1]]

    def items(self) -> Iterator[tuple[str | tuple[int, str], Tensor]]:
        """Every value with its key."""
        yield from self.root.items()
        for layer, values in enumerate(self.blocks):
            for name, value in values.items():
                yield (layer, name), value


class Weights:
    """A model's parameters by name, under a prefix; `__call__` gives ``None`` where there is none."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix

    def at(self, path: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{path}.")

    def __call__(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}")

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}"]


#: What is done with a value on its way: given its name and what it is, what it shall be.
Visit = Callable[[str, Tensor], Tensor]


def keeping(kept: dict[str, Tensor], edits: Mapping[str, Edit]) -> Visit:
    """Rewrite each value where an edit says so, and keep it."""

    def visit(name: str, value: Tensor) -> Tensor:
        kept[name] = edits[name](value) if name in edits else value
        return kept[name]

    return visit


# -- the model -------------------------------------------------------------------------


def forward(
    model: torch.nn.Module | Mapping[str, Tensor],
    config: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    edits: Mapping[str | tuple[int, str], Edit] | None = None,
    *,
    position_ids: Tensor | None = None,
    cache: list[tuple[Tensor, Tensor]] | None = None,
) -> Result:
    """The forward pass, every named value of it.

    Args:
        model: An `AfmoeForCausalLM`, or its state dict.
        config: Its config.
        input_ids: ``[batch seq]``.
        attention_mask: ``[batch past+seq]``, zeros are padding; none is padding by default.
        edits: Values to rewrite, by key: ``"token_embeddings"``, ``(3, "mlp.expert_weights")``.
        position_ids: ``[batch seq]`` or ``[1 seq]``; by default tokens are counted from the first, padding too.
        cache: Keys and values of the tokens before these, `Result.cache` of an earlier call.

    Returns:
        The values, each as rewritten, and the cache to continue from.

    Raises:
        NotImplementedError: the config asks for a rotary or an activation that is not in the equations.
        KeyError: an edit names a value that this pass does not have.
    """
    edits = edits or {}
    result = Result()
    equations = Pass(model, config)
    root = keeping(result.root, {key: edit for key, edit in edits.items() if isinstance(key, str)})
    past = cache[0][0].shape[2] if cache else 0
    h = equations.begin(root, input_ids, attention_mask, position_ids, past)
    for layer in range(config.num_hidden_layers):
        values: dict[str, Tensor] = {}
        own = {key[1]: edit for key, edit in edits.items() if not isinstance(key, str) and key[0] == layer}
        h, kept = equations.block(layer, keeping(values, own), h, cache[layer] if cache else None)
        result.blocks.append(values)
        result.cache.append(kept)
    equations.end(root, h)
    known = dict(result.items())
    unknown = [key for key in edits if key not in known]
    if unknown:
        raise KeyError(f"no such value in this pass: {unknown}")
    return result


class Pass:
    """One forward pass in its parts, for a caller that looks at each value on its way.

    `begin`, then `block` for each layer in turn, then `end`. Every value is handed to a visit as it
    is computed, and what the visit returns is what the pass goes on with.
    """

    def __init__(self, model: torch.nn.Module | Mapping[str, Tensor], config: Any) -> None:
        supported(config)
        self.weights = Weights(dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else model)
        self.config = config

    def begin(
        self,
        visit: Visit,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past: int = 0,
    ) -> Tensor:
        """``h0 = E[token] * sqrt(d)``, the masks of full and sliding blocks, and the rotary's angles."""
        config = self.config
        ids = visit("input_ids", input_ids)
        if attention_mask is None:
            attention_mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.int64, device=ids.device)
        mask = visit("attention_mask", attention_mask)
        if position_ids is None:
            position_ids = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        self.rotation = rotary(config, position_ids)
        self.full = allowed(mask, ids.shape[1], None)
        self.sliding = allowed(mask, ids.shape[1], config.sliding_window)
        h = visit("token_embeddings", self.weights["model.embed_tokens.weight"][ids])
        return h * config.hidden_size**0.5 if config.mup_enabled else h

    def block(
        self, layer: int, visit: Visit, h: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Block ``layer`` on the stream ``h``: the stream it leaves, and its keys and values of all tokens so far."""
        w, config, sliding = self.weights.at(f"model.layers.{layer}"), self.config, self.slides(layer)
        eps = config.rms_norm_eps
        h = visit("layer_input", h)
        x = visit("attention_norm_output", norm(h, w["input_layernorm.weight"], eps))
        mask, rotation = (self.sliding, self.rotation) if sliding else (self.full, None)
        x, kept = attention(w.at("self_attn"), config, visit, x, mask, rotation, past)
        added = visit("self_attn.attention_output", norm(x, w["post_attention_layernorm.weight"], eps))
        m = visit("layer_mid", h + added)
        x = visit("mlp_norm_output", norm(m, w["pre_mlp_layernorm.weight"], eps))
        x = visit("mlp_input", x)
        if layer < config.num_dense_layers:
            x = swiglu(w.at("mlp"), x, visit, "mlp.")
        else:
            x = mixture(w.at("mlp"), config, visit, x)
        added = visit("mlp.mlp_output", norm(x, w["post_mlp_layernorm.weight"], eps))
        return visit("layer_output", m + added), kept

    def end(self, visit: Visit, h: Tensor) -> Tensor:
        """``logits = W_head N(h)``, the head being the embedding where the two are tied."""
        config, w = self.config, self.weights
        h = visit("final_norm_output", norm(h, w["model.norm.weight"], config.rms_norm_eps))
        tied = config.tie_word_embeddings
        logits = linear(h, w["model.embed_tokens.weight" if tied else "lm_head.weight"])
        return visit("logits", visit("lm_head_output", logits))

    def slides(self, layer: int) -> bool:
        """Whether block ``layer`` attends within the window, and so has the rotary."""
        return self.config.layer_types[layer] == "sliding_attention"


def supported(config: Any) -> None:
    """Raise `NotImplementedError` unless the config is one that these equations are of."""
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope != "default":
        raise NotImplementedError(f"the reference has the default rotary, not rope_type={rope!r}")
    if config.hidden_act != "silu":
        raise NotImplementedError(f"the reference has the silu activation, not hidden_act={config.hidden_act!r}")


# -- parts -----------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``w * x / sqrt(mean(x^2) + eps)``, in float32, cast back last."""
    y = x.float()
    scale = (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * (y * scale)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``W x + b``."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rotary(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine and sine of every position's angles, ``[batch 1 seq head_dim]``: frequency ``theta^(-2i/d)``, each twice."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -exponent
    angles = einsum(positions.float(), frequencies, "batch seq, half -> batch seq half")
    angles = repeat(angles, "batch seq half -> batch 1 seq (two half)", two=2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head: ``(a, b) -> (a cos - b sin, b cos + a sin)``."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = rearrange(x, "... (two half) -> two ... half", two=2)
    return x * cos + torch.cat([-b, a], -1) * sin


def allowed(mask: Tensor, seq: int, window: int | None) -> Tensor:
    """Who may look at whom, ``[batch 1 query key]``: real tokens, not ahead, at most ``window`` back with itself."""
    keys = torch.arange(mask.shape[1], device=mask.device)
    queries = keys[-seq:]
    back = rearrange(queries, "query -> query 1") - keys
    near = (back >= 0) if window is None else (back >= 0) & (back < window)
    return near & rearrange(mask.bool(), "batch key -> batch 1 1 key")


def attention(
    w: Weights,
    config: Any,
    visit: Visit,
    x: Tensor,
    mask: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    past: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Causal attention with normed queries and keys, grouped heads, and a sigmoid gate on every head's channels."""

    def heads(name: str) -> Tensor:
        y = linear(x, w[f"{name}.weight"], w(f"{name}.bias"))
        return rearrange(y, "batch seq (head d) -> batch head seq d", d=config.head_dim)

    q = norm(heads("q_proj"), w["q_norm.weight"], config.rms_norm_eps)
    k = norm(heads("k_proj"), w["k_norm.weight"], config.rms_norm_eps)
    v = heads("v_proj")
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    kept = (k, v)
    q = visit("self_attn.attention_queries", q)
    k = visit("self_attn.attention_keys", k)
    v = visit("self_attn.attention_values", v)

    # Query head h reads key/value head h // group.
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = (repeat(y, "batch head key d -> batch (head group) key d", group=group) for y in (k, v))
    scores = einsum(q, k, "batch head query d, batch head key d -> batch head query key") * config.head_dim**-0.5
    hidden = torch.zeros_like(scores).masked_fill(~mask, torch.finfo(scores.dtype).min)
    scores = visit("self_attn.attention_scores", scores + hidden)
    pattern = visit("self_attn.attention_probabilities", scores.float().softmax(-1).to(q.dtype))
    mixed = einsum(pattern, v, "batch head query key, batch head key d -> batch query head d")
    mixed = visit("self_attn.attention_head_outputs", mixed)

    gate = rearrange(linear(x, w["gate_proj.weight"]), "batch seq (head d) -> batch seq head d", d=config.head_dim)
    gated = visit("self_attn.attention_premix", mixed * gate.sigmoid())
    gated = rearrange(gated, "batch seq head d -> batch seq (head d)")
    return linear(gated, w["o_proj.weight"], w("o_proj.bias")), kept


def swiglu(w: Weights, x: Tensor, visit: Visit, prefix: str) -> Tensor:
    """``W_down(silu(W_gate x) * W_up x)``."""
    activation = visit(f"{prefix}mlp_activation", torch.nn.functional.silu(linear(x, w["gate_proj.weight"])))
    neurons = visit(f"{prefix}mlp_neurons", activation * linear(x, w["up_proj.weight"]))
    return linear(neurons, w["down_proj.weight"])


def mixture(w: Weights, config: Any, visit: Visit, x: Tensor) -> Tensor:
    """``shared(x) + sum over the chosen of w_e expert_e(x)``."""
    logits = visit("mlp.router_logits", linear(x, w["router.gate.weight"]))
    chosen, weights = route(logits, w["expert_bias"], config)
    shared = visit("mlp.shared_expert_output", swiglu(w.at("shared_experts"), x, visit, "mlp.shared_experts."))
    weights = visit("mlp.expert_weights", weights)
    chosen = visit("mlp.expert_indices", chosen)
    slots = visit("mlp.expert_outputs", experts(w.at("experts"), x, chosen, weights))
    routed = visit("mlp.routed_output", reduce(slots, "batch seq slot d -> batch seq d", "sum").to(x.dtype))
    return shared + routed


def route(logits: Tensor, bias: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Choose the top of ``sigmoid(logits) + bias``; weigh by ``sigmoid(logits)``, normed to sum to ``route_scale``."""
    scores = logits.float().sigmoid()
    chosen = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, chosen)
    total = reduce(weights, "batch seq slot -> batch seq 1", "sum") + 1e-20
    return chosen, weights / total * config.route_scale


def experts(w: Weights, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each slot's ``w_e expert_e(x)``, ``[batch seq slot hidden]``, an expert's matrices at a time."""
    parts, places = [], []
    for expert in chosen.unique():
        place = torch.nonzero(chosen == expert, as_tuple=True)
        xs, weight = x[place[0], place[1]], rearrange(weights[place], "slot -> slot 1")
        both = linear(xs, w["gate_up_proj"][expert])
        gate, up = rearrange(both, "slot (two i) -> two slot i", two=2)
        parts.append(linear(torch.nn.functional.silu(gate) * up, w["down_proj"][expert]) * weight)
        places.append(place)
    slots = torch.zeros(*chosen.shape, x.shape[-1], dtype=parts[0].dtype, device=x.device)
    where = tuple(torch.cat(axis) for axis in zip(*places, strict=True))
    return slots.index_put(where, torch.cat(parts))
