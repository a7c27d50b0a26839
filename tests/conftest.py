"""What every test starts from, and what it must leave behind: nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from lockstep.world import LAUNCHERS  # noqa: E402
from waiting import wait_until  # noqa: E402

# The suite may itself run inside a job: its tests are not that job's ranks.
for launcher in LAUNCHERS:
    for variable in (*launcher.rank, *launcher.size):
        os.environ.pop(variable, None)

# `make campaign` runs what `make test` leaves out, and properties once more, with other examples each time.
IN_CAMPAIGN = "LOCKSTEP_CAMPAIGN" in os.environ

# Examples take as long as the machine is busy; the deadline of the whole test is the one that counts.
hypothesis.settings.register_profile(
    "lockstep",
    deadline=None,
    derandomize=not IN_CAMPAIGN,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("lockstep")

GRACE_S = 10.0  #: for what a test has told to end but did not wait for


#: Tests that share what they compute once, and so belong on one worker, which takes them before all others. The marks
#: of pytest-xdist 3.8 say the same, and pytest 9.2 does not hear them.
TOGETHER = re.compile(
    r"tests/strategies/test_laws\.py::test_law\[.*(?=-\w+\]$)|"
    r"tests/strategies/test_(zero|pipeline|buffers|layouts)\.py|tests/run/test_(loops|carry|samplers|end_of_step)\.py|"
    r"tests/test_(by_hand|faults|nodes|transparency)\.py|"
    r"tests/test_recipes\.py::test_vision_transformer_learns_under_every_strategy"
)


#: Tests that take many seconds by themselves: they begin before the others, so that none of them is the last to end.
LONG = re.compile(
    r"test_campaign$|test_digits_reach_|test_mnist_is_read|test_commands_that_work_on_a_script|test_scripts_run_on_one_rank|"
    r"test_the_bits_are_those_of_one_rank\[4-3\]|test_a_model_trains_and_resumes_within_a_limit|"
    r"test_the_rank_that_hangs_is_named|test_the_command_line_goes_back_to_it|test_kills$|"
    r"test_whatever_is_killed|test_whoever_is_killed|test_without_room_in_memory|test_a_script_that_breaks_off|"
    r"test_the_same_bits_after_the_planned_faults|test_what_is_left_behind_fails|test_a_function_runs_on_ranks_that_are_copies"
)


#: Tests whose like is in the suite already, for another strategy or benchmark. They run in `make campaign` only, where
#: LOCKSTEP_CAMPAIGN is set, so that the suite stays under twelve minutes on two cores.
CAMPAIGN = re.compile(
    r"test_law_with_options\[.*-(survives_a_killed_rank|moves_between_strategies)\]|"
    r"test_law\[(auto|hsdp.*|diloco.*|dp|zero|local-sgd.*|hybrid.*)-survives_a_killed_rank\]|"
    r"test_law\[(auto|hsdp.*|diloco.*|zero|hybrid.*)-(moves_between_\w+|respects_count|clips_alike)\]|"
    r"test_law\[fsdp:tensor.*-(?!moves_between_worlds)\w+\]|test_copies_of_what_tensor_groups_hold|"
    r"test_a_model_of_transformers_is_divided|"
    r"test_a_package_shuffles_alike_.*\[\w+-(0-2|1-0)\]|"
    r"test_whatever_is_killed_.*\[(second|third)\]|"
    r"test_whoever_is_killed_.*\[(accumulates|steps)\]|test_no_step_is_lost_where_.*\[(?!fsdp\])|"
    r"test_training_on_a_package_.*\[webdataset\]|"
    r"test_it_is_killed_and_begun_again_on_other_ranks\[(?!steps\]|two_passes_in_an_epoch\]|evaluation_in_the_body\])|"
    r"test_a_habit_ends_everywhere_as_the_table_says|test_ten_thousand_changes|"
    r"test_parameters_that_ddp_will_wait_for_|test_ranks_that_cannot_start_|test_examples_have_no_problem|"
    r"test_each_ends_as_the_page_says\[.*\(1, 2, 3\)\]|test_figures_are_those_of_plain_torch_|"
    r"test_recipes_huggingface\.py|test_contrastive_loss_is_that_of_the_whole_batch|test_a_cadence_in_seconds|"
    r"test_zero\.py::test_(the_bits_are|each_rank_has)_.*\b2\]|test_buffers\.py::test_on_any_world_.*\[2\]|"
    r"test_on_any_world_what_learns_.*\[(2-ddp|3-zero)\]|"
    r"test_layouts\.py::test_gradients_are_.*\[3\]|test_fsdp\.py::test_on_three_ranks|"
    r"test_loops\.py::test_a_loop_is_the_same_on_any_world|"
    r"test_law_with_options\[(ddp:compress=bf16|fsdp:wrap.*|hybrid.*|pipeline.*bubble)-equals_the_reference\]|"
    r"test_hybrid\.py::test_the_bits_are_those_of_one_rank\[(2-1|4-2)\]|"
    r"test_what_one_rank_meets_is_told_by_it\[3\]|"
    r"test_the_bits_are_those_of_one_rank_on_every_rank\[4-1\]|test_any_cut_gives_the_bits_of_one_rank\[(2|3)\]|"
    r"test_(diloco|compression)\.py::test_on_three_ranks|"
    r"test_same_bits_on_any_world\[(small buckets|halves|fused adamw|bf16 adamw|tokens clipped)\]|"
    r"test_trains_what_plain_torch_trains\[channels_last_3d-3\]|"
    r"test_on_any_world_it_follows_the_place\[2\]|test_what_comes_out_is_what_the_run_evaluates\[3\]|"
    r"test_a_script_alone_leaves_with_74_and_says_so_last\[live\]|"
    r"test_runs\.py::test_(the_last_words_name|a_script_that_starts_ranks_itself).*\[plain\]|"
    r"test_a_planted_fault_is_found_with_its_line\[(?!counter_in_the_body\]|seed_from_the_process\])|"
    r"test_an_example_is_the_same_in_all_ways|"
    r"test_examples_end_well_with_smaller_arguments|test_a_resnet_goes_through_a_pipeline_of_two|"
    r"test_vision_transformer_learns_under_every_strategy|"
    r"test_a_run_begins_with_the_largest_micro_batch|test_a_profile_a_trace_and_the_largest_batch|test_a_script_that_fails_alone_is_told|"
    r"test_search_digits_finds_a_network|test_300_mb_of_parameters|"
    r"test_nodes\.py::test_(a_spare_and_another_host_take_over|a_rank_that_hangs_on_another_host)|"
    r"test_networks\.py::test_ranks_|test_parts\.py::test_wherever_in_its_start_a_launcher_is_killed|"
    r"test_gloo_threads\.py::test_no_rank_aborts_at_its_end|"
    r"test_kills\.py::test_many_kills|test_losses_do_not_depend_on_the_ranks\[1-3\]|"
    r"test_benchmarks\.py::test_(loop|servers|links|data|price|compress|zero|strategies|start|soak|memory|exact|failures|goodput|tune_speed)$"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The suite without `CAMPAIGN`, or those tests and properties; in their random order, but for `LONG`."""
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_campaigns = CAMPAIGN.search(item.nodeid) is not None
        is_property = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        runs = is_campaigns or is_property if IN_CAMPAIGN else not is_campaigns
        (chosen if runs else left_out).append(item)
    items[:] = sorted(chosen, key=lambda item: LONG.search(item.nodeid) is None)
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: as many as keep the cores busy while some wait. Each begins with 15 s of imports."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests go to whichever worker is free, those of `TOGETHER` as one."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForEachScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = TOGETHER.match(nodeid)
            return together[0] if together else nodeid

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
