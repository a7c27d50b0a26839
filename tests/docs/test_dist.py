"""The wheel and the source distribution hold what users need, and nothing else; installed, the README's lines run."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser

import pytest

import lockstep
from doc_blocks import HOUSE
from installed import build, first_lines, try_first_lines

pytestmark = [pytest.mark.long, pytest.mark.together]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    for package in ("build", "hatchling", "pip"):
        pytest.importorskip(package)
    return build(tmp_path_factory.mktemp("dist"))


def tracked():
    """The files of the package, without what Python and editors leave there."""
    package = HOUSE / "src" / "lockstep"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in files}


def test_the_wheel_is_the_package_with_its_licence_and_its_types(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        about = next(name for name in names if name.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(about).decode())
    assert {name for name in names if ".dist-info/" not in name} == tracked()
    assert "lockstep/py.typed" in names
    assert {"licenses/LICENSE", "entry_points.txt"} <= {
        name.split(".dist-info/")[1] for name in names if "info/" in name
    }
    assert metadata["Version"] == lockstep.__version__
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_source_distribution_has_what_tests_and_documentation_need(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "src/lockstep/py.typed",
        "tests/conftest.py",
        "docs/conf.py",
        "examples/digits.py",
        "benchmarks/README.md",
    )
    assert {*wanted, "Makefile", "pyproject.toml", "LICENSE", "CHANGELOG.md", "README.md"} <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".venv", "runs", "dist"))]


def test_installed_without_a_checkout_the_readmes_first_lines_run(built, tmp_path):
    place = tmp_path / "environment"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*install, str(built[1])], check=True, capture_output=True)
    # `python` is found beside it; what Lockstep needs comes from the environment of these tests.
    (place / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (place / "bin" / "python").chmod(0o755)
    (tmp_path / "run").mkdir()
    said = try_first_lines(place / "bin", tmp_path / "run", PYTHONPATH=str(place))
    assert first_lines()[1:] == ["python train.py", "lockstep run --nproc-per-node 4 train.py"]
    assert said.startswith(f"lockstep {lockstep.__version__}\n")
    assert said.count("accuracy 0.9") >= 2
    where = [sys.executable, "-c", "import lockstep; print(lockstep.__file__)"]
    env = {"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin"}
    assert subprocess.run(where, env=env, capture_output=True, text=True).stdout.startswith(str(place))
