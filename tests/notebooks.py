"""Run the notebooks in examples/, each from a fresh kernel: what CI does to each, and what renews their outputs.

python tests/notebooks.py            # run them all, and say how long each took
python tests/notebooks.py --write    # and keep what they showed
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
#: What each may take, in seconds.
LIMIT = 120


def execute(path: Path) -> Any:
    """The notebook with the outputs of this run; raises `nbclient.exceptions.CellExecutionError` where a cell fails."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT, record_timing=False, resources={"metadata": {"path": str(EXAMPLES)}}
    )
    return client.execute()


def main() -> int:
    """Run them all."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    parser.add_argument("only", nargs="*", type=Path, help="these notebooks only")
    arguments = parser.parse_args()
    for path in arguments.only or NOTEBOOKS:
        start = time.perf_counter()
        done = execute(path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
        if arguments.write:
            for cell in done.cells:
                if cell.cell_type == "code":  # progress bars
                    cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            nbformat.write(done, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
