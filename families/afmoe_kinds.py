"""AFMoE's kinds of block, as the config tells them: what the table and the drawing both go by."""

from __future__ import annotations

from typing import Any

__all__ = ["NO_DENSE", "NO_ROUTER", "is_dense", "slides"]

NO_DENSE = "a mixture has no dense MLP"
NO_ROUTER = "a dense block has no router and no experts"


def is_dense(config: Any, layer: int) -> bool:
    """Whether block ``layer`` has a dense MLP."""
    return layer < config.num_dense_layers


def slides(config: Any, layer: int) -> bool:
    """Whether block ``layer`` attends within the sliding window, and so has the rotary."""
    return config.layer_types[layer] == "sliding_attention"
