"""Public names, options, settings, variables and exit codes are the promised ones: they go or change only by plan."""

import re
from dataclasses import fields

import pytest

from lockstep import launch_contract
from lockstep.cli.run_options import run_options
from lockstep.cpython_private import actions_by_option
from lockstep.settings import OPTIONS_VARIABLE, Settings
from public_surface import FILE, HOUSE, REFERENCE, documented, read, surface, unannounced, write

PROMISED = read(FILE.read_text())
CHANGELOG = """# Changelog
## [0.2.0]
### Changed
- {}
### Added
- `Run.step`
## [0.1.0]
### Removed
- `lockstep run --fit`
"""


def test_it_is_the_promised_one():
    now, changelog = surface(), (HOUSE / "CHANGELOG.md").read_text()
    assert unannounced(PROMISED, now, changelog) == [], "gone or changed, and not in the changelog: docs/versioning.md"
    assert now == PROMISED, "after a change: make surface"
    assert write(now) == FILE.read_text()


def test_it_holds_what_it_is_said_to_hold():
    assert {"lockstep.Run.step", "lockstep.Run.device", "lockstep run -m, --module"} <= PROMISED.keys()
    assert {f"setting {field.name}" for field in fields(Settings)} <= PROMISED.keys()
    assert {"variable LOCKSTEP_VIEW", "exit code 75", "lockstep checkpoints list"} <= PROMISED.keys()
    assert documented().keys() == {"lockstep", "lockstep.testing", "lockstep.tune"}
    assert "0x" not in FILE.read_text()


def test_each_option_of_run_is_also_taken_with_underscores():
    known = actions_by_option(run_options())
    assert {f"--{option[2:].replace('-', '_')}" for option in known if option.startswith("--")} <= known.keys()


@pytest.mark.parametrize(
    ("gone", "said", "suffices"),
    [
        ("lockstep.Run.step", "`Run.steps` is another name", False),
        ("lockstep.Run.step", "`Run.step` takes `count`", True),
        ("lockstep.Run.step", "Run.step, but not as code", False),
        ("lockstep run --fit", "`--fit` is gone", False),
        ("lockstep run --fit", "`lockstep run --fit` is gone", True),
        ("lockstep tune --resume", "`lockstep run --resume` is gone", False),
        ("returned EarlyStopping.stopped", "`EarlyStopping.stopped` is a method", True),
        ("setting micro_batch", "`micro_batch` is gone", True),
        ("exit code 75", "75", False),
    ],
)
def test_what_goes_or_changes_is_named_in_the_changelog(gone, said, suffices):
    assert gone in PROMISED
    for now in ({k: v for k, v in PROMISED.items() if k != gone}, PROMISED | {gone: "other"}):
        assert unannounced(PROMISED, now, CHANGELOG.format(said)) == ([] if suffices else [gone])


def test_what_is_new_needs_no_entry():
    assert unannounced(PROMISED, PROMISED | {"lockstep.Run.new": "(self) -> None"}, CHANGELOG.format("-")) == []


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        ("(self, a: int, b: str = 'x', *, c: int = 0, d: float = 1.0) -> None", True),
        ("(self, a: int, b: str = 'x', e: int = 3, *, c: int = 0) -> None", True),
        ("(self, e: int = 3, a: int = 1, b: str = 'x', *, c: int = 0) -> None", False),
        ("(self, a: int, b: str = 'y', *, c: int = 0) -> None", False),
        ("(self, a: int, b: str = 'x', *, c: int = 0, d: float) -> None", False),
        ("(self, a: int, b: str = 'x') -> None", False),
        ("(self, a: int, b: str = 'x', *, c: int = 0) -> int", False),
    ],
)
def test_a_parameter_more_with_a_default_is_new_and_all_else_is_a_change(now, holds):
    promised = {"lockstep.Run.old": "(self, a: int, b: str = 'x', *, c: int = 0) -> None"}
    assert (unannounced(promised, {"lockstep.Run.old": now}, CHANGELOG.format("-")) == []) == holds


def test_each_variable_in_the_source_is_public_or_an_agreement_of_the_launcher_with_its_ranks():
    """A variable that is in neither place would be a switch that nobody knows of."""
    text = "\n".join(path.read_text() for path in (HOUSE / "src").rglob("*.py"))
    used = set(re.findall(r'"(LOCKSTEP_[A-Z_]*[A-Z])"', text))
    agreed = {value for value in vars(launch_contract).values() if isinstance(value, str)} | {OPTIONS_VARIABLE}
    of_settings = {f"LOCKSTEP_{field.name.upper()}" for field in fields(Settings)}
    assert {name for name in used - agreed - of_settings if f"variable {name}" not in PROMISED} <= INTERNAL
    assert all(name in used for name in INTERNAL)
    assert "LOCKSTEP_VIEW" in (REFERENCE / "environment.md").read_text()


#: How a launcher tells single rooms' processes something; described where they are read.
INTERNAL = {"LOCKSTEP_LOCAL_RANK_OPTION", "LOCKSTEP_RESULT", "LOCKSTEP_VERIFY"}
