"""What the package raises, each saying the request, what was found, and what to do.

None but `NoSuchName` is an `AttributeError`: Python takes one raised by a property for "no such
attribute" and goes on to blame another name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "LoadError",
    "NnterpError",
    "NoSuchName",
    "OutOfOrder",
    "OutsideTrace",
    "ReadOnly",
    "Unavailable",
    "UnsupportedModel",
    "WriteError",
]


class NnterpError(Exception):
    """The base of every error of this package."""


class LoadError(NnterpError):
    """A model could not be built from what was passed: no config there, an unknown keyword, no tokenizer."""


class UnsupportedModel(LoadError):
    """The config is of a model type that no registered family describes."""


class ConfigError(LoadError):
    """The config is of a supported family and contradicts itself."""


class Unavailable(NnterpError):
    """A value does not exist on this block, or not under this implementation."""


class OutsideTrace(NnterpError):
    """A value was read or written where no forward pass is running."""


class OutOfOrder(NnterpError):
    """A value was asked for after the forward pass had gone by it."""


class WriteError(NnterpError):
    """What was assigned does not fit the value: not a tensor, or of another shape, kind or device."""


class ReadOnly(WriteError):
    """The value is derived from another one and can't be assigned."""


class NoSuchName(AttributeError):
    """A host has no value, module or attribute of this name; the message offers the near ones.

    An `AttributeError`, so that `hasattr`, `copy` and `pickle` work. The near names are
    looked for when the message is read, not when the lookup fails.
    """

    def __init__(self, host: str, name: str, known: Iterable[str], verb: str = "has no") -> None:
        super().__init__(f"{host} {verb} {name!r}", name=name)
        self._known = known

    def __str__(self) -> str:
        return f"{self.args[0]}{near(self.name or '', self._known)}"


def near(name: str, known: Iterable[str]) -> str:
    """``"; near names: a, b"``, or nothing where no name is near."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return f"; near names: {', '.join(found)}" if found else ""
