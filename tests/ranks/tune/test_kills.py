"""Whatever is killed: no finished trial is lost, none is counted twice, and the search ends."""

import os
import random
import signal
import time

import psutil
import pytest

from lockstep.tune import load
from lockstep.tune.record.journal import SEARCH_FILE, JournalReader
from lockstep.tune.record.records import TrialEnded
from searches import exit_code_of, processes_of, search_quickly, started
from waiting import wait_until

TRIALS = 60
DEADLINE_S = 280  #: for the start of a search and its first trial, four seconds on an idle machine


def ends(run_dir):
    """The losses of the trials that have ended, by their numbers, as they were written first."""
    reader, found = JournalReader(run_dir), {}
    for entry in reader.read():
        if isinstance(entry.record, TrialEnded):
            found.setdefault(entry.record.number, []).append(entry.record.losses)
    reader.close()
    return found


def kill_something(driver, choose):
    """Kill one process of the search, or the whole of it; returns what it was, "" if there was nothing."""
    processes = processes_of(driver.pid)
    kind = choose.choice(["rank", "rank", "rank", "launcher", "fork server", "driver"])
    if kind == "driver":
        driver.kill()
        return kind
    if not processes[kind]:
        return ""
    victim = choose.choice(processes[kind])
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return ""
    return kind


def search_through_kills(run_dir, kills, seed):
    """A search some process of which is killed again and again; returns what was killed."""
    choose, killed, before, trials = random.Random(seed), [], {}, 0
    driver = None
    while driver is None or driver.exitcode != 0 or len(killed) < kills:
        if driver is None or driver.exitcode is not None:
            if driver is None or driver.exitcode == 0:
                trials += TRIALS  # it was through with those before
            resume = (run_dir / SEARCH_FILE).exists() or (run_dir / "journal").exists()
            driver = started(
                search_quickly, run_dir, trials, workers=2, ranks_per_worker=(2, 1), retries=10**6, resume=resume
            )
        count = len(ends(run_dir))
        wait_until(lambda c=count, d=driver: len(ends(run_dir)) > c or d.exitcode is not None, deadline_s=DEADLINE_S)
        if len(killed) < kills:
            time.sleep(choose.random() * 0.2)
            if what := kill_something(driver, choose):
                killed.append(what)
        now = ends(run_dir)
        assert before.items() <= now.items(), "a finished trial is lost"
        before = now
        if len(before) == trials:
            driver.join()
    found = ends(run_dir)
    assert sorted(found) == list(range(trials))
    assert before.items() <= found.items()
    result = load(run_dir)
    assert [trial.number for trial in result.trials] == list(range(trials))
    assert result.counts["done"] == trials
    assert all(trial.losses == found[trial.number][0] for trial in result.trials)
    return killed


@pytest.mark.long
def test_kills(tmp_path):
    search_through_kills(tmp_path / "search", kills=4, seed=11)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_many_kills(tmp_path, seed):
    killed = search_through_kills(tmp_path / "search", kills=15, seed=seed)
    assert {"rank", "driver"} <= set(killed)


def test_a_stop_leaves_everything_to_be_gone_on_with(tmp_path):
    run_dir = tmp_path / "search"
    driver = started(search_quickly, run_dir, 200, workers=2)
    wait_until(lambda: len(ends(run_dir)) > 5, "five trials", deadline_s=DEADLINE_S)
    os.kill(driver.pid, signal.SIGTERM)
    assert exit_code_of(driver) == 75
    ended = ends(run_dir)
    assert 5 < len(ended) < 200
    driver = started(search_quickly, run_dir, len(ended) + 10, workers=1, resume=True)
    assert exit_code_of(driver) == 0
    assert load(run_dir).counts["done"] == len(ended) + 10
    assert ended.items() <= ends(run_dir).items()
