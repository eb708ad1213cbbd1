"""Numbers drawn as SVG: grids and bars, each with its labels, its scale and its numbers as a table.

A `Picture` is a handful of panels. Nothing in one is told by colour alone: each cell carries its
numbers as a tooltip, small grids print them, and `Picture.table` has them all. Text outside of cells takes the
colour of its surroundings, so that a picture reads in a light notebook and in a dark one.
"""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["Bars", "Grid", "Label", "Picture", "Scale", "difference"]

#: The scales' colours, light to dark, and from one side over zero to the other.
ONE_SIDED = ((247, 251, 255), (107, 174, 214), (8, 48, 107))
TWO_SIDED = ((127, 59, 8), (247, 247, 247), (5, 48, 97))
LIGHT, DARK = "#ffffff", "#111111"
FONT = "font-family:system-ui,sans-serif;font-size:11px"


@dataclass(frozen=True)
class Label:
    """A row's or a column's: what the table says, and what is drawn."""

    key: Any
    text: str = ""

    def __str__(self) -> str:
        return self.text or str(self.key)


@dataclass(frozen=True)
class Scale:
    """From a number to a colour.

    Attributes:
        low: What the first colour stands for.
        high: What the last one does.
        name: What the numbers are.
    """

    low: float
    high: float
    name: str

    @property
    def centred(self) -> bool:
        """Whether zero is in the middle, where the colour is neither side's."""
        return self.low == -self.high

    def rgb(self, number: float) -> tuple[int, ...]:
        """The colour, as three numbers to 255; what lies outside the scale takes its end's."""
        stops = TWO_SIDED if self.centred else ONE_SIDED
        span = self.high - self.low
        at = min(1.0, max(0.0, (number - self.low) / span if span else 0.5)) * (len(stops) - 1)
        left = min(int(at), len(stops) - 2)
        return tuple(round(a + (b - a) * (at - left)) for a, b in zip(stops[left], stops[left + 1], strict=True))

    def colour(self, number: float) -> str:
        """The colour, as ``#rrggbb``."""
        return "#{:02x}{:02x}{:02x}".format(*self.rgb(number))

    def ink(self, number: float) -> str:
        """Black or white, whichever reads on that colour."""
        parts = [c / 255 for c in self.rgb(number)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return LIGHT if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.18 else DARK


@dataclass(frozen=True)
class Grid:
    """A panel of coloured cells.

    Attributes:
        values: ``rows x columns`` numbers; one that is NaN or infinite has no colour, and a cross.
        rows: The rows' labels.
        columns: The columns' labels.
        axes: What rows and columns are, as the table names them.
        scale: The numbers' colours; its name is the table's column.
        title: Above the panel.
        panel: What tells the panels of a picture apart, as the table has it, e.g. ``{"head": 3}``.
        texts: What is printed in the cells; by default nothing.
        more: Further columns of the table, each ``rows x columns``.
        shaded: ``rows x columns``, true where a cell is out of reach: hatched, without a number.
        beside: A number from 0 to 1 for each row, drawn as a bar to the right of it.
        beside_name: What those numbers are.
        sparse: Numbers smaller than this are not drawn one by one, since they look like zero; the table has them.
        cell: A cell's width and height.
        incomparable: Why a cell of one run can't be subtracted from that of another, where it can't.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[Label]
    columns: Sequence[Label]
    axes: tuple[str, str]
    scale: Scale
    title: str = ""
    panel: dict[str, Any] = field(default_factory=dict)
    texts: Sequence[Sequence[str]] | None = None
    more: dict[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    shaded: Sequence[Sequence[bool]] | None = None
    beside: Sequence[float] | None = None
    beside_name: str = ""
    sparse: float = 0.0
    cell: tuple[int, int] = (18, 16)
    incomparable: str = ""

    def records(self) -> list[dict[str, Any]]:
        """One record a cell that is not shaded."""
        found = []
        for r, row in enumerate(self.rows):
            for c, column in enumerate(self.columns):
                if self.shaded is not None and self.shaded[r][c]:
                    continue
                record = {**self.panel, self.axes[0]: row.key, self.axes[1]: column.key}
                for axis, label in zip(self.axes, (row, column), strict=True):
                    if label.text and label.text != str(label.key):
                        record[f"{axis}_text"] = label.text
                record[self.scale.name] = self.values[r][c]
                record |= {name: more[r][c] for name, more in self.more.items()}
                if self.beside is not None:
                    record[self.beside_name] = self.beside[r]
                found.append(record)
        return found

    def draw(self, parent: ElementTree.Element, x: float, y: float) -> tuple[float, float]:
        """Draw it with its corner at ``x``, ``y``; returns where it ends."""
        width, height = self.cell
        corner = f"{self.axes[0]} \u2193 {self.axes[1]} \u2192"
        left = x + 8 + max(6.2 * max(len(str(label)) for label in self.rows), 5.6 * len(corner))
        longest = max(len(str(label)) for label in self.columns)
        turned = longest * 6.2 > width - 2
        above = 12 + 6.4 * longest if turned else 14
        top = y + (18 if self.title else 0) + above
        if self.title:
            text(parent, x, y + 12, self.title, weight="bold")
        text(parent, left - 5, top - 4, corner, anchor="end", size=9)
        for c, label in enumerate(self.columns):
            at = left + width * (c + 0.5)
            if turned:
                text(parent, at + 3, top - 4, str(label), turn=-60)
            else:
                text(parent, at, top - 4, str(label), anchor="middle")
        if self.sparse:
            whole = {"width": width * len(self.columns) - 1, "height": height * len(self.rows) - 1}
            shape(parent, "rect", x=left, y=top, fill=self.scale.colour(0.0), **whole)
        for r, label in enumerate(self.rows):
            text(parent, left - 5, top + height * (r + 0.5) + 4, str(label), anchor="end")
            for start, length in runs(self.shaded[r] if self.shaded is not None else ()):
                box = {
                    "x": left + width * start,
                    "y": top + height * r,
                    "width": width * length - 1,
                    "height": height - 1,
                }
                hatch = shape(parent, "rect", fill="url(#out)", **box)
                tooltip(hatch, f"{self.axes[0]} {label}: out of reach")
            for c, column in enumerate(self.columns):
                number = self.values[r][c]
                if (self.shaded is not None and self.shaded[r][c]) or (self.sparse and abs(number) < self.sparse):
                    continue
                box = {"x": left + width * c, "y": top + height * r, "width": width - 1, "height": height - 1}
                known = math.isfinite(number)
                fill = self.scale.colour(number) if known else "none"
                cell = shape(parent, "rect", fill=fill, **({} if known else {"stroke": "currentColor"}), **box)
                where = f"{self.axes[0]} {label}, {self.axes[1]} {column}"
                extra = "".join(f", {name} {more[r][c]}" for name, more in self.more.items())
                tooltip(cell, f"{where}: {shown(number)}{extra}")
                said = (self.texts[r][c] if self.texts is not None else "") if known else "\u2715"
                if said:
                    at = left + width * (c + 0.5) - 0.5, top + height * (r + 0.5) + 3
                    ink = self.scale.ink(number) if known else "currentColor"
                    text(parent, *at, said, anchor="middle", fill=ink, size=9)
        right, bottom = left + width * len(self.columns), top + height * len(self.rows)
        if self.beside is not None:
            text(parent, right + 6, top - 4, self.beside_name, size=9)
            for r, number in enumerate(self.beside):
                at = {"x": right + 6, "y": top + height * r + 2, "height": height - 5}
                shape(parent, "rect", width=40, fill="none", stroke="currentColor", **at)
                full = min(1.0, max(0.0, number)) if math.isfinite(number) else 0.0
                bar = shape(parent, "rect", width=round(40 * full, 1), fill="currentColor", **at)
                tooltip(bar, f"{self.axes[0]} {self.rows[r]}: {self.beside_name} {shown(number)}")
            right += 60
        return max(right, x + 6.2 * len(self.title)) + 10, bottom + 6


@dataclass(frozen=True)
class Bars:
    """A panel of bars, one pair a column: what it is alone, and what it comes to with something added.

    Attributes:
        first: A number a column, drawn as a bar.
        second: What it comes to, drawn as a mark.
        names: What the two are, as the table names them.
        columns: The columns' labels.
        axis: What the columns are.
        marked: The columns that are chosen: filled, and told by a tick.
        cut: Where the choice falls, drawn across.
        title: Above the panel.
        panel: As a `Grid`'s.
        more: Further columns of the table, a number a column.
    """

    first: Sequence[float]
    second: Sequence[float]
    names: tuple[str, str]
    columns: Sequence[Label]
    axis: str
    marked: Sequence[bool]
    cut: float
    title: str = ""
    panel: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Sequence[Any]] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        """One record a bar."""
        return [
            {
                **self.panel,
                self.axis: label.key,
                self.names[0]: self.first[c],
                self.names[1]: self.second[c],
                "chosen": self.marked[c],
                **{name: more[c] for name, more in self.more.items()},
            }
            for c, label in enumerate(self.columns)
        ]

    def draw(self, parent: ElementTree.Element, x: float, y: float) -> tuple[float, float]:
        """Draw it with its corner at ``x``, ``y``; returns where it ends."""
        high, low = max(*self.first, *self.second, self.cut), min(*self.first, *self.second, self.cut, 0.0)
        wide = max(30, 20 + 7 * max(len(str(label)) for label in self.columns))
        left, top, tall = x + 44, y + 24, 120
        floor = top + tall * high / ((high - low) or 1)

        def at(number: float) -> float:
            return floor - tall * number / ((high - low) or 1)

        text(parent, x, y + 12, self.title, weight="bold")
        right = left + wide * len(self.columns)
        # A lowest number close to zero would be written over it.
        for number in (high, 0.0, low) if low < -(high - low) / 10 else (high, 0.0):
            text(parent, left - 6, at(number) + 4, shown(number), anchor="end", size=9)
        for c, label in enumerate(self.columns):
            chosen, middle = self.marked[c], left + wide * (c + 0.5)
            start, end = sorted((at(self.first[c]), floor))
            fill = {"fill": "#3182bd" if chosen else "none", "stroke": "#3182bd"}
            bar = shape(parent, "rect", x=middle - 9, y=start, width=18, height=max(end - start, 0.5), **fill)
            mark = at(self.second[c])
            shape(parent, "path", d=f"M{middle - 12:.1f} {mark:.1f}h24", stroke="currentColor", **{"stroke-width": 3})
            said = ", ".join(
                f"{name} {shown(n[c])}" for name, n in zip(self.names, (self.first, self.second), strict=True)
            )
            extra = "".join(f", {name} {more[c]}" for name, more in self.more.items())
            tooltip(bar, f"{self.axis} {label}: {said}, {'chosen' if chosen else 'not chosen'}{extra}")
            name = f"{label} \u2713" if chosen else str(label)
            text(parent, middle, top + tall + 16, name, anchor="middle", weight="bold" if chosen else "normal")
        line = {"stroke": "currentColor", "stroke-dasharray": "5 3"}
        shape(parent, "path", d=f"M{left:.1f} {at(self.cut):.1f}H{right:.1f}", **line)
        text(parent, right + 4, at(self.cut) + 4, f"the cut, {shown(self.cut)}", size=10)
        text(parent, left, top + tall + 32, f"bar: {self.names[0]}; line: {self.names[1]}; \u2713: chosen", size=10)
        return max(right + 100, x + 6.2 * len(self.title)), top + tall + 40


@dataclass(frozen=True)
class Picture:
    """Something to look at, with its numbers: shown by a notebook, saved, or read as a table.

    Attributes:
        title: What it shows.
        panels: What is drawn, in the order of reading.
        notes: What has to be known to read it, and what was cut.
        across: How many panels stand side by side.
    """

    title: str
    panels: tuple[Grid | Bars, ...]
    notes: tuple[str, ...] = ()
    across: int = 1

    @property
    def table(self) -> list[dict[str, Any]]:
        """The numbers drawn, a record each: ``pandas.DataFrame(picture.table)``."""
        return [record for panel in self.panels for record in panel.records()]

    def __repr__(self) -> str:
        return "\n".join([f"Picture: {self.title} ({len(self.table)} numbers; .table, .save)", *self.notes])

    def svg(self, titled: bool = True) -> str:
        """The drawing, as an SVG element with its notes; with its title above, unless a page gives it."""
        root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "style": FONT})
        tooltip(root, self.title)
        pattern = shape(shape(root, "defs"), "pattern", id="out", width=5, height=5, patternUnits="userSpaceOnUse")
        shape(pattern, "path", d="M0 5L5 0", stroke="#808080")
        y, widest = 4.0, 0.0
        if titled:
            text(root, 4, 16, self.title, weight="bold", size=13)
            y, widest = 28.0, 7.5 * len(self.title) + 20
        for start in range(0, len(self.panels), self.across):
            x, lowest = 4.0, y
            for panel in self.panels[start : start + self.across]:
                x, bottom = panel.draw(root, x, y)
                x, lowest = x + 14, max(lowest, bottom)
            y, widest = lowest + 8, max(widest, x)
        grids = [panel for panel in self.panels if isinstance(panel, Grid)]
        for scale in dict.fromkeys(grid.scale for grid in grids):
            right, y = legend(root, 4, y, scale)
            widest = max(widest, right)
        for note in self.notes:
            text(root, 4, y + 12, note, size=10)
            y, widest = y + 15, max(widest, 5.6 * len(note))
        root.set("viewBox", f"0 0 {widest:.0f} {y + 6:.0f}")
        root.set("width", f"{widest:.0f}")
        root.set("height", f"{y + 6:.0f}")
        return ElementTree.tostring(root, encoding="unicode")

    def standalone(self) -> str:
        """The drawing for a file of its own, dark on light."""
        return self.svg().replace(f'style="{FONT}"', f'style="{FONT};color:{DARK};background:{LIGHT}"', 1)

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%;overflow-x:auto">{self.svg()}</div>'

    def save(self, path: str | os.PathLike) -> Path:
        """Write it to ``path``, as a page with its table (``.html``) or as the drawing alone (``.svg``).

        Raises:
            ValueError: the path ends otherwise.
        """
        path = Path(path)
        if path.suffix == ".svg":
            drawn = self.standalone()
        elif path.suffix == ".html":
            drawn = self._page()
        else:
            raise ValueError(f"{path.name!r} ends in neither .html nor .svg")
        path.write_text(drawn, encoding="utf-8")
        return path

    def _page(self) -> str:
        """A page of its own, with the numbers below the drawing."""
        columns = list(dict.fromkeys(itertools.chain.from_iterable(self.table)))
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(shown(record.get(name, str())))}</td>' for name in columns)}</tr>"
            for record in self.table
        )
        title = html.escape(self.title)
        style = "body{font:14px system-ui,sans-serif;margin:1em}td,th{padding:.1em .6em;text-align:left}"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style></head>'
            f'<body><main><h1>{title}</h1><div tabindex="0" role="region" aria-label="the drawing" style="overflow-x:auto">'
            f"{self.svg(titled=False)}</div><details><summary>The numbers</summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details></main></body></html>\n"
        )


def difference(before: Picture, after: Picture) -> Picture:
    """``after - before``, cell by cell, on a scale centred at zero.

    Args:
        before: A picture made of grids.
        after: Another of the same sort, with the same rows and columns.

    Raises:
        ValueError: the two do not have the same panels, rows and columns, or their cells are of different things.
    """
    pictures = (before, after)
    if not all(isinstance(picture, Picture) for picture in pictures):
        raise TypeError(f"a difference is of two pictures, not of {type(before).__name__} and {type(after).__name__}")
    old, new = ([panel for panel in picture.panels if isinstance(panel, Grid)] for picture in pictures)
    reasons = [grid.incomparable for grid in (*old, *new) if grid.incomparable]
    if reasons or len(old) < len(before.panels) or [frame(grid) for grid in old] != [frame(grid) for grid in new]:
        why = reasons[0] if reasons else "a difference takes two pictures of the same grids, rows and columns"
        raise ValueError(f"{before.title!r} and {after.title!r} can't be subtracted: {why}")
    changes = [
        [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(first.values, second.values, strict=True)]
        for first, second in zip(old, new, strict=True)
    ]
    sizes = (abs(number) for rows in changes for row in rows for number in row)
    most = max(filter(math.isfinite, sizes), default=0.0) or 1.0
    scale = Scale(-most, most, f"change of {old[0].scale.name}")
    panels = tuple(
        replace(
            grid,
            values=change,
            scale=scale,
            texts=[[signed(number) for number in row] for row in change] if grid.cell[0] >= 28 else None,
            more={},
            beside=None,
            sparse=0.0,
        )
        for grid, change in zip(old, changes, strict=True)
    )
    return Picture(f"After less before: {before.title}", panels, before.notes, before.across)


def frame(grid: Grid) -> tuple:
    """What two grids have to share to be subtracted."""
    rows, columns = [label.key for label in grid.rows], [str(label) for label in grid.columns]
    return grid.axes, grid.panel, rows, columns, grid.scale.name


# -- the elements --------------------------------------------------------------------------


def shown(number: Any) -> str:
    """A number in few digits, anything else as it is."""
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where the flags are true: the start and the length of each run."""
    found, at = [], 0
    for flag, group in itertools.groupby(flags):
        length = len(list(group))
        if flag:
            found.append((at, length))
        at += length
    return found


def legal(content: str) -> str:
    """A text without the characters that XML has no place for."""
    return "".join(
        c if c in "\t\n" or (c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff") else "\ufffd"
        for c in content
    )


def signed(number: float) -> str:
    """A change in two digits, or nothing where it would read as zero."""
    return f"{number:+.2f}" if abs(number) >= 0.005 else ""


def shape(parent: ElementTree.Element, tag: str, **attributes: Any) -> ElementTree.Element:
    """A child element; numbers are rounded to what can be seen."""
    given = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, given)


def tooltip(parent: ElementTree.Element, content: str) -> None:
    """What is said of an element when it is pointed at."""
    shape(parent, "title").text = legal(content)


def text(
    parent: ElementTree.Element,
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = "currentColor",
    size: int = 11,
    turn: int = 0,
) -> None:
    """A line of text."""
    attributes: dict[str, Any] = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": fill, "font-size": size}
    if anchor != "start":
        attributes["text-anchor"] = anchor
    if weight != "normal":
        attributes["font-weight"] = weight
    if turn:
        attributes["transform"] = f"rotate({turn} {x:.1f} {y:.1f})"
    shape(parent, "text", **attributes).text = legal(content)


def legend(parent: ElementTree.Element, x: float, y: float, scale: Scale) -> tuple[float, float]:
    """The scale's colours with its ends; returns where it ends."""
    steps = 40
    for step in range(steps):
        number = scale.low + (scale.high - scale.low) * step / (steps - 1)
        shape(parent, "rect", x=x + 4 * step, y=y, width=4, height=10, fill=scale.colour(number))
    middle = " (0 in the middle)" if scale.centred else ""
    said = f"{scale.name}: {shown(scale.low)} to {shown(scale.high)}{middle}"
    text(parent, x + 4 * steps + 6, y + 9, said, size=10)
    return x + 4 * steps + 12 + 5.6 * len(said), y + 18
