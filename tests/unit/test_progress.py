"""Laws of progress: counting, and nothing lost in a checkpoint."""

import json

from hypothesis import given
from hypothesis import strategies as st

from lockstep.progress import Progress

events = st.lists(st.none() | st.integers(0, 1000))  # a step over so many samples, or the end of an epoch


def after(events: list[int | None]) -> Progress:
    progress = Progress()
    for samples in events:
        progress = progress.after_epoch() if samples is None else progress.after_step(samples)
    return progress


@given(events)
def test_everything_done_is_counted(done):
    progress = after(done)
    assert progress.step == sum(samples is not None for samples in done)
    assert progress.samples == sum(samples or 0 for samples in done)
    assert progress.epoch == done.count(None)
    assert progress.epoch_step == len(done) - 1 - max(
        (i for i, samples in enumerate(done) if samples is None), default=-1
    )


@given(events)
def test_it_survives_a_checkpoint(done):
    assert Progress.from_dict(json.loads(json.dumps(after(done).as_dict()))) == after(done)
