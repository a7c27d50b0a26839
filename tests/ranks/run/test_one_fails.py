"""What the other ranks notice of one that fails and lives on."""

from pathlib import Path

import torch
from torch import nn

from lockstep.errors import PeerLost
from lockstep.run import Run
from lockstep.testing import run_ranks
from waiting import wait_until


def one_fails_and_lives_on(directory):
    """Rank 1 leaves by an error that it catches; what rank 0 meets, while rank 1 is still there."""
    told = Path(directory, "told")
    try:
        with Run() as run:
            model = run.model(nn.Linear(2, 2))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in run.epochs(1):
                for batch in run.train(run.loader(torch.ones(32, 2), global_batch=8, micro_batch=2)):
                    if run.rank == 1 and run.progress.step == 2:
                        raise ValueError("a bad sample")
                    run.step(model(batch).square().mean())
    except PeerLost as error:
        told.write_text(str(error))
        return "lost"
    except ValueError as error:
        kept = error  # and with its traceback everything that the run holds
        wait_until(told.exists, "what rank 0 is told")
        return str(kept)
    return "nothing"


def test_a_rank_that_fails_and_lives_on_is_noticed_at_once(tmp_path):
    assert run_ranks(one_fails_and_lives_on, 2, str(tmp_path)) == ["lost", "a bad sample"]
    assert "rank 1 left during the reduction" in (tmp_path / "told").read_text()
