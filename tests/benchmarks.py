"""What things cost, as ratios measured in one run; timing decides no test.

python tests/benchmarks.py            # print
python tests/benchmarks.py --write    # and rewrite the table in docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nnterp_afmoe.testing import tiny, tiny_module

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
START, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
TOKENS = 64


def seconds(*functions: Callable[[], object], repeats: int = 15) -> list[float]:
    """The median time of each, taken in turns so that whatever else runs bears on all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def prompt(vocabulary: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


def check_time() -> tuple[str, str, str]:
    """A check against a plain forward of the same prompt."""
    model, ids = tiny(attn_implementation="eager"), prompt(261)
    bare = tiny_module(attn_implementation="eager")
    forward, check = seconds(lambda: bare(ids), lambda: model.check(ids, progress=False))
    return "check(), tiny model", "a plain forward", f"{check / forward:.1f}"


def check_memory() -> tuple[str, str, str]:
    """The process's peak while it checks, against the model's size."""
    model = tiny(
        hidden_size=512, intermediate_size=2048, moe_intermediate_size=512, num_experts=16, vocab_size=16000,
        num_attention_heads=8, head_dim=64, num_hidden_layers=8,
    )  # fmt: skip
    size = sum(parameter.numel() * parameter.element_size() for parameter in model._module.parameters())
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model.check(prompt(16000), progress=False)
    extra = status("VmHWM") - before
    return f"check(), peak memory, a model of {size / 2**20:.0f} MiB", "the model", f"{(size + extra) / size:.2f}"


def status(field: str) -> int:
    """A size from this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    """Run every benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = [benchmark() for benchmark in (check_time, check_memory)]
    table = Table("what", "against", "ratio")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if arguments.write:
        lines = ["| what | against | ratio |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        text = DOCUMENT.read_text()
        body = "\n".join([START, *lines, END])
        DOCUMENT.write_text(text[: text.index(START)] + body + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    sys.exit(main())
