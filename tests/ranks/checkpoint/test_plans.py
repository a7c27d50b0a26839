"""The pure parts: who writes what, what is read, what retention removes, what a manifest says."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.commit import Committed, expired
from lockstep.checkpoint.json_state import decode, encode
from lockstep.checkpoint.layout import Extent, lay_out, share_of_blocks
from lockstep.checkpoint.manifest import BLOCK_BYTES, FORMAT, Manifest, Piece, TensorRecord
from lockstep.errors import CheckpointError, DamagedCheckpoint
from lockstep.size_balancing import owners_of

ROOT = Path("/root")
EXTENTS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16])).map(lambda p: Extent(p[0] * p[1], p[1])),
    max_size=30,
)


def files_of(extents, ranks):
    owners, _ = owners_of([extent.length for extent in extents], [0] * ranks)
    held = list(zip(owners, enumerate(extents), strict=True))
    return [lay_out(rank, [numbered for owner, numbered in held if owner == rank]) for rank in range(ranks)]


#: By bytes of an element.
TYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def written(extents, ranks):
    """The manifest of a save, with sums made up."""
    stored = [None] * len(extents)
    parts = files_of(extents, ranks)
    for part in parts:
        for placed in part.tensors:
            count = placed.length // extents[placed.tensor].element
            sums = (1,) * (max(0, placed.length - 1) // BLOCK_BYTES)
            piece = Piece(part.name, placed.offset, placed.length, placed.tensor, (0,), (count,), sums)
            stored[placed.tensor] = TensorRecord(
                str(placed.tensor), TYPES[extents[placed.tensor].element], (count,), (piece,) * (count > 0)
            )
    files = {part.name: part.length for part in parts if part.length}
    return Manifest(7, {"dict": []}, tuple(stored), files, {"note": 0.1})


@given(EXTENTS, st.integers(1, 9))
def test_each_tensor_is_written_once_without_gaps_and_the_shares_are_even(extents, ranks):
    parts = files_of(extents, ranks)
    assert len(parts) == ranks
    assert sorted(placed.tensor for part in parts for placed in part.tensors) == list(range(len(extents)))
    for part in parts:
        ends = itertools.accumulate((placed.length for placed in part.tensors), initial=0)
        assert [placed.offset for placed in part.tensors] + [part.length] == list(ends)
        assert all(placed.offset % extents[placed.tensor].element == 0 for placed in part.tensors if placed.length)
    total, largest = sum(e.length for e in extents), max((e.length for e in extents), default=0)
    assert max(part.length for part in parts) <= total / ranks + largest


@given(EXTENTS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_ranks_verify_each_block_once_and_about_equally_much_whoever_wrote(extents, ranks, others, readers):
    extents = [Extent(extent.length << 18, extent.element) for extent in extents]  # some of several blocks
    one = written(extents, ranks)
    assert one.same_state(written(extents, others))
    shares = [list(share_of_blocks(one, rank, readers)) for rank in range(readers)]
    placed = [(piece.file, piece.offset + block.first) for share in shares for piece, block in share]
    assert placed == sorted(set(placed)), "files are read from their beginning to their end"
    lengths = [sum(block.end - block.first for _, block in share) for share in shares]
    assert sum(lengths) == sum(extent.length for extent in extents)
    assert max(lengths) <= sum(lengths) / readers + BLOCK_BYTES


@given(EXTENTS, st.integers(1, 4))
def test_a_manifest_comes_back_equal(extents, ranks):
    manifest = written(extents, ranks)
    assert Manifest.parse(manifest.dump(), "here") == manifest
    json.loads(manifest.dump())


MANIFEST = written([Extent(8, 4), Extent(3, 1)], 2).dump()


@given(st.integers(0, len(MANIFEST) - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_manifest_is_noticed(at, mask):
    damaged = bytearray(MANIFEST)
    damaged[at] ^= mask
    with pytest.raises(DamagedCheckpoint, match="here"):
        Manifest.parse(bytes(damaged), "here")


@given(st.integers(0, len(MANIFEST) - 1))
def test_a_manifest_cut_short_is_noticed(length):
    with pytest.raises(DamagedCheckpoint):
        Manifest.parse(MANIFEST[:length], "here")


def test_a_newer_format_is_refused_with_the_way_out():
    newer = replace(written([], 1), format=FORMAT + 1, lockstep="9.0")
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 1}, written by lockstep 9\.0.*install a newer"):
        Manifest.parse(newer.dump(), "here")


@pytest.mark.parametrize("offset", [1, 7])
def test_bytes_that_no_sum_covers_are_refused(offset):
    piece = Piece("part-00000.safetensors", offset, 8, 0, (0,), (2,))
    manifest = Manifest(
        1, None, (TensorRecord("w", "float32", (2,), (piece,)),), {"part-00000.safetensors": 8 + offset}, {}
    )
    with pytest.raises(DamagedCheckpoint, match="gap"):
        Manifest.parse(manifest.dump(), "here")


def test_the_tree_says_where_the_thing_is_that_cannot_be_saved():
    with pytest.raises(CheckpointError, match=r"'optimizer/param_groups/0/hook' is a builtins\.object.*state_dict"):
        encode({"optimizer": {"param_groups": [{"hook": object()}]}}, lambda _value, _path: None)
    with pytest.raises(CheckpointError, match=r"'a' has the key \(1, 2\) \(tuple\).*str or int"):
        encode({"a": {(1, 2): 3}}, lambda _value, _path: None)
    with pytest.raises(CheckpointError, match="its root is a"):
        encode(object(), lambda _value, _path: None)


def test_a_value_of_a_kind_from_the_future_is_not_guessed():
    with pytest.raises(ValueError, match="unknown kind of value 'colour'"):
        decode({"colour": "red"}, ())


STEPS = st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 2)), st.booleans(), min_size=1, max_size=12)


@given(STEPS, st.integers(1, 4), st.data())
def test_retention_keeps_the_newest_whole_ones_and_never_the_last(steps, keep, data):
    whole = {Committed(step, revision, ROOT): good for (step, revision), good in steps.items()}
    step = data.draw(st.sampled_from(sorted({one.step for one in whole})))
    just = max(one for one in whole if one.step == step)
    whole[just] = True  # it was written a moment ago
    gone = expired(list(whole), whole.__getitem__, just, keep)
    left = [one for one in whole if one not in gone]
    good = [one for one in left if whole[one]]
    assert just in left
    steps_good = {one.step for one, is_good in whole.items() if is_good}
    assert len(good) == min(keep, len(steps_good)), "no more than asked for, and no fewer while there are"
    assert len({one.step for one in good}) == len(good)
    others = sorted(steps_good - {just.step}, reverse=True)[: keep - 1]
    assert {one.step for one in good} == {just.step, *others}


@given(STEPS, st.integers(1, 4), st.data())
def test_retention_leaves_protected_steps_alone_and_the_rest_as_if_they_were_not_there(steps, keep, data):
    whole = {Committed(step, revision, ROOT): good for (step, revision), good in steps.items()}
    protected = data.draw(st.sets(st.sampled_from(sorted({one.step for one in whole}))))
    just = data.draw(st.sampled_from(sorted(whole)))
    gone = expired(list(whole), whole.__getitem__, just, keep, protected)
    assert just not in gone
    assert not {one.step for one in gone} - {just.step} & protected, "but for what was saved again"
    rest = [one for one in whole if one.step not in protected]
    if just in rest:
        assert set(gone) == set(expired(rest, whole.__getitem__, just, keep))
    else:
        good = {one.step for one in rest if whole[one]}
        assert len([one for one in rest if whole[one] and one not in gone]) == min(keep, len(good))


def test_listing_and_verifying_need_no_torch():
    code = "import sys, lockstep.checkpoint as c; c.verify, c.list_checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
