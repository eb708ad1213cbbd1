"""What a model offers, as data: a header, its kinds of block, a row a value. What a notebook shows, and the page.

All of it comes from the family's table, the config and `support`; nothing loads weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2

from .support import block_values, ranges

if TYPE_CHECKING:
    from .model import StandardizedTransformer
    from .support import Support
    from .values import Value

__all__ = ["Description", "Kind", "Row", "describe", "template"]

#: What tells the kinds of block apart beside their colour.
MARKS = "\u25cf\u25a0\u25b2\u25c6\u25bc\u2605"


@dataclass(frozen=True)
class Row:
    """One value on one kind of block, or on the model.

    Attributes:
        name: As `support` spells it.
        layout: The layout's name; empty for something that is not a tensor.
        axes: Its axes, each with its length where the config fixes it: ``"hidden_size=1024"``.
        description: The table's line.
        place: Where it is read, as the table writes it.
        access: ``"read/write"`` or ``"read"``.
        note: A caveat, or nothing.
        missing: Why this kind lacks it, or nothing.
    """

    name: str
    layout: str
    axes: tuple[str, ...]
    description: str
    place: str
    access: str
    note: str
    missing: str


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    Attributes:
        name: Its traits, ``"mixture, sliding"``.
        mark: The sign it is told by, the same in every model of the family.
        sign: The number of that sign, and of its colour.
        index: Which of this model's kinds it is, from 0.
        layers: Its layers.
        rows: Its values, available or not.
    """

    name: str
    mark: str
    sign: int
    index: int
    layers: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def where(self) -> str:
        """Its layers in few words, ``"2-4, 6"``."""
        return ranges(self.layers)

    @property
    def has(self) -> int:
        """How many values it has."""
        return sum(not row.missing for row in self.rows)


@dataclass(frozen=True)
class Description:
    """A model: its header, its kinds of block, and the values of the model itself."""

    family: str
    architecture: str
    facts: Mapping[str, str]
    kinds: tuple[Kind, ...]
    root: tuple[Row, ...]


def describe(model: StandardizedTransformer, support: Support) -> Description:
    """What ``model`` offers under the implementations that ``support`` speaks of."""
    family, config = model.family, model.config
    kinds = []
    for index, (traits, layers) in enumerate(family.kinds(config).items()):
        case = family.case(config, layers[0], support.attn_implementation, support.experts_implementation)
        here, answers = block_values(model, case), support.layer(layers[0])
        table = {host.dotted(name): value for host in reversed(family.hosts) for name, value in host.values().items()}
        rows = tuple(
            row(name, *here.get(name, (None, table[name])), reason, support.notes.get(name, ""))
            for name, reason in answers.items()
        )
        sign = family.every_kind.index(traits)
        kinds.append(Kind(", ".join(traits), MARKS[sign], sign, index, tuple(layers), rows))
    reasons = model._reasons(None)
    root = tuple(row(name, model, value, reasons[name], "") for name, value in type(model).values().items())
    return Description(family.name, family.architecture.__name__, facts(model, support), tuple(kinds), root)


def row(name: str, host: Any, value: Value, reason: str | None, note: str) -> Row:
    """One value's row; ``host`` is who carries it, or ``None`` where this kind of block has no such module."""
    dims = value.layout.dims if value.layout else ()
    axes = tuple(
        axis if host is None or axis not in host._root.family.axes else f"{axis}={host._axis(axis)}" for axis in dims
    )
    return Row(
        name=name,
        layout=value.layout.name if value.layout else "",
        axes=axes,
        description=value.description or "",
        place=str(value.place),
        access="read/write" if value.writable else "read",
        note=note,
        missing=reason or "",
    )


def facts(model: StandardizedTransformer, support: Support) -> dict[str, str]:
    """The header: sizes, parameters, dtype, devices, implementations."""
    parameters = list(model._module.parameters())
    devices = sorted({str(parameter.device) for parameter in parameters})
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "num_experts", "top_k")
    return {
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}",
        **{name: f"{getattr(model, name):,}" for name in sizes},
        "dtype": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        "devices": "none yet: no weights are loaded" if devices == ["meta"] else ", ".join(devices),
        "attention": support.attn_implementation,
        "experts": support.experts_implementation,
    }


@cache
def environment() -> jinja2.Environment:
    """The package's templates; a name that is missing raises."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("nnterp_afmoe"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template(name: str) -> jinja2.Template:
    """A template of the package, ``name`` as its file's."""
    return environment().get_template(name)
