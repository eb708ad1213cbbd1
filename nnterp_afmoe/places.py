"""Where a value is read: a short path, written in a family's table and resolved against the installed source.

A place is written from the block (or, for a value of the model, from the root):

    "post_mlp_layernorm.output"                       a module's output
    "mlp.experts.input[top_k_index]"                  one argument of a module's call, by its name
    "source{hidden_states = residual + hidden_states}.output"   the first such assignment in the forward
    "self_attn.source{attention_interface()}.input[query]"      the last call of that name in the forward
    "...source{attention_interface()}.source{nn.functional.softmax()}.input[0]"   a call inside the called function

An operation is named by the code it runs, never by a counter, so a release that adds a line
above it does not move it. `resolve` walks a place through the source that is installed and
says where it stands in the order of the forward pass; a place whose name has gone raises
`Moved`, which becomes the reason that the value is unavailable.

Parsing (`parse`) is pure; resolving reads source and runs nothing of the model.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.intervention.source import (
    STATE,
    Compiled,
    SourceNotAvailable,
    compiled,
    decorator_chain,
    module_body,
)
from nnsight.intervention.util import first_input

__all__ = ["Moved", "Place", "Resolved", "Step", "operation", "parse", "resolve"]

STEP = re.compile(r"(?P<name>\w+)(\{(?P<code>[^}]*)\})?(\[(?P<pick>\w+)\])?(\.|$)")

#: Ranks inside one call: its input comes before what it runs, which comes before its output.
BEFORE, INSIDE, AFTER = 0, 1, 2


class Moved(Exception):
    """A name that a place relies on is not in the installed source."""


@dataclass(frozen=True)
class Step:
    """One part of a place: a child module, or with ``code`` an operation of the forward."""

    name: str
    code: str | None = None


@dataclass(frozen=True)
class Place:
    """A parsed place: the way there, which end of the call, and which part of what passes.

    Attributes:
        steps: Child modules and operations, outermost first; empty for the host's own call.
        key: ``"input"`` or ``"output"``.
        pick: The argument or output field to take, by name or position; ``None`` for all of it.
    """

    steps: tuple[Step, ...]
    key: str
    pick: str | int | None = None

    def __str__(self) -> str:
        """As the table writes it: ``parse(str(place)) == place``."""
        steps = [step.name if step.code is None else f"{step.name}{{{step.code}}}" for step in self.steps]
        return ".".join([*steps, self.key if self.pick is None else f"{self.key}[{self.pick}]"])


@dataclass(frozen=True)
class Resolved:
    """A place in the installed source.

    Attributes:
        base: nnsight's path of the module or operation, from the block; ``""`` for the block itself.
        key: ``"input"`` or ``"output"``.
        pick: As in `Place`.
        position: Where a named argument stands when it is passed by position.
        calls: The operations whose called function has to be instrumented, outermost first.
        rank: Sorts the places of one block in the order of its forward pass.
    """

    base: str
    key: str
    pick: str | int | None
    position: int | None
    calls: tuple[str, ...]
    rank: tuple[float, ...]

    def location(self, path: str) -> str:
        """Nnsight's location under the block (or root) at ``path``."""
        return ".".join(part for part in (path, self.base, self.key) if part)

    def take(self, raw: Any) -> Any:
        """The part of ``raw`` this place names; ``None`` where this call was made without it."""
        if self.pick is None:
            return raw
        if self.key == "input":
            args, kwargs = raw
            if isinstance(self.pick, str):
                if self.pick in kwargs:
                    return kwargs[self.pick]
                return args[self.position] if self.position is not None and self.position < len(args) else None
            return first_input(args, kwargs)
        if isinstance(self.pick, str):
            return getattr(raw, self.pick, None)
        return raw[self.pick]

    def put(self, raw: Any, value: Any) -> Any:
        """``raw`` with the part this place names replaced by ``value``."""
        if self.pick is None:
            return value
        if self.key == "input":
            args, kwargs = raw
            if isinstance(self.pick, str):
                if self.pick not in kwargs and self.position is not None and self.position < len(args):
                    return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
                return args, {**kwargs, self.pick: value}
            if args:
                return (value, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): value}
        if isinstance(self.pick, str):
            copy = raw.copy()
            copy[self.pick] = value
            return copy
        return (*raw[: self.pick], value, *raw[self.pick + 1 :])


@functools.cache
def parse(text: str) -> Place:
    """A place from its spelling; raises `ValueError` on one that is not well formed."""
    steps: list[Step] = []
    position, pick = 0, None
    while position < len(text):
        match = STEP.match(text, position)
        if match is None or pick is not None:
            raise ValueError(f"{text!r} is not a place: cannot read it from {text[position:]!r} on")
        position = match.end()
        pick = match["pick"]
        steps.append(Step(match["name"], match["code"]))
    key = steps.pop()
    if key.name not in ("input", "output") or key.code is not None:
        raise ValueError(f"{text!r} is not a place: it ends in {key.name!r}, neither input nor output")
    return Place(tuple(steps), key.name, int(pick) if pick and pick.isdigit() else pick)


def resolve(place: Place, module: torch.nn.Module, callees: Mapping[str, Callable[[], Callable]]) -> Resolved:
    """Walk ``place`` from ``module`` through the installed source.

    Args:
        place: What to look for.
        module: The block (or root) the place is written from. Meta tensors do.
        callees: For a function that a forward looks up while it runs, its name in that
            forward and how to look it up now.

    Raises:
        Moved: naming what the source no longer has.
    """
    here: torch.nn.Module | Callable = module
    names = _compiled(here)
    prefix: list[str] = []
    calls: list[str] = []
    rank: list[float] = []
    owner = type(module).__name__
    for step in place.steps:
        if step.code is None:
            child = getattr(here, step.name, None)
            if not isinstance(child, torch.nn.Module):
                raise Moved(f"{owner} has no module {step.name!r}")
            label = f"self_{step.name}_0"
            # A container is not called by its own name; its place in the order is unknown.
            rank.append(names.names.index(label) if label in names.names else -1)
            prefix.append(step.name)
            here, owner = child, type(child).__name__
            names = _compiled(here)
        else:
            label = _label(names, step.code, owner)
            if not isinstance(here, torch.nn.Module):
                calls.append(".".join(prefix))
            rank.append(names.names.index(label))
            prefix += ["source", label]
            name = step.code.removesuffix("()")
            if name in callees:
                here = callees[name]()
                names, owner = _compiled(here), getattr(here, "__name__", name)
        rank.append(INSIDE)
    if rank:
        rank[-1] = BEFORE if place.key == "input" else AFTER
    else:
        rank = [float("-inf") if place.key == "input" else float("inf")]
    position = None
    if place.key == "input" and isinstance(place.pick, str):
        position = _position(here, place.pick, owner)
    return Resolved(".".join(prefix), place.key, place.pick, position, tuple(calls), tuple(rank))


def operation(module: torch.nn.Module, code: str) -> str:
    """nnsight's label of the operation ``code`` in the module's forward; raises `Moved`."""
    return _label(_compiled(module), code, type(module).__name__)


def _compiled(here: torch.nn.Module | Callable) -> Compiled:
    function = here
    if isinstance(here, torch.nn.Module):
        # A module that nnsight wraps runs the controller; what it was before is on its state.
        state = here.__dict__.get(STATE)
        function = module_body(here) if state is None else state.original
    try:
        return compiled(decorator_chain(function)[0])
    except SourceNotAvailable as error:
        raise Moved(f"{getattr(function, '__qualname__', function)}: {error}") from error


@functools.cache
def _labels(source: str, names: tuple[str, ...], lines: tuple[int, ...]) -> dict[str, str]:
    """Code -> label: the first assignment of each spelling, the last call of each name."""
    at: dict[tuple[int, str], list[str]] = {}
    for label, line in zip(names, lines, strict=True):
        at.setdefault((line, label.rpartition("_")[0]), []).append(label)
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            code = ast.unparse(node)
            target = ast.unparse(node.targets[0]).replace(".", "_")
            candidates = [*at.get((node.lineno, target), ()), *([found[code]] if code in found else ())]
            if candidates:
                found[code] = min(candidates, key=names.index)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            code = f"{name}()"
            candidates = [
                *at.get((node.lineno, name.replace(".", "_")), ()),
                *([found[code]] if code in found else ()),
            ]
            if candidates:
                found[code] = max(candidates, key=names.index)
    return found


def _label(source: Compiled, code: str, owner: str) -> str:
    labels = _labels(source.source, source.names, tuple(source.lines[name] for name in source.names))
    if code not in labels:
        raise Moved(f"the source of {owner} has no `{code}`")
    return labels[code]


def _position(here: torch.nn.Module | Callable, name: str, owner: str) -> int:
    is_module = isinstance(here, torch.nn.Module)
    names = list(inspect.signature(type(here).forward if is_module else here).parameters)[is_module:]
    if name not in names:
        raise Moved(f"{owner} takes no argument {name!r}")
    return names.index(name)
