"""What users import, and what that costs them."""

import inspect
import subprocess
import sys

import pytest

import lockstep
from lockstep import errors


def loaded_by(statement: str) -> set[str]:
    """The modules that a new interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_it_lists_its_names():
    assert sorted(dir(lockstep)) == sorted(lockstep.__all__)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_each_name_is_there(name):
    assert getattr(lockstep, name) is not None


def test_every_error_can_be_caught_by_name():
    raised = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert set(raised) <= set(lockstep.__all__)


def test_a_misspelt_name_is_an_attribute_error_that_lists_the_names():
    with pytest.raises(AttributeError, match="'lockstep' has no attribute 'run_all'; it has AuditError"):
        _ = lockstep.run_all
    with pytest.raises(ImportError):
        exec("from lockstep import Runn")


def test_the_front_door_loads_no_room():
    ours = {name for name in loaded_by("import lockstep") if name.startswith(("lockstep.", "torch", "numpy", "rich"))}
    assert ours == set()


@pytest.mark.parametrize(
    "room",
    [
        *("errors", "world", "batch", "progress", "settings", "report", "heartbeat", "launch", "saved_run", "cli"),
        "__main__",
    ],
)
def test_a_torch_free_room_is_free_of_torch(room):
    assert not {"torch", "numpy"} & loaded_by(f"import lockstep.{room}")


def test_launch_is_the_function_whoever_loaded_its_room_first():
    code = "import lockstep.launch, lockstep; from lockstep.launch import launch; assert lockstep.launch is launch"
    loaded_by(code)
    loaded_by("import lockstep; lockstep.launch; " + code)
