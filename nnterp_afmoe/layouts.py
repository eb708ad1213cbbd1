"""The shapes a reader is handed, each an object with named axes.

A value always comes out in its layout, whatever shape the tensor has inside the model.
A layout carries the axis names only; how long an axis is belongs to the model at hand
(`Family.axes`), and to the call (`batch`, `seq`, `query`, `key`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "LAYOUTS",
    "ExpertIndices",
    "ExpertOutputs",
    "ExpertWeights",
    "HeadOutputs",
    "Keys",
    "Layout",
    "Logits",
    "Neurons",
    "NextTokenProbs",
    "Pattern",
    "Queries",
    "Residual",
    "RouterLogits",
    "Tokens",
    "Values",
]


@dataclass(frozen=True)
class Layout:
    """A name and the axes of a tensor, in order.

    ``str(Residual)`` is ``"Residual [batch seq hidden_size]"``; ``Residual.axes`` is the
    einops spelling, ``"batch seq hidden_size"``.
    """

    name: str
    dims: tuple[str, ...]

    @property
    def axes(self) -> str:
        """The axis names as einops writes them."""
        return " ".join(self.dims)

    def __str__(self) -> str:
        return f"{self.name} [{self.axes}]"


Tokens = Layout("Tokens", ("batch", "seq"))
Residual = Layout("Residual", ("batch", "seq", "hidden_size"))
Logits = Layout("Logits", ("batch", "seq", "vocab_size"))
NextTokenProbs = Layout("NextTokenProbs", ("batch", "vocab_size"))
Queries = Layout("Queries", ("batch", "num_heads", "seq", "qk_head_dim"))
Keys = Layout("Keys", ("batch", "num_kv_heads", "seq", "qk_head_dim"))
Values = Layout("Values", ("batch", "num_kv_heads", "seq", "head_dim"))
Pattern = Layout("Pattern", ("batch", "num_heads", "query", "key"))
HeadOutputs = Layout("HeadOutputs", ("batch", "seq", "num_heads", "head_dim"))
Neurons = Layout("Neurons", ("batch", "seq", "intermediate_size"))
RouterLogits = Layout("RouterLogits", ("batch", "seq", "num_experts"))
ExpertWeights = Layout("ExpertWeights", ("batch", "seq", "top_k"))
ExpertIndices = Layout("ExpertIndices", ("batch", "seq", "top_k"))
ExpertOutputs = Layout("ExpertOutputs", ("batch", "seq", "top_k", "hidden_size"))

#: Every layout by its name.
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in list(globals().values()) if isinstance(layout, Layout)}
