"""The family's encyclopedia page: one file that says what exists in a model, where, and how to reach it.

Everything about a value, its layout, words, place and availability, is the family's table's; the
drawing, the config's fields and the notes are the family's `Schematic`. The file stands alone: no network, the same bytes
for the same config, readable without JavaScript.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .describing import Description, Row, describe, template
from .support import grouped

if TYPE_CHECKING:
    from .family import Case, Family
    from .model import StandardizedTransformer
    from .schematic import Part, Schematic
    from .support import Support

__all__ = ["page", "stale"]

#: The drawing's measures: a column's and a row's distance, a part's size.
COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 176, 46, 160, 30, 12


@dataclass(frozen=True)
class Card:
    """Everything the page says of one value or part.

    Attributes:
        name: The value's dotted name, or the part's.
        label: What is written on it.
        value: Whether it is a value.
        host: What carries the value: ``model``, ``block``, ``self_attn``, ...; of a part, ``stream`` or ``steps``.
        layout: The layout's name and axes.
        sizes: The axes with the lengths the config fixes, by kind of block where they differ.
        does: What it is or does.
        module: The place it is read at, or the module that does it.
        path: How it is reached from ``model``, with ``{layer}`` for the block.
        access: ``"read/write"`` or ``"read"``; empty for a part that is no value.
        note: A caveat.
        loaded: Under which implementations it is there, where that depends on them.
        missing: Why each kind of block lacks it, a reason a kind, empty where it has it.
    """

    name: str
    label: str
    value: bool
    host: str
    layout: str
    sizes: str
    does: str
    module: str
    path: str
    access: str
    note: str
    loaded: str
    missing: tuple[str, ...]


def page(model: StandardizedTransformer) -> str:
    """The page of a model's config, as HTML; nothing is loaded or run.

    Raises:
        NotImplementedError: the family declares no page.
    """
    family = model.family
    schematic = family.schematic
    if schematic is None:
        raise NotImplementedError(f"the {family.name} family declares no page")
    support = model.support()
    described = describe(model, support)
    values = value_cards(described, implementations(family, support))
    cards = {card.name: card for card in [*values, *part_cards(model, schematic)]}
    hosts = ["model", *(host.at or "block" for host in family.hosts)]
    flow = [part.name for part in (*schematic.stream, *schematic.block)]
    return template("page.html").render(
        model=described,
        config=fields(model, schematic),
        schematic=schematic,
        features=schematic.features(model.config),
        cards=cards,
        hosts={host: [cards[name] for name in flow if cards[name].host == host] for host in dict.fromkeys(hosts)},
        block=drawing(schematic.block, cards),
        printed=printed(model),
        layers=[next(kind for kind in described.kinds if layer in kind.layers) for layer in range(model.num_layers)],
        first_with={
            name: next((kind.layers[0] for kind in described.kinds if not card.missing[kind.index]), None)
            for name, card in cards.items()
        },
        style=asset("page.css"),
        script=asset("page.js"),
    )


def stale(model: StandardizedTransformer, path: str | os.PathLike) -> str | None:
    """Why the file is not the page of ``model`` any more; ``None`` where it is."""
    path = Path(path)
    if not path.exists():
        return f"{path} is not there"
    if path.read_text(encoding="utf-8") != page(model):
        return f"{path} is stale: write it again with `nnterp-afmoe page`"
    return None


def asset(name: str) -> str:
    """A file beside the templates."""
    return (files("nnterp_afmoe") / "templates" / name).read_text(encoding="utf-8")


# -- cards ---------------------------------------------------------------------------------


def value_cards(described: Description, depends: dict[str, str]) -> list[Card]:
    """A card for every value of the family's table, and of the model."""
    cards = [value_card([row] * len(described.kinds), row.name, "model") for row in described.root]
    for rows in zip(*(kind.rows for kind in described.kinds), strict=True):
        name = rows[0].name
        host = name.rpartition(".")[0] or "block"
        cards.append(value_card(rows, f"layers[{{layer}}].{name}", host, depends.get(name, "")))
    return cards


def value_card(rows: Sequence[Row], path: str, host: str, loaded: str = "") -> Card:
    """The card of one value, from its row on each kind of block."""
    having = [row for row in rows if not row.missing] or list(rows)
    sized = [row for row in having if any("=" in axis for axis in row.axes)] or having
    return Card(
        name=rows[0].name,
        label=rows[0].name.rpartition(".")[2],
        value=True,
        host=host,
        layout=having[0].layout,
        sizes=" or ".join(dict.fromkeys(" ".join(row.axes) for row in sized)),
        does="; ".join(dict.fromkeys(row.description for row in having)),
        module=" or ".join(dict.fromkeys(row.place for row in having)),
        path=f"model.{path}",
        access=having[0].access,
        note=rows[0].note,
        loaded=loaded,
        missing=tuple(row.missing for row in rows),
    )


def implementations(family: Family, support: Support) -> dict[str, str]:
    """The values that are there under some implementations only, and under which."""
    found = {}
    for keyword in ("attn_implementation", "experts_implementation"):
        groups = grouped(support, keyword, getattr(support, keyword))
        known = getattr(family, f"{keyword}s")()
        for value in support:
            having = {name for names, answer in groups if answer.anywhere(value) for name in names}
            if 0 < len(having) < len(known):
                listed = " or ".join(repr(name) for name in known if name in having)
                found[value] = f"there under {keyword}={listed}"
    return found


def part_cards(model: StandardizedTransformer, schematic: Schematic) -> list[Card]:
    """A card for every part of the drawings that is not a value."""
    family, config = model.family, model.config
    cases = [family.case(config, layers[0]) for layers in family.kinds(config).values()]
    return [
        Card(
            name=part.name,
            label=part.label,
            value=False,
            host=host,
            layout="",
            sizes="",
            does=part.does,
            module=part.module or "the forward itself",
            path=f"model.{before}{part.module}" if part.module else "",
            access="",
            note="",
            loaded="",
            missing=tuple(reason(part.missing, case) for case in cases),
        )
        for parts, before, host in ((schematic.stream, "", "stream"), (schematic.block, "layers[{layer}].", "steps"))
        for part in parts
        if part.label
    ]


def reason(missing: Callable[[Case], str | None] | None, case: Case) -> str:
    """Why a part is missing in a case, or nothing."""
    return (missing(case) if missing else None) or ""


# -- the drawing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A part with its place on the page."""

    part: Part
    card: Card
    x: float
    y: float


@dataclass(frozen=True)
class Drawing:
    """Boxes, the paths between them, and the size of it all.

    A wire is its source, its target, its path, and the parts whose absence cuts it.
    """

    boxes: tuple[Box, ...]
    wires: tuple[tuple[str, str, str, tuple[str, ...]], ...]
    width: float
    height: float
    box: tuple[int, int]


def drawing(parts: tuple[Part, ...], cards: dict[str, Card]) -> Drawing:
    """Where each part stands, and a path along each flow of data."""
    boxes = {
        part.name: Box(part, cards[part.name], MARGIN + COLUMN * part.at[0], MARGIN + ROW * part.at[1])
        for part in parts
    }
    wires = []
    for part in parts:
        end = boxes[part.name]
        for source, lane in (*((source, None) for source in part.after), *part.around):
            start = boxes[source]
            # A value that can't be read is still computed; only a step that is not taken cuts the flow.
            cuts = tuple(box.part.name for box in (start, end) if not box.card.value and not box.part.bypassed)
            wires.append((source, part.name, path(start, end, lane), cuts))
    width = max(box.x for box in boxes.values()) + WIDTH + MARGIN
    height = max(box.y for box in boxes.values()) + HEIGHT + MARGIN
    return Drawing(tuple(boxes.values()), tuple(wires), width, height, (WIDTH, HEIGHT))


def path(start: Box, end: Box, lane: float | None) -> str:
    """From one box to the next: level where they stand side by side, else down, across, and down, by a lane if one is given."""
    x0, x1 = start.x + WIDTH / 2, end.x + WIDTH / 2
    if lane is not None:
        turn = (ROW - HEIGHT) / 2
        first, last = start.y + HEIGHT + turn, end.y - turn
        return f"M{x0:g} {start.y + HEIGHT:g}V{first:g}H{MARGIN + COLUMN * lane:g}V{last:g}H{x1:g}V{end.y:g}"
    if start.y == end.y:
        edge = start.x + WIDTH if x1 > x0 else start.x
        return f"M{edge:g} {start.y + HEIGHT / 2:g}H{end.x if x1 > x0 else end.x + WIDTH:g}"
    top, bottom = start.y + HEIGHT, end.y
    if x0 == x1:
        return f"M{x0:g} {top:g}V{bottom:g}"
    turn = bottom - (ROW - HEIGHT) / 2
    return f"M{x0:g} {top:g}V{turn:g}H{x1:g}V{bottom:g}"


# -- the rest ------------------------------------------------------------------------------


def fields(model: StandardizedTransformer, schematic: Schematic) -> list[tuple[str, str, str]]:
    """Each config field that the family has words for: its name, its value here, what it does."""
    return [(name, shown(getattr(model.config, name)), does) for name, does in schematic.fields.items()]


def shown(value: Any) -> str:
    """A field's value; of a list with an entry a block, how many there are of each."""
    if isinstance(value, list) and len(value) > len(set(value)):
        return ", ".join(f"{count} \u00d7 {entry}" for entry, count in Counter(value).items())
    return str(value)


def printed(model: StandardizedTransformer) -> list[tuple[str, str, str]]:
    """The printout: each line's indentation, the rest of it, and the value that it shows, or nothing."""
    values = [*type(model).values().values(), *(v for host in model.family.hosts for v in host.values().values())]
    shown, lines, stack = {str(value) for value in values}, [], []
    for line in str(model).split("\n"):
        text = line.lstrip()
        indent = (len(line) - len(text)) // 2
        match = re.match(r"\(([\w-]+)\)", text)
        stack[indent - 1 :] = [match[1] if match else ""]
        value = ""
        if text in shown:
            inside = stack[:indent]
            value = ".".join(inside[2:] if inside[0] == "layers" else inside)
        lines.append((line[: len(line) - len(text)], text, value))
    return lines
