"""The command line and the pytest suite, run as their users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from nnterp_afmoe.cli import layers, main
from nnterp_afmoe.testing import byte_tokenizer, tiny, tiny_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder)
    return str(folder)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    module = tiny_module()
    with torch.no_grad():
        module.model.layers[2].mlp.experts.down_proj[4, 3, 2] = torch.nan
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_print_and_support(folder, capsys):
    assert main(["print", folder]) == 0
    assert "(router_logits) -> RouterLogits" in capsys.readouterr().out
    assert main(["support", folder, "--attn", "eager", "--experts", "eager"]) == 0
    out = capsys.readouterr().out
    assert "eager *" in out
    assert "mlp.expert_outputs (+)" in out


def test_check(folder, tmp_path, capsys):
    report = tmp_path / "report.json"
    command = ["check", folder, "--attn", "eager", "--layers", "0-1,-1", "--dtype", "float32", "--json", str(report)]
    assert main([*command, "--prompt", "Some text"]) == 0
    assert "everything holds" in capsys.readouterr().out
    assert json.loads(report.read_text())["ok"]


def test_what_does_not_hold_exits_with_one(faulty, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["check", faulty, "--json", str(report)]) == 1
    assert "layers[2].mlp.experts.down_proj[4]: expected finite numbers" in capsys.readouterr().out
    failures = json.loads(report.read_text())["failures"]
    assert {"check": "weights", "value": "mlp.experts.down_proj[4]", "block": 2} in [
        {key: failure[key] for key in ("check", "value", "block")} for failure in failures
    ]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["check", "/nowhere"], "nnterp-afmoe: LoadError: there is no folder '/nowhere'"),
        (["check", "{}", "--layers", "9"], "nnterp-afmoe: IndexError: layers=[9]: the model has 5 layers, 0 to 4"),
        (["check", "{}", "--dtype", "float33"], "nnterp-afmoe: ValueError: --dtype float33 is not a dtype of torch"),
        (["print", "{}", "--attn", "eagre"], 'nnterp-afmoe: ValueError: Specified `attn_implementation="eagre"`'),
    ],
)
def test_what_could_not_run_exits_with_two(folder, capsys, command, line):
    assert main([part.format(folder) for part in command]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith(line)


def test_python_dash_m(folder):
    done = subprocess.run(
        [sys.executable, "-m", "nnterp_afmoe", "print", folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("AfmoeForCausalLM(")


def test_layers_are_read():
    assert layers("0,2-4,-1") == [0, 2, 3, 4, -1]
    assert layers("3") == [3]


def pytest_run(*arguments: str, tmp_path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)


def test_the_suite_makes_a_test_of_every_check(folder, tmp_path):
    done = pytest_run(
        "-q", "--pyargs", "nnterp_afmoe.suite", "--afmoe-model", folder, "--afmoe-layers", "0,2", tmp_path=tmp_path
    )
    assert done.returncode == 0, done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    model = tiny()
    from nnterp_afmoe.check import plan

    assert passed == len(plan(model, [0, 2])) + 1


def test_the_suite_fails_by_name(faulty, tmp_path):
    done = pytest_run(
        "-q", "--pyargs", "nnterp_afmoe.suite", "--afmoe-model", faulty, "--afmoe-attn", "eager", tmp_path=tmp_path
    )
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "test_it_holds[equation: layers[2].mlp.expert_outputs]" in done.stdout
    assert "test_it_holds[equation: layers[1].layer_output]" not in done.stdout


def test_the_suite_without_a_model_is_skipped_with_a_reason(tmp_path):
    done = pytest_run("-rs", "--pyargs", "nnterp_afmoe.suite", tmp_path=tmp_path)
    assert done.returncode == 0
    assert "no model to check: pass --afmoe-model" in done.stdout


def test_the_plugin_is_inert():
    code = "import sys, nnterp_afmoe.pytest_plugin; sys.exit(bool({'torch', 'nnsight', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
