"""Checkpoint directories that somebody else has written to: nothing is believed, and nothing outside is touched."""

import json
import os
import time
import tracemalloc
import zlib

import pytest
import torch

from lockstep.checkpoint import CheckpointReader, Checkpoints, load_tree
from lockstep.checkpoint.commit import list_checkpoints, partial_saves, read_manifest, remove, verify
from lockstep.checkpoint.filesystem import LOCAL
from lockstep.checkpoint.manifest import ITEM_BYTES, MANIFEST, Manifest, Piece, TensorRecord
from lockstep.collectives import single_rank_group
from lockstep.errors import DamagedCheckpoint
from lockstep.saved_run.listed import check, rows
from lockstep.saved_run.located import open_checkpoint
from waiting import DEADLINE_S

PART = "part-00000.bin"


def enveloped(body):
    return b'{"crc32":"' + b"%08x" % zlib.crc32(body) + b'","manifest":' + body + b"}\n"


def manifest(name=PART, shape=(4,), box=(4,), length=4, tree=None, sizes=None, dtype="uint8", about=None, step=1):
    piece = Piece(name, 0, length, zlib.crc32(b"root"), (0,) * len(box), box)
    stored = TensorRecord("x", dtype, shape, (piece,))
    tree = tree or {"dict": [["x", {"tensor": 0}]]}
    return Manifest(step, tree, (stored,), sizes or {name: length}, about or {})


def put(tmp_path, content, part=b"root"):
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    (directory / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.dump())
    if part is not None:
        (directory / PART).write_bytes(part)
    return directory


def test_the_checkpoint_that_all_of_these_change_is_whole(tmp_path):
    assert verify(put(tmp_path, manifest())).step == 1


def test_every_type_of_torch_is_known_and_no_other():
    types = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    since = {"bcomplex32": 4}  # torch 2.15
    assert since | {str(one).removeprefix("torch."): one.itemsize for one in types} == dict(ITEM_BYTES)


BODY = {"format": 1, "step": 1, "tree": None, "tensors": [], "files": {}, "about": {"dict": []}, "heads": {}}


@pytest.mark.parametrize(
    "content",
    [
        manifest("../../etc/passwd"),
        manifest("/etc/passwd"),
        manifest(MANIFEST),
        manifest(shape=(1 << 40,)),
        manifest(box=(3,), shape=(4,)),
        manifest(tree={"dict": [["x", {"tensor": -1}]]}),
        manifest(tree={"dict": [["x", {"tensor": 1}]]}),
        manifest(length=-4, sizes={PART: -4}),
        manifest(box=(-4,)),
        # Of these, a save has once resumed into a traceback, or ended the run beside whole checkpoints.
        manifest(shape=(1 << 33,), box=(1 << 33,)),
        manifest(shape=(1,) * 5000, box=(1,) * 5000, length=1),
        manifest(shape=(1 << 40, 1 << 40, 0), box=(1 << 40, 1 << 40, 0)),
        manifest(dtype="load"),
        manifest(dtype="float32"),
        manifest(about={"protected_steps": [["a"]]}),
        manifest(about={"protected_steps": 5}),
        manifest(step=2),
        *(
            enveloped(json.dumps({**BODY, **odd}).encode())
            for odd in ({"files": []}, {"files": {PART: "4"}}, {"step": "x"}, {"step": -1}, {"about": {"tensor": -1}})
        ),
        *(enveloped(body) for body in (b"[1]", b'{"format":1}', b'{"format":"1"}', b"null")),
        enveloped(b'{"format":1,"step":1,"tree":' + b"[" * 100_000 + b"]" * 100_000 + b',"tensors":[]}'),
    ],
)
def test_a_manifest_that_makes_no_sense_is_a_damaged_checkpoint(tmp_path, content):
    with pytest.raises(DamagedCheckpoint):
        verify(put(tmp_path, content))


def overlapping(boxes):
    """A manifest in which many boxes would have to be compared with each other."""
    n = len(boxes)
    pieces = [Piece(PART, number, 1, 0, start, (1,) * len(start)) for number, start in enumerate(boxes)]
    stored = TensorRecord("x", "uint8", (n,) * len(boxes[0]), tuple(pieces))
    return Manifest(1, {"tensor": 0}, (stored,), {PART: n}, {})


def test_what_no_manifest_needs_is_refused_before_it_takes_time_or_memory(tmp_path):
    directory = put(tmp_path, manifest())
    with (directory / MANIFEST).open("r+b") as file:
        os.truncate(file.fileno(), 8 << 30)  # a hole, which takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match="a manifest at most"):
            verify(directory)
        os.truncate(directory / MANIFEST, 500 << 20)
        with pytest.raises(DamagedCheckpoint, match="do not match their own sum"):
            verify(directory)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_many_boxes_that_no_save_has_written_are_not_compared_for_hours(tmp_path):
    began = time.monotonic()
    with pytest.raises(DamagedCheckpoint, match="contradicts itself about x"):
        verify(put(tmp_path, overlapping([(0, number) for number in range(20_000)]), part=bytes(20_000)))
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize("broken", [{"shape": (1 << 33,), "box": (1 << 33,)}, {"dtype": "load"}, {"step": 2}])
def test_all_who_read_checkpoints_agree_on_which_are_whole(tmp_path, broken):
    root = tmp_path / "checkpoints"
    root.mkdir()
    put(root, manifest())
    newer = root / "step-00000009"
    newer.mkdir()
    (newer / MANIFEST).write_bytes(manifest(**{"step": 9, **broken}).dump())
    (newer / PART).write_bytes(b"root")
    says = {}
    for read in (verify, read_manifest, CheckpointReader, load_tree):
        with pytest.raises(DamagedCheckpoint) as raised:
            read(newer)
        says[str(raised.value)] = read
    assert len(says) == 1
    listed = {row.step: row.damaged for row in rows(root)}
    assert listed == {9: next(iter(says)), 1: ""}
    assert {one.step: fault for one, fault in check(root)} == listed
    with pytest.raises(DamagedCheckpoint, match="The newest whole one is of step 1"):
        open_checkpoint(root, "newest")
    told = []
    found = Checkpoints(root, single_rank_group(), keep=3, say=told.append).newest()
    assert found.step == 1
    assert "DAMAGED checkpoint of step 9" in told[0]


@pytest.mark.parametrize("name", [PART, MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_only_regular_files_are_opened(tmp_path, name, kind):
    directory = put(tmp_path, manifest())
    (directory / name).rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(directory / name)  # whoever opened it would wait for ever
    elif kind == "link":
        (directory / name).symlink_to(tmp_path / "elsewhere")
    else:
        (directory / name).mkdir()
    with pytest.raises(DamagedCheckpoint, match="no regular file"):
        verify(directory)


@pytest.mark.parametrize("name", ["step-00000001", ".saving-step-00000002-x-1", ".removing-step-00000003"])
def test_retention_removes_a_link_and_nothing_behind_it(tmp_path, name):
    archive, root = tmp_path / "archive", tmp_path / "checkpoints"
    archive.mkdir()
    (archive / "thesis.txt").write_text("x")
    root.mkdir()
    (root / name).symlink_to(archive)
    there = [one.path for one in list_checkpoints(root)] + list(partial_saves(root, LOCAL))
    assert there == [root / name]
    remove(there, root, LOCAL)
    assert list(root.iterdir()) == []
    assert (archive / "thesis.txt").read_text() == "x"
