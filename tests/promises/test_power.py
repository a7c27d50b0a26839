"""P5: whatever system call the power is cut before, the newest checkpoint is whole, and is the old or the new one."""

import errno
import re
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import Checkpoints, list_checkpoints, verify
from lockstep.collectives import in_memory, single_rank_group
from power import CONTENT, EVERYTHING, NAMES, NOTHING, PowerDisk, Survival

ROOT = Path("/shared/run/checkpoints")
SURVIVALS = [NOTHING, EVERYTHING, NAMES, CONTENT]


def state(step, flavour=0):
    return {"model": {"w": torch.full((40,), step + flavour / 10), "n": torch.tensor(step)}, "step": step, "x": flavour}


def equal(a, b):
    return a["step"] == b["step"] and a["x"] == b["x"] and all(torch.equal(a["model"][k], b["model"][k]) for k in "wn")


def run(disk, steps, *, keep=1, flavour=0):
    """One life of a run: resume, save each step; what it said and the steps that it believed committed."""
    said = []
    saves = Checkpoints(ROOT, single_rank_group(), keep=keep, say=said.append, disk=disk)
    saves.newest()
    committed = []
    for step in steps:
        saves.save(state(step, flavour), step, {})
        saves.wait()
        committed += [news.step for news in saves.finished_saves() if news.committed]
    saves.close()
    return said, committed


def begun(steps=(1, 2), keep=1):
    """A disk that has seen ``steps`` committed and all its caches written."""
    disk = PowerDisk()
    disk.root.names["shared"] = disk.root.flushed["shared"] = type(disk.root)()
    if steps:
        _, committed = run(disk, steps, keep=keep)
        assert committed == list(steps)
    return disk.after(EVERYTHING)


def check(disk, survival, allowed, told):
    """The law, after one cut."""
    found = disk.after(survival)
    said = []
    saves = Checkpoints(ROOT, single_rank_group(), keep=1, say=said.append, disk=found)
    for there in list_checkpoints(ROOT, found):
        verify(there.path, found)
    newest = saves.newest()
    assert said == []
    state_found = in_memory(saves.load(newest)) if newest else None
    assert any(state_found is a or (a and state_found and equal(a, state_found)) for a in allowed), (newest, survival)
    if told is not None:
        assert equal(state_found, told), f"told that it was committed, but it is gone: {survival.title}"
    if found.is_directory(ROOT):
        assert not [name for name in found.names(ROOT) if name.startswith(".")]
    return saves


def cuts(before, steps, allowed, *, keep=1, flavour=0, ignores=()):
    """Cut the power before each call of a run in turn, and hold the law against each way of surviving."""
    whole = before.after(EVERYTHING)
    run(whole, steps, keep=keep, flavour=flavour)
    assert len(whole.calls) > 3
    for n in range(len(whole.calls) + 1):
        disk = before.after(EVERYTHING, cut_before=n, ignores=ignores)
        said, committed = run(disk, steps, keep=keep, flavour=flavour)
        assert disk.cut == (n < len(whole.calls)), "the fault was not seen to happen"
        if not committed and disk.cut:
            assert any("the power is off" in line for line in said)
        told = state(committed[-1], flavour) if committed else None
        for survival in [*SURVIVALS, *(Survival.any_of(100 * n + seed) for seed in range(4))]:
            saves = check(disk, survival, allowed, told)
    saves.save(state(9), 9, {})
    saves.close()
    assert saves.last_committed_step == 9


def test_the_first_checkpoint_is_there_whole_or_not_at_all():
    cuts(begun(()), [1], [None, state(1)])


@pytest.mark.parametrize("keep", [1, 2])
def test_a_cut_leaves_the_old_or_the_new_checkpoint(keep):
    cuts(begun((1, 2), keep), [3], [state(2), state(3)], keep=keep)


def test_a_cut_while_the_same_step_is_saved_with_another_content_leaves_one_of_both():
    cuts(begun((1, 2)), [2], [state(2), state(2, 1)], flavour=1)


def test_a_cut_while_the_same_step_is_saved_again_leaves_it():
    before = begun((1, 2))
    cuts(before, [2], [state(2)])
    run(before, [2])
    assert [c.path.name for c in list_checkpoints(ROOT, before)] == ["step-00000002"]


@pytest.mark.parametrize("ignored", ["sync", "sync_directory"])
def test_the_model_notices_a_disk_that_does_not_flush(ignored):
    with pytest.raises(Exception, match=r"gone|DAMAGED|not what was|is missing|do not match|has no|assert"):
        cuts(begun((1, 2)), [3], [state(2), state(3)], ignores=[ignored])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_when_any_one_call_fails_the_training_goes_on_and_nothing_is_left_behind(error):
    before = begun((1, 2))
    whole = before.after(EVERYTHING)
    run(whole, [3])
    for n in range(len(whole.calls)):
        disk = before.after(EVERYTHING, fail_at=n, error=error)
        said, committed = run(disk, [3, 4])
        assert disk.failed
        assert committed[-1] == 4
        assert len(said) == 1, said
        if committed == [4]:
            assert "checkpoint of step 3 not saved" in said[0]
            assert said[0].endswith("Training goes on; last good: step 2")
            assert ("is full" in said[0]) == (error == errno.ENOSPC)
        else:
            assert "cannot remove older checkpoints" in said[0]
        saves = Checkpoints(ROOT, single_rank_group(), keep=1, say=said.append, disk=disk)
        assert equal(in_memory(saves.load(saves.newest())), state(4))
        assert [name for name in disk.names(ROOT) if not name.startswith("step-")] == []


def test_a_disk_without_room_is_not_written_to():
    disk = begun((1, 2)).after(EVERYTHING, room=100)
    said, committed = run(disk, [3])
    assert committed == []
    assert disk.calls == []
    assert len(said) == 1
    assert re.fullmatch(
        rf"checkpoint of step 3 not saved: {ROOT} is full \(\d+ bytes free, [\d.]+ KiB needed\)\. "
        r"Training goes on; last good: step 2",
        said[0],
    )
