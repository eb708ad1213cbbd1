"""The documentation: every block of code in it runs, every public name is in the reference, the site builds strictly."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnterp_afmoe

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
WITH_CODE = sorted(page for page in PAGES.rglob("*.md") if "```python" in page.read_text())


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(PAGES)))
def test_every_block_runs_in_the_order_of_its_page(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "print(error)" not in script.read_text() or done.stdout.strip()


def test_every_shell_command_is_run_somewhere():
    """The commands of the pages are the README's, or are tested as a command line."""
    tested = (ROOT / "README.md").read_text() + (ROOT / "tests" / "test_cli.py").read_text()
    for page in PAGES.rglob("*.md"):
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.strip().splitlines():
                program = line.split()[0].rpartition("/")[2]
                assert program in ("python3", "pip", "python", "nnterp-afmoe", "pytest"), line
                assert program in tested


def test_every_public_module_and_name_is_in_the_reference():
    listed = re.findall(r"^::: ([\w.]+)$", (PAGES / "reference.md").read_text(), re.MULTILINE)
    modules = {name for name in listed if name.rpartition(".")[2].islower()}
    for name in nnterp_afmoe.__all__:
        thing = getattr(nnterp_afmoe, name)
        home = getattr(thing, "__module__", getattr(thing, "__name__", ""))
        assert f"{home}.{name}" in listed or home in modules or f"{home}.afmoe" in modules, name
    for name in listed:
        module = importlib.import_module(name if name in modules else name.rpartition(".")[0])
        assert name in modules or hasattr(module, name.rpartition(".")[2]), name


def test_every_error_has_a_page():
    from nnterp_afmoe import errors

    index = (PAGES / "errors" / "index.md").read_text()
    for name in errors.__all__:
        if name == "NnterpError":
            continue
        slug = re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower()
        text = (PAGES / "errors" / f"{slug}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert f"`{name}`]({slug}.md)" in index


def test_the_table_of_names_names_real_values():
    here = {name for host in nnterp_afmoe.families.AFMOE.hosts for name in host.values()}
    here |= set(nnterp_afmoe.StandardizedTransformer.values())
    here |= {"steer", "skip_layers", "project_on_vocab", "get_topk_closest_tokens", "collect"}
    rows = [line for line in (PAGES / "map.md").read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1]):
            assert name.rpartition(".")[2] in here, name


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        ROOT / "docs" / "mkdocs.yml",
        "-d",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in tmp_path.rglob("*.html"):
        for link in re.findall(r'href="([^"#:]+\.html)"', path.read_text()):  # mkdocs checks those to pages of its own
            assert (path.parent / link).resolve().exists(), (path, link)
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        assert "<svg" in (tmp_path / "notebooks" / notebook.stem / "index.html").read_text() or notebook.stem[0] in "78"
    reference = (tmp_path / "reference" / "index.html").read_text()
    for name in (
        "nnterp_afmoe.model.StandardizedTransformer.collect",
        "nnterp_afmoe.families.afmoe.Mixture.expert_weights",
    ):
        assert f'id="{name}"' in reference
