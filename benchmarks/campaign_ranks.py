"""The kinds of faults of the campaign that a rank does to itself: by an error, an end, a hang, a flipped bit, a mode.

Each is some code that one rank, drawn, runs once at a place of its script, with the names of the script.
"""

from __future__ import annotations

import signal

from campaign_faults import KILL, RANK, REPLICATED, Fault, HeldBy, Strike, killed_by, one_machine
from campaign_training import Training, send


def itself(code: str, place: str = "step") -> Strike:
    """A rank, drawn, runs ``code`` when it comes to that place of the script."""
    return lambda training: training.tell(code, place)


def by_itself(code: str, says: str, place: str = "step", *, held_by: HeldBy = "others", beside: bool = False) -> Fault:
    """A rank ends by ``code``, or hangs in it."""
    return Fault(itself(code, place), says, held_by, beside=beside)


def borne(code: str, says: str = "", place: str = "step") -> Fault:
    """A rank does what costs nothing."""
    return Fault(itself(code, place), says, ends=False)


def at_the_end(code: str) -> Fault:
    """A rank does this after its last step, whatever strikes the training before."""
    return Fault(lambda training: training.tell(code, "end", later=True), ends=False)


def prepared(code: str, signum: signal.Signals) -> Strike:
    """A rank runs ``code``, goes on, and gets a signal a little later."""

    def strike(training: Training) -> None:
        before = training.ranks()
        number = training.tell(code)
        training.wait_for_steps(2)
        named = training.machines["n1"].processes()
        send(next(process for process in before if named.get(process) == f"rank {number}"), signum)

    return strike


_ENDED = r"ranks have parted ways|left|ended by sys\.exit"
_HANGS = RANK + r".*hung"
_RAISED = RANK + r".*raised "

ERRORS = {
    "exception": by_itself("raise ValueError('bad label 255')", _RAISED + "ValueError", beside=True),
    **{
        f"exception in the {place}": by_itself("raise ValueError('bad label 255')", _RAISED + "ValueError", place)
        for place in ("data set", "collate", "forward", "backward", "update", "scheduler", "evaluation")
    },
    "more memory than there is": by_itself("torch.empty(2**50)", _RAISED + "RuntimeError", beside=True),
    "a text by sys.exit": by_itself("sys.exit('no data')", RANK + r".*(left with exit code 1|no data)"),
    "KeyboardInterrupt is raised": by_itself("raise KeyboardInterrupt", RANK + r".*(130|KeyboardInterrupt)"),
    "sys.exit(3)": by_itself("sys.exit(3)", RANK + r".*left with exit code 3", beside=True),
    "sys.exit(0)": by_itself("sys.exit(0)", r"(?s)run failed: .*(ended by sys\.exit|left)"),
    **{
        f"os._exit({code})": by_itself(f"os._exit({code})", RANK + r".*left (early|with exit code)", beside=code == 5)
        for code in (0, 5, 74, 75, 137)
    },
    "break on one rank": by_itself("leaves = 'break'", r"(?s)run failed: .*parted ways"),
    "return on one rank": by_itself("leaves = 'return'", r"(?s)run failed: .*parted ways"),
    "os.abort": by_itself("os.abort()", killed_by(signal.SIGABRT), beside=True),
    "SIGSEGV in C": by_itself("ctypes.string_at(0)", killed_by(signal.SIGSEGV)),
    "SIGSEGV in C in a thread": by_itself(
        "threading.Thread(target=ctypes.string_at, args=(0,)).start(); time.sleep(60)", killed_by(signal.SIGSEGV)
    ),
    "files are closed": by_itself("os.closerange(3, 200)", "run failed: "),
    "stdin is read": by_itself("input()", _RAISED + "EOFError"),
    "an error whose text raises": by_itself(
        "class Bad(ValueError):\n    __str__ = None\nraise Bad", _RAISED + r"\S*Bad"
    ),
    "an error with 10 MB of text": by_itself("raise ValueError('x\\033[2J' * 2_000_000)", _RAISED + "ValueError"),
    "an error with what is no text": by_itself("raise ValueError('\\udcff\\0')", _RAISED + "ValueError"),
    "a group of errors": by_itself(
        "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", _RAISED + "ExceptionGroup"
    ),
    "an error while threads print": by_itself(
        "for _ in range(8):\n    threading.Thread(target=lambda: [print('x' * 99) for _ in range(3000)], daemon=True)"
        ".start()\nraise ValueError('bad label 255')",
        _RAISED + "ValueError",
    ),
}
HANGS = {
    "endless loop": by_itself("while True: pass", _HANGS),
    "deadlock": by_itself("gone.acquire(); gone.acquire()", _HANGS),
    "deadlock in a loader process": by_itself("gone.acquire(); gone.acquire()", _HANGS, "collate"),
    "a regular expression without an end": by_itself("import re; re.match('(a+)+$', 'a' * 64 + 'b')", _HANGS),
    "a wait in C": by_itself("import select; select.select([], [], [])", _HANGS),
    "an error whose handler hangs": by_itself(
        "try:\n    raise ValueError('bad label 255')\nfinally:\n    time.sleep(3600)", _HANGS
    ),
}
BORNE = {
    "an error in a thread": borne("threading.Thread(target=lambda: 1 / 0).start()"),
    "an error in __del__": borne("class Bad:\n    def __del__(self):\n        raise ValueError('at its end')\nBad()"),
    "stdout and stderr are closed": borne("os.close(1); os.close(2)"),
    "stdout is full": borne("os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost', flush=True)"),
    "20 MB of output": borne("print('x' * 20_000_000, flush=True)"),
    "output that is no text": borne("sys.stdout.buffer.write(bytes(range(256)) * 40)"),
    "a child that trains on": borne("os.fork()"),
    "another directory, no environment": borne("os.chdir('/'); os.environ.clear()"),
    "a rank is slow for 10 steps": borne("slow = time.sleep(1.5)"),
    "torch's random state": borne("torch.manual_seed(1)"),
    "handlers of its own, then kill -9": Fault(
        prepared("[signal.signal(one, signal.SIG_IGN) for one in (2, 15, 17)]", KILL), killed_by(KILL)
    ),
    "a child that holds stdout, then kill -9": Fault(
        prepared("import subprocess; subprocess.Popen(['sleep', '600'])", KILL), killed_by(KILL)
    ),
    "a child in a session of its own, then kill -9": Fault(
        # It outlives its rank, as docs/assumptions.md says, and holds nothing up.
        prepared("import subprocess; subprocess.Popen(['sleep', '5'], start_new_session=True)", KILL),
        killed_by(KILL),
    ),
    "os._exit(3) at its end": at_the_end("import atexit; atexit.register(os._exit, 3)"),
    "kill -9 at its end": at_the_end("os.kill(os.getpid(), 9)"),
    "an endless loop at its end": at_the_end("import atexit; atexit.register(lambda: time.sleep(3600))"),
}

_PARTED = r"(?s)run failed: .*ranks hold different values"
_FLIP = "{}.data.view(torch.int32).view(-1)[0] ^= 1 << {}"
_ADAM = "optimizer.state[network[0].weight]"


def flipped(code: str, says: str = _PARTED) -> Fault:
    """A rank holds something else than the others from now on; steps since the last checkpoint are not trusted."""
    return by_itself(code, says, held_by="disk")


NUMBERS = {
    "a bit of a parameter": flipped(_FLIP.format("network[0].weight", 20)),
    "a bit of a bias": flipped(_FLIP.format("network[4].bias", 22)),
    "a running mean of BatchNorm": by_itself(
        "network[1].running_mean[0] += 1", r"(?s)run failed: .*the buffer 1\.running_mean changed"
    ),
    "a bit of Adam's average": flipped(_FLIP.format(f"{_ADAM}['exp_avg']", 22)),
    "Adam's count of steps": flipped(f"{_ADAM}['step'] += 1"),
    "a count of BatchNorm": flipped(
        "network[1].num_batches_tracked += 1",
        r"(?s)run failed: .*(ranks hold different values|num_batches_tracked changed)",
    ),
    "the learning rate": flipped("optimizer.param_groups[0]['lr'] *= 2"),
    "eps of Adam": flipped("optimizer.param_groups[0]['eps'] = 1e-3"),
    "the scheduler's epoch": by_itself("scheduler.last_epoch += 7", r"(?s)run failed: .*its last_epoch is"),
    "a gradient that is not finite": by_itself(
        "spoils = float('nan')", r"(?s)run failed: .*NonFiniteError", "backward"
    ),
    "Dropout.p": flipped("network[3].p = 0.5"),
    "eval() of a module": flipped("network[1].eval()"),
    "eval() of the model": flipped("model.eval()"),
    "another number of threads": flipped("torch.set_num_threads(2)", r"(?s)run failed: .*set_num_threads"),
    "another default dtype": flipped("torch.set_default_dtype(torch.float64)", r"(?s)run failed: .*default_dtype"),
    "another precision of products": flipped(
        "torch.set_float32_matmul_precision('medium')", r"(?s)run failed: .*fp32_precision"
    ),
}

GROUPS = {
    "errors of a rank": one_machine(ERRORS),
    "hangs of a rank": one_machine(HANGS, most=6),
    "what is borne": one_machine(BORNE),
    "numbers of a rank": one_machine(NUMBERS, strategies=REPLICATED),
}
