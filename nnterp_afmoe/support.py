"""What is available where, answered from the config before anything runs.

`Support` is a mapping from a value's dotted name to ``None`` where every block has it, else to
``{layer: reason}``. Printed, it is a table: a row a value, a column a kind of block, then the
attention and experts implementations under which blocks have it at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import near

if TYPE_CHECKING:
    from .family import Case
    from .hosts import Host
    from .model import StandardizedTransformer
    from .values import Value

__all__ = ["Support", "block_values", "grouped", "layer_support", "ranges"]


def block_values(model: StandardizedTransformer, case: Case) -> dict[str, tuple[Host, Value]]:
    """The values of the hosts that a block has, by dotted name, each with its host."""
    block = model.layers[case.layer]
    found: dict[str, tuple[Host, Value]] = {}
    for host in model.family.hosts:
        if model.family.present(case.config, case.layer, host.at) is host:
            envoy = block.get(host.at) if host.at else block
            found |= {host.dotted(name): (envoy, value) for name, value in host.values().items()}
    return found


def layer_support(model: StandardizedTransformer, case: Case) -> dict[str, str | None]:
    """One block's values, by dotted name: ``None``, or the reason why it lacks one."""
    here = block_values(model, case)
    answer: dict[str, str | None] = {}
    for host in model.family.hosts:
        for name in map(host.dotted, host.values()):
            if name in here:
                envoy, value = here[name]
                answer[name] = envoy._reason(value, case)
            else:
                answer[name] = host.absent(case)
    return answer


class Support(Mapping[str, "dict[int, str] | None"]):
    """The answer of `StandardizedTransformer.support`, a mapping and a table.

    Attributes:
        attn_implementation: The attention implementation it speaks of.
        experts_implementation: The experts implementation it speaks of.
        notes: A value's dotted name to a caveat about reading it, for values that have one.
    """

    def __init__(
        self, model: StandardizedTransformer, attn_implementation: str | None, experts_implementation: str | None
    ) -> None:
        config = model.config
        self._model = model
        self._cases = [
            model.family.case(config, layer, attn_implementation, experts_implementation)
            for layer in range(model.num_layers)
        ]
        check_known("attn_implementation", attn_implementation, model.family.attn_implementations())
        check_known("experts_implementation", experts_implementation, model.family.experts_implementations())
        self.attn_implementation = attn_implementation or config._attn_implementation
        self.experts_implementation = experts_implementation or config._experts_implementation
        self._layers = [layer_support(model, case) for case in self._cases]
        names = dict.fromkeys(name for layer in self._layers for name in layer)
        self._answer: dict[str, dict[int, str] | None] = {}
        for name in names:
            answers = ((index, layer[name]) for index, layer in enumerate(self._layers))
            self._answer[name] = {index: reason for index, reason in answers if reason is not None} or None
        self.notes = {
            host.dotted(name): "; ".join(notes)
            for host in model.family.hosts
            for name, value in host.values().items()
            if (notes := value.notes(self._cases[0]))
        }

    def __getitem__(self, name: str) -> dict[int, str] | None:
        if name not in self._answer:
            raise KeyError(f"{name!r} is not a value of this family{near(name, self._answer)}")
        return self._answer[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answer)

    def __len__(self) -> int:
        return len(self._answer)

    def layer(self, index: int) -> dict[str, str | None]:
        """Block ``index``, flat: a value's dotted name to ``None`` or the reason."""
        return dict(self._layers[index])

    # -- printing ------------------------------------------------------------------

    def anywhere(self, name: str) -> bool:
        """Whether any block has the value."""
        return any(layer.get(name) is None for layer in self._layers)

    def __rich__(self) -> Table:
        return self._table()[0]

    def _table(self) -> tuple[Table, list[str]]:
        model, family = self._model, self._model.family
        kinds = family.kinds(model.config)
        reasons: list[str] = []

        def mark(reason: str | None) -> str:
            if reason is None:
                return "yes"
            if reason not in reasons:
                reasons.append(reason)
            return f"no [{reasons.index(reason) + 1}]"

        table = Table(title=f"{family.name}: what is available", title_justify="left")
        table.add_column("value", no_wrap=True)
        for kind, layers in kinds.items():
            table.add_column(f"{', '.join(kind)}\n{ranges(layers)}", justify="left")
        alternatives = []
        for keyword, title, current in (
            ("attn_implementation", "attention", self.attn_implementation),
            ("experts_implementation", "experts", self.experts_implementation),
        ):
            for names, support in grouped(self, keyword, current):
                shown = "\n".join(f"{name} *" if name == current else name for name in names)
                table.add_column(Text(f"{title}:\n{shown}"), justify="left")
                alternatives.append(support)
        for name in self:
            cells = []
            for layers in kinds.values():
                answers = dict.fromkeys(self._layers[layer][name] for layer in layers)
                cells.append(", ".join(mark(answer) for answer in answers))
            for support in alternatives:
                cells.append("yes" if support.anywhere(name) else "no")
            label = f"{name} (+)" if name in self.notes else name
            table.add_row(label, *(Text(cell) for cell in cells))
        return table, reasons

    def __str__(self) -> str:
        table, reasons = self._table()
        lines = [
            "* the implementation in use. The kinds are answered under it; the implementation columns say whether any block has the value.",
            *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)),
            *(f"(+) {name}: {note}" for name, note in self.notes.items()),
            f"On the model, always: {', '.join(type(self._model).values())}.",
        ]
        console = Console(width=max(160, 24 * len(table.columns)), color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(table)
        body = "\n".join(line.rstrip() for line in capture.get().splitlines())
        return "\n".join([body, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: the model's cards, under the implementations that this speaks of."""
        from .describing import describe, template  # which builds on this module

        return template("card.html").render(model=describe(self._model, self))


def grouped(support: Support, keyword: str, current: str) -> list[tuple[list[str], Support]]:
    """The implementations of one sort, those with the same answers together, the current one first."""
    known = getattr(support._model.family, f"{keyword}s")()
    fixed = {
        "attn_implementation": support.attn_implementation,
        "experts_implementation": support.experts_implementation,
    }
    groups: list[tuple[list[str], Support]] = []
    for name in [current, *(name for name in known if name != current)]:
        answer = support if name == current else Support(support._model, **{**fixed, keyword: name})
        for names, same in groups:
            if all(same.anywhere(value) == answer.anywhere(value) for value in answer):
                names.append(name)
                break
        else:
            groups.append(([name], answer))
    return groups


def ranges(layers: Iterable[int]) -> str:
    """``[2, 3, 4, 6]`` as ``"2-4, 6"``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def check_known(keyword: str, name: str | None, known: list[str]) -> None:
    """Raise `ValueError` for an implementation that the installed transformers does not know."""
    if name is not None and name not in known:
        raise ValueError(f"{keyword}={name!r} is not known here; known: {', '.join(known)}{near(name, known)}")
