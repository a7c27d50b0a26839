"""Saving and loading real files on one rank."""

import errno
import gc
import json
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lockstep.checkpoint import (
    MANIFEST,
    Checkpoints,
    FileSystem,
    Manifest,
    Piece,
    TensorRecord,
    async_save,
    list_checkpoints,
    verify,
)
from lockstep.checkpoint.layout import lay_out
from lockstep.checkpoint.lock import LOCK_FILE
from lockstep.checkpoint.tensors import CpuStager, flatten
from lockstep.collectives import in_memory, single_rank_group
from lockstep.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint
from trees import TREES, same

STATE = {
    "model": {"w": torch.arange(600.0).reshape(20, 30), "half": torch.ones(5).bfloat16(), "flag": torch.tensor(True)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999), "eps": float("nan"), "none": None},
}


def checkpoints(root, *, keep=3, **options):
    said = []
    return Checkpoints(Path(root), single_rank_group(), keep=keep, say=said.append, **options), said


def save(root, *steps, tree=STATE, **options):
    saves, said = checkpoints(root, **options)
    for step in steps:
        saves.save(tree, step, {"step": step})
    saves.close()
    assert said == []
    return [one.path for one in list_checkpoints(Path(root))]


def test_a_run_that_slept_while_its_job_went_on_elsewhere_commits_nothing_any_more(tmp_path):
    saves, said = checkpoints(tmp_path)
    saves.claim("job", 2)
    saves.save(STATE, 1, {})
    saves.wait()
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "n2", "process": 7, "job": "job", "generation": 3}))
    saves.save(STATE, 2, {})
    saves.release()
    assert [one.step for one in list_checkpoints(tmp_path)] == [1]
    assert "was taken over by generation 3 of this job (process 7 on n2)" in "".join(said)


@settings(max_examples=60)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_any_tree_comes_back_as_it_was(tmp_path_factory, trees):
    saves, said = checkpoints(tmp_path_factory.mktemp("any"), keep=1)
    for step, tree in enumerate(trees):
        saves.save(tree, step, {"lr": 0.1, "betas": (0.9, 1)})
    saves.close()
    newest = saves.newest()
    assert (newest.step, newest.about) == (len(trees) - 1, {"lr": 0.1, "betas": (0.9, 1)})
    assert same(in_memory(saves.load(newest)), trees[-1])
    assert said == []
    manifest = verify(newest.path)
    opened = {name: tensor for file in manifest.files for name, tensor in load_file(newest.path / file).items()}
    stored = [entry for entry in manifest.tensors if entry.pieces]
    assert len(opened) == len(stored), "each part is a file that other tools open"
    of_path = {entry.path: opened[entry.path] for entry in stored if entry.path != "__metadata__"}
    tensors = {path: tensor for path, tensor in leaves(trees[-1]) if path in of_path}
    assert all(same(tensor, tensors[path]) for path, tensor in of_path.items() if only(path, stored))


def leaves(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path.removeprefix("/"), tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")


def only(path, stored):
    return sum(entry.path.partition("#")[0] == path for entry in stored) == 1


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    lambda p: torch.optim.RMSprop(p, centered=True),
], ids=["SGD", "AdamW", "RMSprop"])  # fmt: skip
def test_a_model_with_its_optimizer_and_schedulers_goes_on_as_if_never_stopped(tmp_path, make):
    def begin():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)).to(
            memory_format=torch.channels_last
        )
        optimizer = make(model.parameters())
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        return model, optimizer, steps, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 20)

    def train(parts, steps):
        for step in steps:
            torch.manual_seed(step)
            parts[1].zero_grad()
            parts[0](torch.randn(4, 1, 8, 8)).square().mean().backward()
            for part in parts[1:]:
                part.step()

    def states(parts):
        return [part.state_dict() for part in parts]

    parts = begin()
    train(parts, range(3))
    saves, _ = checkpoints(tmp_path)
    saves.save(states(parts), 3, {})
    train(parts, range(3, 6))  # changes the tensors that are being saved
    saves.close()
    again = begin()
    for part, loaded in zip(again, in_memory(saves.load(saves.newest())), strict=True):
        part.load_state_dict(loaded)
    train(again, range(3, 6))
    assert same(states(again), states(parts))
    assert again[2].milestones.elements(), "a Counter stays a Counter"


def test_what_changes_after_save_returned_is_not_saved(tmp_path):
    saves, _ = checkpoints(tmp_path)
    weights = torch.ones(1000)
    for step in range(4):
        saves.save({"w": weights}, step, {})
        weights += 1
    saves.close()
    assert torch.equal(in_memory(saves.load(saves.newest()))["w"], torch.full((1000,), 4.0))


def test_tensors_that_share_their_storage_come_back_equal_and_apart(tmp_path):
    tied = torch.arange(6.0)
    saves, _ = checkpoints(tmp_path)
    saves.save({"a": tied, "b": tied.view(2, 3).t()}, 1, {})
    saves.close()
    loaded = in_memory(saves.load(saves.newest()))
    assert same(loaded, {"a": tied, "b": tied.view(2, 3).t()})
    loaded["a"].zero_()
    assert loaded["b"].sum() == tied.sum()


def test_what_cannot_be_saved_is_refused_at_once_with_its_path(tmp_path):
    saves, _ = checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model/w' is a torch\.sparse_coo tensor.*to_dense"):
        saves.save({"model": {"w": torch.eye(3).to_sparse()}}, 1, {})
    with pytest.raises(CheckpointError, match=r"'model/w' is a torch\.strided tensor on meta"):
        saves.save({"model": {"w": torch.empty(3, device="meta")}}, 1, {})
    with pytest.raises(CheckpointError, match=r"'rng/1' is a numpy\.ndarray.*from_numpy"):
        saves.save({"rng": ("MT", torch.ones(3).numpy())}, 1, {})
    saves.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_may_lie_in_several_pieces(tmp_path):
    whole = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    boxes = [((0, 0), whole[:3]), ((3, 0), whole[3:, :1]), ((3, 1), whole[3:, 1:])]
    content, pieces = b"", []
    for start, box in boxes:
        raw = box.contiguous().numpy().tobytes()
        pieces.append(Piece("part-0.bin", len(content), len(raw), crc32(raw), start, tuple(box.shape)))
        content += raw
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "part-0.bin").write_bytes(content)
    manifest = Manifest(
        1, {"tensor": 0}, (TensorRecord("", "int32", (4, 3), tuple(pieces)),), {"part-0.bin": len(content)}, {}
    )
    (tmp_path / "step-00000001" / MANIFEST).write_bytes(manifest.dump())
    saves, _ = checkpoints(tmp_path)
    assert same(in_memory(saves.load(saves.newest())), whole)


# Damage


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    (path,) = save(tmp_path_factory.mktemp("one"), 7)
    return path


@settings(max_examples=150)
@given(st.data())
def test_a_flipped_byte_anywhere_is_noticed_by_verify_and_by_load(one, data):
    name = data.draw(st.sampled_from(sorted(p.name for p in one.iterdir())))
    whole = (one / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    saves, _ = checkpoints(one.parent)
    found = saves.newest()
    try:
        (one / name).write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=name):
            verify(one)
        with pytest.raises(DamagedCheckpoint, match=name):
            in_memory(saves.load(found))
    finally:
        (one / name).write_bytes(whole)
    verify(one)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


DAMAGES = [shorten, lengthen, flip, Path.unlink]


@pytest.mark.parametrize("name", [MANIFEST, "part-00000.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_one_before_loudly(tmp_path, name, damage):
    newest, before, _ = save(tmp_path, 1, 2, 3)
    damage(newest / name)
    saves, said = checkpoints(tmp_path)
    assert saves.newest().path == before
    assert len(said) == 1
    assert said[0].startswith("DAMAGED checkpoint of step 3: ")
    assert name in said[0]
    assert said[0].endswith("Falling back to the one before")
    assert saves.last_committed_step == 2
    assert newest.is_dir(), "it stays, for someone to look at"


class Failing(FileSystem):
    """A device that does not give some files for a while."""

    fails = ""

    def reader(self, path):
        file = super().reader(path)
        if self.fails in str(path) and self.fails:
            file.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return file


@pytest.mark.parametrize("name", [MANIFEST, "part-00000.safetensors"])
def test_what_cannot_be_read_now_is_not_damaged_and_nothing_older_is_taken(tmp_path, name):
    newest, _ = save(tmp_path, 1, 2)
    disk = Failing()
    saves, said = checkpoints(tmp_path, disk=disk)
    disk.fails = f"{newest.name}/{name}"
    with pytest.raises(UnreadableCheckpoint, match=f"{name} cannot be read: Input/output error") as failed:
        saves.newest()
    assert "--fresh" not in str(failed.value)
    assert said == []
    disk.fails = ""
    found = saves.newest()
    assert (found.path, said) == (newest, [])
    tree = saves.load(found)
    disk.fails = "part"
    with pytest.raises(UnreadableCheckpoint, match="cannot be read: Input/output error"):
        in_memory(tree)


class Flips(FileSystem):
    """A disk that stores one bit wrongly, of the byte that is ``left`` bytes away."""

    def __init__(self, left):
        self.left, self.flipped = left, False

    def write(self, file, data):
        if not self.flipped and self.left < len(data):
            wrong = bytearray(data)
            wrong[self.left] ^= 16
            data, self.flipped = memoryview(wrong), True
        self.left -= len(data)
        return super().write(file, data)


@settings(max_examples=20)
@given(st.integers(0, 400))
def test_a_bit_that_the_disk_stored_wrongly_is_found_before_the_commit(tmp_path_factory, at):
    root = tmp_path_factory.mktemp("flips")
    disk = Flips(at)
    saves, said = checkpoints(root, disk=disk, reads_back=True)
    saves.save(STATE, 1, {"step": 1})
    saves.save(STATE, 2, {"step": 2})
    saves.close()
    assert disk.flipped
    assert [one.step for one in list_checkpoints(root)] == [2]
    assert "were read back with other bytes than were written" in said[0]
    verify(list_checkpoints(root)[0].path)


@settings(max_examples=25)
@given(st.lists(st.none() | st.sampled_from(DAMAGES), min_size=1, max_size=4))
def test_the_newest_is_the_last_whole_one_whatever_is_damaged(tmp_path_factory, damages):
    root = tmp_path_factory.mktemp("some")
    save(root, *range(len(damages)), keep=9)
    for step, damage in enumerate(damages):
        if damage:
            damage(root / f"step-{step:08d}" / "part-00000.safetensors")
    saves, said = checkpoints(root)
    whole = [step for step, damage in enumerate(damages) if not damage]
    if whole:
        assert saves.newest().step == whole[-1]
        assert len(said) == len(damages) - 1 - whole[-1]
    else:
        with pytest.raises(CheckpointError, match=r"none of \d checkpoints? .* is whole.*--fresh"):
            saves.newest()


def test_a_damaged_step_that_is_reached_again_is_saved_again(tmp_path):
    newest, _ = save(tmp_path, 1, 2)
    flip(newest / "part-00000.safetensors")
    save(tmp_path, 2)
    assert [one.path.name for one in list_checkpoints(tmp_path)] == ["step-00000002.1", "step-00000001"]
    saves, said = checkpoints(tmp_path)
    assert same(in_memory(saves.load(saves.newest())), STATE)
    assert said == []


def test_the_same_step_saved_again_keeps_the_one_there(tmp_path):
    (path,) = save(tmp_path, 5)
    before = (path / MANIFEST).stat().st_ino
    assert save(tmp_path, 5) == [path]
    assert (path / MANIFEST).stat().st_ino == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_format_from_the_future_is_an_error_and_not_a_reason_to_fall_back(tmp_path):
    newest, _ = save(tmp_path, 1, 2)
    manifest = verify(newest)
    object.__setattr__(manifest, "format", 99)
    (newest / MANIFEST).write_bytes(manifest.dump())
    saves, _ = checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"format 99.*install a newer"):
        saves.newest()


# Around a save


def test_leftovers_of_a_crash_are_swept_and_nothing_else_is(tmp_path):
    save(tmp_path, 1)
    for name in (".saving-step-00000002-dead-1", ".removing-step-00000000", "mine", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-note.txt").write_text("x")
    saves, said = checkpoints(tmp_path)
    assert saves.newest().step == 1
    assert sorted(os.listdir(tmp_path)) == [".hidden", "mine", "step-00000001", "step-note.txt"]
    assert said == []


def test_starting_over_sets_the_old_ones_aside(tmp_path):
    save(tmp_path, 50, 60)
    saves, _ = checkpoints(tmp_path, keep=1)
    assert saves.archive() == tmp_path / "before-1"
    assert saves.newest() is None
    saves.save(STATE, 10, {})
    saves.close()
    assert saves.newest().step == 10
    assert [one.step for one in list_checkpoints(tmp_path / "before-1")] == [60, 50]
    assert saves.archive() == tmp_path / "before-2"
    assert saves.archive() is None


class Gate(FileSystem):
    """Holds each new file back until it is opened."""

    def __init__(self):
        self.open = threading.Event()
        self.reached = threading.Event()

    def create(self, path):
        self.reached.set()
        assert self.open.wait(30)
        return super().create(path)


def steps_in(root):
    return [one.step for one in list_checkpoints(root)]


def test_the_newest_is_protected_also_by_those_who_resume_from_a_later_one(tmp_path):
    saves, said = checkpoints(tmp_path, keep=1)
    saves.protect_newest()  # there is none yet
    for step in (1, 2, 3, 4):
        saves.save(STATE, step, {"step": step})
        saves.wait()
        if step == 2:
            saves.protect_newest()
            saves.protect_newest()
    assert steps_in(tmp_path) == [4, 2], "it does not count towards `keep`"
    saves.close()

    resumed, said = checkpoints(tmp_path, keep=1)
    assert resumed.newest().about == {"step": 4}
    for step in (5, 6):
        resumed.save(STATE, step, {})
        resumed.wait()
    resumed.protect_newest()
    resumed.save(STATE, 7, {})
    resumed.wait()
    resumed.save(STATE, 8, {})
    resumed.close()
    assert steps_in(tmp_path) == [8, 6, 2]

    later, said = checkpoints(tmp_path, keep=1)
    later.newest()
    later.archive()
    for step in (2, 6, 9):
        later.save(STATE, step, {})
        later.wait()
    later.close()
    assert steps_in(tmp_path) == [9], "another run's protection is not this one's"
    assert said == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_one_in_flight_is_protected_beside_the_newest(tmp_path, fails):
    gate, said = Gate(), []
    gate.open.set()
    saves = Checkpoints(tmp_path, single_rank_group(), keep=1, say=said.append, disk=gate)
    saves.save(STATE, 1, {})
    saves.wait()
    gate.open.clear()
    gate.reached.clear()
    saves.save(STATE, 2, {})
    assert gate.reached.wait(30)
    saves.protect_newest()
    if fails:
        next(tmp_path.glob(".saving-*")).rmdir()
    gate.open.set()
    for step in (3, 4):
        saves.save(STATE, step, {})
        saves.wait()
    saves.close()
    assert steps_in(tmp_path) == ([4, 1] if fails else [4, 2, 1])
    assert len(said) == fails


def test_one_save_at_a_time_beside_the_training(tmp_path, monkeypatch):
    gate, said = Gate(), []
    ticks = iter(range(0, 10_000, 5))
    monkeypatch.setattr(async_save, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    saves = Checkpoints(tmp_path, single_rank_group(), keep=3, say=said.append, disk=gate)
    saves.save(STATE, 1, {})
    assert gate.reached.wait(30), "it is being written while we are here"
    assert saves.finished_saves() == ()
    assert saves.last_committed_step is None
    assert list_checkpoints(tmp_path) == ()
    threading.Timer(0.05, gate.open.set).start()
    saves.save(STATE, 2, {})  # waits for the first
    assert [there.step for there in list_checkpoints(tmp_path)][-1] == 1
    assert len(said) == 1
    assert said[0].startswith("step 2: waited ")
    assert "for the checkpoint of step 1 to be written" in said[0]
    saves.close()
    assert [(news.step, news.committed) for news in saves.finished_saves()] == [(1, True), (2, True)]
    assert saves.finished_saves() == ()


class SeesLess(FileSystem):
    """Files of others appear shorter than they are, as where a network file system has not caught up."""

    def size(self, path):
        return super().size(path) - 1


def test_a_part_that_the_leader_does_not_see_in_full_is_not_committed(tmp_path):
    said = []
    saves = Checkpoints(tmp_path, single_rank_group(), keep=1, say=said.append, disk=SeesLess())
    saves.save(STATE, 1, {})
    assert not saves.close().committed
    (message,) = said
    assert "part-00000.safetensors is not in full where the leader looks" in message
    assert list_checkpoints(tmp_path) == ()


class Roomy(FileSystem):
    """Promises room that is not there, as when someone else fills the disk meanwhile."""

    def free_bytes(self, path):
        return 1 << 40


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("disk", [FileSystem(), Roomy()], ids=["seen before", "met while writing"])
def test_a_full_disk_stops_neither_the_training_nor_harms_what_is_there(small_disk, disk):
    root = small_disk / "checkpoints"
    saves, said = checkpoints(root, keep=1, disk=disk)
    saves.save({"w": torch.ones(50_000)}, 1, {})
    saves.wait()
    saves.save({"w": torch.ones(260_000)}, 2, {})
    saves.wait()
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint of step 2 not saved: {root} is full (")
    assert said[0].endswith("needed). Training goes on; last good: step 1")
    assert os.listdir(root) == ["step-00000001"]
    saves.save({"w": torch.ones(60_000)}, 3, {})
    saves.close()
    assert os.listdir(root) == ["step-00000003"]
    assert saves.newest().step == 3
    assert len(said) == 1


def test_the_last_save_does_not_fail_in_silence(tmp_path):
    (tmp_path / "root").write_text("a file, where the directory should be")
    saves, said = checkpoints(tmp_path / "root")
    saves.save(STATE, 1, {})
    while not said:
        saves.finished_saves()
    assert said[0].startswith("checkpoint of step 1 not saved: ")
    assert said[0].endswith("Training goes on; there is none yet")
    ended = saves.close()
    assert (ended.step, ended.committed) == (1, False)
    assert ended.why_not in said[0]
    assert len(said) == 1

    saves, said = checkpoints(tmp_path / "root")
    assert saves.close() is None
    saves, said = checkpoints(tmp_path / "root")
    saves.save(STATE, 1, {})
    saves.close()
    assert len(said) == 1
    assert said[0].endswith("The run is ending; there is none yet")


def test_no_open_file_and_no_thread_is_left(tmp_path):
    save(tmp_path, 1)  # loads whatever is loaded late
    files = len(os.listdir("/proc/self/fd"))
    save(tmp_path, 2, 3)
    saves, _ = checkpoints(tmp_path)
    in_memory(saves.load(saves.newest()))
    assert len(os.listdir("/proc/self/fd")) == files
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-checkpoint"]


class StopsBeforeCommit(FileSystem):
    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def rename(self, old, new):
        self.reached.set()
        assert self.go_on.wait(60)
        super().rename(old, new)


def copies_in_memory(size):
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return sum(one.dtype == torch.uint8 and one.nbytes >= size for one in tensors)


def test_the_memory_of_the_copy_is_given_back_as_soon_as_it_is_written(tmp_path):
    state, disk = {"w": torch.arange(100_000.0), "flag": torch.tensor(True)}, StopsBeforeCommit()
    saves = Checkpoints(tmp_path, single_rank_group(), keep=1, say=pytest.fail, disk=disk)
    saves.save(state, 1, {})
    assert disk.reached.wait(60)
    copies = copies_in_memory(state["w"].nbytes)
    disk.go_on.set()
    saves.close()
    assert copies == 0


def test_a_copy_has_memory_of_its_own():
    _, names, tensors = flatten({"w": torch.arange(100_000.0), "flag": torch.tensor(True)})
    part = lay_out(0, enumerate(named.here for named in names))
    copier = CpuStager()
    copier.copy(part, tensors)
    assert copies_in_memory(part.length) == 1
    tensors[0].add_(1)
    assert np.asarray(copier.content)[:400_000].view("float32").tolist() == list(range(100_000))
    copier.free()
    assert copies_in_memory(part.length) == 0
