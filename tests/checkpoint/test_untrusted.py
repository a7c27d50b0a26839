"""Checkpoint directories that somebody else has written to: nothing is believed, and nothing outside is touched."""

import json
import os
import zlib

import pytest

from lockstep.checkpoint.commit import list_checkpoints, partial_saves, remove, verify
from lockstep.checkpoint.filesystem import LOCAL
from lockstep.checkpoint.manifest import MANIFEST, Manifest, Piece, TensorRecord
from lockstep.errors import DamagedCheckpoint

PART = "part-00000.bin"


def enveloped(body):
    return b'{"crc32":"' + b"%08x" % zlib.crc32(body) + b'","manifest":' + body + b"}\n"


def manifest(name=PART, shape=(4,), box=(4,), length=4, tree=None, sizes=None):
    piece = Piece(name, 0, length, zlib.crc32(b"root"), (0,), box)
    stored = TensorRecord("x", "uint8", shape, (piece,))
    return Manifest(1, tree or {"dict": [["x", {"tensor": 0}]]}, (stored,), sizes or {name: length}, {})


def put(tmp_path, content, part=b"root"):
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    (directory / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.dump())
    if part is not None:
        (directory / PART).write_bytes(part)
    return directory


def test_the_checkpoint_that_all_of_these_change_is_whole(tmp_path):
    assert verify(put(tmp_path, manifest())).step == 1


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
