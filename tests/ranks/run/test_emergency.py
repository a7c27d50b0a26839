"""No step is lost when a rank dies: whoever is killed, wherever, the next generation goes on from the last step."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from campaign_marks import IN_CAMPAIGN, combinations
from lockstep.checkpoint import FlatTree, checksums_in, list_checkpoints, load_tree, save_whole, verify
from lockstep.collectives import TensorShard, open_group, single_rank_group
from lockstep.errors import CheckpointError, DifferentCalls, MismatchError, NonFiniteError, PeerLost
from lockstep.launch.run_dir.owned_directory import emergency_memory
from lockstep.launch_contract import EMERGENCY, RUN_DIR
from lockstep.run.metrics.metric_means import MetricMeans, PassMetrics
from lockstep.run.recovery.emergency_files import EmergencyFiles
from lockstep.run.recovery.measures_journal import (
    Journal,
    Measured,
    MeasuresJournal,
    Sums,
    journal_in,
    part_after,
    read_journal,
    total,
)
from lockstep.run.recovery.newest_state import Choice, Left, LeftBehind, LeftState, choose
from lockstep.run.recovery.resume_point import PointMarks, ResumePoint
from lockstep.run.recovery.survivor import Emergency, EmergencyMemory, open_emergency, writes_emergency
from lockstep.run.setup.run_checkpoints import DirectoryCheckpointer
from lockstep.run.state.registered import State
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.settings import Settings
from lockstep.strategies import StatePart
from lockstep.testing import run_ranks
from lockstep.trial_contract import CurrentTrial, evaluating
from lockstep.world import World
from metric_lines import metric_lines

SOURCE = str(Path(lockstep.__file__).parents[1])

# ---- what a rank has measured ---------------------------------------------------------------------------------------

VALUES = st.floats(allow_infinity=False, allow_nan=False, width=32)
STEPS = st.lists(
    st.tuples(st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.integers(1, 9)), max_size=3), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=25)
@given(steps=STEPS, logs=st.integers(1, 5), begins=st.sets(st.integers(1, 12)))
def test_a_journal_tells_the_sums_of_the_last_step_and_of_the_one_before(tmp_path_factory, steps, logs, begins):
    path = tmp_path_factory.mktemp("journal") / "measures"
    journal = MeasuresJournal(path)
    train, recent = MetricMeans(), MetricMeans()
    was = None
    for step, (values, begins_pass) in enumerate(steps, 1):
        measured = [Measured(name, value, weight, weight) for name, value, weight in values]
        if begins_pass:
            train = MetricMeans()
        if begins_pass or step in begins or not journal.takes(measured):
            journal.begin(step - 1, Sums(train.own(), recent.own()), "ab")
        journal.note(step, measured)
        for one in measured:
            train.add_number(*one)
            recent.add_number(*one)
        now = Sums(train.own(), recent.own())
        logged = (step - 1) // logs * logs
        part = part_after(read_journal(path), step, logged)
        assert part is not None
        assert part.sums == now
        assert not part.late
        assert not part.closed
        if was is not None:
            before = part_after(read_journal(path), step - 1, (step - 2) // logs * logs)
            assert before is not None
            assert before.sums == was
            assert before.closed, "the next step has begun"
        if step % logs == 0:
            recent = MetricMeans()
        was = now
    assert part_after(read_journal(path), len(steps) + 1, 0) is None
    journal.close()


def test_a_journal_that_is_full_begins_anew_and_one_that_is_torn_tells_nothing(tmp_path):
    path, sums, made = tmp_path / "measures", MetricMeans(), 0
    journal = MeasuresJournal(path)
    for step in range(1, 9000):
        one = [Measured("loss", 0.5 * step, 8, 8)]
        if not journal.takes(one):
            journal.begin(step - 1, Sums(sums.own(), {}), ["loss"])
            made += 1
        journal.note(step, one)
        sums.add_number(*one[0])
    assert made > 2
    part = part_after(read_journal(path), 8999, 8999)
    assert part is not None
    assert part.sums.train == sums.own()
    journal.begin(8999, Sums({"x" * (1 << 18): [1, 0.0, 1]}, {}), ["x"])
    journal.note(9000, [])
    assert part_after(read_journal(path), 9000, 0) is None, "sums for which there is no room"
    assert part_after(read_journal(path), 8999, 8999) is not None, "the other area is what it was"
    journal.close()
    path.write_bytes(path.read_bytes()[:1000])
    assert read_journal(path) == Journal()
    assert read_journal(tmp_path / "nowhere") == Journal()


def items_after(path, step):
    """How many items each mean is over after ``step``; None: the journal does not say."""
    part = part_after(read_journal(path), step, step)
    return None if part is None else {name: items for name, (_, _, items) in part.sums.train.items()}


@pytest.mark.parametrize("first", range(3))
def test_a_step_that_is_noted_in_parts_or_made_again_counts_once(tmp_path, first):
    """As where two optimizers have a loss each, and a name comes with the second one; or a step is discarded."""
    path, sums = tmp_path / "measures", MetricMeans()
    journal = MeasuresJournal(path)
    for step in range(1, first + 2):
        journal.begin(step - 1, Sums(sums.own(), {}), ["loss"])  # into one area or the other
        journal.note(step, [Measured("loss", 1.0, 1, 1)])
        sums.add_number("loss", 1.0, 1, 1)
    last = first + 2
    journal.note(last, [Measured("loss", 1.0, 1, 1)])
    whole = [Measured("loss", 1.0, 1, 1), Measured("fake", 1.0, 1, 1)]
    for _ in range(2):
        journal.begin(last - 1, Sums(sums.own(), {}), ["loss", "fake"])
        assert items_after(path, last) is None, "a part of it is not taken for the whole"
        assert items_after(path, last - 1) == {"loss": last - 1}, "nobody may have finished more"
        journal.note(last, whole)
        assert items_after(path, last) == {"loss": last, "fake": 1}
        assert items_after(path, last - 1) == {"loss": last - 1}
    journal.close()


NOTES = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.booleans(), st.booleans()), min_size=2, max_size=5)


@settings(deadline=None, max_examples=25)
@given(steps=NOTES)
def test_a_copy_of_a_journal_that_is_behind_tells_all_of_a_step_or_nothing(tmp_path_factory, steps):
    """Each step has one loss or two, is discarded so often before, begins a pass or not, and measures late or not."""
    path = tmp_path_factory.mktemp("journal") / "measures"
    writes, finished = [], {}
    journal = MeasuresJournal(path, lambda at, content: writes.append((at, content)))
    train, begun = MetricMeans(), False
    for step, (losses, discards, begins_pass, late) in enumerate(steps, 1):
        train = MetricMeans() if begins_pass else train
        for attempt in range(discards + 1):
            made = losses if attempt == discards else 1
            whole = [Measured("loss", step + attempt / 8 + number / 64, 1, 1) for number in range(made)]
            for number in range(made):
                measured = whole[number : number + 1]
                if begins_pass or attempt or not begun:
                    if not number:
                        journal.begin(step - 1, Sums(train.own(), {}), ["loss"])
                    begun = True
                journal.note(step, measured)
        for one in whole:
            train.add_number(*one)
        if late:
            after = Measured("loss", -step, 1, 1)
            journal.note(step, [after], late=True)
            train.add_number(*after)
        finished[step] = (len(writes), read_journal(path), Sums(train.own(), {}), late)
    journal.close()
    copy = bytearray(Path(path).stat().st_size)
    fresh = path.with_name("fresh")
    MeasuresJournal(fresh).close()
    copy[:] = fresh.read_bytes()
    found = set()
    for made, (at, content) in enumerate(writes, 1):
        copy[at : at + len(content)] = content
        for step, (_, survivors, sums, late) in finished.items():
            if made > finished.get(step + 1, (len(writes),))[0]:
                continue  # nobody has done more than one step more
            state = replace(STATE, step=step, ranks=2, rank=1)
            key = STATE.generation
            nodes = [Left((state,), {(key, 1): survivors}, (), {(key, 0): journal_in(bytes(copy))})]
            choice = choose(nodes, None)
            found |= {step} if choice is not None else set()
            assert choice is None or choice.sums.train == total([sums, sums]).train, (step, made)
            assert choice is not None or made < finished[step][0] or late, "the whole journal tells all"
    assert found >= {step for step, (*_, late) in finished.items() if not late}


def test_a_full_memory_costs_the_journal_and_not_the_rank(tmp_path):
    """A write into the hole of a mapped file that finds no room is SIGBUS."""
    MeasuresJournal(tmp_path / "measures").close()
    stat = (tmp_path / "measures").stat()
    assert stat.st_blocks * 512 >= stat.st_size > 0


# ---- which state is taken -------------------------------------------------------------------------------------------


def part_of(step, late=False):
    """A journal of one rank after ``step``."""

    class Area:
        begins, noted = step - 1, step
        entries = ((step, Measured("loss", 1.0, 2, 2)),)
        sums = Sums({"loss": [1 << 1074, 0.0, 1]}, {})

    Area.late = step if late else -1
    return Journal((Area,))


STATE = LeftState("generation-0-a", 7, False, 1, 2, "/memory/state", {"weight": 1}, {}, [])
BOTH = {("generation-0-a", 0): part_of(7), ("generation-0-a", 1): part_of(7)}
LATE = {("generation-0-a", 0): part_of(7, late=True)}
ODD = replace(STATE, checksums={"weight": 2})


def test_the_newest_state_of_which_all_is_known_is_taken():
    older = replace(STATE, step=6, rank=0)
    taken = choose([Left((older,), {}), Left((STATE,), BOTH), Left()], None)
    assert taken is not None
    assert taken.state is STATE
    assert taken.sums == total(2 * [Sums({"loss": [3 << 1074, 0.0, 3]}, {})])
    other = replace(STATE, rank=0, path="/other")
    twice = choose([Left((other,), BOTH), Left((STATE,))], None)
    assert twice is not None
    assert {copy.path for copy in twice.parts[0]} == {"/other", "/memory/state"}


@pytest.mark.parametrize(
    ("why", "nodes"),
    [
        ("nothing is there", [Left()]),
        ("a rank's part is on a node that is gone", [Left((STATE,), {("generation-0-a", 1): part_of(7)})]),
        ("a rank died before it measured what the others had", [Left((STATE,), BOTH | LATE)]),
        ("its ranks had come to differ", [Left((STATE,), BOTH, ("generation-0-a",))]),
        ("two ranks have left different values", [Left((STATE,), BOTH), Left((ODD,))]),
    ],
)  # fmt: skip
def test_a_state_of_which_something_is_missing_or_suspect_is_not_taken(why, nodes):
    assert choose(nodes, None) is None, why


# ---- how it is written ----------------------------------------------------------------------------------------------


def test_a_state_saved_by_one_rank_is_a_checkpoint_as_any_other(tmp_path):
    tree = {
        "w": torch.randn(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "n": [1, (2.5, "x")],
        "none": torch.empty(0),
    }
    flat = FlatTree.of(tree)
    save_whole(tmp_path / "root", flat, 4, {"rank": 1})
    saved = save_whole(tmp_path / "root", FlatTree.of({**tree, "n": [2]}), 5, {"rank": 1})
    assert [one.step for one in list_checkpoints(tmp_path / "root")] == [5], "the one before is gone"
    manifest = verify(saved.path)
    assert checksums_in(manifest) == {path: crc for path, crc in flat.checksums().items() if path != "none"}
    loaded = load_tree(saved.path)
    assert torch.equal(loaded["w"], tree["w"])
    assert torch.equal(loaded["half"], tree["half"])
    assert loaded["n"] == [2]
    assert flat.size_bytes >= sum(path.stat().st_size for path in saved.path.iterdir())


def test_a_state_that_has_begun_to_change_is_never_given():
    weight, large, kept = torch.ones(3), torch.ones(1 << 16), [1]
    point = ResumePoint(lambda: {"weight": weight, "large": large, "kept": kept})
    assert point.take() is None, "no step was made"
    point.reach()
    assert point.take() is not None
    point.lose()
    assert point.take() is None
    point.note()
    assert point.take() is None
    point.reach()
    point.note()
    kept.append(2)
    taken = point.take()
    assert taken is not None
    assert taken.tree(taken.tensors)["kept"] == [1], "as it was when the loop was left"
    large.add_(1)
    assert point.take() is None, "a tensor that was changed since"
    point.begin_turn()
    assert point.take() is not None
    weight.data.add_(1)  # which leaves no trace but its bits
    assert point.take() is None
    point.reach()
    marks = []
    point = ResumePoint(lambda: {"weight": weight}, lambda afresh=False: [*marks])
    point.reach()
    marks.append("a rate that was lowered before the step")
    assert point.take() is None
    point.note()
    assert point.take() is None, "the loop was left with it"
    point.reach()
    assert point.take() is not None
    with torch.inference_mode():
        weight = torch.ones(1 << 16)  # does not count its changes
        point.note()
        weight.mul_(2)
    assert point.take() is None
    point.reach()
    weight = object()
    point.note()
    assert point.take() is None, "and the run goes on"
    weight = torch.ones(3)
    point.reach()
    point.refuse("keep(kept=...)")
    assert point.take() is None


def test_what_a_script_changes_before_a_step_is_seen_at_a_glance():
    state, model = State(), torch.nn.Linear(2, 2)
    state.add_model(model)
    state.optimizers.append(torch.optim.SGD(model.parameters(), lr=0.5))
    average, worst, best = torch.nn.Linear(2, 2), {"a": [float("nan")]}, Counts()
    for name, value in {"average": average, "worst": worst, "best": best, "history": [0.5] * 99}.items():
        state.keep(name, value)

    def lower():
        state.optimizers[0].param_groups[0]["lr"] *= 0.5

    def set_best():
        best.best = 2.0

    def average_weights():
        with torch.no_grad():
            average.weight.mul_(0.5)

    def replace_weights():
        average.weight = torch.nn.Parameter(torch.ones(2, 2))

    def scale():
        with torch.no_grad():
            model.bias.add_(1.0)

    marks = PointMarks(state)
    options = state.optimizers[0].param_groups[0]
    options["lr"] = torch.tensor(0.5)
    for change in (lower, set_best, average_weights, scale, lambda: worst["a"].append(1), replace_weights):
        before = marks()
        assert marks(afresh=True) == before
        change()
        assert marks(afresh=True) != before


def test_options_are_given_as_they_were_at_the_point():
    """What the body sets before its step, it sets again after a resume."""
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), lr=0.5)
    (group,) = optimizer.param_groups
    point = ResumePoint(
        lambda: {"lr": group["lr"], "betas": group["betas"], "names": sorted(group)}, optimizers=[optimizer]
    )
    point.reach()
    flat = point.take()
    at_point = flat.tree(flat.tensors)
    group["lr"], group["betas"], group["preheated"] = 0.25, (0.5, 0.9), True
    for _ in range(2):
        flat = point.take()
        assert flat.tree(flat.tensors) == at_point
        assert (group["lr"], group["betas"], group["preheated"]) == (0.25, (0.5, 0.9), True), (
            "the script goes on with its own"
        )
        point.note()
    point.reach()
    flat = point.take()
    assert flat.tree(flat.tensors)["lr"] == 0.25


class Counts:
    """An object with a state of its own, and something else."""

    def __init__(self):
        self.best, self.lock = 1.0, object()

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


def test_who_leaves_a_state_and_where_one_is_looked_for(tmp_path):
    group = single_rank_group()
    several = SimpleNamespace(size=2, over_cpu=True)
    whole, divided, unknown = (
        SimpleNamespace(state_part=part)
        for part in (StatePart(0, 1, None), StatePart(0, 2, None, divides_models=True), None)
    )
    env = {EMERGENCY: str(tmp_path)}
    assert writes_emergency(env, Settings(), several, whole)
    assert not writes_emergency({}, Settings(), several, whole), "nobody starts another generation"
    assert not writes_emergency(env, Settings(emergency=False), several, whole)
    assert not writes_emergency(env, Settings(), several, divided), "a part is gone with the rank"
    assert writes_emergency(env, Settings(), SimpleNamespace(size=4, over_cpu=True), divided), "it has a copy"
    assert not writes_emergency(env, Settings(), several, unknown)
    assert not writes_emergency(env, Settings(), group, whole), "nobody would be left"
    assert not writes_emergency(env, Settings(), SimpleNamespace(size=2, over_cpu=False), whole)
    world, metrics = World(0, 1, 0, 1, 0, 1, generation=1, run_dir=str(tmp_path)), PassMetrics(counts=True)
    off = open_emergency(Settings(emergency=False), env, group, world, whole, metrics, print)
    assert type(off) is Emergency
    assert off.find() is None
    one, other = (
        open_emergency(Settings(checkpoint=name), env, group, world, whole, metrics, print) for name in ("one", "other")
    )
    about = {"step": 7, "turn": False, "rank": 0, "ranks": 0, "identity": {}, "rows": []}
    name = one._files.own.name.replace("generation-1", "generation-0")
    for node, step in ((1, 7), (0, 6)):  # one of which had no room in its memory, and both the same run directory
        save_whole(tmp_path / name / f"state-{node}", FlatTree.of({"w": torch.ones(2)}), step, about | {"step": step})
    found = one.find()
    assert found is not None
    assert (found.step, other.find()) == (7, None), "that of another run of the same script"
    one.forget_before()
    assert one.find() is None


def test_files_of_earlier_generations_are_found_wherever_there_was_room(tmp_path, monkeypatch):
    def files(generation, run="run-1"):
        return EmergencyFiles(tmp_path / "memory", tmp_path, run, generation)

    def states(left):
        return sorted((state.generation, Path(state.path).parent.name, state.step) for state in left)

    (tmp_path / "memory").mkdir()
    about = {"step": 7, "turn": False, "rank": 0, "ranks": 2, "identity": {}, "rows": []}
    earlier, other, now = files("0-a"), files("0-a", "run-2"), files("1-b")
    for one in (earlier, other, now):
        save_whole(one.state(0, 1), FlatTree.of({"w": torch.ones(2)}), 7, about)
    monkeypatch.setattr("lockstep.run.recovery.emergency_files.free_memory", lambda: 0)
    assert earlier.state(1, 1 << 60) is None, "there is no room at all"
    in_run_dir = earlier.state(1, 1)
    assert in_run_dir.is_relative_to(tmp_path / "emergency"), "there is no room in memory"
    save_whole(in_run_dir, FlatTree.of({"w": torch.ones(2)}), 7, about)
    assert (states(now.left().states), now.left().suspect) == (
        [("run-1-generation-0-a", "state-0", 7), ("run-1-generation-0-a", "state-1", 7)],
        (),
    )
    earlier.suspect("ranks differ")
    assert set(now.left().suspect) == {"run-1-generation-0-a"}
    assert states(now.own_states()) == [("run-1-generation-1-b", "state-0", 7)]
    now.remove_before()
    assert now.left() == Left()
    assert [len(one.own_states()) for one in (earlier, other, now)] == [0, 1, 1]
    monkeypatch.setattr("lockstep.run.recovery.emergency_files._TURN_S", 0.0)
    with now.turn(), pytest.raises(BlockingIOError), other.turn():
        pass
    with other.turn():
        pass


def two_generations(tmp_path):
    """The emergencies of a rank alone in two generations, the first of which notes its state; and what they say."""
    said, whole = [], SimpleNamespace(state_part=StatePart(0, 1, None))
    made = [
        open_emergency(
            Settings(),
            {EMERGENCY: str(tmp_path)},
            single_rank_group(),
            World(0, 1, 0, 1, 0, 1, generation=generation, run_dir=str(tmp_path)),
            whole,
            PassMetrics(counts=True),
            said.append,
        )
        for generation in range(2)
    ]
    made[0].notes = True
    return made, said


@pytest.mark.parametrize("leaves", [True, False])
def test_the_reason_for_which_no_state_was_left_is_said_by_the_next_generation(tmp_path, leaves):
    """A script's own object raises where it is asked for its state; another one refuses to be described."""
    made, said = two_generations(tmp_path)

    def state():
        if not leaves:
            raise ValueError("the environment\nis closed")
        return {"w": torch.ones(1)}

    def about():
        raise KeyError("length")

    point = ResumePoint(state)
    point.reach()
    made[0].leave(PeerLost("rank 1 is gone"), point, about)
    assert made[1].find() is None
    why = "KeyError while the state was collected: 'length'" if leaves else "ValueError while the state was collected: "
    assert len(said) == 1
    assert said[0].startswith(f"rank 0 left no state when another one died: {why}")


ABOUT = {"step": 7, "turn": False, "rank": 0, "ranks": 0, "identity": {}, "rows": []}


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (PeerLost("rank 1 is gone"), 7),
        (NonFiniteError("the gradient is not finite"), 7),
        (DifferentCalls("ranks make different calls"), 7),
        (MismatchError("ranks hold different values"), None),
        (ValueError("a label is 255"), None),
    ],
)
def test_who_fails_with_all_others_leaves_what_its_error_has_spared(tmp_path, error, step):
    made, _ = two_generations(tmp_path)
    point = ResumePoint(lambda: {"w": torch.ones(1)})
    point.reach()
    made[0].leave(error, point, lambda: dict(ABOUT))
    found = made[1].find()
    assert (None if found is None else found.step) == step


def test_survivors_that_hold_other_bits_are_told(tmp_path):
    """One of them is wrong, and nobody knows which: the checkpoint is used, and a broken machine is not hidden."""
    made, said = two_generations(tmp_path)
    for value in (1.0, 1.0000001):
        point = ResumePoint(lambda value=value: {"w": torch.tensor([value])})
        point.reach()
        made[0].leave(PeerLost("rank 1 is gone"), point, lambda: dict(ABOUT))
    assert made[1].find() is None
    why = "ranks 0 and 0 differ after step 7"
    assert said == [f"the states that survivors have left are not used, for one of the machines may be faulty: {why}"]


def test_a_trial_of_a_search_neither_leaves_nor_takes_what_another_one_has_left(tmp_path, monkeypatch):
    monkeypatch.setenv(EMERGENCY, str(tmp_path / "memory"))
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    trial = CurrentTrial(0, tmp_path / "trial", 2, None, lambda loss, reports: "")
    with lockstep.Run() as run:
        assert isinstance(run._context.emergency, EmergencyMemory)
    with evaluating(trial), lockstep.Run() as run:
        assert type(run._context.emergency) is Emergency


def test_a_state_is_not_taken_whose_best_step_was_never_saved():
    """Its rank died while that was being written: the older checkpoint makes the best step again."""
    said = []
    checkpoints = SimpleNamespace(newest=lambda: None, steps=lambda: (4,), root="checkpoints")
    for best, taken in (({"step": 6}, False), ({"step": 4}, True), (None, True)):
        left = SimpleNamespace(step=7, origin="state of rank 1", about={}, load=lambda best=best: {"best": best})
        checkpointer = DirectoryCheckpointer(checkpoints, said.append, JobDeadline(None))
        tree = checkpointer.resume(asked=True, fresh=False, left=left)
        assert (tree is not None) is taken
        assert (checkpointer.resumed_from is left) is taken
    assert "the best step, 6, was not saved" in said[0]


def sent_to_others(place):
    """On three ranks of which the second one sees a state."""
    with the_world() as group:
        copy = replace(STATE, path=str(Path(place, "there" if group.rank == 1 else "nowhere")))
        if group.rank == 1:
            tree = {"w": torch.arange(6.0).view(2, 3), "none": torch.empty(0), "n": [1, (2.5, "x")]}
            copy = replace(copy, path=str(save_whole(Path(place), FlatTree.of(tree), 7, {}).path))
        return LeftBehind(group, Choice(copy, ((copy,),), Sums({"loss": [1, 0.0, 1]}, {})), None).load()


@contextlib.contextmanager
def the_world():
    group = open_group(World.from_env(os.environ), torch.device("cpu"), 30.0)
    try:
        yield group
    finally:
        group.close()


def test_a_state_goes_to_nodes_that_have_none(tmp_path):
    for tree in run_ranks(sent_to_others, 3, str(tmp_path)):
        assert tree is not None
        assert torch.equal(tree["w"], torch.arange(6.0).view(2, 3))
        assert (tree["none"].numel(), tree["n"], tree["measures"]) == (0, [1, (2.5, "x")], {"loss": [1, 0.0, 1]})


def test_a_divided_tensor_is_no_whole_checkpoint(tmp_path):
    shard = TensorShard(torch.ones(1), (0,), (2,), torch.float32)
    with pytest.raises(CheckpointError, match="divided among ranks"):
        save_whole(tmp_path, FlatTree.of({"w": shard}), 1, {})


def test_what_a_killed_launcher_left_in_memory_is_removed_by_the_next_one(tmp_path):
    with emergency_memory(tmp_path, tmp_path) as living:
        killed = tmp_path / "lockstep-emergency-killed"
        killed.mkdir()
        (killed / "owner").touch()
        with emergency_memory(tmp_path, tmp_path) as memory:
            assert not killed.exists()
            assert living.is_dir()
            assert memory.stat().st_mode & 0o077 == 0, "for its user alone"
    assert list(tmp_path.iterdir()) == []
    with emergency_memory(tmp_path, tmp_path / "nowhere") as memory:
        assert memory.parent == tmp_path, "where there is no shared memory"


# ---- whole runs -----------------------------------------------------------------------------------------------------

TRAIN = """
    import contextlib, functools, hashlib, json, os, signal, sys
    import torch, lockstep, lockstep.run.recovery.emergency_files as emergency_files
    import lockstep.checkpoint.commit as commit, lockstep.checkpoint.whole_save as whole_save
    from torch import nn
    from torch.nn import functional as F
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from torch.utils.data import TensorDataset

    torch.manual_seed(1)
    X, Y = torch.randn(96, 8), torch.randint(0, 3, (96,))

    def train(shape, kills, save_every):
        generation, rank = int(os.environ.get("LOCKSTEP_GENERATION", "0")), int(os.environ["RANK"])
        ranks, last, where = kills[generation] if generation < len(kills) else ([], -1, "")

        def at(step, place):
            if rank in ranks and (step, place) == (last, where):
                os.kill(os.getpid(), signal.SIGKILL)

        class Deadly(torch.optim.AdamW):
            def step(self, closure=None):
                done = run.progress.step
                if rank in ranks and (done, where) == (last, "half an update"):
                    next(iter(self.param_groups[0]["params"])).data.add_(1)
                    at(done, where)
                super().step(closure)
                at(done, "an update")

        def half_written(path, content, disk, written=commit.write_file):
            at(run.progress.step, "a forward pass, and half its state written")
            return written(path, content, disk)

        whole_save.write_file = half_written
        if "FULL" in os.environ:
            emergency_files.free_memory = lambda: 0
        # A rate that is lowered in the body is lowered once a step only where each rank has one micro-batch.
        given = {"replay": shape != "irregular" and bool(kills), "save_every": save_every, "clip_norm": 1.0}
        with lockstep.Run(seed=3, log_every="3 steps", **given) as run:
            net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
            model, other = run.model(net), run.model(nn.Linear(8, 3))
            optimizer = run.optimizer(Deadly(model.parameters(), lr=0.05))
            second = run.optimizer(torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9))
            run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9))
            history, ema = [], AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            seen = []
            run.keep(history=history, ema=ema, seen=seen)
            micro_batch = {"accumulates": 2, "irregular": 8}.get(shape, 4)
            batches = run.loader(TensorDataset(X, Y), global_batch=16, micro_batch=micro_batch, workers=0)
            held_out = run.loader(TensorDataset(X, Y), global_batch=16, shuffle=False, workers=0, micro_batch=4)
            outer = run.steps(24, every=6) if shape == "steps" else run.epochs(4)
            for turn in outer:
                for part in range(2 if shape == "irregular" else 1):
                    for x, y in (
                        run.train(batches)
                        if part == 0  # the place tells a resumed script which of the two goes on
                        else run.train(batches)
                    ):
                        if shape == "irregular" and run.progress.step == 7:
                            optimizer.param_groups[0]["lr"] *= 0.5
                        at(run.progress.step, "a forward pass")
                        if rank == 1 and last == run.progress.step and "half" in where and "forward" in where:
                            os.kill(os.getpid(), signal.SIGKILL)
                        out = model(x)
                        run.measure(right=out.argmax(1) == y)
                        if shape == "changes what is kept before its step" and run.micro_batch.last:
                            seen.append(1)
                        run.step(F.cross_entropy(out, y), optimizer=optimizer)
                        if shape == "irregular":
                            run.measure(between=out.mean(1))
                        if run.step(F.cross_entropy(other(x) + out.detach(), y), optimizer=second):
                            ema.update_parameters(model)
                            at(run.progress.step, "the body")
                        if shape == "irregular":
                            run.measure(late=out.std(1))
                            if run.progress.step in (2, 5, 8, 10, 14):
                                break
                    for number, (x, y) in enumerate(run.evaluate(held_out)):
                        if number == 1:
                            at(run.progress.step, "an evaluation")
                        run.measure(held=model(x).argmax(1) == y)
                history.append(run.metrics["held"])
                at(run.progress.step, "before it logs")
                run.log()
                at(run.progress.step, "the turn")
            state = hashlib.sha256(repr(history).encode())
            for module in (model, ema, other):
                for tensor in module.state_dict().values():
                    state.update(tensor.numpy().tobytes())
            for one in (optimizer, second):
                for values in one.state.values():
                    for tensor in values.values():
                        state.update(tensor.numpy().tobytes())
            return state.hexdigest()

    if __name__ == "__main__":
        results = {}
        for name, (shape, ranks, kills, save_every) in json.loads(sys.argv[1]).items():
            main = functools.partial(train, shape, kills, save_every)
            states = lockstep.launch(main, ranks=ranks, run_dir=name, max_restarts=len(kills))
            results[name] = sorted(set(states))
        print("results", json.dumps(results))
"""
#: Who is killed after how many steps and where, one generation after the other; and from where the next one goes on.
EPOCHS = [
    ([1], 2, "a forward pass", 2),
    ([0], 4, "half an update", 5),
    ([2], 7, "an update", 8),
    ([0, 1], 9, "the body", 9),
    ([1], 12, "an evaluation", 12),
    ([0], 12, "the turn", 12),
    ([0], 17, "a forward pass, and half its state written", 17),
]
#: The likes of which stay in the suite: another moment of an update, and a turn's end of a script that breaks off.
ALIKE = [EPOCHS[2], EPOCHS[5]]
STEPS_LOOP = [
    ([0], 1, "an update", 2),
    ([1], 6, "an evaluation", 6),
    ([1], 12, "a forward pass", 12),
]
ACCUMULATES = [([1], 3, "half an update", 4), ([0], 5, "a forward pass", 5), ([0], 6, "a forward pass", 6)]
RUNS = {"epochs": (3, EPOCHS, None), "steps": (2, STEPS_LOOP, "4 steps"), "accumulates": (2, ACCUMULATES, None)}


def launched(place, cases, **env):
    """The states that the runs ended with, and what the launchers said."""
    script = place / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "OMP_"))}
    ended = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        cwd=place,
        env={**clean, "PYTHONPATH": SOURCE, **env},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    return json.loads(said.rpartition("results ")[2].partition("\n")[0]), said


def went_on_at(place):
    """The steps from which generations went on with what survivors had left, and those of checkpoints."""
    log = (place / "logs" / "rank-0000.log").read_text()
    left = re.findall(r"^goes on from step (\d+) \(state of rank \d+\)$", log, re.MULTILINE)
    return [int(step) for step in left], [
        int(step) for step in re.findall(r"^resumed at step (\d+)", log, re.MULTILINE)
    ]


def kills(plan):
    return [[ranks, step, where] for ranks, step, where, _ in plan]


@pytest.mark.long
@pytest.mark.parametrize("shape", combinations(RUNS, campaign=lambda shape: shape != "epochs"))
def test_whoever_is_killed_wherever_no_step_is_lost(tmp_path, shape):
    ranks, plan, save_every = RUNS[shape]
    if not IN_CAMPAIGN:
        plan = [kill for kill in plan if kill not in ALIKE]
    cases = {"calm": (shape, 1, [], None), "killed": (shape, ranks, kills(plan), save_every)}
    states, said = launched(tmp_path, cases)
    left, saved = went_on_at(tmp_path / "killed")
    assert sorted(left + saved) == [step for *_, step in plan], said
    assert all(step % 4 == 0 for step in saved), "a checkpoint is taken where it is as new"
    assert states["killed"] == states["calm"], said
    assert metric_lines(tmp_path / "killed") == metric_lines(tmp_path / "calm")
    assert len(re.findall("(was|were) killed by SIGKILL", said)) == len(plan), said
    assert not (tmp_path / "killed" / "emergency").exists(), "there was room in memory"


@pytest.mark.campaign
@pytest.mark.long
def test_without_room_in_memory_or_a_whole_state_something_else_is_gone_on_from(tmp_path):
    """The memory is full; the loop's body changes what is kept before its step."""
    plan = [([1], 4, "a forward pass", 4)]
    cases = {
        "full": ("epochs", 2, kills(plan), None),
        "unsafe": ("changes what is kept before its step", 2, kills(plan), None),
        "plain": ("epochs", 1, [], None),
    }
    states, said = launched(tmp_path, cases, FULL="1")
    assert went_on_at(tmp_path / "full") == ([4], []), said
    assert (tmp_path / "full" / "emergency").is_dir(), "there was room in the run directory"
    assert went_on_at(tmp_path / "unsafe") == ([], []), "what is there is not what the last step has left"
    assert "rank 0 left no state when another one died: keep(seen=...) is changed in the loop's body before" in said
    assert states["full"] == states["unsafe"] == states["plain"]
    assert metric_lines(tmp_path / "full") == metric_lines(tmp_path / "unsafe") == metric_lines(tmp_path / "plain")


@pytest.mark.long
def test_a_script_that_breaks_off_and_changes_its_rate_before_a_step_gets_the_bits_of_one_that_was_left_alone(tmp_path):
    """A rate that was lowered before the step in work is left as it was before, since the body lowers it once more."""
    plan = [
        ([0], 5, "before it logs", 5),
        ([1], 7, "a forward pass", 0),
        ([1], 9, "a forward pass", 9),
        ([1], 10, "before it logs", 10),
        ([0], 17, "a forward pass", 17),  # in a pass without a break, whose means have what came after `run.step`, too
    ]
    cases = {"calm": ("irregular", 2, [], None), "killed": ("irregular", 2, kills(plan), None)}
    states, said = launched(tmp_path, cases)
    assert went_on_at(tmp_path / "killed") == ([5, 7, 9, 10, 17], []), said
    assert states["killed"] == states["calm"], said
    assert metric_lines(tmp_path / "killed") == metric_lines(tmp_path / "calm")


STOPPED = """
    import os, signal, torch
    from torch.utils.data import TensorDataset
    from lockstep import Run

    with Run() as run:
        model = run.model(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.train(run.loader(TensorDataset(torch.ones(120, 4)), global_batch=12, micro_batch=4, workers=0)):
            if run.progress.step == 3 and os.environ["LOCKSTEP_GENERATION"] == "0":
                if run.rank == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if run.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            run.step(model(x).square().mean())
"""


def test_a_rank_that_waits_for_one_that_is_stopped_leaves_what_it_holds(tmp_path):
    """Rank 2 waits for rank 0, which is stopped; rank 1 was killed."""
    (tmp_path / "train.py").write_text(textwrap.dedent(STOPPED))
    words = ("--nproc-per-node", "3", "--run-dir", "r", "--grace", "3", "--max-restarts", "1", "train.py")
    command = [sys.executable, "-m", "lockstep", "run", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert "goes on from step 3 (state of rank 2)" in said
    assert "run failed: rank 1 of 3 was killed by SIGKILL" in said
