"""What a run has to know beyond nnsight's own: how many tokens a row has, and which are real.

Inside a mixture tensors are flat over tokens, ``[batch*seq, ...]``. nnsight narrows a value to
one prompt's rows by its first axis being the batch; here a first axis of batch times seq is
narrowed as well, to the tokens of those rows. Both numbers are of the forward pass that is
running: the first block's input is observed on its way by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from nnsight.intervention.batching import Batcher
from nnsight.intervention.interleaver import Interleaver, Mediator
from nnsight.intervention.source import SourceEnvoy
from nnsight.intervention.util import first_input
from nnsight.modeling.tp import TPFragments
from torch._subclasses.fake_tensor import FakeTensor

from .places import Moved, Resolved
from .values import current_mediator

if TYPE_CHECKING:
    from .hosts import ValueHost
    from .model import StandardizedTransformer
    from .values import Value
    from .views import Site

__all__ = ["RunInterleaver", "TokenBatcher"]

#: Observes for the whole batch, whatever the prompts.
WHOLE_BATCH: Any = SimpleNamespace(batch_group=None)


class Observer:
    """An entry among the interleaver's observers: hands what passes to a function."""

    def __init__(self, function: Any) -> None:
        self.observe_selected = lambda selected, value: function(value)


class RunInterleaver(Interleaver):
    """nnsight's interleaver, which also knows the model and the shape of the running forward pass.

    Attributes:
        implementations: The attention and experts implementation of the run.
        seq: Tokens a row in the forward pass that is running.
        mask: Its ``[batch, tokens so far]`` attention mask, or ``None``.
        kept: Its ``logits_to_keep``.
        resolved: The places resolved so far, by value, place and implementations.
        recomputed: The recomputed value of the visit that is going on, and a copy of it as it was.
        sites: Where the values asked for so far stand under these implementations, by host and value.
    """

    def __init__(self, root: StandardizedTransformer) -> None:
        super().__init__(fragments=TPFragments())
        self._root = weakref.ref(root)
        self.implementations: tuple[str, str] = ("", "")
        self.seq: int = 1
        self.mask: torch.Tensor | None = None
        self.kept: Any = 0
        self.resolved: dict[tuple[Value | None, int, str, str], Resolved | Moved] = {}
        self.sites: dict[tuple[str, Value], Site] = {}
        self.recomputed: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __deepcopy__(self, memo: dict) -> RunInterleaver:
        """Part of a tree is copied, and goes on in the run of the whole; `StandardizedTransformer` copies itself."""
        return self

    @property
    def root(self) -> StandardizedTransformer:
        """The model's root envoy."""
        root = self._root()
        if root is None:
            raise ReferenceError("the model of this envoy has been deleted")
        return root

    def moved(self, moved: Moved) -> str:
        """The reason for a value whose place is not in the installed release."""
        import transformers

        return f"{moved}, in transformers {transformers.__version__}; a release that this package is tested with has it"

    def __enter__(self) -> RunInterleaver:
        config = self.root.config
        implementations = (config._attn_implementation, config._experts_implementation)
        if implementations != self.implementations:
            self.implementations = implementations
            self.sites.clear()
        super().__enter__()
        return self

    def reindex(self) -> None:
        super().reindex()
        if self.mediators:
            root = self.root
            for location, function in (
                (f"{root.path}.input", self._see_call),
                (f"{root.layers.path}.0.input", self._see_block),
            ):
                self.observers.setdefault(location, []).append((WHOLE_BATCH, Observer(function), ("", "")))

    def _see_call(self, value: Any) -> None:
        _, kwargs = value
        mask = kwargs.get("attention_mask")
        self.kept = kwargs.get("logits_to_keep", 0)
        self.mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def _see_block(self, value: Any) -> None:
        self.seq = first_input(*value).shape[1]

    def computed(
        self, site: Site, visit: int, compute: Callable[[], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A recomputed value at one visit, for every block of code the same, and a copy of it as it was."""
        key = (site.location, visit)
        if key not in self.recomputed:
            assert compute is not None
            self.recomputed.clear()
            value = compute()
            self.recomputed[key] = value, value.detach().clone()
        return self.recomputed[key]

    def rows(self, value: Any, mediator: Mediator) -> Any:
        """The rows of ``value`` that are this block of code's."""
        return value if self.batcher is None else self.batcher.narrow(value, mediator.batch_group)

    def step(self, mediator: Mediator) -> int:
        """Which forward pass of a generation is running, as this block of code counts."""
        entry = f"{self.root.path}.input"
        begun = mediator.occurrence(entry)
        entering = any(
            other.pending is not None and other.pending.provider == entry and other.pending.iteration == begun
            for other in self.mediators
        )
        return begun if entering else begun - 1

    def forget(self) -> None:
        """Resolve every place anew: the modules have changed."""
        self.resolved.clear()
        self.sites.clear()

    def own_mask(self) -> torch.Tensor | None:
        """The rows of `mask` that are the running block of code's."""
        mediator = current_mediator()
        return self.mask if mediator is None else self.rows(self.mask, mediator)

    def cancel(self) -> None:
        super().cancel()
        self.mask = None
        self.recomputed.clear()

    @contextmanager
    def stood_down(self) -> Iterator[None]:
        """Run modules outside their place in the forward pass, served to nobody."""
        interleaving, self.interleaving = self.interleaving, False
        try:
            yield
        finally:
            self.interleaving = interleaving

    def instrument_call(self, host: ValueHost, mediator: Mediator, path: str) -> None:
        """Make the operations inside the function called at ``path`` addressable in this run.

        nnsight counts the visits of an operation from when it is instrumented. A block of
        code that first asks at a later step of a generation would so wait for a visit that
        does not come; the steps already made are counted in.
        """

        def count_in(*locations: str) -> None:
            made = mediator.occurrence(f"{path}.output")
            for location in locations:
                self.counts[location] = mediator.counts_at_start.get(location, 0) + made

        count_in(f"{path}.fn")
        # Waits for the call, which may be steps ahead of where the model is now.
        inside = SourceEnvoy(host, path.rpartition(".")[2], path, "", 0).source
        count_in(*(f"{path}.source.{label}.{end}" for label in inside.names for end in ("input", "skip", "output")))


class TokenBatcher(Batcher):
    """Narrows and widens tensors that are flat over tokens, as nnsight's does those over rows."""

    def assemble(self, fn: Any) -> tuple:
        args, kwargs = super().assemble(fn)
        if self.batching:
            config = kwargs.get("generation_config")
            for name in ("num_beams", "num_return_sequences"):
                each = kwargs.get(name) or getattr(config, name, None) or 1
                if each > 1:
                    raise ValueError(
                        f"{name}={each} makes {each} rows of every prompt, so several invokes can't be told apart: "
                        f"generate from one prompt at a time, or with {name}=1"
                    )
        return args, kwargs

    @property
    def interleaver(self) -> RunInterleaver:
        return self.envoy.interleaver  # pyright: ignore[reportReturnType]

    def _flat(self, tensor: torch.Tensor) -> int:
        """Leading entries that one row takes up in ``tensor``: the tokens a row if it is flat, else 1."""
        seq = self.interleaver.seq
        return seq if tensor.dim() and seq > 1 and tensor.shape[0] == self.total * seq else 1

    def _narrow_tensor(self, tensor: torch.Tensor, group: list) -> torch.Tensor:
        each = self._flat(tensor)
        if each == 1:
            return super()._narrow_tensor(tensor, group) if tensor.dim() else tensor
        start, size = group
        view = tensor.narrow(0, start * each, size * each)
        # As the base class marks its slices, so that `.grad` is found.
        view._nnsight_batch = True  # pyright: ignore[reportAttributeAccessIssue]
        return view

    def _in_place(self, full: torch.Tensor, group: list, edited: torch.Tensor) -> bool:
        """Whether ``edited`` is these rows of ``full`` themselves, so that what was done to it is done to both.

        A copy put in their place would leave every view handed out before without effect.
        """
        if isinstance(full, FakeTensor) or isinstance(edited, FakeTensor):
            return False
        if getattr(edited, "_nnterp_back", False) and edited.requires_grad:
            return False
        rows = self._narrow_tensor(full, group)
        return (edited.data_ptr(), edited.shape, edited.stride()) == (rows.data_ptr(), rows.shape, rows.stride())

    def _widen_tensor(self, full: torch.Tensor, group: list, edited: torch.Tensor) -> torch.Tensor:
        if full.dim() and self._in_place(full, group, edited):
            return full
        each = self._flat(full)
        if each == 1:
            return super()._widen_tensor(full, group, edited) if full.dim() else edited
        start, size = (each * number for number in group)
        return torch.cat([full[:start], edited, full[start + size :]], dim=0)
