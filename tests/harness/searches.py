"""Searches that are started as copies of the test's own process, which has torch already."""

import multiprocessing
import os
import sys
import time

import psutil

import lockstep
from lockstep.errors import LaunchError
from lockstep.tune import Float


def started(function, *args, **kwargs):
    """A process of its own that calls ``function``; it leaves with 0, 1 for a `LaunchError`, or what it exits with."""
    process = multiprocessing.get_context("fork").Process(target=_called, args=(function, args, kwargs))
    process.start()
    return process


def exit_code_of(process):
    """What ``process`` exits with. Only the test's own limit ends the wait: a loaded machine takes its time."""
    process.join()
    return process.exitcode


def _called(function, args, kwargs):
    try:
        function(*args, **kwargs)
    except LaunchError:
        os._exit(1)
    except SystemExit as ending:
        os._exit(ending.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def quick(params):
    """An objective of which many are evaluated in a second."""
    time.sleep(0.02)
    return params["x"] ** 2


def search_quickly(run_dir, trials, **kwargs):
    """A search with `quick`."""
    return lockstep.tune(quick, {"x": Float(-1, 1)}, trials=trials, run_dir=run_dir, **kwargs)


def processes_of(driver):
    """The processes below ``driver`` that belong to its search, by what they are."""
    found = {"launcher": [], "fork server": [], "rank": []}
    try:
        launchers = psutil.Process(driver).children()
        for launcher in launchers:
            found["launcher"].append(launcher)
            for server in launcher.children():
                found["fork server"].append(server)
                found["rank"] += [child for child in server.children() if child.name().startswith("rank")]
    except psutil.NoSuchProcess:
        pass
    return found
