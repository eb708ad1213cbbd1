"""What several tests share: where a value hangs, how to read them all, how far two tensors are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.testing import byte_tokenizer

Key = str | tuple[int, str]


def place(model: StandardizedTransformer, key: Key) -> tuple[Any, str]:
    """The host of a value and its name there."""
    if isinstance(key, str):
        return model, key
    path, _, name = key[1].rpartition(".")
    block = model.layers[key[0]]
    return (block.get(path) if path else block), name


def read(model: StandardizedTransformer, key: Key) -> torch.Tensor:
    host, name = place(model, key)
    return getattr(host, name)


def assign(model: StandardizedTransformer, key: Key, value: Any) -> None:
    host, name = place(model, key)
    setattr(host, name, value)


def keys(model: StandardizedTransformer) -> list[Key]:
    """Every available value of the model, in the order one trace reads them."""
    found: list[Key] = [name for name in model.order() if name != "input_size"]
    found += [(layer, name) for layer in range(model.num_layers) for name in model.order(layer)]
    return sorted(found, key=lambda key: model.rank(key) if isinstance(key, str) else model.rank(key[1], key[0]))


def read_all(model: StandardizedTransformer, *args: Any, **kwargs: Any) -> dict[Key, torch.Tensor]:
    """Every available value, from one trace."""
    wanted, values = keys(model), {}
    with torch.no_grad(), model.trace(*args, **kwargs):
        for key in wanted:
            values[key] = read(model, key).clone()
    return values


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest value there is."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.dtype.is_floating_point:
        return float((got != want).sum())
    scale = want.abs()[want.abs() < 1e30].max().item()
    # Masked scores are the dtype's least number on both sides, give or take the score itself.
    both = (got.abs() > 1e30) & (want.abs() > 1e30) & (got.sign() == want.sign())
    return ((got - want).masked_fill(both, 0).abs().max() / scale).item()


def trinity(name: str) -> StandardizedTransformer:
    """A checkpoint's config, ``"nano"`` or ``"large"``, wrapped without weights."""
    return StandardizedTransformer(str(Path(__file__).parent / "data" / f"trinity_{name}"), tokenizer=byte_tokenizer())


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, each ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
