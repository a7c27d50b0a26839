"""Defaults of a project and of a user: ``lockstep.toml``, or ``[tool.lockstep]`` of ``pyproject.toml``.

    command line  >  environment  >  script  >  project's file  >  user's file  >  default

The project's file is the nearest one, from the working directory upward. Its tables::

    [run]           settings of `Run`                    [slurm], [sge]    of job scripts
    [launch]        options of ``lockstep run``          [prices], [predict]
    [bench], [tune], [verify], [doctor]                  options of these commands
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean
from lockstep.launch_contract import PROJECT, PROJECT_SETTINGS
from lockstep.records import read_bytes, toml_in, value_in
from lockstep.settings import ResolvedSettings, SettingsLayer

FILE: Final = "lockstep.toml"
_PYPROJECT: Final = "pyproject.toml"
#: The tables that a file may have.
TABLES: Final = (
    *("run", "launch", "slurm", "sge", "prices", "predict"),
    *("bench", "tune", "verify", "doctor"),
)


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """One file that was read."""

    path: Path
    of: Literal["project", "user"]
    tables: Mapping[str, Any]
    text: str
    prefix: str = ""  #: before the name of each table, as ``tool.lockstep.``

    def table(self, name: str) -> Mapping[str, object]:
        """The table ``[name]``; empty without one."""
        found = self.tables.get(name, {})
        return found if isinstance(found, dict) else {}

    def place(self, table: str, key: str = "") -> str:
        """Where that is, as ``lockstep.toml:12``; the user's file with its directory."""
        name = self.path.name if self.of == "project" else str(self.path)
        number = _line_of(self.text, f"{self.prefix}{table}", key)
        return f"{name}:{number}" if number else name


def project_files(env: Mapping[str, str]) -> list[ProjectFile]:
    """The files whose defaults hold here: the project's, then the user's.

    Args:
        env: the environment: `LOCKSTEP_PROJECT` names the project's file, or none if it is empty.

    Raises:
        SettingError: for a file that cannot be read, or is no TOML.
    """
    project, user = _project_path(env), _user_path(env)
    found = [] if project is None else [_read(project, "project")]
    return found if user is None else [*found, _read(user, "user")]


def unknown_tables(files: Sequence[ProjectFile]) -> list[str]:
    """What is wrong with the tables of ``files``, each in words; for an error that says all that is wrong at once."""
    return [problem for file in files for problem in _unknown_tables(file)]


def table(name: str, files: Sequence[ProjectFile]) -> dict[str, Any]:
    """What ``files`` say under ``[name]``, the first one over the others.

    Raises:
        SettingError: for tables that no file has.
    """
    if wrong := unknown_tables(files):
        raise SettingError("\n  ".join(wrong))
    return {key: value for file in reversed(files) for key, value in file.table(name).items()}


def resolve_settings(given: Mapping[str, object], env: Mapping[str, str]) -> ResolvedSettings:
    """`ResolvedSettings.resolve` of what the script gives, with the files that hold here.

    Below a launcher, with what they said when that was started.

    Raises:
        SettingError: as `project_files` and `ResolvedSettings.resolve` do.
    """
    if frozen := env.get(PROJECT_SETTINGS):
        said: dict[str, list[str]] = value_in(frozen)
        values = {name: text for name, (text, _) in said.items()}
        return ResolvedSettings.resolve(given, env, [SettingsLayer(values, lambda name: said[name][1])])
    return ResolvedSettings.resolve(given, env, _layers(project_files(env)))


def freeze_settings(env: MutableMapping[str, str]) -> None:
    """Let `resolve_settings` give what the files say now to all processes that ``env`` is handed on to.

    Else ranks that start later would train with other settings, if a file is changed meanwhile.

    Raises:
        SettingError: as `resolve_settings` does.
    """
    layers = _layers(project_files(env))
    ResolvedSettings.resolve({}, {}, layers)  # refuses what cannot be used
    said = {name: (text, layer.place(name)) for layer in layers for name, text in layer.texts().items()}
    env[PROJECT_SETTINGS] = json.dumps(said)


def fix_project(env: MutableMapping[str, str]) -> None:
    """Let processes that ``env`` is handed on to read the project's file of this directory, wherever they work."""
    path = _project_path(env)
    env[PROJECT] = "" if path is None else str(path.absolute())


def _layers(files: Sequence[ProjectFile]) -> list[SettingsLayer]:
    return [
        SettingsLayer(file.table("run"), partial(file.place, "run"), tuple(unknown_tables([file])))
        for file in reversed(files)
    ]


def _project_path(env: Mapping[str, str]) -> Path | None:
    if (named := env.get(PROJECT)) is not None:
        return Path(named) if named else None
    try:
        here = Path.cwd()
    except FileNotFoundError:  # which the command tells that needs it
        return None
    for directory in (here, *here.parents):
        # Where others write to, too, only what is the user's own is the user's choice.
        needs_own = directory != here or bool(here.stat().st_mode & stat.S_IWOTH)
        for path in (directory / FILE, directory / _PYPROJECT):
            if path.is_file() and (not needs_own or _is_own(path)) and (path.name == FILE or _has_tables(path)):
                return path
    return None


def _has_tables(pyproject: Path) -> bool:
    """Whether a ``pyproject.toml`` says something to Lockstep."""
    try:
        text = read_bytes(pyproject).decode()
        return "lockstep" in text and "lockstep" in toml_in(text).get("tool", {})
    except (ValueError, OSError):  # which other tools will tell
        return False


def _is_own(path: Path) -> bool:
    """Whether nobody but this user, or root, has put ``path`` there, or what it leads to."""
    return {path.lstat().st_uid, path.stat().st_uid} <= {os.getuid(), 0}


def _user_path(env: Mapping[str, str]) -> Path | None:
    home = env.get("XDG_CONFIG_HOME") or (os.path.join(env["HOME"], ".config") if env.get("HOME") else "")
    path = Path(home, "lockstep", FILE)
    return path if home and path.is_file() else None


def _read(path: Path, of: Literal["project", "user"]) -> ProjectFile:
    try:
        text = read_bytes(path).decode()
        tables: Any = toml_in(text)
    except (ValueError, OSError) as error:
        raise SettingError(f"{path}: {error}") from None
    prefix = ""
    if path.name == _PYPROJECT:
        prefix, tables = "tool.lockstep.", tables.get("tool", {}).get("lockstep", {})
    if not isinstance(tables, dict):
        raise SettingError(f"{path}: tool.lockstep = {tables!r}; write tables, such as [tool.lockstep.run]")
    return ProjectFile(path, of, tables, text, prefix)


def _unknown_tables(file: ProjectFile) -> Iterator[str]:
    for name, value in file.tables.items():
        if name not in TABLES:
            yield f"{file.place(name)}: no table [{name}] is known; {did_you_mean(name, TABLES)}"
        elif not isinstance(value, dict):
            yield f"{file.place(name)}: {name} = {value!r}; write a table, [{file.prefix}{name}]"


def _line_of(text: str, table: str, key: str) -> int:
    """The number of the line that sets ``key`` in a table, or that begins the table; 0 if neither is found."""
    current, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            current = re.sub(r"[\s\"']", "", head[1])
            begun = number if current == table and not begun else begun
        elif (not key and re.match(rf"\s*[\"']?{re.escape(table)}[\"']?\s*=", line)) or (
            key and current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line)
        ):
            return number
    return begun
