"""A scheduler signals every process of a job, at any moment, also before it is ready for it."""

import signal
import subprocess
import sys

from lockstep.launch.child_process import stop_signals_blocked


def test_a_process_that_is_just_being_started_does_not_die_of_a_stop():
    ready = (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_SETMASK, ())"
    )
    with stop_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", f"{ready}\nprint('lives')"], stdout=subprocess.PIPE, text=True
        )
    # It is still reading its own interpreter.
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "lives\n"
    assert process.returncode == 0
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_stop_that_comes_while_torch_is_imported_ends_in_order(workshop, hit):
    train = workshop.script("print('begun')")
    launcher = workshop.start("--nproc-per-node", 2, train)
    fork_server = None
    while fork_server is None:
        fork_server = next((pid for pid, name in workshop.processes().items() if pid != launcher.pid), None)
        assert launcher.poll() is None
    for _ in range(20):
        hit(fork_server, "SIGUSR1")
    ended = workshop.end_of(launcher)
    assert ended.code == 0, ended.err
    assert ended.out == "begun\n"
