"""What is known of the step after a checkpoint is there as soon as the checkpoint is, if that step was over before."""

import pytest

from lockstep.checkpoint.commit import Committed
from lockstep.checkpoint.filesystem import LOCAL
from lockstep.checkpoint.next_step import NEXT_STEP, NextStepFile, read_next_step

CONTENT = {"losses": {"0": ["0x1p+0"]}}


def scratch_of(root):
    root.mkdir()
    scratch = root / ".saving"
    scratch.mkdir()
    return scratch, Committed(6, 0, root)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_that_is_over_before_the_commit_becomes_visible_with_the_checkpoint(tmp_path, is_first):
    scratch, checkpoint = scratch_of(tmp_path / "root")
    file = NextStepFile(LOCAL)
    calls = [lambda: file.put(6, CONTENT), lambda: file.before_commit(scratch, 6)]
    for call in calls if is_first else calls[::-1]:
        call()
    scratch.rename(checkpoint.path)
    assert read_next_step(checkpoint.path, LOCAL) == CONTENT
    written = (checkpoint.path / NEXT_STEP).stat().st_ino
    file.committed(checkpoint)
    assert (checkpoint.path / NEXT_STEP).stat().st_ino == written, "it is never half there"


def test_one_that_is_over_later_is_written_then_and_of_another_checkpoint_nothing(tmp_path):
    scratch, checkpoint = scratch_of(tmp_path / "root")
    file = NextStepFile(LOCAL)
    file.put(4, CONTENT)
    file.before_commit(scratch, 6)
    scratch.rename(checkpoint.path)
    file.committed(checkpoint)
    assert read_next_step(checkpoint.path, LOCAL) is None
    file.put(6, CONTENT)
    assert read_next_step(checkpoint.path, LOCAL) == CONTENT


def test_one_that_an_earlier_run_has_left_is_replaced(tmp_path):
    scratch, checkpoint = scratch_of(tmp_path / "root")
    scratch.rename(checkpoint.path)
    for content in (CONTENT, {"losses": {}}):
        file = NextStepFile(LOCAL)
        file.put(6, content)
        file.committed(checkpoint)
        assert read_next_step(checkpoint.path, LOCAL) == content
