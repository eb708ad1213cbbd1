"""One index, several, or a slice, as they are asked for."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["counted"]


def counted(wanted: Any, length: int) -> tuple[list[int], list[int]]:
    """The indices asked for, counted from 0, and those among them that name none of ``length``.

    Raises:
        TypeError: something asked for is no index.
    """
    if isinstance(wanted, slice):
        return list(range(length)[wanted]), []
    several = wanted.tolist() if isinstance(wanted, torch.Tensor) else wanted
    several = list(several) if isinstance(several, Iterable) else [several]
    given = [operator.index(each) for each in several]
    return [index % length for index in given], [index for index in given if not -length <= index < length]
