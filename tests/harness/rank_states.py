"""Worlds of ranks as a launcher sees them, made up."""

from dataclasses import replace

from hypothesis import strategies as st

from lockstep.heartbeat_message import PHASES, Heartbeat, SourceLine
from lockstep.launch.diagnosis.hang_analysis import RankState

BEAT = Heartbeat(
    rank=0, process=1000, step=4, phase_changes=20, phase="script",
    place=SourceLine("/home/ada/train.py", 28, "train_step"), call="", meets=False, collectives=16, cpu_s=1.0, at=1.7e9,
)  # fmt: skip


def beat(rank, **values):
    return replace(BEAT, rank=rank, process=1000 + rank, **values)


def rank_state(rank, *, silent_s=0.3, still_s=60.0, idle=True, same_phase_s=None, **values):
    same = still_s if same_phase_s is None else same_phase_s
    return RankState(rank, beat(rank, **values), silent_s, still_s, same, idle)


def waiting(rank, call="all_reduce", **values):
    return rank_state(rank, call=call, meets=True, **values)


places = st.builds(
    SourceLine, st.sampled_from(["/home/ada/train.py", "/home/ada/data.py"]), st.integers(1, 99), st.sampled_from("fgh")
)
beats = st.builds(
    Heartbeat,
    rank=st.integers(0, 63),
    process=st.integers(1, 1 << 22),
    step=st.integers(-1, 1 << 40),
    phase_changes=st.integers(0, 1 << 40),
    phase=st.sampled_from(PHASES),
    place=st.builds(SourceLine, st.text(), st.integers(0, 1 << 20), st.text()),
    call=st.text(),
    meets=st.booleans(),
    collectives=st.integers(0, 1 << 40),
    cpu_s=st.floats(0, 1e9),
    at=st.floats(0, 1e12),
)
#: A rank anywhere, heard or not.
anything = st.fixed_dictionaries(
    {
        "silent_s": st.sampled_from([0.1, 0.5, 70.0]),
        "still_s": st.floats(0, 100),
        "idle": st.booleans(),
        "step": st.integers(-1, 5),
        "phase": st.sampled_from(PHASES),
        "place": places,
        "call": st.sampled_from(["", "all_reduce", "broadcast", "next(loader)", "backward"]),
        "meets": st.booleans(),
        "collectives": st.integers(0, 3),
    }
).map(lambda values: values | {"meets": values["meets"] and values["call"] != ""})
worlds = st.lists(anything, min_size=1, max_size=6).map(
    lambda ranks: [rank_state(rank, **values) for rank, values in enumerate(ranks)]
)
