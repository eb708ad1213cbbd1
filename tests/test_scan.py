"""Shapes without weights: every value, in any dtype, under any implementation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ATTENTION, EXPERTS
from helpers import keys, read, read_all

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.testing import byte_tokenizer, tiny

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_every_value(folder, ids, attention, experts, dtype):
    model = StandardizedTransformer(folder, attn_implementation=attention, experts_implementation=experts, dtype=dtype)
    shapes = {}
    wanted = keys(model)
    with model.scan(ids):
        for key in wanted:
            value = read(model, key)
            shapes[key] = (tuple(value.shape), value.dtype)
    assert not model.dispatched
    assert model.config._experts_implementation == experts
    loaded = tiny(attn_implementation=attention, experts_implementation=experts)
    want = read_all(loaded, ids)
    assert {key: shape for key, (shape, _) in shapes.items()} == {
        key: tuple(value.shape) for key, value in want.items()
    }
    assert shapes[3, "mlp.expert_weights"][1] is torch.float32
    assert shapes[3, "mlp.expert_indices"][1] is torch.int64
    assert shapes[3, "layer_output"][1] is dtype


def test_under_another_default_dtype(folder):
    torch.set_default_dtype(torch.float64)
    try:
        model = StandardizedTransformer(folder)
        shapes = {}
        wanted = keys(model)
        with model.scan("A prompt"):
            for key in wanted:
                shapes[key] = tuple(read(model, key).shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert shapes[3, "mlp.expert_outputs"] == (1, 8, 3, 40)


def test_a_string_and_a_write(folder):
    model = StandardizedTransformer(folder)
    shapes = []
    with model.scan("A prompt"):
        model.layers[2].mlp.expert_weights[:] = 0
        model.layers[2].layer_output = torch.zeros(1, 8, 40)
        shapes.append(tuple(model.logits.shape))
    assert shapes == [(1, 8, 261)]
    assert not model.dispatched


def test_a_scan_that_raised_leaves_the_implementation(folder):
    model = StandardizedTransformer(folder)
    with pytest.raises(ZeroDivisionError):
        with model.scan("A prompt"):
            model.layers[0].layer_output
            1 / 0
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("name", ["nano", "large"])
def test_a_checkpoints_config_in_little_memory(name, tmp_path):
    (tmp_path / "config.json").write_text((DATA / f"trinity_{name}" / "config.json").read_text())
    byte_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from helpers import keys, read\n"
        "from nnterp_afmoe import StandardizedTransformer\n"
        "model = StandardizedTransformer(sys.argv[1])\n"
        "str(model), str(model.support())\n"
        "wanted, shapes = keys(model), {}\n"
        "with model.scan('A prompt'):\n"
        "    for key in wanted:\n"
        "        shapes[key] = tuple(read(model, key).shape)\n"
        "assert len(shapes) == len(wanted) > 1000 and not model.dispatched\n"
        "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    file = tmp_path / "scan.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, file, tmp_path, Path(__file__).parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1024
