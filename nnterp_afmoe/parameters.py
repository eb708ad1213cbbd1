"""What a load has done to the parameters, and whether they are still as it left them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .family import Family

__all__ = ["Samples", "report_cast"]


class Samples:
    """Some entries of every parameter, kept when the model was loaded, to tell later whether it was changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.kept = {name: sample(parameter) for name, parameter in module.named_parameters()}

    def changed(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the parameter differs from its sample; not of one that was not there."""
        kept, now = self.kept.get(name), sample(parameter)
        return kept is not None and not torch.equal(kept.to(now.device), now)


def sample(parameter: torch.Tensor) -> torch.Tensor:
    """All of a vector, and some 64 entries of anything larger."""
    flat = parameter.detach().reshape(-1)
    step = 1 if parameter.dim() < 2 else max(1, flat.numel() // 64)
    return flat[::step].clone()


def report_cast(module: torch.nn.Module, family: Family) -> None:
    """Warn of parameters that the family keeps in float32 and this load did not."""
    cast = [
        (name, parameter.dtype)
        for name, parameter in module.named_parameters()
        if name.endswith(family.float32) and parameter.dtype is not torch.float32
    ]
    if cast:
        name, dtype = cast[0]
        warnings.warn(
            f"{len(cast)} of {', '.join(family.float32)} (the first is {name}) are {dtype} after this load, and "
            f"{family.name} keeps them in float32: experts whose scores nearly tie may be chosen otherwise. "
            f"Load with dtype=torch.float32, or copy the checkpoint's own into them",
            stacklevel=4,
        )
