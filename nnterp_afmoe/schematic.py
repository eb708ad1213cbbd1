"""How a family is drawn and told: the parts of a block as data flows, what each config field does, and notes.

A family declares them beside its table and repeats nothing of it: a part that is a value gives the
value's name alone, and its layout, words and availability are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .family import Case

__all__ = ["Note", "Part", "Schematic"]


@dataclass(frozen=True)
class Part:
    """A value, or something that is done to the data, in the drawing of a block or of the stream.

    Attributes:
        name: A value's dotted name, or the part's own.
        at: Where it stands: column and row.
        after: The parts whose data flows into it.
        label: What is written on it; of a value, the last part of its name.
        module: The module that does it, from the block; empty where it is arithmetic of the forward.
        does: What it does, in a sentence; of a value, what the table says.
        missing: Why a block lacks it, or ``None``; of a value, what `support` says.
        bypassed: Where a block lacks it the data goes on as it is.
        around: Further parts whose data flows into it, each by the column along which its wire goes around.
    """

    name: str
    at: tuple[float, float]
    after: tuple[str, ...] = ()
    label: str = ""
    module: str = ""
    does: str = ""
    missing: Callable[[Case], str | None] | None = None
    bypassed: bool = False
    around: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Note:
    """A paragraph or two about the model, in our own words; blank lines part the paragraphs."""

    title: str
    text: str


@dataclass(frozen=True)
class Schematic:
    """What a family's page needs beside its table.

    Attributes:
        features: What is particular to a config, a line each: ``(config) -> lines``.
        stream: From tokens to logits, in order.
        blocks: The part of the stream that stands for the blocks.
        block: One block, every value of the table among its parts.
        fields: What each config field does.
        notes: What has to be understood.
    """

    features: Callable[[Any], list[str]]
    stream: tuple[Part, ...]
    blocks: str
    block: tuple[Part, ...]
    fields: Mapping[str, str]
    notes: tuple[Note, ...]
