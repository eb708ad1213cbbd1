"""How long functions take, for every tool alike; needs nothing but Python."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def seconds(*functions: Callable[[], object], repeats: int = 15) -> list[float]:
    """The lower quartile of each one's times, taken in turns so that whatever else runs bears on all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    gc.enable()
    return [statistics.quantiles(taken, n=4)[0] for taken in times]
