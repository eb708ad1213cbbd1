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
from typing import TYPE_CHECKING, Any, overload

import torch
from einops import rearrange
from greenlet import getcurrent
from nnsight import Object
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Event, Mediator
from torch._subclasses.fake_tensor import FakeTensor

from .errors import OutOfOrder, OutsideTrace, ReadOnly, Unavailable, WriteError
from .layouts import Layout
from .places import Place, parse
from .views import Access, Held, Recomputed, Site, Views, ask, going_back, separate, watched

if TYPE_CHECKING:
    from typing_extensions import Self

    from .family import Case
    from .hosts import ValueHost

__all__ = ["Value"]


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
                access.mediator.transform = watched(access, raw, derived, lambda: self._refuse_edit(site.label))
            return derived
        view = self._to_layout(obj, tensor)
        if self.shared:
            view = view.clone()
        elif site.recomputed is None:
            if not separate(view, tensor):
                if self.below is not None and open_views is None and not isinstance(view, FakeTensor):
                    access.mediator.transform = watched(access, raw, view, lambda: self._refuse_range(access, view))
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
        mediator.flush()  # What is waiting to go back is of this block of code's rows.
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
        self._refuse_range(access, value)
        return value.to(current.dtype)

    def _refuse_range(self, access: Access, value: torch.Tensor) -> None:
        """Raise `WriteError` on integers that name nothing, which some kernels take and answer with garbage."""
        if self.below is not None and value.numel():
            low, high, end = int(value.min()), int(value.max()), access.host._axis(self.below)
            if low < 0 or high >= end:
                raise WriteError(
                    f"{access.site.label} is {self.layout}, each from 0 to {end - 1} ({self.below}); "
                    f"what was written has {low} to {high}"
                )

    def _refuse_edit(self, label: str) -> None:
        """Raise `ReadOnly` on an edit of a derived tensor."""
        raise ReadOnly(
            f"{label} was edited in place, which reaches nothing: it is derived; "
            f"assign the value it comes from, or edit a copy (.clone())"
        )


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
