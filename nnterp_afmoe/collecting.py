"""`StandardizedTransformer.collect`: any values, named in any order, from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import Unavailable, near

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, repr=False)
class Collected(Mapping[str, Any]):
    """What `collect` read: a value's name to its tensor, or for a value of the blocks to ``{layer: tensor}``.

    Attributes:
        values_by_name: The tensors, by name.
        dims: Each value's axis names, by name.
        input_ids: ``[batch seq]`` token ids; ``None`` where the call was made with embeddings.
        mask: ``[batch seq]``, true on real tokens, false on padding.
        tokens: Each row's token strings, padding included; ``None`` without ids or a tokenizer.
    """

    values_by_name: Mapping[str, Any]
    dims: Mapping[str, tuple[str, ...]]
    input_ids: torch.Tensor | None
    mask: torch.Tensor | None
    tokens: list[list[str]] | None

    def __getitem__(self, name: str) -> Any:
        if name not in self.values_by_name:
            raise KeyError(f"{name!r} was not collected{near(name, self.values_by_name)}")
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __repr__(self) -> str:
        lines = []
        for name, found in self.items():
            first = next(iter(found.values()), None) if isinstance(found, dict) else found
            where = f" on layers {', '.join(map(str, found))}" if isinstance(found, dict) else ""
            if isinstance(first, torch.Tensor):
                sizes = " ".join(f"{axis}={size}" for axis, size in zip(self.dims[name], first.shape, strict=True))
                lines.append(f"  {name}: [{sizes}]{where}")
            else:
                lines.append(f"  {name}: {first if first is not None else 'on no layer'}")
        return "\n".join(["Collected(", *lines, ")"])


def collect(
    model: StandardizedTransformer,
    prompt: Any,
    values: str | Sequence[str],
    layers: int | Sequence[int] | None = None,
) -> Collected:
    """See `StandardizedTransformer.collect`."""
    if model.interleaver.interleaving:
        raise RuntimeError("collect runs a pass of its own: call it outside the trace")
    if not model._batch_size(prompt):
        raise ValueError("collect needs a prompt: this one is empty")
    names = [values] if isinstance(values, str) else list(values)
    wanted = sorted(requests(model, names, layers), key=lambda request: request[0])
    root = type(model).values()
    # An edit that the model carries may stand after the last value wanted, and has to find its place.
    stop = bool(wanted) and wanted[-1][0] < model.rank("final_norm_output") and not model._edits
    found: dict[str, Any] = {name: None if name in root else {} for name in names}
    inputs: dict[str, Any] = {}
    with torch.no_grad(), model.trace(prompt) as tracer:
        inputs |= {name: read_input(model, name) for name in ("input_ids", "attention_mask")}
        if inputs["input_ids"] is not None and not inputs["input_ids"].shape[-1]:
            raise ValueError("collect needs a prompt: this one has no tokens")
        for _, layer, name in wanted:
            if layer is None:
                found[name] = getattr(model, name)
            else:
                found[name][layer] = model.layers[layer].get(name)
        if stop:
            tracer.stop()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    tokens: Any = None
    if ids is not None and model.tokenizer is not None:
        tokens = [model.tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
    return Collected(
        {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in found.items()},
        {name: dims(model, name) for name in names},
        ids,
        mask.bool() if mask is not None else None,
        tokens,
    )


def read_input(model: StandardizedTransformer, name: str) -> torch.Tensor | None:
    """One of the call's inputs, or ``None`` where the call was made without it."""
    try:
        return getattr(model, name)
    except Unavailable:
        return None


def requests(
    model: StandardizedTransformer, names: Sequence[str], layers: int | Sequence[int] | None
) -> list[tuple[tuple[float, ...], int | None, str]]:
    """Every single value asked for, with its rank: on the layers asked for, or on all that have it."""
    every = range(model.num_layers)
    chosen = None if layers is None else model._indices(layers)
    root = type(model).values()
    answers: Mapping[str, dict[int, str] | None] = model.support() if set(names) - set(root) else {}
    found: list[tuple[tuple[float, ...], int | None, str]] = []
    for name in names:
        if name in root:
            found.append((model.rank(name), None, name))
            continue
        if name not in answers:
            raise KeyError(f"{name!r} is not a value of the model or its blocks{near(name, [*answers, *root])}")
        missing = answers[name] or {}
        if chosen is None and len(missing) == len(every):
            raise Unavailable(f"{name} is unavailable on every layer: {missing[0]}")
        for layer in chosen or ():
            if layer in missing:
                raise Unavailable(f"layers[{layer}].{name} is unavailable: {missing[layer]}")
        having = chosen if chosen is not None else [i for i in every if i not in missing]
        found += [(model.rank(name, layer), layer, name) for layer in having]
    return found


def dims(model: StandardizedTransformer, name: str) -> tuple[str, ...]:
    """A value's axis names."""
    root = type(model).values()
    if name in root:
        layout = root[name].layout
    else:
        layout = next(
            host.values()[n] for host in model.family.hosts for n in host.values() if host.dotted(n) == name
        ).layout
    return layout.dims if layout is not None else ()
