"""What every test starts from, and what it must leave behind: nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

# Before anything imports torch, which reads it once: ranks of a test share few cores, and the number of threads is
# part of a run's identity.
os.environ["OMP_NUM_THREADS"] = "1"
# Where no name server answers, looking up this host's own name would otherwise wait many seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Tests are written for ranks on the CPU, of which there are more than GPUs; `make test-gpu` names those for GPUs.
is_controller = "PYTEST_XDIST_WORKER" not in os.environ
if is_controller and os.path.exists("/dev/nvidiactl") and not any("tests/gpu" in word for word in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A shell starts what it puts in the background with Ctrl-C ignored, and all that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Inherited by every process that a test starts, so that also those whose parent died are found.
MARK = "LOCKSTEP_TEST_SESSION"
os.environ[MARK] = str(os.getpid())

# To look for garbage while all tests are imported takes a third of the time, and finds next to none.
gc.disable()

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from campaign_marks import IN_CAMPAIGN  # noqa: E402
from lockstep.world import LAUNCHERS  # noqa: E402
from waiting import wait_until  # noqa: E402

# The suite may itself run inside a job: its tests are not that job's ranks.
for launcher in LAUNCHERS:
    for variable in (*launcher.rank, *launcher.size):
        os.environ.pop(variable, None)

# Examples take as long as the machine is busy; the deadline of the whole test is the one that counts.
# `make campaign` runs properties once more, with other examples each time.
hypothesis.settings.register_profile(
    "lockstep",
    deadline=None,
    derandomize=not IN_CAMPAIGN,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("lockstep")

GRACE_S = 10.0  #: for what a test has told to end but did not wait for
SCOPES = pytest.StashKey[Path]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the mark `campaign`, or those tests and properties; in their random order, but for the mark `long`."""
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_campaigns = item.get_closest_marker("campaign") is not None
        is_property = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        runs = is_campaigns or is_property if IN_CAMPAIGN else not is_campaigns
        (chosen if runs else left_out).append(item)
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("long") is None)
    config.hook.pytest_deselected(items=left_out)


def scope_of(item: pytest.Item) -> str | None:
    """What all tests share that the mark `together` keeps on one worker: their file, or there the value of `by`."""
    together = item.get_closest_marker("together")
    if together is None:
        return None
    file = item.nodeid.partition("::")[0]
    by = together.kwargs.get("by")
    return file if by is None else f"{file}[{item.callspec.params[by]}]"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: as many as keep the cores busy while some wait. Each begins with 15 s of imports."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of the controller: tell a worker where to write which of its tests belong together."""
    node.workerinput["scopes"] = str(_scopes(node.config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Of a worker, which alone collects: leave the scopes in a file for the controller, which alone divides tests up.

    It is told node ids only. `xdist_group` of pytest-xdist 3.8 adds its name to these where pytest 9.2 does not look.
    """
    # What was imported is not looked at again: neither for garbage, nor by a `Run` that looks for a script's functions.
    gc.freeze()
    gc.enable()
    told = getattr(session.config, "workerinput", None)
    if told is not None:
        scopes = {item.nodeid: scope for item in session.items if (scope := scope_of(item))}
        Path(told["scopes"], told["workerid"]).write_text(json.dumps(scopes))


def _scopes(config: pytest.Config) -> Path:
    """The directory where each worker of this run writes them; it goes with the run."""
    if SCOPES not in config.stash:
        directory = tempfile.TemporaryDirectory(prefix="lockstep-scopes-")
        config.add_cleanup(directory.cleanup)
        config.stash[SCOPES] = Path(directory.name)
    return config.stash[SCOPES]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests go to whichever worker is free, those of a scope as one, and the largest scopes first."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForEachScope(LoadScopeScheduling):
        @cached_property
        def _scope_of(self) -> dict[str, str]:
            # Asked for when all workers have collected, and each has collected the same.
            return json.loads(next(_scopes(config).iterdir()).read_text())

        def _split_scope(self, nodeid: str) -> str:
            return self._scope_of.get(nodeid, nodeid)

        # A worker begins a test when it knows of the one after it, or that there is none. One that takes the place of
        # a worker that crashed is asked only once, and would wait for ever with a scope of a single test.
        def _assign_work_unit(self, node: Any) -> None:
            if self.workqueue:
                super()._assign_work_unit(node)
            self._reschedule(node)

    return OneWorkerForEachScope(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose own limit is longer is not ended, and the run with it, by ``faulthandler_timeout``."""
    limit = item.get_closest_marker("timeout")
    if limit is not None and limit.args[0] >= float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script train.py in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Each test finds the process as the one before found it; threads, ranks and groups left behind are a failure."""
    environment, directory = dict(os.environ), os.getcwd()
    randomness, torch_before = random.getstate(), _torch_state()
    threads, processes, tracing = set(threading.enumerate()), _numbers(), sys.gettrace()
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.setstate(randomness)
    left = [*_restore_torch(torch_before), *_left_threads(threads), *_left_processes(processes)]
    if (trace := sys.gettrace()) is not None and trace is not tracing:
        sys.settrace(tracing)
        left.append(f"the trace function {trace}")
    if left:
        pytest.fail(f"left behind: {'; '.join(left)}", pytrace=False)


def _torch_state() -> tuple[object, object, int] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    numpy = sys.modules["numpy"]
    return torch.get_rng_state(), numpy.random.get_state(), torch.get_num_threads()


def _restore_torch(before: tuple[object, object, int] | None) -> list[str]:
    """Put torch's global state back; what was left that must not be."""
    left: list[str] = []
    torch = sys.modules.get("torch")
    if torch is None:
        return left
    if "torch.distributed" in sys.modules and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        left.append("the default process group")
    if before is not None:
        state, numpy_state, threads = before
        torch.set_rng_state(state)
        sys.modules["numpy"].random.set_state(numpy_state)
        torch.set_num_threads(threads)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    return left


def _left_threads(before: set[threading.Thread]) -> list[str]:
    # Threads of C++ that once called into Python appear as dummies and stay, and so does the one that tqdm starts with
    # its first bar, wherever in torch that is; they are not the test's.
    def left() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in before and not isinstance(thread, threading._DummyThread) and thread.name != "tqdm_monitor"
        ]

    _wait(lambda: not left())
    return [f"thread {thread.name}" for thread in left()]


def _left_processes(before: set[int]) -> list[str]:
    multiprocessing.active_children()  # collects those that have ended

    def left() -> dict[int, str]:
        return _ours(_numbers() - before)

    _wait(lambda: not left())
    found = left()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"process {pid} ({command})" for pid, command in found.items()]


def _wait(happened: Callable[[], bool]) -> None:
    """Wait for what has been told to end; the caller says what did not."""
    with contextlib.suppress(AssertionError):
        wait_until(happened, deadline_s=GRACE_S)


def _numbers() -> set[int]:
    """Of all processes that there are. Quick, and most tests leave no new one: to ask each takes 8 ms."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _ours(numbers: set[int]) -> dict[int, str]:
    """Which of these are living processes that this one started, directly or not, also if their parent has died."""
    mark = f"{MARK}={os.getpid()}".encode()
    found: dict[int, str] = {}
    for number in numbers:
        entry = Path("/proc", str(number))
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" or "multiprocessing.resource_tracker" in command or "forkserver" in command:
                continue
            if int(parent) == os.getpid() or mark in (entry / "environ").read_bytes().split(b"\0"):
                found[number] = command[:120]
    return found
