"""Run the tests against each supported release of transformers, in a fresh environment each.

    python tests/releases.py                      # every release of docs/pages/releases.md, and rewrite its table
    python tests/releases.py --only oldest        # one of them, the table left alone: what CI runs

Exit code 1 if a release fails. ``PIP_CONSTRAINT`` is honoured for everything but transformers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASES = ("5.19.0", "5.20.2", "5.21.1", "5.22.2")
DOCUMENT = ROOT / "docs" / "pages" / "releases.md"
START, END = "<!-- releases -->", "<!-- /releases -->"


def constraints(release: str, folder: Path) -> Path:
    """The caller's constraints with this transformers."""
    given = os.environ.get("PIP_CONSTRAINT")
    lines = Path(given).read_text().splitlines() if given else []
    lines = [line for line in lines if not line.startswith("transformers")]
    path = folder / "constraints.txt"
    path.write_text("\n".join([*lines, f"transformers=={release}"]) + "\n")
    return path


def run(release: str) -> tuple[bool, str]:
    """Install into a fresh environment and run the tests; whether they pass, and a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        environment = {**os.environ, "PIP_CONSTRAINT": str(constraints(release, folder))}
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        install = [python, "-m", "pip", "install", "-q", f"{ROOT}[test]"]
        subprocess.run(install, check=True, env=environment)
        tests = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
        done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
        tail = "\n".join(done.stdout.strip().splitlines()[-15:])
        print(f"== transformers {release}\n{tail}", flush=True)
        versions = subprocess.run(
            [python, "-c", "import nnsight, torch; print(nnsight.__version__, torch.__version__.partition('+')[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout.strip().splitlines()[-1]):
            counts[word] = int(number)
        row = [release, *versions, *map(str, counts.values())]
        return done.returncode == 0, f"| {' | '.join(row)} |"


def main() -> int:
    """Run the releases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("oldest", "newest"))
    only = parser.parse_args().only
    releases = {None: RELEASES, "oldest": RELEASES[:1], "newest": RELEASES[-1:]}[only]
    results = [run(release) for release in releases]
    if only is None:
        header = "| transformers | nnsight | torch | passed | failed | skipped |\n|---|---|---|---|---|---|"
        table = "\n".join([START, header, *(row for _, row in results), END])
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(text[: text.index(START)] + table + text[text.index(END) + len(END) :])
    return 0 if all(ok for ok, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
