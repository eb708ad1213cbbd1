"""What things cost, as ratios measured in one run on one thread; timing decides no test.

    python tests/bench/run.py                    # print
    python tests/bench/run.py --write            # and rewrite the table in docs/pages/benchmarks.md
    python tests/bench/run.py --peers            # with TransformerLens and nnterp, each in an environment of its own

The peers' environments are made under ``~/.cache/nnterp_afmoe/bench`` when they are first asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from nnsight.modeling.transformers import TransformersModel
from rich.console import Console
from rich.table import Table
from timing import seconds

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.testing import byte_tokenizer, tiny, tiny_module

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "pages" / "benchmarks.md"
START, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
TOKENS = 64

#: Eight blocks of the Nano's widths, with fewer experts and a small vocabulary.
NANO = {
    "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 8, "num_dense_layers": 2,
    "num_hidden_layers": 8, "vocab_size": 4096, "sliding_window": 2048,
}  # fmt: skip

#: What was measured, against what, the ratio (or seconds), and the bound it is held against.
Row = tuple[str, str, float, float]


def prompt(vocabulary: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


def wrap(module: torch.nn.Module) -> StandardizedTransformer:
    return StandardizedTransformer(module, tokenizer=byte_tokenizer())


def read_all_outputs(model: StandardizedTransformer, ids: torch.Tensor) -> None:
    found = []
    with model.trace(ids):
        for layer in model.layers:
            found.append(layer.layer_output)


def read_all_values(model: StandardizedTransformer, ids: torch.Tensor, names: list[tuple[int, str]]) -> None:
    found = []
    with model.trace(ids):
        for layer, name in names:
            found.append(model.layers[layer].get(name))


def hooks(module: torch.nn.Module, ids: torch.Tensor) -> None:
    """Every block's output, as one would write it with torch's hooks."""
    found: dict[int, torch.Tensor] = {}
    handles = [
        block.register_forward_hook(lambda _, args, out, index=index: found.update({index: out}))
        for index, block in enumerate(module.model.layers)
    ]
    module(ids)
    for handle in handles:
        handle.remove()


def everyday(label: str, fields: dict, repeats: int) -> Iterator[Row]:
    """The rows that stand for a tiny model and for a slice of the Nano alike."""
    ids = prompt(fields.get("vocab_size", 261))
    bare, model = tiny_module(**fields), wrap(tiny_module(**fields))
    raw = TransformersModel(tiny_module(**fields), tokenizer=byte_tokenizer(), task="text-generation")

    def raw_outputs() -> None:
        found = []
        with raw.trace(ids):
            for layer in raw.model.layers:
                found.append(layer.output)

    names = [(layer, name) for layer in range(model.num_layers) for name in model.order(layer)]
    plain, alone, wrapped, ours, theirs, everything, collected, hooked = seconds(
        lambda: bare(ids),
        lambda: raw._module(ids),
        lambda: model._module(ids),
        lambda: read_all_outputs(model, ids),
        raw_outputs,
        lambda: read_all_values(model, ids, names),
        lambda: model.collect(ids, "layer_output"),
        lambda: hooks(bare, ids),
        repeats=repeats,
    )
    yield f"{label}: wrapped, untraced forward", "bare forward", wrapped / plain, 1.02
    yield f"{label}: the same, wrapped by nnsight alone", "bare forward", alone / plain, math.nan
    yield f"{label}: trace reading every layer_output", "raw nnsight, the same outputs", ours / theirs, 1.05
    yield f"{label}: every available value of every block", "plain forward", everything / plain, 1.25
    yield f"{label}: collect of every layer_output", "hand-written hooks", collected / hooked, 1.05


def partial_collect() -> Iterator[Row]:
    """A collect stops after the last value wanted."""
    model, ids = wrap(tiny_module(**NANO)), prompt(4096)
    early, late = seconds(
        lambda: model.collect(ids, "layer_output", layers=[1]), lambda: model.collect(ids, "layer_output", layers=[7])
    )
    yield "Nano slice: collect up to block 2 of 8", "up to block 8", early / late, 0.35


def growth() -> Iterator[Row]:
    """What a read costs, as the blocks grow in number."""
    costs = []
    for layers, repeats in ((4, 601), (64, 61)):
        fields = {"num_hidden_layers": layers}
        model, ids = wrap(tiny_module(**fields)), prompt(261, 8)

        def nothing(model: StandardizedTransformer = model, ids: torch.Tensor = ids) -> None:
            with model.trace(ids):
                model.layers[0].layer_input

        read, base = seconds(lambda model=model, ids=ids: read_all_outputs(model, ids), nothing, repeats=repeats)
        costs.append((read - base) / (layers - 1))
    yield "cost of a read in a model of 64 blocks", "in a model of 4", costs[1] / costs[0], 1.2


def check_time() -> Iterator[Row]:
    """A check against a plain forward of the same prompt."""
    model, ids = tiny(attn_implementation="eager"), prompt(261)
    bare = tiny_module(attn_implementation="eager")
    forward, check = seconds(lambda: bare(ids), lambda: model.check(ids, progress=False))
    yield "tiny: check()", "plain forward", check / forward, 12


def memory() -> Iterator[Row]:
    """The process's peak, against the model's size and what is kept."""
    model = tiny(
        hidden_size=512, intermediate_size=2048, moe_intermediate_size=512, num_experts=16, vocab_size=16000,
        num_attention_heads=8, head_dim=64, num_hidden_layers=8,
    )  # fmt: skip
    size = sum(parameter.numel() * parameter.element_size() for parameter in model._module.parameters())
    ids = prompt(16000)
    extra = peak(lambda: model.collect(ids, "layer_output", layers=[5]))
    kept = 64 * 512 * 4
    yield (
        f"collect of one value, peak memory, a model of {size / 2**20:.0f} MiB",
        "model + kept",
        (size + extra) / (size + kept),
        1.1,
    )
    extra = peak(lambda: model.check(ids, progress=False))
    yield f"check(), peak memory, a model of {size / 2**20:.0f} MiB", "model", (size + extra) / size, 1.5


def peak(function: Callable[[], object]) -> int:
    """How far this process' memory rises above where it stands while a function runs."""
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return status("VmHWM") - before


def status(field: str) -> int:
    """A size from this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def startup() -> Iterator[Row]:
    """Seconds, beyond nnsight's own: importing, and wrapping, printing and asking the Large config."""
    both = (
        "import time, nnsight.modeling.transformers, transformers.models.afmoe.modeling_afmoe, transformers.pipelines\n"
    )
    code = both + "t = time.perf_counter(); import nnterp_afmoe.model; print(time.perf_counter() - t)"
    spent = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    yield "import, seconds beyond nnsight's own", "", statistics.median(spent), 0.3
    with tempfile.TemporaryDirectory() as folder:
        config = HERE.parent / "data" / "trinity_large" / "config.json"
        (Path(folder) / "config.json").write_text(config.read_text())
        byte_tokenizer().save_pretrained(folder)

        def ours() -> None:
            model = StandardizedTransformer(folder)
            str(model), str(model.support())

        theirs, all_of_it = seconds(lambda: TransformersModel(folder, task="text-generation"), ours, repeats=5)
    yield "Large config: wrap, print and support, seconds beyond nnsight's build", "", all_of_it - theirs, 0.3


def peers() -> Iterator[Row]:
    """Every block's output of the tiny model, each tool against the plain forward in its own environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nnterp_afmoe" / "bench"
    model, bare, ids = tiny(), tiny_module(), prompt(261)
    plain, read = seconds(lambda: bare(ids), lambda: read_all_outputs(model, ids), repeats=61)
    with tempfile.TemporaryDirectory() as folder:
        tiny(folder)
        for name, packages, limit in (
            ("TransformerLens", ["transformer-lens==4.3.0"], 0.6),
            ("nnterp", ["nnterp==1.3.0", "nnsight<0.8"], 0.8),
        ):
            python = cache / name / "bin" / "python"
            if not (cache / name / "ready").exists():
                subprocess.run([sys.executable, "-m", "venv", cache / name], check=True)
                environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
                install = [
                    python,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    f"torch=={torch.__version__.partition('+')[0]}",
                    *packages,
                ]
                subprocess.run(install, check=True, env=environment)
                (cache / name / "ready").touch()
            script = HERE / f"peer_{name.lower()}.py"
            done = subprocess.run([python, script, folder, str(TOKENS)], capture_output=True, text=True)
            if done.returncode:
                print(f"{name} did not run: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            theirs = json.loads(done.stdout.strip().splitlines()[-1])
            ratio = (read / plain) / (theirs["read"] / theirs["plain"])
            yield "tiny: trace reading every layer_output", f"{name} {packages[0].partition('==')[2]}", ratio, limit


def bound(limit: float) -> str:
    return "" if math.isnan(limit) else f"{limit:g}"


def main() -> None:
    """Run every benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the table in docs/pages/benchmarks.md")
    parser.add_argument("--peers", action="store_true", help="with the peers, in environments of their own")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    table = Table("what", "against", "measured", "bound")
    benchmarks = [
        lambda: everyday("tiny", {}, 61), lambda: everyday("Nano slice", NANO, 9), partial_collect, growth,
        check_time, memory, startup, *([peers] if arguments.peers else []),
    ]  # fmt: skip
    for benchmark in benchmarks:
        for row in benchmark():
            rows.append(row)
            table.add_row(row[0], row[1], f"{row[2]:.2f}", bound(row[3]))
        gc.collect()
    Console(width=140).print(table)
    if arguments.write:
        lines = ["| what | against | measured | bound |", "|---|---|---|---|"]
        lines += [
            f"| {what} | {against} | {measured:.2f} | {bound(limit)} |" for what, against, measured, limit in rows
        ]
        text = DOCUMENT.read_text()
        body = "\n".join([START, *lines, END])
        DOCUMENT.write_text(text[: text.index(START)] + body + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    main()
