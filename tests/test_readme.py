"""The README's lines, as a newcomer runs them: in a notebook, a script, a function, a method, a loop, a session."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

#: What the README takes as given: a model with the layers it names, and a direction to add.
GIVEN = """
import torch
from nnterp_afmoe.testing import tiny
model = tiny(num_hidden_layers=8)
direction = torch.randn(model.hidden_size)
"""


def blocks(language: str = "python") -> list[str]:
    return [block.strip() for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)]


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)


def wrapped(way: str, body: str) -> str:
    """The lines in one of the places where people put them."""
    if way == "script":
        return GIVEN + body
    inside = textwrap.indent(GIVEN + body, "    ")
    if way == "function":
        return f"def main():\n{inside}\n\nmain()\n"
    if way == "method":
        return f"class Experiment:\n  def run(self):\n{inside}\n\nExperiment().run()\n"
    return f"for _ in range(2):\n{inside}\n"


@pytest.mark.parametrize("way", ["script", "function", "method", "loop"])
def test_every_python_block(tmp_path, way):
    assert len(blocks()) >= 4
    done = run(tmp_path, wrapped(way, "\n\n".join(blocks())))
    assert done.returncode == 0, done.stderr


def test_in_a_fresh_notebook_kernel(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(code) for code in (GIVEN, *blocks(), "print(model)", "model.support()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "router_logits" in str(notebook.cells[-2].outputs)
    assert "self_attn.attention_scores" in str(notebook.cells[-1].outputs)


def test_in_an_interactive_session(tmp_path):
    """An interpreter keeps the source of what is typed from 3.13 on; before that nnsight says what to do instead."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
    command = [sys.executable, "-q"]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, cwd=tmp_path, env=environment):
        os.close(side)
        typed = "from nnterp_afmoe.testing import tiny\nmodel = tiny()\nprint(model.support()['layer_output'])\n"
        typed += "with model.trace('A prompt'):\n    out = model.logits.save()\n\nprint('shape', out.shape)\nexit()\n"
        os.write(main, typed.encode())
        seen = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                part = os.read(main, 4096)
            except OSError:
                break
            if not part:
                break
            seen += part
        os.close(main)
    text = seen.decode(errors="replace")
    assert "None" in text
    assert (
        "shape torch.Size([1, 8, 261])" in text or "has to live somewhere that source can be read back from" in text
    ), text


def test_the_readme_has_two_commands():
    shell = blocks("bash")
    commands = [line for block in shell for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "examples/quickstart.py" in commands[0]
    assert "pytest" in commands[1]


def test_what_the_readme_prints(tmp_path):
    """The block of output at its top, against the Nano config."""
    from nnterp_afmoe import StandardizedTransformer, Unavailable
    from nnterp_afmoe.testing import byte_tokenizer

    (tmp_path / "config.json").write_text((ROOT / "tests" / "data" / "trinity_nano" / "config.json").read_text())
    byte_tokenizer().save_pretrained(tmp_path)
    model = StandardizedTransformer(str(tmp_path))
    shown = README.split("```")[1]
    printed = str(model.layers[2].mlp)
    for line in re.findall(r"^  \(\w+\) -> .*$", shown, re.MULTILINE):
        assert line in printed
    with pytest.raises(Unavailable) as error:
        model.layers[0].mlp.router_logits
    assert f"Unavailable: {error.value}" in shown


def test_the_quickstart(tmp_path):
    command = [sys.executable, ROOT / "examples" / "quickstart.py"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    print(f"{time.monotonic() - start:.1f} s")
    assert done.returncode == 0, done.stderr
    assert "(router_logits) -> RouterLogits" in done.stdout
    assert "equals layer_output to" in done.stdout
    assert "before and after expert" in done.stdout
