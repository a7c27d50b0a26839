"""Two real ranks that save together."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import Checkpoints, FileSystem, list_checkpoints, verify
from lockstep.collectives import in_memory, open_group, single_rank_group
from lockstep.errors import CheckpointError, PeerLost
from lockstep.testing import run_each, run_ranks
from lockstep.world import World
from trees import same
from waiting import wait_until

DEADLINE_S = 60


def state(step):
    return {"w": torch.full((3000,), float(step)), "m": torch.full((2000,), -float(step)), "n": torch.tensor(step)}


class Broken(FileSystem):
    def create(self, path):
        raise PermissionError(13, "Permission denied", str(path))


def on_a_rank(scenario, root):
    """What ``scenario`` has put into a dict, and under ``said`` what the rank's checkpoints said."""
    told, said = {}, []
    group = open_group(World.from_env(os.environ), torch.device("cpu"), DEADLINE_S)
    scenario(group, root, said, told)
    group.close()
    return told | {"said": said}


def save_and_load_each_others(group, root, said, told):
    saves = Checkpoints(root, group, keep=9, say=said.append)
    told["found"] = saves.newest().step
    told["first"] = same(in_memory(saves.load(saves.newest())), state(1))
    saves.save(state(2), 2, {})
    saves.wait()
    told["committed"] = saves.last_committed_step
    told["second"] = same(in_memory(saves.load(saves.newest())), state(2))

    other = state(3) | ({"extra": torch.ones(1)} if group.rank else {})
    saves.save(other, 3, {})
    saves.wait()
    saves.save(state(4) | {"clock": group.rank}, 4, {})
    saves.wait()
    saves.close()
    told["news"] = [(news.step, news.committed) for news in saves.finished_saves()]

    broken = Checkpoints(root, group, keep=9, say=said.append, disk=Broken() if group.rank else FileSystem())
    broken.save(state(5), 5, {})
    broken.wait()
    told["last"] = [(news.step, news.committed) for news in broken.finished_saves()]
    told["end of all"] = broken.close().why_not


def test_two_ranks_write_one_checkpoint_and_what_fails_on_one_fails_on_both(tmp_path):
    one = Checkpoints(tmp_path, single_rank_group(), keep=9, say=pytest.fail)
    one.save(state(1), 1, {})
    one.close()
    sent = run_ranks(on_a_rank, 2, save_and_load_each_others, tmp_path)
    for told in sent:
        assert (told["found"], told["first"], told["committed"], told["second"]) == (1, True, 2, True)
        assert told["news"] == [(2, True), (3, False), (4, True)]
        assert told["last"] == [(5, False)]
    assert sent[1]["said"] == [], "only the leader speaks"
    lines = sent[0]["said"]
    assert lines[0] == (
        "checkpoint of step 3 not saved: rank 1 would save other tensors than rank 0. Training goes on; "
        "last good: step 2"
    )
    assert lines[1] == "checkpoint of step 4: rank 1 held other plain values than rank 0, whose were saved"
    assert lines[2].startswith("checkpoint of step 5 not saved: rank 1: PermissionError: ")
    assert len(lines) == 3
    for told in sent:
        assert told["end of all"].startswith("rank 1: PermissionError: ")

    assert [c.step for c in list_checkpoints(tmp_path)] == [4, 2, 1]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000004"], "no scratch is left"
    assert set(verify(tmp_path / "step-00000002").files) == {"part-00000.safetensors", "part-00001.safetensors"}
    assert set(verify(tmp_path / "step-00000001").files) == {"part-00000.safetensors"}
    newest = one.newest()
    assert same(in_memory(one.load(newest)), state(4) | {"clock": 0})


def newest_of_damaged(group, root, said, told):
    saves = Checkpoints(root, group, keep=9, say=said.append)
    told["found"] = saves.newest().step
    for name, elsewhere in (("hidden", Hides()), ("another", Elsewhere(root))):
        disk = elsewhere if group.rank else FileSystem()
        try:
            Checkpoints(root, group, keep=9, say=said.append, disk=disk).newest()
        except CheckpointError as error:
            told[name] = str(error)


class Hides(FileSystem):
    """On another node, with another directory of this name."""

    def is_directory(self, path):
        return False


class Elsewhere(FileSystem):
    """On another node, where a directory of this name holds the checkpoints of another run."""

    def __init__(self, root):
        self.root = root

    def _there(self, path):
        return self.root.with_name("elsewhere") / path.relative_to(self.root)

    def reader(self, path):
        return super().reader(self._there(path))

    def size(self, path):
        return super().size(self._there(path))


def test_what_is_damaged_in_the_share_of_any_rank_is_passed_over_by_all(tmp_path):
    root = tmp_path / "root"
    one = Checkpoints(root, single_rank_group(), keep=9, say=pytest.fail)
    for step in range(1, 5):
        one.save(state(step), step, {})
    one.close()
    another = Checkpoints(tmp_path / "elsewhere", single_rank_group(), keep=9, say=pytest.fail)
    another.save(state(7), 1, {})
    another.close()
    for step, place in ((4, -1), (3, 400), (2, 1)):  # bytes from the beginning: of the end, the middle, and the head
        file = root / f"step-{step:08d}" / "part-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(bytes(content))
    leader, other = run_ranks(on_a_rank, 2, newest_of_damaged, root)
    assert leader["found"] == other["found"] == 1
    assert [line.partition(":")[0] for line in leader["said"][:3]] == [
        f"DAMAGED checkpoint of step {step}" for step in (4, 3, 2)
    ]
    assert other["said"] == [], "only the leader speaks"
    assert leader["hidden"] == other["hidden"]
    assert "rank 1 does not see" in leader["hidden"]
    assert leader["another"] == other["another"]
    assert "step-00000001 is another checkpoint for rank 1 than for the leader" in leader["another"]


class WaitsForASign(FileSystem):
    """Commits when a file is there."""

    def __init__(self, sign):
        self.sign = sign

    def rename(self, old, new):
        wait_until(self.sign.exists, "the sign")
        super().rename(old, new)


def one_hears_nothing(group, root, said, told):
    sign = root.with_name("rank 1 has given up")
    disk, patience_s = (FileSystem(), 2.0) if group.rank else (WaitsForASign(sign), DEADLINE_S)
    saves = Checkpoints(root, group, keep=1, say=said.append, disk=disk, peer_timeout_s=patience_s)
    saves.save(state(1), 1, {})
    if group.rank:
        saves.wait()
        told["before"] = saves.last_committed_step
        sign.touch()
    told["ended"] = saves.close()
    told["committed"] = saves.last_committed_step


def test_in_the_end_all_know_what_the_leader_knows(tmp_path):
    sent = run_ranks(on_a_rank, 2, one_hears_nothing, tmp_path / "root")
    assert sent[1]["before"] is None, "rank 1 must have given up"
    for told in sent:
        assert (told["ended"].step, told["ended"].committed, told["committed"]) == (1, True, 1)


def one_dies(group, root, said, told):
    saves = Checkpoints(root, group, keep=1, say=said.append)
    saves.save(state(1), 1, {})
    saves.wait()
    group.barrier("one is saved")
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    saves.save(state(2), 2, {})
    with contextlib.suppress(PeerLost):
        group.barrier("never met")
    saves.abandon()
    told["committed"] = saves.last_committed_step


def test_a_rank_that_dies_leaves_the_last_checkpoint_and_holds_nobody_up(tmp_path: Path):
    survivor, killed = run_each(on_a_rank, 2, one_dies, tmp_path)
    assert isinstance(killed.error, ChildProcessError), "the rank was not killed"
    told = survivor.value
    assert told["committed"] == 1
    assert len(told["said"]) == 1
    assert told["said"][0].startswith("checkpoint of step 2 not saved: the part of rank 1 did not come before")
    assert os.listdir(tmp_path) == ["step-00000001"]
    verify(tmp_path / "step-00000001")
