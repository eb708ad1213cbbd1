"""The views that a block of code holds of values, and how they go back to the model.

A view may need to be put back: it is a copy, or with autograd it is not on the way to the loss, or it
was computed and no tensor holds it. nnsight issues one write-back when the block of code asks for
something else; `Views` makes that one stand for every value held at a location.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from greenlet import getcurrent
from nnsight.intervention.eproperty import WriteBack
from nnsight.intervention.interleaver import Event, Mediator, Pending
from torch._subclasses.fake_tensor import FakeTensor

from .places import Place, Resolved

if TYPE_CHECKING:
    from .family import Case
    from .hosts import ValueHost
    from .values import Value

__all__ = ["Access", "Held", "Recomputed", "Site", "Views", "ask", "going_back", "separate", "watched"]


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


def watched(access: Access, raw: Any, given: torch.Tensor, edited: Callable[[], None]) -> WriteBack:
    """A write-back that changes nothing, and calls ``edited`` if what a reader was given was edited in place meanwhile.

    Under inference mode a tensor keeps no version to tell by, so ``edited`` is called as if it was.
    """
    version = None if given.is_inference() else given._version

    def issue() -> Any:
        if version is None or given._version != version:
            edited()
        return raw

    return WriteBack(issue, given, None, access.site.location, access.occurrence)


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
