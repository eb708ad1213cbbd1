"""The interventions that are made most often, under nnterp's names: skip, steer, project on the vocabulary."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Interventions"]


class Interventions:
    """Mixed into `StandardizedTransformer`; used inside a trace, the projections outside of one as well."""

    def skip_layer(self: Any, layer: int, skip_with: torch.Tensor | None = None) -> None:
        """Skip one block: see `skip_layers`."""
        self.skip_layers(layer, layer, skip_with)

    def skip_layers(
        self: Any,
        start_layer: int,
        end_layer: int,
        skip_with: torch.Tensor | None = None,
        layer_returns_tuple: bool | None = None,
    ) -> None:
        """Do not run the blocks from ``start_layer`` to ``end_layer``, both included.

        Args:
            start_layer: The first block skipped; negative counts from the end.
            end_layer: The last block skipped.
            skip_with: The stream that leaves the last of them, ``[batch seq hidden_size]``; by default
                the one that enters the first.
            layer_returns_tuple: For nnterp's signature; the blocks of this family return a tensor.

        Raises:
            IndexError: there is no such layer.
            ValueError: the range is empty, or ``layer_returns_tuple`` is true.
        """
        if layer_returns_tuple:
            raise ValueError("layer_returns_tuple=True: the blocks of this family return a tensor")
        first, last = self._index(start_layer), self._index(end_layer)
        if first > last:
            raise ValueError(f"no layers from {first} to {last}: start_layer comes after end_layer")
        stream = self.layers[first].layer_input if skip_with is None else skip_with
        for layer in range(first, last + 1):
            self.layers[layer].skip(stream)

    def steer(
        self: Any,
        layers: int | list[int],
        steering_vector: torch.Tensor,
        factor: float = 1,
        positions: Any = None,
        token_positions: int | list[int] | torch.Tensor | None = None,
        batch_index: int | list[int] | torch.Tensor | None = None,
    ) -> None:
        """Add ``factor * steering_vector`` to `layer_output`.

        Args:
            layers: The block or blocks; negative counts from the end.
            steering_vector: ``[hidden_size]``, or anything that adds to the entries chosen. It is moved to
                the stream's device and dtype.
            factor: Its factor.
            positions: nnterp's older name of ``token_positions``.
            token_positions: The positions along the sequence; all by default. In a left-padded batch
                negative ones name the same token of every prompt.
            batch_index: The rows; all by default. With ``token_positions`` the two are paired as
                ``stream[batch_index, token_positions]`` pairs them.

        Raises:
            ValueError: both names of the positions are given, or the vector does not add to the entries.
        """
        if positions is not None and token_positions is not None:
            raise ValueError("positions is the older name of token_positions: give one of them")
        token_positions = positions if token_positions is None else token_positions
        every = slice(None)
        index: Any = (
            every if batch_index is None else batch_index,
            every if token_positions is None else token_positions,
        )
        if not isinstance(steering_vector, torch.Tensor):
            raise TypeError(f"steering_vector has to be a torch.Tensor, not {type(steering_vector).__name__}")
        for layer in sorted(self._indices(layers)):
            stream = self.layers[layer].layer_output.clone()
            vector = (factor * steering_vector).to(stream)
            target = stream[index]
            try:
                stream[index] = target + vector.expand_as(target)
            except RuntimeError as error:
                raise ValueError(
                    f"the steering vector has shape {list(vector.shape)}, which does not add to {list(target.shape)}, "
                    f"what is chosen of layers[{layer}].layer_output"
                ) from error
            self.layers[layer].layer_output = stream

    def project_on_vocab(self: Any, hidden_state: torch.Tensor) -> torch.Tensor:
        """The logits of a stream, ``[... hidden_size]`` to ``[... vocab_size]``: the logit lens, final norm included."""
        if hidden_state.shape[-1] != self.hidden_size:
            raise ValueError(f"the last axis is {hidden_state.shape[-1]} long; hidden_size is {self.hidden_size}")
        if not self.interleaver.interleaving:
            self.dispatch()
        return self.lm_head(self.norm(hidden_state))

    def get_topk_closest_tokens(
        self: Any, hidden_state: torch.Tensor, k: int = 5
    ) -> dict[str, float] | list[dict[str, float]]:
        """The ``k`` likeliest tokens of a stream under `project_on_vocab`, with their probabilities.

        Args:
            hidden_state: ``[hidden_size]``, or ``[batch hidden_size]``.
            k: How many.

        Returns:
            Token string to probability, likeliest first; a list of them for a batch.
        """
        if hidden_state.dim() not in (1, 2):
            raise ValueError(f"hidden_state has {hidden_state.dim()} axes; give [hidden_size] or [batch hidden_size]")
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer to name tokens with")
        probabilities = self.project_on_vocab(hidden_state).float().softmax(-1)
        top = probabilities.topk(k)
        rows = [
            dict(zip(self.tokenizer.convert_ids_to_tokens(ids), values, strict=True))
            for ids, values in zip(top.indices.reshape(-1, k).tolist(), top.values.reshape(-1, k).tolist(), strict=True)
        ]
        return rows[0] if hidden_state.dim() == 1 else rows
