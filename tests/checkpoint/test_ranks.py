"""Two real ranks that save together."""

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from pathlib import Path

import pytest
import torch
from trees import same

from lockstep.checkpoint import Checkpoints, LocalFileSystem, list_checkpoints, verify
from lockstep.collectives import open_group, single_rank_group
from lockstep.errors import PeerLost
from lockstep.world import World

DEADLINE_S = 60


def state(step):
    return {"w": torch.full((3000,), float(step)), "m": torch.full((2000,), -float(step)), "n": torch.tensor(step)}


class Broken(LocalFileSystem):
    def create(self, path):
        raise PermissionError(13, "Permission denied", str(path))


def rank_main(scenario, rank, port, root, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    try:
        world = World(rank, 2, rank, 2, 0, 1, address="127.0.0.1", port=port)
        group = open_group(world, torch.device("cpu"), DEADLINE_S)
        said = []
        scenario(group, root, said, pipe.send)
        pipe.send(("said", said))
        group.close()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise
    finally:
        pipe.send(("end", None))
        pipe.close()


def two_ranks(scenario, root):
    """Run ``scenario`` on two ranks; for each rank what it sent, by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    ends, ranks = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(scenario, rank, port, root, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        ranks.append(process)
    sent = [{}, {}]
    try:
        for rank, end in enumerate(ends):
            with contextlib.suppress(EOFError):
                while "end" not in sent[rank]:
                    assert end.poll(DEADLINE_S), f"rank {rank} is silent"
                    name, value = end.recv()
                    sent[rank][name] = value
            ranks[rank].join(DEADLINE_S)
            assert "failed" not in sent[rank], sent[rank]["failed"]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return sent


def save_and_load_each_others(group, root, said, tell):
    saves = Checkpoints(root, group, keep=9, say=said.append)
    tell(("found", saves.newest().step))
    tell(("first", same(saves.load(saves.newest()), state(1))))
    saves.save(state(2), 2, {})
    saves.wait()
    tell(("committed", saves.last_committed_step))
    tell(("second", same(saves.load(saves.newest()), state(2))))

    other = state(3) | ({"extra": torch.ones(1)} if group.rank else {})
    saves.save(other, 3, {})
    saves.wait()
    saves.save(state(4) | {"clock": group.rank}, 4, {})
    saves.wait()
    saves.close()
    tell(("news", [(news.step, news.committed) for news in saves.finished_saves()]))

    broken = Checkpoints(root, group, keep=9, say=said.append, disk=Broken() if group.rank else LocalFileSystem())
    broken.save(state(5), 5, {})
    broken.wait()
    tell(("last", [(news.step, news.committed) for news in broken.finished_saves()]))
    tell(("end of all", broken.close().why_not))


def test_two_ranks_write_one_checkpoint_and_what_fails_on_one_fails_on_both(tmp_path):
    one = Checkpoints(tmp_path, single_rank_group(), keep=9, say=pytest.fail)
    one.save(state(1), 1, {})
    one.close()
    sent = two_ranks(save_and_load_each_others, tmp_path)
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
    assert same(one.load(newest), state(4) | {"clock": 0})


class WaitsForASign(LocalFileSystem):
    """Commits when a file is there."""

    def __init__(self, sign):
        self.sign = sign

    def rename(self, old, new):
        deadline = time.monotonic() + DEADLINE_S
        while not self.sign.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        super().rename(old, new)


def one_hears_nothing(group, root, said, tell):
    sign = root.with_name("rank 1 has given up")
    disk, patience_s = (LocalFileSystem(), 2.0) if group.rank else (WaitsForASign(sign), DEADLINE_S)
    saves = Checkpoints(root, group, keep=1, say=said.append, disk=disk, peer_timeout_s=patience_s)
    saves.save(state(1), 1, {})
    if group.rank:
        saves.wait()
        tell(("before", saves.last_committed_step))
        sign.touch()
    tell(("ended", saves.close()))
    tell(("committed", saves.last_committed_step))


def test_in_the_end_all_know_what_the_leader_knows(tmp_path):
    sent = two_ranks(one_hears_nothing, tmp_path / "root")
    assert sent[1]["before"] is None, "rank 1 must have given up"
    for told in sent:
        assert (told["ended"].step, told["ended"].committed, told["committed"]) == (1, True, 1)


def one_dies(group, root, said, tell):
    saves = Checkpoints(root, group, keep=1, say=said.append)
    saves.save(state(1), 1, {})
    saves.wait()
    group.barrier("one is saved")
    if group.rank == 1:
        tell(("end", None))
        os.kill(os.getpid(), 9)
    saves.save(state(2), 2, {})
    with contextlib.suppress(PeerLost):
        group.barrier("never met")
    saves.abandon()
    tell(("committed", saves.last_committed_step))


def test_a_rank_that_dies_leaves_the_last_checkpoint_and_holds_nobody_up(tmp_path: Path):
    sent = two_ranks(one_dies, tmp_path)
    assert "said" not in sent[1], "the rank was not killed"
    assert sent[0]["committed"] == 1
    assert len(sent[0]["said"]) == 1
    assert sent[0]["said"][0].startswith("checkpoint of step 2 not saved: the part of rank 1 did not come before")
    assert os.listdir(tmp_path) == ["step-00000001"]
    verify(tmp_path / "step-00000001")
