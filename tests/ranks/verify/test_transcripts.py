"""Transcripts of real ranks: equal on any world and under strategies of equal bits; what differs is found in place."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.launch_contract import TRANSCRIPT
from lockstep.testing import run_each
from lockstep.transcript import MICRO_BATCH, SAID, STATE, STOPPED, Place, Transcript, TranscriptRequest
from lockstep.verify.difference import aligned, described, first_difference, other_variables


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.full((4,), float(index)) / 10 + torch.randn(4), torch.tensor(index % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x):
        return self.last(F.dropout(self.norm(self.first(x)), 0.2, self.training))


class Counting(Net):
    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * min(1, self.calls / 8)


def train(kind=Net):
    with lockstep.Run(seed=0, replay=False) as run:
        model = run.model(kind())
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        batches = run.loader(Noisy(), global_batch=8, micro_batch=2, workers=0)
        seen = []
        for epoch in run.epochs(3):
            for x, y in run.train(batches):
                seen.append(len(x))
                run.step(F.cross_entropy(model(x), y))
            for x, y in run.evaluate(batches):
                run.measure(accuracy=model(x).argmax(1) == y)
            run.log(epoch=epoch, rate=optimizer.param_groups[0]["lr"])


def transcript_of(place, ranks, kind=Net, strategy="ddp", **request):
    directory = place / f"{strategy}-{ranks}-{kind.__name__}-{len(list(place.iterdir()))}"
    directory.mkdir()
    asked = TranscriptRequest(str(directory), **{"steps": 7, "pass_steps": 2, **request})
    outcomes = run_each(train, ranks, kind, env={TRANSCRIPT: asked.to_text(), "LOCKSTEP_STRATEGY": strategy})
    ended = [None if outcome.error is None else str(outcome.error) for outcome in outcomes]
    assert ended in ([None] * ranks, ["0"] * ranks), [outcome.trace for outcome in outcomes]  # SystemExit(0)
    return Transcript.read(directory)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return transcript_of(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize(
    ("ranks", "strategy"), [pytest.param(2, "ddp", marks=pytest.mark.campaign), (3, "ddp"), (2, "zero"), (3, "fsdp")]
)
def test_they_are_equal_on_any_world(tmp_path, alone, ranks, strategy):
    other = transcript_of(tmp_path, ranks, strategy=strategy)
    assert first_difference(alone, other) is None
    assert other.steps == alone.steps == 6
    names = {name for notes in other.notes.values() for name in notes}
    assert {
        "sample 0",
        "the loss",
        "run.log(rate=...)",
        "run.metrics['accuracy']",
        "the buffer norm.running_mean",
    } <= names
    assert {"state.optimizers.0.first.weight.exp_avg", "state.models.0.norm.running_var"} <= names


def test_a_pass_is_cut_short_and_the_run_ends_with_its_steps(tmp_path):
    short = transcript_of(tmp_path, 1, steps=3)
    assert short.steps == 3
    assert STOPPED in short.about
    assert first_difference(short, transcript_of(tmp_path, 2)) is None  # as far as both go
    evaluated = [place.step for place, notes in short.notes.items() if "run.metrics['accuracy']" in notes]
    assert evaluated == [2, 3]  # after the two steps of the first pass


def test_what_differs_is_found_where_it_begins_and_in_which_module(tmp_path):
    first = transcript_of(tmp_path, 1, Counting, detail=0)
    other = transcript_of(tmp_path, 2, Counting, detail=0)
    found = first_difference(first, other)
    assert (found.place, found.what) == (Place.of(MICRO_BATCH, 0, 2), "the output of the model (Counting)")
    changed = other_variables(first.variables[found.place], other.variables[found.place])
    assert changed["model.calls"] == ("'2'", "'0'")
    assert "model.first.weight" not in changed


def test_an_evaluation_can_be_left_out(tmp_path, alone):
    without = transcript_of(tmp_path, 1, evaluates=False)
    assert not any("run.metrics['accuracy']" in notes for notes in without.notes.values())
    assert first_difference(alone, without) is None


def test_half_a_line_of_a_rank_that_was_killed_is_left_out(tmp_path):
    (tmp_path / "rank-0000.jsonl").write_text('["state",0,0,{"a":["1",""]}]\n["state",1,0,{"a":["2"')
    assert Transcript.read(tmp_path).notes == {Place.of(STATE, 0): {"a": ("1", "")}}


notes = st.dictionaries(
    st.sampled_from(["the loss", "sample 1", "x"]), st.tuples(st.text("01", max_size=2), st.just(""))
)
places = st.builds(Place.of, st.sampled_from([STATE, SAID, MICRO_BATCH]), st.integers(0, 3), st.integers(0, 2))


@given(st.dictionaries(places, notes, min_size=1), st.data())
def test_the_first_of_any_changes_is_found(content, data):
    ends = {Place.of(STATE, step): {"end": ("1", "")} for step in (0, 4)}
    content = ends | content
    same = Transcript(notes={place: dict(found) for place, found in content.items()})
    assert first_difference(Transcript(notes=content), same) is None
    spots = sorted(place for place in content if content[place])
    changed = data.draw(st.sets(st.sampled_from(spots), min_size=1))
    for place in changed:
        name = next(iter(content[place]))
        same.notes[place][name] = "another", ""
    assert first_difference(Transcript(notes=content), same).place == min(changed)


@given(st.integers(1, 5), st.integers(0, 5))
def test_a_run_that_counts_anew_is_found_by_its_weights(steps, lost):
    whole = {Place.of(STATE, step): {"state.models.0.w": (str(step), "")} for step in range(steps + 1)}
    begins = min(lost, steps)
    rest = {place._replace(step=place.step - begins): note for place, note in whole.items() if place.step >= begins}
    assert aligned(Transcript(notes=whole), Transcript(notes=rest)).first_step() == begins
    rest[Place.of(STATE, 0)] = {"state.models.0.w": ("another", "")}
    assert aligned(Transcript(notes=whole), Transcript(notes=rest)) is None


def test_names_are_those_that_users_know():
    assert described("state.models.0.norm.weight") == "norm.weight"
    assert described("state.models.1.norm.weight") == "norm.weight of model 1"
    assert described("state.optimizers.0.norm.weight.exp_avg") == "optimizer state norm.weight.exp_avg"
    assert described("state.kept_values.best") == "run.kept.best"


def test_a_request_is_the_same_after_its_text():
    request = TranscriptRequest("here", 5, pass_steps=2, detail=3)
    assert TranscriptRequest.from_text(request.to_text()) == request
    assert dataclasses.replace(request, budget_s=1.0).to_text() != request.to_text()
