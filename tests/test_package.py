"""What is shipped: the wheel's contents, the public names, the family registry."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nnterp_afmoe
from nnterp_afmoe.family import FAMILIES, register
from nnterp_afmoe.places import Moved, Place, Step, parse, resolve
from nnterp_afmoe.testing import tiny_module

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_families(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "nnterp_afmoe/families/afmoe.py" in names
    assert "nnterp_afmoe/py.typed" in names
    assert {f"nnterp_afmoe/templates/{name}" for name in ("page.html", "page.css", "page.js", "card.html")} <= set(
        names
    )
    assert {"nnterp_afmoe/pinned/model.safetensors", "nnterp_afmoe/pinned/README.md"} <= set(names)
    assert not [name for name in names if name.startswith(("families/", "tests/"))]
    assert len(names) == len(set(names))


def test_every_module_names_what_is_public():
    for module in pkgutil.walk_packages(nnterp_afmoe.__path__, "nnterp_afmoe."):
        if module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        assert loaded.__doc__, module.name
        for name in loaded.__all__:
            assert getattr(loaded, name, None) is not None or name in {"Blocks"}, (module.name, name)


def test_registering_a_model_type_twice():
    with pytest.raises(ValueError, match="'afmoe' is registered already"):
        register(FAMILIES["afmoe"])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("output", Place((), "output")),
        ("input[0]", Place((), "input", 0)),
        ("mlp.experts.input[top_k_index]", Place((Step("mlp"), Step("experts")), "input", "top_k_index")),
        ("source{a = b.c + d}.output", Place((Step("source", "a = b.c + d"),), "output")),
    ],
)
def test_a_place_is_parsed(text, place):
    assert parse(text) == place


@pytest.mark.parametrize("text", ["mlp", "", "mlp..output", "input[0].output", "source{f()}"])
def test_what_is_not_a_place(text):
    with pytest.raises((ValueError, IndexError)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mlp.gone.output", "AfmoeMLP has no module 'gone'"),
        (
            "source{hidden_states = residual - hidden_states}.output",
            "the source of AfmoeDecoderLayer has no `hidden_states = residual - hidden_states`",
        ),
        ("self_attn.input[gone]", "AfmoeAttention takes no argument 'gone'"),
    ],
)
def test_a_place_that_has_moved_says_what_is_missing(text, words):
    with pytest.raises(Moved, match=words):
        resolve(parse(text), tiny_module().model.layers[0], {})
