"""`profile`: each rank's steps as `torch.profiler` saw them, in any world, over a stop, and without changing a bit."""

import gzip
import json
import os

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world

X = torch.linspace(0, 1, 32).view(16, 2)  # 4 steps an epoch


def trained(directory, profile="steps 3:6", strategy="ddp", stop_at=0, resume=False):
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    try:
        with Run(
            checkpoint=directory, profile=profile, strategy=strategy, save_every="1 step" if directory else None
        ) as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader(X, global_batch=4, micro_batch=2, workers=0)
            for _ in run.epochs(2):
                for x in run.train(batches):
                    if run.step(model(x).square().mean()) and run.progress.step == stop_at:
                        raise KeyboardInterrupt
            return state_hash(model)
    except KeyboardInterrupt:
        return "left"


def traces(directory):
    """The names of the events in each trace, by the file's name."""
    return {
        path.name: {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        for path in (directory / "profile").iterdir()
    }


def steps_of(names):
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def test_each_rank_has_a_trace_of_these_steps(tmp_path, capfd):
    whole, left, resumed, served = (str(tmp_path / name) for name in ("whole", "parts", "parts", "served"))
    results = on_world(
        2,
        [
            (trained, str(tmp_path / "plain"), None),
            (trained, whole),
            (trained, left, "steps 3:6", "ddp", 5),
            (trained, resumed, "steps 3:6", "ddp", 0, True),
            (trained, resumed, "steps 3:6", "ddp", 0, True),
            (trained, served, "steps 0:2", "parameter-server"),
        ],
    )
    plain, profiled, _, again, _, _ = results
    assert plain == profiled == again, results
    assert not (tmp_path / "plain" / "profile").exists()
    found = traces(tmp_path / "whole")
    assert sorted(found) == ["steps-3-6-rank0.json.gz", "steps-3-6-rank1.json.gz"]
    for names in found.values():
        assert steps_of(names) == [4, 5, 6]
        assert any("Backward" in name for name in names)
    parts = traces(tmp_path / "parts")
    steps = {name: steps_of(names) for name, names in parts.items() if "rank1" in name}
    assert len(steps) == 2, "a part from before it was left, and one from after"
    (first, second) = sorted(steps)
    assert first.startswith("steps-3-")
    assert second.endswith("-6-rank1.json.gz")
    assert steps[second][-1] == 6
    served_names = traces(tmp_path / "served")
    assert {name: steps_of(names) for name, names in served_names.items()} == {
        f"steps-0-2-rank{rank}.json.gz": [1, 2] for rank in range(2)
    }


def test_the_leader_says_where_they_are_or_that_there_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_VIEW", "lines")
    monkeypatch.setenv("LOCKSTEP_RESUME", "0")
    monkeypatch.chdir(tmp_path)
    trained(None)
    assert "steps 4 to 6 of each rank are in profile/steps-3-6-rank*.json.gz" in capsys.readouterr().err
    assert [*traces(tmp_path)] == ["steps-3-6-rank0.json.gz"]
    trained(None, "steps 8:9")
    assert "profile='steps 8:9': none of these steps was done" in capsys.readouterr().err


def test_a_profiler_of_the_scripts_own_is_in_the_way(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_RESUME", "0")
    with torch.profiler.profile(acc_events=True), pytest.raises(UsageError, match="a profiler of its own"):
        trained(None)
