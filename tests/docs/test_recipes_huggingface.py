"""Models and data sets of Hugging Face: the same bits on any number of ranks, after an interruption, and by hand."""

import math

import pytest
import torch

import lockstep
from by_hand import seed_everything, seed_of
from example_scripts import example
from lockstep.testing import state_hash
from worlds import on_world

HELD_OUT = 16
SMALL = {
    "finetune": {"epochs": 2, "samples": 100},
    "streaming": {"epochs": 2, "length": 64, "limit": 2},
}


class Interrupted(Exception):
    """What ends a training on purpose."""


def play(name, home=None, interrupt_at=None):
    """On a rank: what the example's ``main`` returns, the trained bits, and the step at which it began."""
    seen = {}
    make, step = lockstep.Run.model, lockstep.Run.step

    def model(run, net, **options):
        seen["model"], seen["run"] = net, run
        return make(run, net, **options)

    def counted(run, *args, **options):
        seen.setdefault("began", run.progress.step)
        if run.progress.step == interrupt_at:
            raise Interrupted
        return step(run, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep.Run, "model", model)
        patch.setattr(lockstep.Run, "step", counted)
        patch.setenv("HF_HUB_OFFLINE", "1")
        if home is not None:
            patch.setenv("LOCKSTEP_CHECKPOINT", f"{home}/{name}")
            patch.setenv("LOCKSTEP_SAVE_EVERY", "2 steps")
            patch.setenv("LOCKSTEP_RESUME", "1")
        module = example(name)
        module.HELD_OUT = HELD_OUT
        result = module.main(**SMALL[name])
    return result, seen["run"].metrics, state_hash(seen["model"]), seen["began"]


def tuned_by_hand(epochs, samples):
    """On a process: the mean loss of the last epoch's tokens, in plain torch, with each step's texts in one batch."""
    module = example("finetune")
    seed_everything(seed_of(0, "init"))
    net, tokenizer = module.tiny()
    rows = module.tokenized(module.numbers(samples + HELD_OUT), tokenizer)
    pad = module.DataCollatorForSeq2Seq(tokenizer, model=net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    steps = epochs * math.ceil(samples / 64)
    schedule = module.get_linear_schedule_with_warmup(optimizer, steps // 10, steps + 1)
    for epoch in range(epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed_of(0, "order", epoch)))
        total, tokens = 0.0, 0
        for picks in order.split(64):
            batch = pad([rows[int(n)] for n in picks])
            loss = net(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            here = int((batch["labels"] != -100).sum())
            total, tokens = total + loss.item() * here, tokens + here
    return total / tokens


pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(300),  # the first test waits for what all of them look at
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """By example: what 1, 2 and 3 ranks came to, and 3 that went on where 2 were interrupted."""
    home = str(tmp_path_factory.mktemp("runs"))
    *alone, by_hand = on_world(1, [*((play, name) for name in SMALL), (tuned_by_hand, *SMALL["finetune"].values())])
    two = on_world(2, [(play, name) for name in SMALL] + [(play, name, home, 3) for name in SMALL])
    three = on_world(3, [(play, name) for name in SMALL] + [(play, name, home) for name in SMALL])
    for by_rank in two[len(SMALL) :]:
        assert "Interrupted" in by_rank[0]
    columns = zip(SMALL, alone, two[: len(SMALL)], three[: len(SMALL)], three[len(SMALL) :], strict=True)
    return {name: worlds for name, *worlds in columns} | {"finetune by hand": by_hand}


@pytest.mark.parametrize("name", SMALL)
def test_ranks_and_an_interruption_do_not_matter(name, played):
    [alone], *worlds = played[name]
    assert not isinstance(alone, str), alone
    for by_rank in worlds:
        for each in by_rank:
            assert not isinstance(each, str), each
            assert each[:3] == alone[:3]
    assert alone[3] == 0
    assert worlds[-1][0][3] > 0, "the interrupted run started over"


def test_fine_tuning_weighs_tokens_as_one_padded_batch_would(played):
    [[_, metrics, *_]], *_ = played["finetune"]
    assert metrics["loss"] == pytest.approx(played["finetune by hand"][0], rel=1e-5)
