"""An installed Lockstep, with no checkout beside it: built, put into empty environments, and tried there.

    python tests/harness/installed.py --python 3.11 3.12 --torch 2.11.0 2.15.0 --tests tests/unit

makes an environment for each Python and torch (with uv, some gigabytes each, removed afterwards), installs the wheel,
runs the first lines of the README, and then these tests. ``make try-installs`` does that for the oldest and the newest.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from doc_blocks import BLOCKS, HOUSE, SCRIPTS, environment

#: What the tests of ``tests/unit`` and most of ``tests/ranks`` need.
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-randomly", "pytest-xdist", "hypothesis", "safetensors", "tqdm")
EXTRAS = "tune,report,prometheus"


def build(place: Path, root: Path = HOUSE) -> tuple[Path, Path]:
    """The source distribution of ``root``, and the wheel that is made from it, in ``place``."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(root)]
    subprocess.run(command, check=True, capture_output=True)
    (source,), (wheel,) = place.glob("*.tar.gz"), place.glob("*.whl")
    return source, wheel


def first_lines() -> list[str]:
    """The commands with which the README runs a script, on one rank and on several of this machine."""
    block = next(b for b in BLOCKS if b.page == "README.md" and b.text.startswith("pip install ."))
    lines = [shlex.join(shlex.split(line, comments=True)) for line in block.text.splitlines()]
    return ["lockstep --version", *lines[1:3]]


def try_first_lines(bin_directory: Path, place: Path, **variables: str) -> str:
    """What they print in ``place``, by the ``python`` and the ``lockstep`` in ``bin_directory``.

    Raises:
        subprocess.CalledProcessError: if one fails; its ``output`` says why.
    """
    (place / "train.py").write_text(SCRIPTS["train.py"].text)
    env = environment(**variables)
    env["PATH"] = f"{bin_directory}{os.pathsep}{env['PATH']}"
    said = ""
    for line in first_lines():
        done = subprocess.run(line, shell=True, cwd=place, env=env, text=True, stdout=-1, stderr=-2, check=True)
        said += done.stdout
    return said


def try_environment(python: str, torch: str, wheel: Path, tests: list[str]) -> str:
    """What became of it, in a line."""
    with tempfile.TemporaryDirectory(prefix="installed-") as directory:
        place = Path(directory)
        own = place / "environment"
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--python", python, str(own)], check=True)
        wanted = [f"torch-lockstep[{EXTRAS}] @ {wheel.as_uri()}", f"torch=={torch}", *(TEST_PACKAGES if tests else ())]
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(own), *wanted], check=True)
        try:
            try_first_lines(own / "bin", place, PYTHONPATH="")
        except subprocess.CalledProcessError as error:
            return f"{error.cmd} ended with {error.returncode}:\n{error.output}"
        versions = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
        found = subprocess.run([own / "bin" / "python", "-c", versions], text=True, capture_output=True, check=True)
        if not tests:
            return f"{found.stdout.strip()}: the README's first lines"
        command = [own / "bin" / "python", "-m", "pytest", "-q", "-m", "not campaign", *tests]
        env = os.environ | {"PATH": f"{own / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
        done = subprocess.run(command, cwd=HOUSE, env=env, text=True, capture_output=True)
        return f"{found.stdout.strip()}: the README's first lines; {done.stdout.strip().splitlines()[-1]}"


def main() -> None:
    """Try all that the command line names, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", required=True, help="versions, or paths of interpreters")
    parser.add_argument("--torch", nargs="+", required=True, help="versions")
    parser.add_argument("--tests", nargs="*", default=[], help="of this repository, to be run there, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        _, wheel = build(Path(place))
        for python in asked.python:
            for torch in asked.torch:
                try:
                    print(try_environment(python, torch, wheel, asked.tests), flush=True)
                except subprocess.CalledProcessError as error:
                    print(f"Python {python}, torch {torch}: not to be had here ({error})", flush=True)


if __name__ == "__main__":
    main()
