"""Interpretability tracing of AFMoE models (Arcee's Trinity) by name, on nnsight."""

from __future__ import annotations

from . import families
from .errors import (
    ConfigError,
    LoadError,
    NnterpError,
    NoSuchName,
    OutOfOrder,
    OutsideTrace,
    ReadOnly,
    Unavailable,
    UnsupportedModel,
    WriteError,
)
from .model import StandardizedTransformer
from .support import Support

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "LoadError",
    "NnterpError",
    "NoSuchName",
    "OutOfOrder",
    "OutsideTrace",
    "ReadOnly",
    "StandardizedTransformer",
    "Support",
    "Unavailable",
    "UnsupportedModel",
    "WriteError",
    "families",
]
