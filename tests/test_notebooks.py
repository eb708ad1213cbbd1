"""The notebooks: each runs from a fresh kernel, within its time, and asserts what it claims."""

from __future__ import annotations

import time

import pytest
from notebooks import LIMIT, NOTEBOOKS, execute

pytest.importorskip("nbclient", reason="the test extra is not installed")

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@by_name
def test_it_runs_from_a_fresh_kernel(path):
    start = time.monotonic()
    done = execute(path)
    took = time.monotonic() - start
    print(f"{took:.0f} s")
    assert took < LIMIT
    kinds = {output.output_type for cell in done.cells if cell.cell_type == "code" for output in cell.outputs}
    assert "error" not in kinds
    said = [output.text for cell in done.cells for output in cell.get("outputs", ()) if "text" in output]
    # tqdm's of ipywidgets says how progress bars are shown, and nothing of the model.
    assert not [text for text in said if "Warning" in text.replace("TqdmWarning", "")]


@by_name
def test_its_claims_are_asserted(path):
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert code.count("assert ") >= 3
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")


@by_name
def test_what_it_showed_is_kept(path):
    """A reader without a kernel sees the outputs; `python tests/notebooks.py --write` renews them."""
    import nbformat

    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None
            assert "error" not in {output.output_type for output in cell.outputs}
