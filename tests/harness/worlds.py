"""Many short runs in one launch of real ranks."""

import functools
import importlib
import os
import pickle
import traceback

import pytest
import torch.distributed as dist

from campaign_marks import IN_CAMPAIGN
from lockstep.run.proofs import replay_series
from lockstep.testing import run_ranks

# Replays take most of the time of a run of a few steps: of several worlds that train the same, one has them.
WITHOUT_REPLAYS = {"LOCKSTEP_REPLAY": "0"}
# A rank that parts ways with the others is told so by a deadline, for its process lives on to the next run.
PEER_TIMEOUT_S = "30"
# Of the bodies that a run's first step tries again: each of its micro-batches twice. All of them are most of the time
# of a run of a few steps: tests of these bodies themselves use `on_world_trying_all`, and `make campaign` tries all.
TRIED = replay_series.MOST if IN_CAMPAIGN else 4


def in_turn(calls, tried=TRIED):
    """On a rank: the result of each ``function(*args)``, or the traceback of what it raised, in their order."""
    replay_series.MOST = tried
    results = []  # as bytes: weights that a running function holds would be those of the next call's script
    for function, *args in calls:
        try:
            results.append(pickle.dumps(function(*args)))
        except Exception:  # noqa: BLE001 - the test that called will read it
            results.append(pickle.dumps(traceback.format_exc()))
            if dist.is_initialized():
                dist.destroy_process_group()
    return [pickle.loads(result) for result in results]


def on_world(size, calls, timeout_s=200, env=None, tried=TRIED):
    """`in_turn` on ``size`` ranks; for each call what the ranks returned, by rank."""
    env = {"LOCKSTEP_PEER_TIMEOUT_S": PEER_TIMEOUT_S, **(env or {})}
    by_rank = run_ranks(in_turn, size, calls, tried, timeout_s=timeout_s, env=env)
    return [list(results) for results in zip(*by_rank, strict=True)]


on_world_trying_all = functools.partial(on_world, tried=replay_series.MOST)


def trying_few(function, *args):
    """For `run_each`: ``function(*args)`` on a rank that tries no more bodies again than those of `on_world`."""
    replay_series.MOST = TRIED
    return function(*args)


def under_own(variables, module, function):
    """On a rank: the ``function`` of ``module``, which is imported under the rank's own ``variables[rank]``."""
    os.environ.update(variables[int(os.environ["RANK"])])
    return getattr(importlib.import_module(module), function)()


def error_of(kind, call, *args, **options):
    """The text of the error of class ``kind`` that the call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)
