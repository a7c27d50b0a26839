"""Names of other tools are answered with names that `Run` has."""

import inspect
import re

import pytest

from lockstep.run import Run
from lockstep.run.setup import missing_names

ATTRIBUTES = set(dir(Run)) | set(inspect.get_annotations(Run))


@pytest.mark.parametrize("name", sorted(missing_names._ATTRIBUTES))
def test_what_is_advised_exists_and_what_is_answered_does_not(name):
    assert name not in ATTRIBUTES
    advised = missing_names._ATTRIBUTES[name]
    assert set(re.findall(r"\brun\.(\w+)", advised)) <= ATTRIBUTES
    assert set(re.findall(r"\bRun\((\w+)=", advised)) <= set(inspect.signature(Run.__init__).parameters)


def test_a_name_of_another_tool_is_answered_with_ours():
    run = object.__new__(Run)
    assert str(missing_names.no_attribute(run, "prepare")).endswith(
        "did you mean run.model(model), run.optimizer(optimizer) and run.loader(dataset, global_batch=...)?"
    )
    assert str(missing_names.no_attribute(run, "bachward")).endswith("; did you mean backward?")
