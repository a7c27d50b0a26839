"""The program that ranks run, looked at before any of them starts: is it there, can it be read, what is it asked."""

from __future__ import annotations

import importlib.machinery
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean
from lockstep.launch.job.request import Executable, Module, Program, Script

_FIRST_LINE_BYTES = 200


def check_program(program: Program) -> None:
    """Check that the program exists and that Python can read it.

    Raises:
        SettingError: if it does not exist, with the nearest name that does; or for a syntax error, with its line.
    """
    if isinstance(program, Script):
        path = Path(program.name)
        if path.is_dir() and not (path / "__main__.py").exists():
            raise SettingError(f"{program.name} is a directory without a __main__.py; name a script in it")
        if not path.exists():
            names = [str(near) for near in path.parent.glob("*.py")] if path.parent.is_dir() else []
            raise SettingError(f"no such file: {program.name}; {did_you_mean(program.name, names, 'check the path')}")
        if path.suffix == ".ipynb":
            raise SettingError(
                f"{program.name} is a notebook: call lockstep.launch(main, ranks=2) in one of its cells, or make a "
                f"script of it: jupyter nbconvert --to script {program.name}"
            )
    elif isinstance(program, Executable):
        if shutil.which(program.name) is None:
            raise SettingError(f"--no-python {program.name}: no such program, or it may not be executed")
    elif isinstance(program, Module) and program.name.endswith(".py") and Path(program.name).is_file():
        module = ".".join(Path(program.name).with_suffix("").parts)
        raise SettingError(f"-m {program.name}: -m takes the name of a module: -m {module}; or leave -m out")
    elif isinstance(program, Module):
        top, _, _ = program.name.partition(".")
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            names = [path.stem for path in Path().glob("*.py")] + [path.parent.name for path in Path().glob("*/*.py")]
            otherwise = "-m takes the name of a module, and a script is started without -m"
            raise SettingError(f"no such module: {program.name}; {did_you_mean(program.name, names, otherwise)}")
    if (file := source_file(program)) is not None:
        _check_syntax(file)


def source_file(program: Program) -> Path | None:
    """The Python source that ``program`` begins with; None for what is no single file, or cannot be found unread."""
    if isinstance(program, Script):
        path = Path(program.name)
        path = path / "__main__.py" if path.is_dir() else path
        return None if zipfile.is_zipfile(path) else path
    if isinstance(program, Module):
        return _source_of_module(program.name)
    return None


def _source_of_module(name: str) -> Path | None:
    # The packages around it are not imported for this: that would run their code, which may import torch.
    where: list[str] = [str(Path.cwd()), *sys.path]
    full, spec = "", None
    for part in [*name.split("."), "__main__"]:
        full = f"{full}.{part}".lstrip(".")
        spec = importlib.machinery.PathFinder.find_spec(full, where)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            break
        where = list(spec.submodule_search_locations)
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    return origin if origin is not None and origin.suffix == ".py" else None


def _check_syntax(file: Path) -> None:
    if _is_of_another_kind(file):
        raise SettingError(f"{file} is no Python script; to start a program of another kind: --no-python {file}")
    try:
        with warnings.catch_warnings():
            # The rank that runs it warns, in its log.
            warnings.simplefilter("ignore")
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise SettingError(
            f"{file}:{error.lineno or 0}: {type(error).__name__}: {error.msg}{f': {line}' if line else ''}"
        ) from None
    except (OSError, ValueError) as error:
        raise SettingError(f"{file} cannot be read as a script: {error}") from None


def _is_of_another_kind(file: Path) -> bool:
    """Whether the beginning of ``file`` says so: it is compiled, or names another interpreter."""
    try:
        with file.open("rb") as opened:
            first = opened.readline(_FIRST_LINE_BYTES)
    except OSError:
        return False
    return first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)


def asks_for_help(program: Script | Module | Executable) -> bool:
    """Whether the script's own options only ask what they are: ``--help``, or ``-h`` at their end."""
    return "--help" in program.args or program.args[-1:] == ("-h",)


def show_help(program: Script | Module | Executable) -> int:
    """Run ``program``, which is asked for help, once and without a launcher; returns its exit code."""
    module = ["-m"] if isinstance(program, Module) else []
    python = [] if isinstance(program, Executable) else [sys.executable, *module]
    return subprocess.run([*python, program.name, *program.args], check=False).returncode


def local_rank_option(program: Program) -> str:
    """How ``program`` spells the option by which old launchers tell each rank its local rank."""
    file = source_file(program)
    text = file.read_text(encoding="utf-8", errors="replace") if file is not None else ""
    return "--local_rank" if "--local_rank" in text and "--local-rank" not in text else "--local-rank"
