"""Draw the pictures of docs/report.md and measure the pages, from runs of an example with faults.

    .venv/bin/python tests/harness/report_pictures.py docs/pictures

Needs Chromium and scikit-learn; takes about two minutes.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
from lockstep.formatting import size

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTS = {"steady": [], "killed": ["--fault", "kill rank 1 at step 60", "--fault", "delay rank 1 by 2 s at step 90"]}


def lockstep(*words: str, cwd: Path) -> None:
    """Carry out a command."""
    env = os.environ | {"LOCKSTEP_VIEW": "silent"}
    subprocess.run([sys.executable, "-m", "lockstep", *words], cwd=cwd, env=env, check=True, stdout=sys.stderr)


def main(out: Path) -> None:
    """Run the example, write its page and the pictures, and print how large the pages are."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run = ("run", "--ranks", "2", "--max-restarts", "1", "--save-every", "40 steps")
        for run_name, faults in FAULTS.items():
            lockstep(*run, *faults, "--run-dir", f"runs/{run_name}", str(EXAMPLES / "digits.py"), cwd=place)
            lockstep("report", f"runs/{run_name}", cwd=place)
        lockstep("report", "-o", "both.html", *(f"runs/{run_name}" for run_name in FAULTS), cwd=place)
        lockstep("report", "--list", "runs", cwd=place)
        for file in ("runs/killed/report.html", "both.html", "runs/runs.html"):
            page = (place / file).read_bytes()
            print(f"{file}: {size(len(page))}, {size(len(gzip.compress(page)))} packed")
        for file, dark in (("report-light.png", False), ("report-dark.png", True)):
            browser.picture(place / "both.html", out / file, width=1000, height=1290, dark=dark, beside=place)
            print(f"{out / file}: {size((out / file).stat().st_size)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
