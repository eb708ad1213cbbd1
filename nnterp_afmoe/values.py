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
from typing import TYPE_CHECKING, Any, NamedTuple, overload

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

__all__ = ["Recomputed", "Site", "Value"]


@dataclass(frozen=True)
class Recomputed:
    """How to serve a value that an implementation never holds as one tensor.

    Attributes:
        when: Whether this case needs it.
        source: The call whose arguments the value follows from.
        sink: Where a write takes effect.
        compute: ``(module, args, kwargs)`` -> the value, as it would be inside the model.
        fold: ``(value, module_output)`` -> what the module returns given the value.
        note: What `support` says of it.
    """

    when: Callable[[Case], bool]
    source: Place
    sink: Place
    compute: Callable[[torch.nn.Module, tuple, dict], torch.Tensor]
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    note: str


@dataclass(frozen=True)
class Site:
    """A value on one host, as it stands under the implementations of a run.

    Attributes:
        label: The value as the user spells it.
        at: The place in the source.
        location: nnsight's name for the place.
        calls: nnsight's paths of the calls whose functions have to be instrumented.
        recomputed: How the value is served, if no tensor holds it here.
        sink: Where a write takes effect.
    """

    label: str
    at: Resolved
    location: str
    calls: tuple[str, ...]
    recomputed: Recomputed | None
    sink: str


class Access(NamedTuple):
    """One read or write that may go ahead: on which host, at which site, for whom, and which visit."""

    host: ValueHost
    site: Site
    mediator: Mediator
    occurrence: int


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
        note: A caveat that `support` gives beside it.
        below: The axis whose length an integer value has to be less than.
    """

    name: str
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
        view: Callable[[Any, Any], Any] | None = None,
        shared: bool = False,
        recomputed: Recomputed | None = None,
        note: str | None = None,
        below: str | None = None,
    ) -> None:
        super().__init__(key="", description=description)
        self.layout = layout
        self.place = parse(at)
        self.inside = inside
        self.when = when
        self.view = view
        self.shared = shared
        self.recomputed = recomputed
        self.note = note
        self.below = below
        self._outward = self._inward = None
        if inside is not None and layout is not None:
            self._outward, self._inward = f"{inside} -> {layout.axes}", f"{layout.axes} -> {inside}"

    def __set_name__(self, owner: type, name: str) -> None:
        # The base class allows no name yet; a value has one from its class body on.
        self.name = self.key = name  # pyright: ignore[reportIncompatibleVariableOverride]
        self.owner = owner
        access = "" if self.writable else " Read-only."
        note = f" Note: {self.note}." if self.note else ""
        self.__doc__ = f"{self.layout or 'Not a tensor'}: {self.description}.{access}{note}"

    def __str__(self) -> str:
        typed = f" -> {self.layout}" if self.layout else ""
        return f"({self.name}){typed}: {self.description}"

    def __repr__(self) -> str:
        return f"<Value {self.name}{f': {self.layout}' if self.layout else ''}>"

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)

    def __deepcopy__(self, memo: dict) -> Value:
        return self

    @property
    def writable(self) -> bool:
        """Whether it can be assigned."""
        return self.view is None

    def unavailable(self, case: Case) -> str | None:
        """Why the value does not exist in this case, or ``None``. From the case alone, not from source."""
        return self.when(case) if self.when else None

    def recomputed_in(self, case: Case) -> Recomputed | None:
        """How the value is served in a case that has no tensor for it; ``None`` where one holds it."""
        return self.recomputed if self.recomputed and self.recomputed.when(case) else None

    def notes(self, case: Case) -> list[str]:
        """The caveats about it in this case."""
        recomputed = self.recomputed_in(case)
        return [note for note in (self.note, recomputed.note if recomputed else None) if note]

    def places(self, case: Case) -> tuple[Place, ...]:
        """Where the value is read in this case, and where it is written if that is elsewhere."""
        recomputed = self.recomputed_in(case)
        return (recomputed.source, recomputed.sink) if recomputed else (self.place,)

    # -- access ------------------------------------------------------------------

    @overload
    def __get__(self, obj: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self, obj: Any, owner: Any = None) -> Object: ...
    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        access = self._open(obj, "read")
        site, open_views = access.site, Views.at(access)
        if open_views is not None and self in open_views.held:
            return open_views.held[self].view
        raw, tensor, untouched = self._read(access, open_views)
        if self.view is not None:
            derived = self.view(obj, tensor)
            if isinstance(derived, torch.Tensor) and not derived.is_inference():
                access.mediator.transform = watched(access, raw, derived)
            return derived
        view = self._to_layout(obj, tensor)
        if self.shared:
            view = view.clone()
        elif site.recomputed is None:
            if not separate(view, tensor):
                return view
            # A tensor of its own, since nnsight looks for the gradient of its slices elsewhere.
            view = view.view_as(view)
        (open_views or Views.open(access, raw)).hold(self, Held(access, view, untouched))
        return view

    def __set__(self, obj: Any, value: Any) -> None:
        access = self._open(obj, "assign")
        site, open_views = access.site, Views.at(access)
        if not self.writable:
            raise ReadOnly(f"{site.label} is read-only: it is derived; assign the value it comes from")
        if open_views is not None and self in open_views.held:
            _, current, untouched = open_views.held[self]
            raw = open_views.raw
        else:
            raw, tensor, untouched = self._read(access, open_views)
            current = self._to_layout(obj, tensor)
        view = self._fitting(access, value, current)
        if site.recomputed is not None:
            # Whoever reads it after this, in this block of code or another, reads what was assigned.
            with torch.no_grad():
                current.copy_(view)
        if open_views is not None or site.recomputed is not None:
            (open_views or Views.open(access, raw)).hold(self, Held(access, view, untouched))
        else:
            Mediator.swap(site.location, site.at.put(raw, self._to_model(view)))

    # -- the steps of an access ----------------------------------------------------

    def _open(self, obj: ValueHost, verb: str) -> Access:
        """Refuse what can't be right, and instrument what the place runs through."""
        interleaver, mediator = obj.interleaver, current_mediator()
        if mediator is None or not interleaver.interleaving:
            label = self._site(obj).label
            raise OutsideTrace(
                f"{label} can be {'read' if verb == 'read' else 'assigned'} only while the model runs, "
                f"inside `with model.trace(prompt):`; to ask whether it is there, use support()"
            )
        site = interleaver.sites.get((obj.path, self))
        if site is None:
            site = interleaver.sites[obj.path, self] = self._site(obj)
        for call in site.calls:
            if interleaver.sourced.get(call) is None:
                # A call that has begun can't be instrumented any more; its gate is where it begins.
                check_order(obj, mediator, f"{call}.skip", site.label, verb)
                interleaver.instrument_call(obj, mediator, call)
        check_order(obj, mediator, site.location, site.label, verb)
        mediator.last_site = site  # pyright: ignore[reportAttributeAccessIssue]
        return Access(obj, site, mediator, mediator.wanted(site.location))

    def _site(self, obj: ValueHost) -> Site:
        """Where the value stands on this host now; raises `Unavailable`."""
        case, label, origin = obj._case(), obj._label(self.name), obj._origin
        reason = obj._reason(self, case)
        if reason is not None:
            raise Unavailable(f"{label} is unavailable: {reason}")
        places = [obj._place(self, place, case) for place in self.places(case)]
        location, sink = places[0].location(origin), places[-1].location(origin)
        calls = tuple(f"{origin}.{call}" for call in places[0].calls)
        return Site(label, places[0], location, calls, self.recomputed_in(case), sink)

    def _read(self, access: Access, open_views: Views | None) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
        """What passes at the location, the value in it, and of a recomputed one a copy: all this block of code's rows."""
        site, interleaver = access.site, access.host.interleaver
        if site.recomputed is None:
            raw = open_views.raw if open_views is not None else Mediator.value(site.location)
            tensor = site.at.take(raw)
            if tensor is None:
                found = isinstance(raw, tuple) and site.at.key == "output"
                why = "returned a tuple (return_dict=False), which has no names" if found else "was made without it"
                raise Unavailable(f"{site.label} is unavailable: this call {why}")
            return raw, tensor, None
        if open_views is not None:
            raw = open_views.put_back()
            value = self._compute(access, raw)
            return raw, value, value.detach().clone()
        # The rows of several blocks of code are computed together, once a visit, so that each sees
        # what another has written.
        mediator = access.mediator
        group, mediator.batch_group = mediator.batch_group, None
        try:
            raw = Mediator.value(site.location)
        finally:
            mediator.batch_group = group
        whole = interleaver.computed(site, access.occurrence, lambda: self._compute(access, raw))
        return (interleaver.rows(part, mediator) for part in (raw, *whole))  # pyright: ignore[reportReturnType]

    def _compute(self, access: Access, raw: Any) -> torch.Tensor:
        assert access.site.recomputed is not None
        with access.host.interleaver.stood_down():
            return access.site.recomputed.compute(access.host._module_at(access.site.at.base), *raw)

    def _to_layout(self, host: ValueHost, tensor: torch.Tensor) -> torch.Tensor:
        if self.inside is None or self._outward is None:
            return tensor
        return rearrange(tensor, self._outward, **host._lengths(self.inside))

    def _to_model(self, view: torch.Tensor) -> torch.Tensor:
        return view if self._inward is None else rearrange(view, self._inward)

    def _put_back(self, access: Access, raw: Any, view: torch.Tensor) -> Any:
        return access.site.at.put(raw, going_back(self._to_model(view)))

    def _fold(self, held: Held) -> torch.Tensor:
        """The module's output given a recomputed view: its own numbers at every row that was left alone."""
        site = held.access.site
        assert site.recomputed is not None
        assert held.untouched is not None
        output = ask(Event.VALUE, site.sink, held.access.occurrence)
        inside = self._to_model(held.view)
        folded = site.recomputed.fold(inside, output)
        edited = (inside.detach() != held.untouched).flatten(1).any(1)
        # Where a gradient is wanted the view carries it and the model's numbers the value.
        same = output.detach() + (folded - folded.detach()) if folded.requires_grad else output
        return torch.where(rearrange(edited, "rows -> rows 1"), folded, same)

    def _fitting(self, access: Access, value: Any, current: torch.Tensor) -> torch.Tensor:
        what = f"{access.site.label} is {self.layout}"
        if not isinstance(value, torch.Tensor):
            raise WriteError(
                f"{what}; it takes a torch.Tensor, not {type(value).__name__}. "
                f"To fill it, write in place: `{self.name}[:] = ...`"
            )
        if value.shape != current.shape:
            raise WriteError(f"{what} = {list(current.shape)} here; the tensor assigned has shape {list(value.shape)}")
        if kind(value.dtype) != kind(current.dtype):
            raise WriteError(f"{what} of {current.dtype}; the tensor assigned is {value.dtype}, of another kind")
        if isinstance(current, FakeTensor):
            return value.to(current)
        if value.device != current.device:
            raise WriteError(
                f"{what} on {current.device}; the tensor assigned is on {value.device}: "
                f"move it with .to({self.name}.device)"
            )
        if self.below is not None and value.numel():
            low, high, end = int(value.min()), int(value.max()), access.host._axis(self.below)
            if low < 0 or high >= end:
                raise WriteError(
                    f"{what}, each from 0 to {end - 1} ({self.below}); the tensor assigned has {low} to {high}"
                )
        return value.to(current.dtype)


class Held(NamedTuple):
    """A view that a block of code holds: how it came by it, and of a recomputed value a copy as it was."""

    access: Access
    view: torch.Tensor
    untouched: torch.Tensor | None


class Views(WriteBack):
    """The views that a block of code holds of what passes at one location, all going back together.

    nnsight keeps one write-back, issued when the block of code asks for something else. Here it is
    that of every value read or assigned at the location, so that none of them goes stale when the
    next is asked for. A recomputed value goes back at another location, after the others.
    """

    raw: Any
    read_at: str
    held: dict[Value, Held]

    @classmethod
    def at(cls, access: Access) -> Views | None:
        """The views that are open where this access reads, if any are."""
        waiting = access.mediator.transform
        here = (access.site.location, access.occurrence)
        return waiting if isinstance(waiting, Views) and (waiting.read_at, waiting.occurrence) == here else None

    @classmethod
    def open(cls, access: Access, raw: Any) -> Views:
        """Hold views of ``raw`` from here on."""
        views = cls(None, None, None, access.site.location, access.occurrence)  # pyright: ignore[reportArgumentType]
        views.raw, views.read_at, views.held = raw, access.site.location, {}
        return views

    def hold(self, value: Value, held: Held) -> None:
        """Hold one more view, or another one of a value held already."""
        self.held[value] = held
        sinks = [other.access.site.sink for other in self.held.values() if other.access.site.recomputed is not None]
        # A tuple can't be changed, so the one that nnsight waits to issue is replaced.
        views = type(self)(self._issue, None, None, sinks[0] if sinks else self.read_at, self.occurrence)
        views.raw, views.read_at, views.held = self.raw, self.read_at, self.held
        held.access.mediator.transform = views

    def put_back(self) -> Any:
        """What passes at the location, with every view but a recomputed one in its place."""
        raw = self.raw
        for value, held in self.held.items():
            if held.access.site.recomputed is None:
                raw = value._put_back(held.access, raw, held.view)
        return raw

    def _issue(self) -> Any:
        """What to swap in, and where a recomputed value is held, what its module returns given all of it."""
        recomputed = [(value, held) for value, held in self.held.items() if held.access.site.recomputed is not None]
        if not recomputed:
            return self.put_back()
        value, held = recomputed[0]
        if len(self.held) > 1:
            ask(Event.SWAP, self.read_at, held.access.occurrence, self.put_back())
        return value._fold(held)


def watched(access: Access, raw: Any, derived: torch.Tensor) -> WriteBack:
    """A write-back that changes nothing, and raises if a derived tensor was edited in place meanwhile."""
    version = derived._version

    def unchanged() -> Any:
        if derived._version != version:
            raise ReadOnly(
                f"{access.site.label} was edited in place, which reaches nothing: it is derived; "
                f"assign the value it comes from, or edit a copy (.clone())"
            )
        return raw

    return WriteBack(unchanged, derived, None, access.site.location, access.occurrence)


def ask(event: Event, location: str, occurrence: int, *value: Any) -> Any:
    """One of nnsight's requests, of a given visit, while a write-back is being issued."""
    return getcurrent().parent.switch(Pending(event, location, occurrence, *value))  # pyright: ignore[reportOptionalMemberAccess]


def separate(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether an edit of ``view``, or its gradient, needs the view to be put back.

    Without autograd a view shares the model's memory, so an edit of it is one of the model's tensor,
    for as long as the tensor is in use. With autograd a view is not on the way to the loss; neither
    are the rows of one prompt of several, which nnsight narrows out of the tensor.
    """
    if isinstance(tensor, FakeTensor):
        return False
    if torch.is_grad_enabled() and tensor.requires_grad:
        return view is not tensor or getattr(tensor, "_nnsight_batch", False)
    return view is not tensor and view.data_ptr() != tensor.data_ptr()


def going_back(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that has to be spliced in even though it shares the memory it goes to."""
    tensor = tensor.view_as(tensor)
    tensor._nnterp_back = True  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


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


def check_order(obj: ValueHost, mediator: Mediator, location: str, label: str, verb: str) -> None:
    """Raise `OutOfOrder` if this forward pass has gone by ``location`` already.

    nnsight pairs a request with the next visit of its location. In a plain trace there is
    none, so the run ends with the request open; in a generation the next step has one, and
    the request would be answered with that step's value.
    """
    served, step = mediator.pending, mediator.iteration
    provider = served.provider if served is not None else None
    if step is None:
        # Relaxed: the step is the visit at which the model is paused for this block of code.
        if served is None:
            return
        if provider is None:
            # Released from a barrier by another block of code, which the model is paused for.
            step = obj.interleaver.step(mediator)
        elif provider.startswith(f"{obj._root_path}."):
            step = served.iteration
    if step is None or mediator.occurrence(location) <= step:
        return
    last: Site | None = getattr(mediator, "last_site", None)
    after = ""
    if provider:
        after = f" after {last.label if last is not None and last.location == provider else provider}"
    raise OutOfOrder(
        f"{label} was asked for{after}, but the forward pass comes to it before: it has gone by. "
        f"{'Read' if verb == 'read' else 'Assign'} it earlier in the block; model.order() lists the order, "
        f"and model.rank(name, layer) sorts by it"
    )
