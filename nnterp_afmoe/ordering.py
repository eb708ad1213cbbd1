"""The order of the forward pass: which value of two has to be asked for first, in one trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Unavailable, near
from .places import INSIDE, parse
from .support import block_values

if TYPE_CHECKING:
    from .family import Case
    from .values import Value

__all__ = ["Ordering"]


class Ordering:
    """Mixed into `StandardizedTransformer`; it reads the config and the installed source, and runs nothing."""

    def order(self: Any, layer: int | None = None) -> list[str]:
        """The values that are available, in the order one trace has to ask for them.

        Args:
            layer: A block, for its values by dotted name; by default the root's own values. The
                root's `input_ids`, `attention_mask` and `token_embeddings` come before every block,
                the others after.
        """
        ranks = self._ranks(layer)
        return sorted(ranks, key=ranks.__getitem__)

    def rank(self: Any, name: str, layer: int | None = None) -> tuple[float, ...]:
        """A sort key: of two values, the one of lower rank has to be asked for first.

        Args:
            name: A value's dotted name, as `support` spells it.
            layer: Its block, negative from the end; ``None`` for a value of the root.

        Raises:
            KeyError: there is no value of that name.
            Unavailable: the value is not available there, so it has no place in the order.
        """
        case, found = self._case_of(layer), self._values_of(layer).get(name)
        reason = found[0]._reason(found[1], case) if found else self._no_such(name, layer)
        if found is None or reason is not None:
            label = name if layer is None else f"layers[{layer}].{name}"
            raise Unavailable(f"{label} is unavailable, so it has no rank: {reason}")
        host, value = found
        return (*self._ahead(layer), *host._rank(value, case))

    def _no_such(self: Any, name: str, layer: int | None) -> str | None:
        """Why a block lacks a value that others have; raises `KeyError` for a name that none has."""
        reasons = self._reasons(layer)
        if name not in reasons:
            where = "the root" if layer is None else "a block"
            raise KeyError(f"{name!r} is not a value of {where}{near(name, reasons)}")
        return reasons[name]

    def _ranks(self: Any, layer: int | None) -> dict[str, tuple[float, ...]]:
        """The rank of every value that is available."""
        case, ahead = self._case_of(layer), self._ahead(layer)
        return {
            name: (*ahead, *host._rank(value, case))
            for name, (host, value) in self._values_of(layer).items()
            if host._reason(value, case) is None
        }

    def _case_of(self: Any, layer: int | None) -> Case:
        return self._case() if layer is None else self.family.case(self.config, self._index(layer))

    def _values_of(self: Any, layer: int | None) -> dict[str, tuple[Any, Value]]:
        """The values of the root, or of a block, each with its host."""
        if layer is None:
            return {name: (self, value) for name, value in type(self).values().items()}
        return block_values(self, self._case_of(layer))

    def _ahead(self: Any, layer: int | None) -> tuple[float, ...]:
        """What every rank of a block begins with."""
        return () if layer is None else (*self._block_rank(), self._case_of(layer).layer)

    def _reasons(self: Any, layer: int | None) -> dict[str, str | None]:
        if layer is not None:
            return self.support(layer=layer)
        case = self._case()
        return {name: self._reason(value, case) for name, value in type(self).values().items()}

    def _block_rank(self: Any) -> tuple[float, ...]:
        call = self._place(None, parse(self.family.block_call))
        return (*call.rank[:-1], INSIDE)
