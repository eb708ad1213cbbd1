"""Interpretability tracing of AFMoE models (Arcee's Trinity) by name, on nnsight.

The names below are imported when they are first used: `import nnterp_afmoe` alone, which is all
that its pytest plugin does in a session that does not ask for it, loads neither torch nor nnsight.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import families, pictures, testing
    from .check import Failure, Report
    from .collecting import Collected
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
    "Collected",
    "ConfigError",
    "Failure",
    "LoadError",
    "NnterpError",
    "NoSuchName",
    "OutOfOrder",
    "OutsideTrace",
    "ReadOnly",
    "Report",
    "StandardizedTransformer",
    "Support",
    "Unavailable",
    "UnsupportedModel",
    "WriteError",
    "families",
    "pictures",
    "testing",
]

#: The names that are modules.
MODULES = ("families", "pictures", "testing")

#: Where the names that are not errors live.
HOMES = {
    "Collected": "collecting",
    "Failure": "check",
    "Report": "check",
    "StandardizedTransformer": "model",
    "Support": "support",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The model module registers the families, which every other name relies on.
    importlib.import_module(".model", __name__)
    if name in MODULES:
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(f".{HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
