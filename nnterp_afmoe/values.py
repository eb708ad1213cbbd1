"""One descriptor a value: a name, a layout, where it is read, when it exists, and a line about it.

`Value` is nnsight's `eproperty` with three things added. The location is a place resolved
against the installed source (`places`), so an operation inside a forward is as good as a
module. What the reader gets is in the value's layout whatever the tensor's shape inside the
model (``inside``, an einops pattern); the way back is the same pattern reversed, bound as
nnsight's write-back, which also puts the reshaped view on the graph to the loss. And a request
that can't be right is refused at its line: an unavailable value, a value already gone by, a
tensor that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from einops import rearrange
from greenlet import getcurrent
from nnsight import Object
from nnsight.intervention.eproperty import WriteBack, eproperty
from nnsight.intervention.interleaver import Event, Mediator, Pending
from torch._subclasses.fake_tensor import FakeTensor

from .errors import OutOfOrder, OutsideTrace, ReadOnly, Unavailable, WriteError
from .layouts import Layout
from .places import Place, Resolved, parse

if TYPE_CHECKING:
    from typing_extensions import Self

    from .family import Case
    from .hosts import ValueHost

__all__ = ["Recomputed", "Value"]


@dataclass(frozen=True)
class Recomputed:
    """How to serve a value that an implementation never holds as one tensor.

    Attributes:
        when: Whether this case needs it.
        at: The call whose arguments the value follows from.
        into: Where a write takes effect.
        compute: ``(module, args, kwargs)`` -> the value, as it would be inside the model.
        fold: ``(value, module_output)`` -> what the module returns given the value.
        note: What `support` says of it.
    """

    when: Callable[[Case], bool]
    at: str
    into: str
    compute: Callable[[torch.nn.Module, tuple, dict], torch.Tensor]
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    note: str


class Value(eproperty):
    """A named value of a host, to read and to write inside ``with model.trace(...):``.

    Args:
        layout: What a reader gets; ``None`` for something that is not a tensor.
        at: The place, written from the block (`places`).
        description: One line, shown by ``print(model)``.
        inside: The tensor's shape inside the model as an einops pattern over the layout's
            axes, where it is not the layout itself.
        when: Gives the reason why a case does not have the value, or ``None`` where it has.
        view: ``(host, tensor)`` -> what a reader gets, for a value derived from the tensor;
            such a value is read-only.
        shared: The tensor outlives the call (a key/value cache holds it), so the reader edits
            a copy that is put back for this call alone.
        recomputed: How to serve it where no tensor holds it.
    """

    layout: Layout | None
    place: Place

    def __init__(
        self,
        layout: Layout | None,
        at: str,
        description: str,
        *,
        inside: str | None = None,
        when: Callable[[Case], str | None] | None = None,
        view: Callable[[ValueHost, Any], Any] | None = None,
        shared: bool = False,
        recomputed: Recomputed | None = None,
    ) -> None:
        super().__init__(key="", description=description)
        self.layout = layout
        self.place = parse(at)
        self.inside = inside
        self.when = when
        self.view = view
        self.shared = shared
        self.recomputed = recomputed
        self.source = parse(recomputed.at) if recomputed else None
        self.sink = parse(recomputed.into) if recomputed else None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.key = name
        access = "" if self.writable else " Read-only."
        self.__doc__ = f"{self.layout or 'Not a tensor'}: {self.description}.{access}"

    def __str__(self) -> str:
        typed = f" -> {self.layout}" if self.layout else ""
        return f"({self.name}){typed}: {self.description}"

    def __repr__(self) -> str:
        return f"<Value {self.name}{f': {self.layout}' if self.layout else ''}>"

    @property
    def writable(self) -> bool:
        """Whether it can be assigned."""
        return self.view is None

    def unavailable(self, case: Case) -> str | None:
        """Why the value does not exist in this case, or ``None``. From the case alone, not from source."""
        return self.when(case) if self.when else None

    def is_recomputed(self, case: Case) -> bool:
        """Whether this case has no tensor for the value, so that it is computed from the call's arguments."""
        return self.recomputed is not None and self.recomputed.when(case)

    # -- access ------------------------------------------------------------------

    @overload
    def __get__(self, obj: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, obj: ValueHost, owner: Any = None) -> Object: ...
    def __get__(self, obj: ValueHost | None, owner: Any = None) -> Any:
        if obj is None:
            return self
        mediator, place, location = self._open(obj, "read")
        target = location if place is not self.source else None
        occurrence = mediator.wanted(location)
        waiting = mediator.transform
        if waiting is not None and waiting.key == (self, location, occurrence):
            return waiting.view
        raw = Mediator.value(location)
        tensor = self._tensor(obj, place, raw)
        if self.view is not None:
            return self.view(obj, tensor)
        view = self._outward(obj, tensor)
        if view is tensor and not self.shared and target:
            return view
        if self.shared:
            view = view.clone()
        back = partial(self._back, obj, mediator, place, raw, view)
        if target is None:
            untouched = view.detach().clone()
            target = obj._place(self, self.sink).location(obj._origin)
            back = partial(self._fold, obj, target, occurrence, view, untouched)
        mediator.transform = Reading(back, view, self, target, occurrence, location)
        return view

    def __set__(self, obj: ValueHost, value: Any) -> None:
        mediator, place, location = self._open(obj, "assign")
        if not self.writable:
            raise ReadOnly(f"{obj._label(self.name)} is read-only: it is derived; assign the value it comes from")
        raw = Mediator.value(location)
        current = self._outward(obj, self._tensor(obj, place, raw))
        tensor = self._inward(self._fitting(obj, value, current))
        if place is self.source:
            target = obj._place(self, self.sink).location(obj._origin)
            Mediator.swap(target, self.recomputed.fold(tensor, Mediator.value(target)))
        else:
            Mediator.swap(location, obj._place(self, place).put(raw, tensor))

    # -- the steps of an access ----------------------------------------------------

    def _open(self, obj: ValueHost, verb: str) -> tuple[Mediator, Place, str]:
        """Refuse what can't be right, and instrument what the place runs through."""
        case = obj._case()
        reason = obj._reason(self, case)
        if reason is not None:
            raise Unavailable(f"{obj._label(self.name)} is unavailable: {reason}")
        mediator = current_mediator()
        if mediator is None or not obj.interleaver.interleaving:
            raise OutsideTrace(
                f"{obj._label(self.name)} can be {'read' if verb == 'read' else 'assigned'} only while the model runs, "
                f"inside `with model.trace(prompt):`; to ask whether it is there, use support()"
            )
        place = self.source if self.is_recomputed(case) else self.place
        resolved = obj._place(self, place)
        location = resolved.location(obj._origin)
        for call in resolved.calls:
            check_order(obj, mediator, f"{obj._origin}.{call}.output", self.name, verb)
            obj.interleaver.instrument_call(obj, mediator, f"{obj._origin}.{call}")
        check_order(obj, mediator, location, self.name, verb)
        mediator.last_value = (location, obj._label(self.name))
        return mediator, place, location

    def _tensor(self, obj: ValueHost, place: Place, raw: Any) -> Any:
        resolved = obj._place(self, place)
        if place is self.source:
            args, kwargs = raw
            module = obj._module_at(resolved.base)
            with obj.interleaver.stood_down():
                return self.recomputed.compute(module, args, kwargs)
        tensor = resolved.take(raw)
        if tensor is None:
            raise Unavailable(f"{obj._label(self.name)} is unavailable: this call was made without it")
        return tensor

    def _outward(self, obj: ValueHost, tensor: torch.Tensor) -> torch.Tensor:
        if self.inside is None:
            return tensor
        return rearrange(tensor, f"{self.inside} -> {self.layout.axes}", **obj._lengths(self.inside))

    def _inward(self, view: torch.Tensor) -> torch.Tensor:
        return view if self.inside is None else rearrange(view, f"{self.layout.axes} -> {self.inside}")

    def _back(self, obj: ValueHost, mediator: Mediator, place: Place, raw: Any, view: torch.Tensor) -> Any:
        return obj._place(self, place).put(raw, self._inward(view))

    def _fold(
        self, obj: ValueHost, target: str, occurrence: int, view: torch.Tensor, untouched: torch.Tensor
    ) -> torch.Tensor:
        """The module's output given an edited view: its own tensor at every row that was left alone."""
        output = getcurrent().parent.switch(Pending(Event.VALUE, target, occurrence))
        folded = self.recomputed.fold(self._inward(view), output)
        edited = self._inward(view.detach() != untouched).flatten(1).any(1)
        same = output
        if folded.requires_grad:
            # The view carries the gradient; the model's own numbers carry the value.
            same = output.detach() + (folded - folded.detach())
        return torch.where(rearrange(edited, "rows -> rows 1"), folded, same)

    def _fitting(self, obj: ValueHost, value: Any, current: torch.Tensor) -> torch.Tensor:
        what = f"{obj._label(self.name)} is {self.layout}"
        if not isinstance(value, torch.Tensor):
            raise WriteError(
                f"{what}; it takes a torch.Tensor, not {type(value).__name__}. "
                f"To fill it, write in place: `{self.name}[:] = ...`"
            )
        if value.shape != current.shape:
            raise WriteError(
                f"{what} = {list(current.shape)} here; the tensor assigned has shape {list(value.shape)}"
            )
        if kind(value.dtype) != kind(current.dtype):
            raise WriteError(f"{what} of {current.dtype}; the tensor assigned is {value.dtype}, of another kind")
        if value.device != current.device and not isinstance(current, FakeTensor):
            raise WriteError(
                f"{what} on {current.device}; the tensor assigned is on {value.device}: move it with .to({self.name}.device)"
            )
        return value.to(current.dtype)


class Reading(WriteBack):
    """A write-back that remembers where its view was read, when that is not where it goes."""

    def __new__(cls, fn: Any, view: Any, value: Value, target: str, occurrence: int | None, read_at: str) -> Reading:
        reading = super().__new__(cls, fn, view, value, target, occurrence)
        reading.read_at = read_at
        return reading

    read_at: str

    @property
    def key(self) -> tuple[Any, str, int | None]:
        """What a repeated read has to match to be answered with the view."""
        return (self.eproperty, self.read_at, self.occurrence)


def current_mediator() -> Mediator | None:
    """The mediator whose block is running now, or ``None`` outside a trace."""
    reference = getattr(getcurrent(), "mediator", None)
    return reference() if reference is not None else None


def kind(dtype: torch.dtype) -> str:
    """``"float"``, ``"complex"``, ``"bool"`` or ``"integer"``: what a write may not change."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype is torch.bool else "integer"


def check_order(obj: ValueHost, mediator: Mediator, location: str, name: str, verb: str) -> None:
    """Raise `OutOfOrder` if this forward pass has gone by ``location`` already.

    nnsight pairs a request with the next visit of its location. In a plain trace there is
    none, so the run ends with the request open; in a generation the next step has one, and
    the request would be answered with that step's value.
    """
    visits = mediator.occurrence(location)
    served = mediator.pending
    step = mediator.iteration
    if step is None:
        # Relaxed: the step is the visit at which the model is paused for this block of code.
        if served is None or served.provider is None or not served.provider.startswith(f"{obj._root_path}."):
            return
        step = served.iteration
    if visits <= step:
        return
    at, last = getattr(mediator, "last_value", (None, None))
    after = ""
    if served is not None and served.provider:
        after = f" after {last if at == served.provider else served.provider}"
    raise OutOfOrder(
        f"{obj._label(name)} was asked for{after}, but the forward pass comes to it before: it has gone by. "
        f"{'Read' if verb == 'read' else 'Assign'} it earlier in the block; model.order() lists the order, "
        f"and model.rank(name, layer) sorts by it"
    )
