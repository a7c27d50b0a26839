"""Tensors that ranks hold together: each writes its box, and what is read are whole tensors."""

import itertools
import os
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lockstep.checkpoint import (
    CheckpointReader,
    Checkpoints,
    FileSystem,
    TensorRecord,
    list_checkpoints,
    load_tree,
    manifest,
    reader,
    verify,
)
from lockstep.checkpoint.layout import Box, coverage_error
from lockstep.collectives import TensorShard, in_memory, open_group, single_rank_group
from lockstep.errors import CheckpointError, DamagedCheckpoint
from lockstep.testing import run_ranks
from lockstep.world import World
from trees import bits, same

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def divided(rng, shape, boxes):
    """``boxes`` boxes, some perhaps empty, that cover ``shape`` once: cut in two at random, again and again."""
    pieces = [Box((0,) * len(shape), shape)]
    while len(pieces) < boxes:
        box = pieces.pop(rng.randrange(len(pieces)))
        if not shape:
            pieces += [box, None]
            continue
        dim = rng.randrange(len(shape))
        cut = rng.randint(0, box.shape[dim])
        for first, size in ((0, cut), (cut, box.shape[dim] - cut)):
            start, cut_shape = list(box.start), list(box.shape)
            start[dim] += first
            cut_shape[dim] = size
            pieces.append(Box(tuple(start), tuple(cut_shape)))
    rng.shuffle(pieces)
    return pieces


def named(boxes):
    return [(f"rank {rank}", box) for rank, box in enumerate(boxes) if box is not None]


@given(SHAPES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_boxes_that_divide_a_tensor_cover_it(shape, ranks, rng):
    assert coverage_error(named(divided(rng, shape, ranks)), shape) == ""


@given(SHAPES, st.data())
def test_the_first_element_is_named_that_not_exactly_one_box_holds(shape, data):
    def box():
        ranges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))

    boxes = data.draw(st.permutations(divided(data.draw(st.randoms(use_true_random=False)), shape, 3)))
    boxes = [one for one in boxes if one is not None and data.draw(st.booleans())]
    boxes += [box() for _ in range(data.draw(st.integers(0, 2)))]
    expected = ""
    for at in itertools.product(*map(range, shape)):
        holders = [
            who for who, one in named(boxes) if all(a <= x < b for a, x, b in zip(one.start, at, one.end, strict=True))
        ]
        if len(holders) != 1:
            expected = f"element {at} is held by {' and by '.join(holders) or 'no rank'}"
            break
    assert coverage_error(named(boxes), shape) == expected


@pytest.mark.parametrize("box", [Box((0,), (3,)), Box((2, 0), (2, 2)), Box((-1, 0), (1, 2)), Box((0, 0), (3,))])
def test_a_box_that_sticks_out_is_named(box):
    assert coverage_error([("rank 1", box)], (3, 2)).startswith("rank 1 holds ")


def test_a_part_that_fits_no_whole_is_refused_at_once_with_its_path(tmp_path):
    saves = Checkpoints(tmp_path, single_rank_group(), keep=1, say=pytest.fail)
    half = torch.ones(3).bfloat16()
    says = r"state at 'model/w': a part of type .* cannot belong to a tensor of type .*bfloat16"
    for part in (
        TensorShard(torch.ones(3), (0,), (6,), torch.bfloat16),
        TensorShard(half, (0, 0), (6,), torch.bfloat16),
        TensorShard(half, (0,), (6, 1), torch.bfloat16),
    ):
        with pytest.raises(CheckpointError, match=says):
            saves.save({"model": {"w": part}}, 1, {})
    with pytest.raises(CheckpointError, match=r"'w' is a torch\.sparse_coo tensor"):
        saves.save({"w": TensorShard(torch.eye(3).to_sparse(), (0, 0), (3, 3), torch.float32)}, 1, {})
    saves.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk", [24, 40, 1 << 20])
def test_any_box_is_read_and_checked_whatever_blocks_it_lies_in(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 64)
    monkeypatch.setattr(reader, "_CHUNK_BYTES", chunk)
    rng, shapes = random.Random(chunk), [(7,), (300,), (40, 9), (6, 5, 11), (2, 3, 4, 7)]
    state = {str(shape): torch.arange(float(torch.Size(shape).numel())).reshape(shape) for shape in shapes}
    saves = Checkpoints(tmp_path, single_rank_group(), keep=1, say=pytest.fail)
    saves.save(state, 1, {})
    saves.close()
    (one,) = list_checkpoints(tmp_path)
    stored = saves.load(saves.newest())
    for _ in range(300):
        tensor, of_file = rng.choice([(state[name], stored[name]) for name in state])
        ranges = [sorted(rng.sample(range(n + 1), 2)) for n in tensor.shape]
        box = of_file.box([a for a, _ in ranges], [b - a for a, b in ranges])
        assert torch.equal(box, tensor[tuple(slice(a, b) for a, b in ranges)])
    # A byte in the last block is not what was committed.
    piece = next(t for t in verify(one.path).tensors if t.path == "(300,)").pieces[0]
    with (one.path / piece.file).open("r+b") as file:
        file.seek(piece.offset + piece.length - 1)
        last = file.read(1)[0]
        file.seek(piece.offset + piece.length - 1)
        file.write(bytes([last ^ 1]))
    assert torch.equal(stored["(300,)"].box([0], [200]), state["(300,)"][:200])
    with pytest.raises(DamagedCheckpoint, match=r"\(300,\)"):
        stored["(300,)"].box([290], [10])


# ---- on ranks --------------------------------------------------------------------------------------------------------


def meet():
    return open_group(World.from_env(os.environ), torch.device("cpu"), 60)


def whole_state(seed):
    """Tensors of all kinds, whole."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (60,), (4, 3), (12, 3, 14), (0, 2), (1,), (5, 1)]
    state = {}
    for place, shape in enumerate(shapes):
        noise = torch.randn(shape, generator=generator).to(rng.choice([torch.float32, torch.bfloat16, torch.float64]))
        state[f"t{place}"] = noise
    return state


def held_by(rank, ranks, state, seed):
    """What ``rank`` holds of ``state``: of some tensors everything, of others a box, perhaps empty."""
    rng = random.Random(f"{seed} {ranks}")
    held = {}
    for name, tensor in state.items():
        box = divided(rng, tuple(tensor.shape), ranks)[rank]
        on_all, told_if_empty = rng.random() < 0.3, rng.random() < 0.5
        if on_all:
            held[name] = tensor
        elif box is None or not (box.elements or told_if_empty):
            held[name] = TensorShard.absent(tuple(tensor.shape), tensor.dtype)
        else:
            slices = tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))
            held[name] = TensorShard(tensor[slices], box.start, tuple(tensor.shape), tensor.dtype)
    return held


SEEDS = range(6)


def hand_on(root, first_step):
    """Load what an earlier world saved, and save it again as this one divides it."""
    group, said = meet(), []
    saves = Checkpoints(root, group, keep=99, say=said.append)
    found = saves.newest()
    loaded = found is None or same(in_memory(saves.load(found)), {"nested": [whole_state(max(SEEDS)), 1.5]})
    back = []
    for seed in SEEDS:
        held = held_by(group.rank, group.size, whole_state(seed), seed)
        saves.save({"nested": [held, 1.5]}, first_step + seed, {})
        back.append(same(in_memory(saves.load(saves.newest())), {"nested": [whole_state(seed), 1.5]}))
    saves.close()
    group.close()
    return loaded, back, said


def test_what_ranks_hold_together_comes_back_whole_on_any_number_of_ranks(tmp_path):
    for turn, ranks in enumerate((3, 2, 1, 4)):
        for loaded, back, said in run_ranks(hand_on, ranks, tmp_path, turn * 10):
            assert loaded, (turn, ranks)
            assert said == []
            assert back == [True] * len(SEEDS), ranks
    for one in list_checkpoints(tmp_path):
        checkpoint = CheckpointReader(one.path)
        for record, tensor in paired(checkpoint.tree, load_tree(one.path)):
            assert checkpoint.content(record) == bits(tensor), record.path
    tensors = [tensor for one in list_checkpoints(tmp_path) for tensor in verify(one.path).tensors]
    assert max(len(tensor.pieces) for tensor in tensors) == 4, "no tensor was divided among all four ranks"
    assert {len(tensor.pieces) for tensor in tensors if 0 in tensor.shape} == {0}


def paired(records, loaded):
    """Each record in a tree with the tensor that stands there in another one."""
    if isinstance(records, TensorRecord):
        yield records, loaded
    elif isinstance(records, dict | list | tuple):
        keys = records if isinstance(records, dict) else range(len(records))
        for key in keys:
            yield from paired(records[key], loaded[key])


class Full(FileSystem):
    def free_bytes(self, path):
        return 0


def many_small(root):
    group, said = meet(), []
    tree = {f"rather/long/path/to/{n}": rows(torch.ones(4, 3), group.rank, group.rank + 1) for n in range(25)}
    for disk in (Full(), FileSystem()):
        saves = Checkpoints(root, group, keep=9, say=said.append, disk=disk)
        saves.save(tree, 1, {})
        saves.close()
    group.close()
    return said


def test_the_room_that_is_asked_for_is_enough_for_many_small_pieces(tmp_path):
    said = run_ranks(many_small, 4, tmp_path)[0]
    asked = 1024 * float(re.fullmatch(r".* is full \(0 bytes free, ([\d.]+) KiB needed\)\. .*", said[0])[1])
    (path,) = tmp_path.iterdir()
    taken = sum(file.stat().st_size for file in path.iterdir())
    assert taken > 3 * 4 * 3 * 25 * 4, "the manifest was to be most of it"
    assert taken <= asked <= 4 * taken + 6 * 4096


def rows(tensor, first, end):
    return TensorShard(tensor[first:end], (first, 0), tuple(tensor.shape), tensor.dtype)


def faults(root):
    group, said = meet(), []
    saves = Checkpoints(root, group, keep=9, say=said.append)
    table, nothing = torch.arange(12.0).reshape(4, 3), TensorShard.absent((4, 3), torch.float32)
    me = group.rank
    trees = [
        [rows(table, 0, 3), rows(table, 3, 4), nothing][me],  # rank 2 holds nothing of anything
        [rows(table, 0, 3), rows(table, 2, 4), nothing][me],
        [rows(table, 0, 2), nothing, rows(table, 3, 4)][me],
        [rows(table, 0, 2), nothing, TensorShard(table[2:], (3, 0), (4, 3), torch.float32)][me],
        [TensorShard.whole(table), nothing, table][me],
        [TensorShard.whole(table), nothing, TensorShard.absent((4, 2), torch.float32)][me],
        [TensorShard.whole(table), nothing, TensorShard.whole(table)][me],
        [nothing, nothing, TensorShard.whole(table)][me],
    ]
    for step, tree in enumerate(trees):
        saves.save({"model": {"table": tree}}, step, {})
    saves.close()
    group.close()
    return said, [(one.step, one.committed) for one in saves.finished_saves()], os.listdir(root)


def test_parts_that_make_no_whole_are_not_saved_and_the_leader_says_why(tmp_path):
    told = run_ranks(faults, 3, tmp_path)
    fates = [(step, step in (0, 7)) for step in range(8)]
    assert [news for _, news, _ in told] == [fates] * 3
    assert [said for said, _, _ in told[1:]] == [[], []]
    why = [line.removeprefix(f"checkpoint of step {1 + n} not saved: ") for n, line in enumerate(told[0][0])]
    assert [line.partition(". Training")[0] for line in why] == [
        "model/table: element (2, 0) is held by rank 0 and by rank 1",
        "model/table: element (2, 0) is held by no rank",
        "model/table: rank 2 holds (2, 3) at (3, 0), which is not within (4, 3)",
        "rank 2 would save other tensors than rank 0",
        "rank 2 would save other tensors than rank 0",
        "model/table: element (0, 0) is held by rank 0 and by rank 2",
    ]
    assert set(told[0][2]) == {"step-00000000", "step-00000007"}, "no scratch is left"
    assert contents(tmp_path / "step-00000000") == {
        "part-00000.safetensors": {"model/table[0:3,0:3]": (3, 3)},
        "part-00001.safetensors": {"model/table[3:4,0:3]": (1, 3)},
    }
    assert contents(tmp_path / "step-00000007") == {"part-00002.safetensors": {"model/table": (4, 3)}}


def contents(path):
    """The tensors in the parts of a checkpoint, by file, as another tool sees them."""
    parts = {name: load_file(path / name) for name in verify(path).files}
    return {name: {key: tuple(tensor.shape) for key, tensor in part.items()} for name, part in parts.items()}
