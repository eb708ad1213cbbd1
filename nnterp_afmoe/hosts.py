"""Envoys that carry values: what a block, its attention and its MLP are wrapped in.

`ValueHost` is what `Value` needs of whoever carries it: where it hangs, which block and config
it belongs to, how long its axes are, why a value is missing. `Host` is that for a module of a
block; a family subclasses it, one class a table of values.

A host reads the config through the interleaver, which the whole tree shares and which a
remote run resolves to the server's own, so that an envoy works after it has travelled.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from nnsight import Envoy
from nnsight.intervention.aliasing import path_ends_with

from .errors import NoSuchName, Unavailable
from .family import Case
from .instrumenting import instrument_operations
from .places import INSIDE, Moved, Place, Resolved, operation, resolve
from .values import Value

if TYPE_CHECKING:
    from .family import Family
    from .interleaving import RunInterleaver
    from .model import StandardizedTransformer

__all__ = ["Chooser", "GuardedEnvoy", "Host", "Layers", "ValueHost"]


class GuardedEnvoy(Envoy):
    """An envoy that refuses, inside a trace, an assignment that would reach nothing."""

    interleaver: RunInterleaver

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign at a value; refuse a name that is none, or that is a module's or a method's.

        Outside a trace, and for modules, an envoy takes attributes as any object does.
        """
        running = "interleaver" in self.__dict__ and self.interleaver.interleaving
        if running and not name.startswith("_") and not isinstance(value, torch.nn.Module):
            self._refuse_assignment(name)
        super().__setattr__(name, value)

    def _refuse_assignment(self, name: str) -> None:
        if inspect.isdatadescriptor(getattr(type(self), name, None)):
            return
        if name in self.__dict__ or hasattr(type(self), name):
            what = "a module" if isinstance(self.__dict__.get(name), Envoy) else "not a value"
            raise NoSuchName(
                self._described(), name, (), f"has nothing to assign at: {name} is {what}. Assign a value of it, not"
            )
        raise NoSuchName(self._described(), name, self._names(), "has nothing to assign at")

    def _described(self) -> str:
        return f"{self.path} ({type(self._module).__name__})"

    def _names(self) -> list[str]:
        return [*self.__dict__.get("_child_map", {}), *self.__dict__.get("_aliases", {}), "input", "output"]


class Chooser:
    """What nnsight builds an envoy of any module with: the family's class for it, or a guarded plain one."""

    def __init__(self, envoys: Mapping[type | str, type]) -> None:
        self.envoys = envoys

    def __call__(self, module: torch.nn.Module, path: str, **options: Any) -> Envoy:
        for klass in type(module).__mro__:
            if klass in self.envoys:
                return self.envoys[klass](module, path=path, **options)
        for key, envoy in self.envoys.items():
            if isinstance(key, str) and path_ends_with(path, key):
                return envoy(module, path=path, **options)
        return GuardedEnvoy(module, path=path, **options)


class ValueHost(GuardedEnvoy):
    """An envoy whose class attributes are values.

    Attributes:
        _origin: The path that its places are written from: the block's, or the root's.
        _layer: The block's index; 0 on the root, whose values depend on no block.
    """

    _origin: str
    _layer: int

    @classmethod
    def values(cls) -> dict[str, Value]:
        """The values declared on this class, by name, as `print` lists them."""
        found: dict[str, Value] = {}
        for klass in cls.__mro__:
            if not issubclass(klass, ValueHost):
                continue
            for name, attribute in vars(klass).items():
                if isinstance(attribute, Value):
                    found.setdefault(name, attribute)
        return found

    @property
    def _root(self) -> StandardizedTransformer:
        return self.interleaver.root

    @property
    def _root_path(self) -> str:
        return self._root.path

    def _case(self) -> Case:
        """This host's block under the config as it is now; within a run, as it was when the run began."""
        interleaver, root = self.interleaver, self._root
        if interleaver.interleaving:
            return Case(root.config, self._layer, *interleaver.implementations)
        return root.family.case(root.config, self._layer)

    def _label(self, name: str) -> str:
        """The value as the user spells it, without the model's name."""
        raise NotImplementedError

    def _module_at(self, base: str) -> torch.nn.Module:
        """The module at ``base`` under the origin."""
        path = f"{self._origin}.{base}" if base else self._origin
        return self._root._module.get_submodule(path.partition(".")[2])

    def _place(self, value: Value | None, place: Place, case: Case | None = None) -> Resolved:
        """Where ``place`` is in the installed source; raises `Moved`."""
        case = case or self._case()
        cache = self.interleaver.resolved
        key = (value, id(place), case.attn_implementation, case.experts_implementation)
        if key not in cache:
            family = self._root.family
            callees = {name: lambda look_up=look_up: look_up(case) for name, look_up in family.callees.items()}
            try:
                cache[key] = resolve(self._native(place), self._module_at(""), callees)
            except Moved as moved:
                cache[key] = moved
        found = cache[key]
        if isinstance(found, Moved):
            raise found
        return found

    def _native(self, place: Place) -> Place:
        return place

    def _reason(self, value: Value, case: Case) -> str | None:
        """Why this host lacks ``value`` in this case, or ``None``."""
        reason = value.unavailable(case)
        if reason is not None:
            return reason
        try:
            for place in value.places(case):
                self._place(value, place, case)
        except Moved as moved:
            return self.interleaver.moved(moved)
        return None

    def _rank(self, value: Value, case: Case) -> tuple[float, ...]:
        """Where ``value`` stands in the order of this origin's forward pass; raises `Moved`."""
        rank = self._place(value, value.places(case)[0], case).rank
        # What is recomputed is read with the arguments of a call and written at its result, so inside it.
        return (*rank[:-1], INSIDE) if value.recomputed_in(case) else rank

    def _lengths(self, pattern: str) -> dict[str, int]:
        """The axes that einops can't read off a tensor shaped like ``pattern``."""
        lengths = {}
        for group in pattern.split("(")[1:]:
            for axis in group.partition(")")[0].split()[1:]:
                lengths[axis] = self.interleaver.seq if axis == "seq" else self._axis(axis)
        return lengths

    def _axis(self, name: str) -> int:
        return self._root.family.axes[name](self._root.config)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise NoSuchName(self._described(), name, self._names()) from None

    def _described(self) -> str:
        return f"{self.path} ({type(self).__name__})"

    def _names(self) -> list[str]:
        return [*self.values(), *self.__dict__.get("_child_map", {}), *self.__dict__.get("_aliases", {})]


class Host(ValueHost):
    """A module of a block, carrying values.

    Attributes:
        at: Where the module hangs in its block; ``""`` for the block itself.
        absent: Gives the reason why a block has no such host.
        family: The family that registered the class.
    """

    at: ClassVar[str] = ""
    family: ClassVar[Family]

    @staticmethod
    def absent(case: Case) -> str:
        """Why a block does not have this host."""
        raise NotImplementedError

    @classmethod
    def dotted(cls, name: str) -> str:
        """``name`` as `support` spells it, from the block: ``"self_attn.attention_scores"``."""
        return f"{cls.at}.{name}" if cls.at else name

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._origin = self.path.removesuffix(f".{self.at}") if self.at else self.path
        self._layer = int(self._origin.rpartition(".")[2])
        self._instrument()

    def _update(self, module: torch.nn.Module) -> None:
        super()._update(module)
        self._instrument()

    def _instrument(self) -> None:
        """Instrument the forwards that places run through, before any of them starts.

        The block does it for all its hosts. A forward that is running already can't be
        swapped for its instrumented twin, so this can't wait for the first read.
        """
        if self.at:
            return
        places = [value.place for host in self.family.hosts for value in host.values().values()]
        wanted: dict[str, set[str]] = {}
        for path, code in filter(None, map(first_operation, places)):
            wanted.setdefault(path, set()).add(code)
        for path, codes in wanted.items():
            try:
                envoy = self.get(path) if path else self
                labels = frozenset(operation(envoy._module, code) for code in codes)
            except (AttributeError, Moved):
                continue  # This block has no such module, or no such operation; `support` tells why.
            instrument_operations(envoy, labels)

    def _label(self, name: str) -> str:
        return f"layers[{self._layer}].{self.dotted(name)}"

    def __getattr__(self, name: str) -> Any:
        for host in self.family.hosts:
            if host.at == self.at and name in host.values():
                # Another kind of block has this value: say so, not "no such attribute".
                raise Unavailable(f"{self._label(name)} is unavailable: {host.absent(self._case())}")
            if host.at == self.dotted(name) and self.family.present(self._root.config, self._layer, host.at) is None:
                raise Unavailable(f"{self._label(name)} is unavailable: {host.absent(self._case())}")
        return super().__getattr__(name)

    def _refuse_assignment(self, name: str) -> None:
        if name not in self.__dict__ and not hasattr(type(self), name):
            getattr(self, name, None)  # Another kind of block may have it, and says why this one has not.
        super()._refuse_assignment(name)

    def support(
        self, *, attn_implementation: str | None = None, experts_implementation: str | None = None
    ) -> dict[str, str | None]:
        """What this host and those inside it offer: a value's dotted name to ``None`` or the reason why not.

        Args:
            attn_implementation: Answer as if the model ran this attention implementation.
            experts_implementation: Answer as if it ran this experts implementation.
        """
        support = self._root.support(
            layer=self._layer, attn_implementation=attn_implementation, experts_implementation=experts_implementation
        )
        prefix = f"{self.at}." if self.at else ""
        return {name.removeprefix(prefix): reason for name, reason in support.items() if name.startswith(prefix)}


class Layers(GuardedEnvoy):
    """The model's blocks, by index or slice; a negative index counts from the end."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise IndexError(
                f"layers[{key}]: the model has {len(self)} layers, 0 to {len(self) - 1} (or -{len(self)} to -1)"
            )
        return super().__getitem__(key)


def first_operation(place: Place) -> tuple[str, str] | None:
    """The module whose forward holds the first operation of ``place``, and its code; ``None`` without one."""
    for index, step in enumerate(place.steps):
        if step.code is not None:
            return ".".join(part.name for part in place.steps[:index]), step.code
    return None
