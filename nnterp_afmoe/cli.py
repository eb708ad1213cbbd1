"""The command line: ``nnterp-afmoe check|print|support|page NAME_OR_FOLDER``, also ``python -m nnterp_afmoe``.

Exit code 0: all holds. 1: something does not. 2: it could not run, with one line why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from .errors import NnterpError
from .model import StandardizedTransformer
from .pages import stale
from .testing import byte_tokenizer

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="nnterp-afmoe", description="Look at an AFMoE model, and check it.")
    commands = top.add_subparsers(dest="command", required=True)
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="NAME_OR_FOLDER", help="a hub name or a local folder")
    model.add_argument("--attn", metavar="NAME", help="attention implementation: eager, sdpa, flex_attention, ...")
    model.add_argument("--experts", metavar="NAME", help="experts implementation: eager, batched_mm, grouped_mm, ...")
    model.add_argument("--revision", help="the checkpoint's revision")
    commands.add_parser("print", parents=[model], help="the tree, each value with its layout; loads no weights")
    commands.add_parser("support", parents=[model], help="what is available on which block; loads no weights")
    page = commands.add_parser("page", parents=[model], help="the encyclopedia page, one HTML file; loads no weights")
    page.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="the file")
    page.add_argument("--check", action="store_true", help="write nothing; fail where the file is stale")
    check = commands.add_parser("check", parents=[model], help="hold every value and write to its equation")
    check.add_argument("--dtype", help="load in this dtype: float32, bfloat16, float16; the checkpoint's by default")
    check.add_argument("--device", metavar="MAP", help="device_map: auto, cpu, cuda:0, ...")
    check.add_argument("--layers", help="check these blocks only, e.g. 0,2,-1 or 0-3")
    check.add_argument("--prompt", help="the text to run; longer than the sliding window tests the window")
    check.add_argument("--json", metavar="FILE", type=Path, help="write the report here as JSON")
    return top


def layers(text: str) -> list[int]:
    """``"0,2-4,-1"`` as ``[0, 2, 3, 4, -1]``."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-") if not part.strip().startswith("-") else (part, "", "")
        found += range(int(first), int(last) + 1) if dash else [int(first)]
    return found


def run(arguments: argparse.Namespace) -> int:
    """Carry out one command; raises what kept it from running."""
    options = {"attn_implementation": arguments.attn, "experts_implementation": arguments.experts}
    options["revision"] = arguments.revision
    if arguments.command != "check":
        # Nothing is run, so a config alone will do: the tokenizer that nnsight wants is never asked.
        options["tokenizer"] = byte_tokenizer()
    else:
        dtype = getattr(torch, arguments.dtype, None) if arguments.dtype else None
        if arguments.dtype and not isinstance(dtype, torch.dtype):
            raise ValueError(f"--dtype {arguments.dtype} is not a dtype of torch")
        options |= {"dtype": dtype, "device_map": arguments.device}
    model = StandardizedTransformer(
        arguments.model, **{name: value for name, value in options.items() if value is not None}
    )
    if arguments.command == "print":
        print(model)
        return 0
    if arguments.command == "support":
        print(model.support())
        return 0
    if arguments.command == "page":
        if arguments.check:
            why = stale(model, arguments.output)
            print(why or f"{arguments.output} is up to date", file=sys.stderr if why else sys.stdout)
            return 1 if why else 0
        arguments.output.write_text(model.page(), encoding="utf-8")
        return 0
    chosen = layers(arguments.layers) if arguments.layers else None
    report = model.check(arguments.prompt, layers=chosen, progress=sys.stderr.isatty())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    Console(width=None if sys.stdout.isatty() else 200).print(report)
    return 0 if report.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = parser().parse_args(argv)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        return run(arguments)
    except (NnterpError, OSError, ValueError, IndexError, ImportError, NotImplementedError, RuntimeError) as error:
        line = " ".join(str(error).split())
        print(f"nnterp-afmoe: {type(error).__name__}: {line}", file=sys.stderr)
        return 2
