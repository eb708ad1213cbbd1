"""`StandardizedTransformer`: a supported model under standard names, its values to read and to write."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from nnsight import Envoy
from nnsight.intervention.tracer import ScanningTracer
from nnsight.modeling.mixins.meta import Meta
from nnsight.modeling.mixins.remotable import Remotable
from nnsight.modeling.transformers import TransformersModel
from transformers import TextGenerationPipeline

from . import families  # noqa: F401  registers them
from .check import check
from .collecting import Collected, collect
from .describing import describe, template
from .errors import LoadError, Unavailable
from .family import Family
from .hosts import Chooser, ValueHost
from .indexing import counted
from .interleaving import RunInterleaver, TokenBatcher
from .interventions import Interventions
from .layouts import Logits, NextTokenProbs, Residual, Tokens
from .loading import family_for, refuse_unknown, refuse_unknown_call, tokenizer_for
from .ordering import Ordering
from .pages import page
from .parameters import Samples, report_cast
from .places import Place, Step
from .support import Support, block_values, check_known, layer_support
from .values import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .check import Report
    from .families import Block

__all__ = ["Blocks", "StandardizedTransformer"]


if TYPE_CHECKING:

    class Blocks(Envoy):
        """The model's blocks."""

        def __getitem__(self, key: int) -> Block: ...  # pyright: ignore[reportIncompatibleMethodOverride]
        def __iter__(self) -> Iterator[Block]: ...
else:
    from .hosts import Layers as Blocks


def last_token_probs(host: ValueHost, logits: torch.Tensor) -> torch.Tensor:
    """The softmax over the last real token's logits, in float32."""
    interleaver = host.interleaver
    mask = interleaver.own_mask()
    if isinstance(interleaver.kept, torch.Tensor):
        raise Unavailable("next_token_probs is unavailable: logits_to_keep chose positions of its own; read logits")
    last = logits[:, -1]
    if mask is not None:
        # The last position whose mask is not zero, the last of all where padding is on the left,
        # among the logits that were kept: the last ones.
        position = logits.shape[1] - 1 - mask.flip(1).ne(0).int().argmax(1)
        if mask.shape[1] != logits.shape[1] and bool((position < 0).any()):
            raise Unavailable(
                "next_token_probs is unavailable: the prompts are padded on the right and the last real token's logits "
                "were not kept; pad on the left, or call without logits_to_keep"
            )
        last = logits[torch.arange(logits.shape[0], device=logits.device), position]
    return last.float().softmax(-1)


def call_size(host: ValueHost, ids: torch.Tensor) -> torch.Size:
    """How many rows, and tokens a row, this call is of."""
    return ids.shape[:2]


#: The keywords of a trace that are nnsight's own.
TRACING = frozenset(
    name
    for method in (TransformersModel.trace, Remotable.trace, Envoy.trace, Meta.scan)
    for name in inspect.signature(method).parameters
)


def written(inputs: tuple) -> bool:
    """Whether an invoke's input is text: a string, or a list of them."""
    data = inputs[0] if inputs else None
    return isinstance(data, str) or (isinstance(data, (list, tuple)) and any(isinstance(item, str) for item in data))


class ScanTracer(ScanningTracer):
    """A scan under the experts implementation that propagates shapes in any dtype."""

    def execute(self, code: Any) -> None:
        model: Any = self.envoy
        before = model.config._experts_implementation
        model.set_experts_implementation(model.family.scan_experts)
        try:
            super().execute(code)
        finally:
            model.set_experts_implementation(before)


class StandardizedTransformer(TransformersModel, Interventions, Ordering, ValueHost):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A model of a supported family, wrapped for tracing, with every named value to read and to write.

    nnsight's `TransformersModel` with the standard names on top: ``layers``, ``embed_tokens``, ``norm``
    and ``lm_head`` at the root, and the named values on the root, each block, its attention and
    its MLP. Every native path (``model.model.layers[0].mlp.router``) works as before.

        model = StandardizedTransformer("arcee-ai/Trinity-Nano-Base")
        with model.trace("The Eiffel Tower is in"):
            stream = model.layers[3].layer_output.save()

    Like nnsight's, it loads no weights until it runs: printing, `support` and `scan` need none.

    Args:
        model: A hub name, a local folder, or a loaded model.
        **kwargs: Everything ``from_pretrained`` and `TransformersModel` take: ``tokenizer``, ``dtype``,
            ``device_map``, ``revision``, ``attn_implementation``, ``experts_implementation``, ``dispatch``, ...

    Raises:
        UnsupportedModel: the model is of another type.
        ConfigError: its config contradicts itself.
        LoadError: there is no config, or a keyword is unknown.
    """

    layers: Blocks
    embed_tokens: Envoy
    norm: Envoy
    lm_head: Envoy
    family: Family

    logits = Value(Logits, "output[logits]", "what the model returns")
    token_embeddings = Value(Residual, "embed_tokens.output", "embed_tokens' output, before any scaling")
    final_norm_output = Value(Residual, "norm.output", "the normed stream that lm_head reads")
    lm_head_output = Value(Logits, "lm_head.output", "lm_head's output")
    next_token_probs = Value(
        NextTokenProbs, "output[logits]", "softmax at the last real token, float32; read-only", view=last_token_probs
    )
    input_ids = Value(Tokens, "input[input_ids]", "the token ids of this call", below="vocab_size")
    attention_mask = Value(Tokens, "input[attention_mask]", "zeros are padding")
    input_size = Value(None, "input[input_ids]", "[batch seq] of this call; read-only", view=call_size)

    _batcher_class = TokenBatcher

    def __init__(self, model: str | os.PathLike | torch.nn.Module, **kwargs: Any) -> None:
        source = os.fspath(model) if isinstance(model, os.PathLike) else model
        family = family_for(source, **kwargs)
        refuse_unknown(source, family, kwargs)
        object.__setattr__(self, "family", family)
        # Named here because nnsight asks the hub for a checkpoint's task, and a folder is on no hub.
        kwargs.setdefault("task", "text-generation")
        if isinstance(source, str) and kwargs.get("tokenizer") is None:
            kwargs["tokenizer"] = tokenizer_for(source, **kwargs)
        super().__init__(
            source,
            interleaver=RunInterleaver(self),
            envoys={torch.nn.Module: Chooser(family.envoys)},
            rename=dict(family.rename),
            **kwargs,
        )
        self._origin, self._layer = self.path, 0
        if self.dispatched:
            self._loaded()
        self._report_moved()

    # -- loading -------------------------------------------------------------------

    def _wrap(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if self.tokenizer is None and not self.repo_id:
            # A model made in the process names no checkpoint to take a tokenizer from. Token
            # ids need none; a string is refused where it is passed.
            self.task = "text-generation"
            self.pipeline = TextGenerationPipeline(model=module, tokenizer=None)
            return module
        return super()._wrap(module, *args, **kwargs)

    def _load(self, repo_id: str, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load the weights, under the implementations that the undispatched model has been switched to."""
        skeleton = self.__dict__.get("_module")
        module: Any = super()._load(repo_id, *args, **kwargs)
        if skeleton is not None:
            module.set_attn_implementation(skeleton.config._attn_implementation)
            module.set_experts_implementation(skeleton.config._experts_implementation)
        return module

    def _update(self, module: torch.nn.Module) -> None:
        super()._update(module)
        self.interleaver.forget()

    def _report_moved(self) -> None:
        """Resolve every place of every kind of block in the installed source, and warn of those that are not there."""
        moved: dict[str, str] = {}
        for layers in self.family.kinds(self.config).values():
            case = self.family.case(self.config, layers[0])
            for name, (host, value) in block_values(self, case).items():
                if value.unavailable(case) is None and (reason := host._reason(value, case)) is not None:
                    moved[name] = reason
        moved |= {name: reason for name, reason in self._reasons(None).items() if reason is not None}
        if moved:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in moved.items())
            warnings.warn(f"values that the installed release does not have are unavailable:\n{lines}", stacklevel=3)

    def trace(self, *inputs: Any, fn: Any = None, **kwargs: Any) -> Any:
        """Run one forward pass, or what ``fn`` names, with the block's reads and writes: nnsight's ``trace``.

        Raises:
            TypeError: a keyword that neither the call nor the model takes.
        """
        self._refuse_unknown(fn, {name: value for name, value in kwargs.items() if name not in TRACING})
        return super().trace(*inputs, fn=fn, **kwargs)

    def scan(self, *inputs: Any, fn: Any = None, backend: Any = None, **kwargs: Any) -> ScanTracer:
        """Shapes without weights: nnsight's ``scan``, in any dtype and under any experts implementation.

        The experts run as the one implementation whose shapes follow from shapes alone.
        """
        self._refuse_unknown(fn, {name: value for name, value in kwargs.items() if name not in TRACING})
        return ScanTracer(self, self._call if fn is None else fn, *inputs, backend=backend, **kwargs)

    def _refuse_unknown(self, fn: Any, kwargs: dict[str, Any]) -> None:
        refuse_unknown_call(self.family.architecture, kwargs, getattr(fn, "__name__", "") in ("generate", "pipe"))

    def _batch(self, invokes: list, fn: Any) -> tuple:
        for _, kwargs in invokes:
            self._refuse_unknown(fn, kwargs)
        if self.tokenizer is None and any(written(inputs) for inputs, _ in invokes):
            raise LoadError(
                "this model has no tokenizer, so it can't take text: pass token ids, "
                "or build it with StandardizedTransformer(model, tokenizer=...)"
            )
        return super()._batch(invokes, fn)

    # -- sizes ---------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's config, as it is now."""
        return self._module.config

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self._axis("hidden_size")

    @property
    def num_heads(self) -> int:
        """Query heads a block."""
        return self._axis("num_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads a block."""
        return self._axis("num_kv_heads")

    @property
    def head_dim(self) -> int:
        """The width of a head's values."""
        return self._axis("head_dim")

    @property
    def qk_head_dim(self) -> int:
        """The width of a head's queries and keys."""
        return self._axis("qk_head_dim")

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return self._axis("vocab_size")

    @property
    def intermediate_size(self) -> int:
        """Neurons of a dense block's MLP."""
        return self._axis("intermediate_size")

    @property
    def num_experts(self) -> int:
        """Routed experts of a mixture."""
        return self._axis("num_experts")

    @property
    def top_k(self) -> int:
        """Experts a token goes through in a mixture."""
        return self._axis("top_k")

    # -- what is there ---------------------------------------------------------------

    def support(
        self,
        layer: int | None = None,
        *,
        attn_implementation: str | None = None,
        experts_implementation: str | None = None,
    ) -> Any:
        """What is available, from the config alone, before anything runs.

        Args:
            layer: Answer for this block only; negative counts from the end.
            attn_implementation: Answer as if the model ran this attention implementation.
            experts_implementation: Answer as if it ran this experts implementation.

        Returns:
            A `Support`: a value's dotted name (``"self_attn.attention_scores"``) to ``None`` where every
            block has it, else ``{layer: reason}``; printed, a table. With ``layer``, a plain dict of
            that block: a name to ``None`` or the reason.

        Raises:
            IndexError: there is no such layer.
            ValueError: an implementation is not known.
        """
        if layer is None:
            return Support(self, attn_implementation, experts_implementation)
        check_known("attn_implementation", attn_implementation, self.family.attn_implementations())
        check_known("experts_implementation", experts_implementation, self.family.experts_implementations())
        index = self._index(layer)
        return layer_support(self, self.family.case(self.config, index, attn_implementation, experts_implementation))

    # -- collecting ------------------------------------------------------------------

    def collect(self, prompt: Any, values: str | Sequence[str], layers: int | Sequence[int] | None = None) -> Collected:
        """Read values from one forward pass, named in any order, without autograd.

        The pass is stopped after the last value wanted. A tensor is the model's own where the layouts
        agree, so nothing is copied that need not be.

            found = model.collect(["A prompt", "another"], ["mlp.router_logits", "layer_output"], layers=[2, 3])
            found["layer_output"][3]        # [batch seq hidden_size]
            found.mask, found.tokens, found.dims["layer_output"]

        Args:
            prompt: Whatever a trace takes: a string, a list of them, token ids.
            values: Names as `support` spells them, and the root's own.
            layers: The blocks, negative from the end; by default every block that has the value.

        Returns:
            A `Collected`: a name to its tensor or to ``{layer: tensor}``, with the axis names, the token
            strings and the mask of real tokens.

        Raises:
            KeyError: there is no value of that name.
            Unavailable: a block that was asked for lacks the value, or every block does.
        """
        return collect(self, prompt, values, layers)

    # -- proof -----------------------------------------------------------------------

    def check(
        self,
        prompt: Any = None,
        *,
        layers: Sequence[int] | None = None,
        since_load: bool = True,
        progress: bool = True,
    ) -> Report:
        """Hold this model, as it is loaded, to its equations, and report what does not hold.

        Every value of every block follows from those before it; a write to each value, on one block
        of each kind, has the effect the equations give it, down to the logits; what `support` calls
        unavailable raises and what it calls available reads; nothing is NaN or infinite; no
        parameter has changed since the model was wrapped. Loads the weights, and keeps the values
        of one block at a time.

        Args:
            prompt: A string, or ``[batch seq]`` token ids; a sentence by default. A prompt longer
                than the sliding window tests the window.
            layers: Check these blocks only, negative from the end; all by default.
            since_load: Also compare the parameters with a sample of them kept when the model was
                wrapped. Pass ``False`` after changing them on purpose.
            progress: Show a progress bar.

        Returns:
            A `Report`: ``.ok``, ``.failures``, ``.to_dict()``; printed, a table.
        """
        return check(self, prompt, layers=layers, since_load=since_load, progress=progress)

    def dispatch(self) -> None:
        if not self.dispatched:
            super().dispatch()
            self._loaded()

    def _loaded(self) -> None:
        """The weights are here: keep a sample of them, and say so if the load has cast what it should not."""
        self._samples = Samples(self._module)
        report_cast(self._module, self.family)

    def __deepcopy__(self, memo: dict) -> StandardizedTransformer:
        """A model of its own: a copy of the module, wrapped anew; of an undispatched model, another build."""
        if not self.dispatched:
            return type(self)(*self.args, **self.kwargs)
        twin = type(self)(copy.deepcopy(self._module, memo), tokenizer=self.tokenizer)
        twin._edits = list(self._edits)
        return twin

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state.pop("_samples", None)
        return state

    # -- which layers ----------------------------------------------------------------

    def _index(self, layer: Any) -> int:
        """A layer's index, counted from the end where it is negative; raises `IndexError` or `TypeError`."""
        return self._indices(layer)[0]

    def _indices(self, layers: Any) -> list[int]:
        """One layer or several, as indices; raises `IndexError` for one that is not there, `TypeError` for what is none."""
        if isinstance(layers, (str, bytes)):
            raise TypeError(f"layers={layers!r}: give a layer's index or several, not text")
        indices, wrong = counted(layers, self.num_layers)
        if wrong:
            raise IndexError(f"layers={wrong}: the model has {self.num_layers} layers, 0 to {self.num_layers - 1}")
        return indices

    # -- what a value needs of its host -------------------------------------------------

    @property
    def _root(self) -> StandardizedTransformer:
        return self

    def _label(self, name: str) -> str:
        return name

    def _native(self, place: Place) -> Place:
        native = {standard: path for path, standard in self.family.rename.items()}
        if not place.steps or place.steps[0].name not in native:
            return place
        first = tuple(Step(part) for part in native[place.steps[0].name].split("."))
        return Place((*first, *place.steps[1:]), place.key, place.pick)

    # -- printing --------------------------------------------------------------------

    def __repr__(self) -> str:
        standard = {path.partition(".")[0] for path in self.family.rename}
        children = [(name, child) for name, child in self._named_children() if name not in standard]
        children += [(alias, getattr(self, alias)) for alias in self.family.rename.values()]
        lines = [f"({name}): {child!r}" for name, child in children]
        lines += [str(value) for value in type(self).values().values()]
        return "\n".join([f"{self._name()}(", *(f"  {line}" for text in lines for line in text.split("\n")), ")"])

    def page(self) -> str:
        """The encyclopedia page of this config, one HTML file that stands alone: see `pages`.

        It loads no weights, and is the same text for the same config and implementations.
        """
        return page(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: a header, a folding card a kind of block, a row a value."""
        return template("card.html").render(model=describe(self, self.support()))
