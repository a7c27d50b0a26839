"""Each rank's part of the state in the host's memory: nothing is lost with a rank, whatever divides the state."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.checkpoint import (
    LOCAL,
    FlatTree,
    PartWriter,
    list_checkpoints,
    load_part,
    load_tree,
    merge_parts,
    read_part_head,
)
from lockstep.collectives import TensorShard
from lockstep.errors import CheckpointError, SettingError
from lockstep.run.emergency_choice import Left, LeftState, choose
from lockstep.run.left_behind import _mapped
from lockstep.run.measures_journal import Sums

SOURCE = str(Path(lockstep.__file__).parents[1])

# ---- the file of a part --------------------------------------------------------------------------------------------


def heads(place):
    """The whole slots, the newest one first."""
    found = [head for path in sorted(place.glob("slot-*")) if (head := read_part_head(path)) is not None]
    return sorted(found, key=lambda head: head.step, reverse=True)


def part_at(head):
    return load_part(_mapped(Path(head.path)))


ROWS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=25)
@given(rows=ROWS, width=st.integers(1, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_the_parts_of_all_ranks_together_are_the_whole_tree(tmp_path_factory, rows, width, dtype):
    whole = (torch.arange(sum(rows) * width) + 1).reshape(sum(rows), width).to(dtype)
    written, first = [], 0
    for rank, own in enumerate(rows):
        shard = TensorShard.absent(tuple(whole.shape), dtype)
        if own:
            shard = TensorShard(whole[first : first + own], (first, 0), tuple(whole.shape), dtype)
        place = tmp_path_factory.mktemp("parts")
        tree = {"w": shard, "states": {rank: {"step": torch.tensor(rank)}}, "n": (1, 2.5), "b": torch.ones(2)}
        writer = PartWriter(place)
        writer.begin(3, {"rank": rank}, FlatTree.of(tree))
        writer.close()
        (head,) = heads(place)
        assert (head.step, head.about) == (3, {"rank": rank})
        written.append(part_at(head))
        first += own
    tree = merge_parts(written[::-1])
    assert torch.equal(tree["w"], whole)
    assert list(tree["states"]) == list(range(len(rows)))
    assert all(one["step"] == rank for rank, one in tree["states"].items())
    assert (tree["n"], tree["b"].tolist()) == ((1, 2.5), [1.0, 1.0])
    lacking = [part for part, own in zip(written, rows, strict=True) if own][1:]
    if lacking:
        with pytest.raises(CheckpointError, match="do not make it whole"):
            merge_parts(lacking)


def test_of_two_slots_one_is_always_whole(tmp_path):
    """The process may be killed at any moment; a tensor that changes while it is copied makes no slot."""
    small, large, grown = torch.zeros(3), torch.zeros(1 << 17), 0
    writer = PartWriter(tmp_path)
    for step in range(1, 9):
        small.fill_(step)
        large.fill_(step)
        grown = 10 ** (100 * step)  # so that the text outgrows its room now and then
        writer.begin(step, {"step": step}, FlatTree.of({"small": small, "large": large, "n": grown}))
        small.fill_(-1)  # as running statistics change in the next forward pass
        assert step == 1 or heads(tmp_path)[0].step >= step - 1
        writer.finish()
        newest = heads(tmp_path)[0]
        tree = part_at(newest)
        assert newest.step == step
        assert tree["small"].tolist() == [step] * 3
        assert torch.equal(tree["large"], large)
        assert tree["n"] == grown
    real = torch._foreach_copy_
    try:
        torch._foreach_copy_ = lambda places, sources: (real(places, sources), [one.add_(1) for one in sources])
        writer.begin(9, {}, FlatTree.of({"small": small, "large": large, "n": grown}))
        writer.finish()
    finally:
        torch._foreach_copy_ = real
    assert [head.step for head in heads(tmp_path)] == [8], "it was changed while it was copied"
    writer.begin(10, {}, FlatTree.of({"small": small}))
    writer.close()
    assert [head.step for head in heads(tmp_path)] == [10, 8]
    (tmp_path / "slot-0").write_bytes(b"x")
    (tmp_path / "slot-1").write_bytes(b"x" * 64)
    assert heads(tmp_path) == []


def test_statistics_of_any_size_are_copied_before_the_next_forward_pass(tmp_path):
    """Their kernels count no changes, so a copy of half of each would not be told."""
    norm = nn.BatchNorm1d(1 << 15)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    writer = PartWriter(tmp_path)
    submitted = []
    writer._thread.submit = lambda copy, *args: submitted.append(lambda: copy(*args))
    writer.begin(1, {}, FlatTree.of(norm.state_dict()), at_once=norm.buffers())
    norm(torch.randn(4, 1 << 15))
    (copy,) = submitted  # of weight and bias
    copy()
    (head,) = heads(tmp_path)
    tree = part_at(head)
    assert all(torch.equal(tree[name], tensor) for name, tensor in before.items())
    writer.close()


SLOT = LeftState(
    "generation-0-a", 7, False, 0, 2, "/0", {}, {}, [], part=0, parts=2, sums=Sums({"loss": [1, 0.0, 1]}, {})
)


def test_a_state_of_parts_is_taken_where_all_of_them_are_there():
    other = replace(SLOT, part=1, rank=1, path="/1")
    older = [replace(one, step=6, path=f"{one.path}/6") for one in (SLOT, other)]
    taken = choose([Left((SLOT, older[0])), Left((older[1], other))], None)
    assert taken is not None
    assert [[copy.path for copy in part] for part in taken.parts] == [["/0"], ["/1"]]
    assert taken.sums == Sums({"loss": [2, 0.0, 2]}, {})
    alone = choose([Left((SLOT, *older))], None)
    assert alone is not None
    assert alone.state.step == 6, "the other rank had not finished step 7"
    assert choose([Left((SLOT, older[1]))], None) is None
    assert choose([Left((SLOT, other), {}, ("generation-0-a",))], None) is None


# ---- whole runs -----------------------------------------------------------------------------------------------------

TRAIN = """
    import functools, json, os, signal, sys, time
    import torch, lockstep
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    torch.manual_seed(1)
    X, Y = torch.randn(96, 8), torch.randint(0, 3, (96,))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 150), nn.BatchNorm1d(150), nn.Linear(150, 3)

        def forward(self, x):
            return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))

    def train(shape, strategy, mirror, kills):
        generation, rank = int(os.environ.get("LOCKSTEP_GENERATION", "0")), int(os.environ["RANK"])
        ranks, last, where = kills[generation] if generation < len(kills) else ([], -1, "")

        def at(step, place):
            if rank in ranks and (step, place) == (last, where):
                while shape == "hang":
                    time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)

        class Deadly(torch.optim.LBFGS if shape == "closure" else torch.optim.AdamW):
            def step(self, closure=None):
                done = run.progress.step
                for group in self.param_groups if where == "half an update" and rank in ranks and done == last else ():
                    group["params"][0].data.add_(1)
                at(done, "half an update")
                super().step(closure)
                at(done, "an update")

        clip = {} if shape == "closure" else {"clip_norm": 1.0}
        with lockstep.Run(seed=3, strategy=strategy, mirror=mirror, log_every="3 steps", **clip) as run:
            net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)) if shape == "closure" else Net()
            model = run.model(net)
            options = {"lr": 0.5, "max_iter": 3} if shape == "closure" else {"lr": 0.05}
            optimizer = run.optimizer(Deadly(model.parameters(), **options))
            batches = run.loader(TensorDataset(X, Y), global_batch=16, micro_batch=4, workers=0)
            held_out = run.loader(TensorDataset(X, Y), global_batch=16, shuffle=False, workers=0, micro_batch=4)
            for epoch in run.epochs(3):
                for x, y in run.train(batches):
                    at(run.progress.step, "a forward pass")
                    if shape == "carry":
                        x = x + 0.1 * run.carry.get("mean", torch.zeros(8))
                        run.carry["mean"] = x.mean(0)
                    out = model(x)
                    run.measure(right=out.argmax(1) == y)
                    if run.step(*((F.cross_entropy, x, y) if shape == "closure" else (F.cross_entropy(out, y),))):
                        at(run.progress.step, "the body")
                for number, (x, y) in enumerate(run.evaluate(held_out)):
                    if number == 1:
                        at(run.progress.step, "an evaluation")
                    run.measure(held=model(x).argmax(1) == y)
                run.log()

    if __name__ == "__main__":
        for name, (shape, ranks, strategy, mirror, kills) in json.loads(sys.argv[1]).items():
            main = functools.partial(train, shape, strategy, mirror, kills)
            hangs = {"hang_after_s": 20.0, "on_hang": "restart"} if shape == "hang" else {}
            lockstep.launch(main, ranks=ranks, run_dir=name, max_restarts=len(kills), **hangs)
"""
#: By run: shape, ranks, strategy and whether it mirrors; who is killed after how many steps and where, one generation
#: after the other, and from where the next one goes on.
RUNS = {
    "plain": ("plain", 1, "none", False, []),
    "zero": ("plain", 2, "zero", True, [([0], 4, "half an update", 4), ([1], 6, "an evaluation", 6)]),
    "fsdp": ("plain", 2, "fsdp", True, [([1], 3, "an update", 3), ([0, 1], 9, "the body", 8)]),
    "hsdp": ("plain", 4, "hsdp:shard=2", False, [([1], 4, "half an update", 5), ([2], 8, "a forward pass", 8)]),
    "hang": ("hang", 2, "ddp", False, [([1], 8, "a forward pass", 8)]),
    "plain-carry": ("carry", 1, "none", False, []),
    "carry": ("carry", 2, "ddp", False, [([1], 8, "half an update", 8)]),
    "plain-closure": ("closure", 1, "none", False, []),
    "closure": ("closure", 2, "ddp", False, [([0], 8, "half an update", 8)]),
}


def final_state(place):
    """The bits of models, of optimizers and of what is carried, as the last checkpoint has them."""
    (*_, last) = sorted(list_checkpoints(place / "checkpoints"), key=lambda one: one.step)
    tree = load_tree(last.path, LOCAL)
    return FlatTree.of({name: tree[name] for name in ("models", "optimizers", "carry")}).checksums()


def rows(place):
    lines = (place / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "wall_s"} for line in lines]


#: What runs at once, first the one that the others are compared with.
GROUPS = {
    "fsdp": ["plain", "fsdp"],
    "zero, hsdp and a hang": ["plain", "zero", "hsdp", "hang"],
    "carry": ["plain-carry", "carry"],
    "closure": ["plain-closure", "closure"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", GROUPS)
def test_no_step_is_lost_where_ranks_hold_parts_or_hang(tmp_path, group):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    plain, *killed = GROUPS[group]
    cases = {name: [*RUNS[name][:-1], [kill[:3] for kill in RUNS[name][-1]]] for name in GROUPS[group]}
    ended = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        cwd=tmp_path,
        env={n: v for n, v in os.environ.items() if not n.startswith(("LOCKSTEP_", "OMP_"))} | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    for name in killed:
        log = (tmp_path / name / "logs" / "rank-0000.log").read_text()
        went_on = [int(step) for step in re.findall(r"^goes on from step (\d+) ", log, re.MULTILINE)]
        expected = [step for *_, step in RUNS[name][-1]]
        if name == "hsdp":  # without a mirror the parts may be of two steps: then it is the checkpoint, here none
            assert set(went_on) <= {*expected, *(step - 1 for step in expected)}, (name, said)
        else:
            assert went_on == expected, (name, said)
        assert final_state(tmp_path / name) == final_state(tmp_path / plain), name
        assert rows(tmp_path / name) == rows(tmp_path / plain), name
    if "hang" in killed:
        assert re.search(r"rank 1 of 2 \(host .*\) hung", said), said


def test_a_mirror_that_nobody_would_look_into_is_refused():
    with pytest.raises(SettingError, match="mirror=True with emergency=False"):
        lockstep.Run(mirror=True, emergency=False)


def test_a_strategy_under_which_a_rank_cannot_tell_its_part_says_so():
    with pytest.raises(SettingError, match=r"mirror=True: under strategy='local-sgd'"):
        lockstep.Run(strategy="local-sgd", mirror=True)
