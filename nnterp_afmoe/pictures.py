"""Pictures of one run: routing, expert load, why an expert was chosen, attention with its gate, the logit lens.

Each function runs the prompt once, without autograd, and returns a `Picture`: a notebook shows it, ``.save`` writes
it, ``.table`` has its numbers. `difference` subtracts two of them. A model with edits (``model.edit()``) is pictured
with them. What is too large to read is cut, and the picture says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange

from .drawing import Bars, Grid, Label, Picture, Scale, difference
from .indexing import counted

if TYPE_CHECKING:
    from .collecting import Collected
    from .model import StandardizedTransformer

__all__ = [
    "Picture",
    "attention",
    "difference",
    "expert_choice",
    "expert_load",
    "logit_lens",
    "routing",
]

#: The most that is drawn of each axis.
MOST_TOKENS, MOST_EXPERTS, MOST_BARS, MOST_HEADS, MOST_LAYERS = 48, 64, 32, 16, 64


def routing(model: StandardizedTransformer, prompt: Any, layers: int | Sequence[int] | None = None) -> Picture:
    """Which experts each token goes through, by layer: in each cell the one that weighs most, as dark as it weighs.

    Args:
        model: A model with mixtures.
        prompt: One prompt: a string, or ``[1 seq]`` token ids.
        layers: Mixture blocks, negative from the end; all by default.
    """
    names = ["mlp.expert_weights", "mlp.expert_indices"]
    found = one_prompt(model, prompt, names, layers)
    weights, indices = found[names[0]], found[names[1]]
    kept, notes = cut(list(weights), MOST_LAYERS, "layers")
    columns, more = token_labels(model, found)
    order = {layer: weights[layer][0].argsort(dim=-1, descending=True) for layer in kept}
    experts = {layer: indices[layer][0].gather(-1, order[layer])[: len(columns)].tolist() for layer in order}
    sorted_weights = {
        layer: weights[layer][0].float().gather(-1, order[layer])[: len(columns)].tolist() for layer in order
    }
    scale = Scale(0.0, float(model.config.route_scale), "weight of the first expert")
    grid = Grid(
        [[token[0] for token in sorted_weights[layer]] for layer in order],
        [Label(layer) for layer in order],
        columns,
        ("layer", "token"),
        scale,
        texts=[[str(token[0]) for token in experts[layer]] for layer in order],
        more={"experts": list(experts.values()), "weights": [rounded(sorted_weights[layer]) for layer in order]},
        cell=(max(24, 10 + 6 * len(str(model.num_experts - 1))), 18),
        incomparable="the first expert of one run may be another in the other; subtract expert_load",
    )
    return Picture("Routing, by token and layer: the expert that weighs most", (grid,), (*notes, *more))


def expert_load(model: StandardizedTransformer, prompts: Any, layers: int | Sequence[int] | None = None) -> Picture:
    """How many of the choices fall on each expert, against an even load, which is 0: 1 is twice as many.

    Args:
        model: A model with mixtures.
        prompts: A prompt or several; padding is not counted.
        layers: Mixture blocks, negative from the end; all by default.
    """
    found = model.collect(prompts, ["mlp.expert_indices"], layers)
    refuse_no_layer(found["mlp.expert_indices"], layers)
    kept, notes = cut(list(found["mlp.expert_indices"]), MOST_LAYERS, "layers")
    loads = {}
    for layer in kept:
        chosen = found["mlp.expert_indices"][layer]
        real = chosen if found.mask is None else chosen[found.mask]
        counts = torch.bincount(real.flatten(), minlength=model.num_experts).float()
        loads[layer] = counts / counts.mean()
    experts, more = cut(list(range(model.num_experts)), MOST_EXPERTS, "experts")
    values = [[loads[layer][expert].item() - 1 for expert in experts] for layer in loads]
    most = max(1.0, *(number for row in values for number in row))
    small = len(experts) <= 16
    grid = Grid(
        values,
        [Label(layer) for layer in loads],
        [Label(expert) for expert in experts],
        ("layer", "expert"),
        Scale(-most, most, "load over even, less 1"),
        texts=[[f"{number:+.2f}" for number in row] for row in values] if small else None,
        cell=(36, 18) if small else (15, 16),
    )
    return Picture("Expert load against an even one", (grid,), (*notes, *more))


def expert_choice(model: StandardizedTransformer, prompt: Any, layer: int, token: int = -1) -> Picture:
    """Why these experts: a token's scores, what the bias makes of them, and the cut; and the tokens it changed.

    Args:
        model: A model with mixtures.
        prompt: One prompt: a string, or ``[1 seq]`` token ids.
        layer: A mixture block.
        token: The position whose scores are drawn; negative counts from the end.
    """
    layer = one_layer(model, layer)
    found = one_prompt(model, prompt, ["mlp.router_logits", "mlp.expert_indices", "mlp.expert_weights"], layer)
    scores = found["mlp.router_logits"][layer][0].float().sigmoid()
    router: Any = model.layers[layer].mlp._module
    bias = router.expert_bias.float()
    indices, weights = found["mlp.expert_indices"][layer][0], found["mlp.expert_weights"][layer][0]
    texts = decoded(model, found)
    (position,) = chosen_of(token, len(scores), "token", "the prompt", "tokens")
    biased = scores + bias
    ranked, order = biased[position].sort(descending=True)
    experts, notes = cut(order.tolist(), MOST_BARS, "experts by score + bias")
    taken = dict(zip(indices[position].tolist(), weights[position].tolist(), strict=True))
    between = (ranked[model.top_k - 1] + ranked[min(model.top_k, len(ranked) - 1)]).item() / 2
    bars = Bars(
        [scores[position, expert].item() for expert in experts],
        [biased[position, expert].item() for expert in experts],
        ("score", "score + bias"),
        [Label(expert) for expert in experts],
        "expert",
        [expert in taken for expert in experts],
        between,
        title=f"Token {position}, {texts[position]!r}: experts by score + bias",
        panel={"layer": layer, "token": position},
        more={"bias": bias[experts].tolist(), "weight": [taken.get(expert, 0.0) for expert in experts]},
    )
    with_bias, without = (sorted_choice(each, model.top_k) for each in (biased, scores))
    changes = [
        (at, sorted(set(now) - set(then)), sorted(set(then) - set(now)))
        for at, (now, then) in enumerate(zip(with_bias, without, strict=True))
        if now != then
    ]
    notes += (f"The bias changed the choice of {len(changes)} of {len(scores)} tokens.",)
    edited = sum(sorted(row) != now for row, now in zip(indices.tolist(), with_bias, strict=True))
    if edited:
        notes += (f"{edited} tokens go through other experts than score + bias says: this run was edited.",)
    changes, more = cut(changes, MOST_TOKENS, "tokens whose choice changed")
    moved = [[came for _, came, _ in changes], [gone for _, _, gone in changes]]
    said = [[" ".join(map(str, experts)) for experts in row] for row in moved]
    grid = Grid(
        [[float(len(experts)) for experts in row] for row in moved],
        [Label("in by the bias"), Label("out by the bias")],
        [Label(at, texts[at]) for at, _, _ in changes],
        ("change", "token"),
        Scale(0.0, float(model.top_k), "experts changed"),
        title="The tokens whose choice the bias changed",
        panel={"layer": layer},
        texts=said,
        more={"experts": moved},
        cell=(12 + 6 * max((len(words) for row in said for words in row), default=1), 18),
    )
    panels = (bars, grid) if changes else (bars,)
    return Picture(f"Why these experts: layer {layer}", panels, (*notes, *more))


def attention(model: StandardizedTransformer, prompt: Any, layer: int, heads: Any = None) -> Picture:
    """A block's patterns, head by head, each beside the strength of its gate; what a window hides is hatched.

    The heads that share keys and values stand in a row. A gate's strength is how much of the head's
    output it lets through at the token that asks, ``|attention_premix| / |attention_head_outputs|``.

    Args:
        model: A model under ``attn_implementation="eager"``.
        prompt: One prompt: a string, or ``[1 seq]`` token ids.
        layer: The block.
        heads: A head, or several, or a slice; all by default.

    Raises:
        Unavailable: another attention implementation keeps the pattern inside its kernel.
    """
    layer = one_layer(model, layer)
    names = [f"self_attn.attention_{name}" for name in ("probabilities", "head_outputs", "premix")]
    found = one_prompt(model, prompt, names, layer)
    pattern, mixed, gated = (found[name][layer][0].float() for name in names)
    strength = rearrange(gated.norm(dim=-1) / mixed.norm(dim=-1), "seq head -> head seq")
    wanted = chosen_of(slice(None) if heads is None else heads, model.num_heads, "heads", "the model", "heads")
    kept, notes = cut(wanted, MOST_HEADS, "heads")
    labels, more = token_labels(model, found)
    size = len(labels)
    window = model.config.sliding_window if "sliding" in model.family.traits(model.config, layer) else None
    position = torch.arange(size)
    behind = rearrange(position, "query -> query 1") - position
    out = (behind < 0) | (behind >= window) if window is not None else behind < 0
    group = model.num_heads // model.num_kv_heads
    panels = [
        Grid(
            pattern[head, :size, :size].tolist(),
            labels,
            labels,
            ("query", "key"),
            Scale(0.0, 1.0, "attention"),
            title=f"head {head} (KV {head // group})",
            panel={"layer": layer, "head": head, "kv_head": head // group},
            shaded=out.tolist(),
            beside=strength[head, :size].tolist(),
            beside_name="gate",
            sparse=0.005,
            cell=(11, 11) if size > 12 else (20, 16),
        )
        for head in kept
    ]
    reach = f"sliding, {window} tokens with its own, rotary" if window is not None else "full, no rotary"
    title = f"Attention of layer {layer} ({reach}){': a row a KV head' if heads is None else ''}"
    hatched = (
        "Hatched: what the causal mask or the window hides. Bars: how much of the head's output its gate lets through."
    )
    return Picture(title, tuple(panels), (hatched, *notes, *more), across=group if heads is None else 3)


def logit_lens(
    model: StandardizedTransformer,
    prompt: Any,
    layers: int | Sequence[int] | None = None,
    token: str | int | None = None,
) -> Picture:
    """What each block's stream says the next token is, through the final norm and the head.

    Args:
        model: The model.
        prompt: One prompt: a string, or ``[1 seq]`` token ids.
        layers: Blocks, negative from the end; all by default.
        token: Draw this token's probability, a string of one token or an id, in place of the likeliest's.

    Raises:
        ValueError: ``token`` is not one token.
    """
    wanted = None if token is None else token_id(model, token)
    found = one_prompt(model, prompt, ["layer_output"], layers)
    kept, notes = cut(list(found["layer_output"]), MOST_LAYERS, "layers")
    columns, more = token_labels(model, found)
    numbers, guesses = [], []
    for layer in kept:
        with torch.no_grad():
            stream = found["layer_output"][layer][0, : len(columns)]
            likely = model.project_on_vocab(stream).float().softmax(-1)
        numbers.append((likely.max(-1).values if wanted is None else likely[:, wanted]).tolist())
        guesses.append([token_name(model, index) for index in likely.argmax(-1).tolist()])
    longest = min(8, max(len(guess) for row in guesses for guess in row))
    of = "the likeliest token" if wanted is None else repr(token_text(model, wanted))
    grid = Grid(
        numbers,
        [Label(layer) for layer in kept],
        columns,
        ("layer", "token"),
        Scale(0.0, 1.0, "probability"),
        panel={"of": of},
        texts=[[guess[:8] for guess in row] for row in guesses] if wanted is None else None,
        more={"likeliest": guesses},
        cell=(10 + 5 * longest, 18),
        incomparable="the likeliest token of one run may be another in the other; name a token"
        if wanted is None
        else "",
    )
    return Picture(f"The logit lens: {of}, after each block", (grid,), (*notes, *more))


# -- what they share -----------------------------------------------------------------------


def one_prompt(model: StandardizedTransformer, prompt: Any, names: list[str], layers: Any) -> Collected:
    """The values of one prompt's run; raises `ValueError` for several, for a padded one, and for no layers."""
    found = model.collect(prompt, names, layers)
    refuse_no_layer(found[names[0]], layers)
    rows = len(next(iter(found[names[0]].values())))
    if rows != 1:
        raise ValueError(f"a picture is of one prompt, and this is {rows}: draw them one by one")
    if found.mask is not None and not found.mask.all():
        raise ValueError("a picture is of a prompt without padding: leave out the tokens that the mask hides")
    return found


def refuse_no_layer(read: dict, layers: Any) -> None:
    """Raise `ValueError` where no layer was read."""
    if not read:
        raise ValueError(f"layers={layers!r} names no layer to draw")


def one_layer(model: StandardizedTransformer, layer: Any) -> int:
    """A layer's index; raises `TypeError` for anything but one."""
    if not isinstance(layer, int):
        raise TypeError(f"layer={layer!r}: this picture is of one layer, given by its index")
    return model._index(layer)


def chosen_of(wanted: Any, length: int, name: str, whose: str, what: str) -> list[int]:
    """One index, several, or a slice, each from 0; raises `IndexError` or `TypeError` for what is none."""
    try:
        indices, wrong = counted(wanted, length)
    except TypeError:
        raise TypeError(f"{name}={wanted!r}: give an index, counted from 0 or back from the end") from None
    if wrong or not indices:
        raise IndexError(f"{name}={wanted!r}: {whose} has {length} {what}, 0 to {length - 1}")
    return indices


def sorted_choice(scores: torch.Tensor, top_k: int) -> list[list[int]]:
    """The experts of the largest scores, by token, in order of their numbers."""
    return scores.topk(top_k).indices.sort(-1).values.tolist()


def token_id(model: StandardizedTransformer, token: Any) -> int:
    """One token's id; raises `TypeError` or `ValueError` for what is not one."""
    if isinstance(token, str):
        if model.tokenizer is None:
            raise ValueError(f"token={token!r}: this model has no tokenizer to read it with; give an id")
        ids = model.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) == 1:
            return ids[0]
        blank = model.tokenizer(f" {token}", add_special_tokens=False)["input_ids"]
        hint = f"; {f' {token}'!r}, with its blank, is one" if len(blank) == 1 else "; give one"
        raise ValueError(f"token={token!r} is {len(ids)} tokens, {model.tokenizer.convert_ids_to_tokens(ids)}{hint}")
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"token={token!r}: give a string of one token, or an id")
    if not 0 <= token < model.vocab_size:
        raise ValueError(f"token={token}: the vocabulary has {model.vocab_size} tokens, 0 to {model.vocab_size - 1}")
    return token


def token_text(model: StandardizedTransformer, token: int) -> str:
    """A token as it reads, its blanks and all."""
    return str(token) if model.tokenizer is None else str(model.tokenizer.decode([token]))


def token_name(model: StandardizedTransformer, token: int) -> str:
    """A token for a narrow cell: without the blanks around it, what does not print escaped."""
    text = token_text(model, token)
    return text.strip() if text.strip() and text.strip().isprintable() else repr(text)[1:-1]


def decoded(model: StandardizedTransformer, found: Collected) -> list[str]:
    """The one prompt's tokens; its positions where it was given as embeddings."""
    if found.input_ids is None:
        first = next(iter(found.values()))
        return [str(position) for position in range(next(iter(first.values())).shape[1])]
    return [token_name(model, token) for token in found.input_ids[0].tolist()]


def token_labels(model: StandardizedTransformer, found: Collected) -> tuple[list[Label], tuple[str, ...]]:
    """The one prompt's tokens as labels, cut where they are too many."""
    texts = decoded(model, found)
    kept, notes = cut(list(enumerate(texts)), MOST_TOKENS, "tokens")
    return [Label(position, text[:14]) for position, text in kept], notes


def cut(entries: list, most: int, what: str) -> tuple[list, tuple[str, ...]]:
    """The first entries, as many as can be read, and what has to be said where that is not all."""
    if len(entries) <= most:
        return entries, ()
    return entries[:most], (f"Cut: the first {most} of {len(entries)} {what} are drawn and in the table.",)


def rounded(rows: list[list[float]]) -> list[list[float]]:
    """To the digits that a tooltip has room for."""
    return [[round(number, 3) for number in row] for row in rows]
