"""What one rank's process does from start to end: set itself up, run the user's program, and record why it failed.

copy of the fork server ──┐
                          ├─►  become_rank  ─►  run_program  ─►  os._exit
python -m ... rank  ──────┘    log, signals     the user's code
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib.util
import io
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from lockstep.cpu_affinity import by_core, own_cpus
from lockstep.cpython_private import run_exit_handlers, set_temporary_directory, wait_for_threads
from lockstep.error_advice import add_advice
from lockstep.errors import LaunchError, PlanError, SettingError, UsageError
from lockstep.faults import FaultPlan
from lockstep.formatting import size
from lockstep.heartbeat import (
    HeartbeatSender,
    LostPeers,
    find_user_frame,
    open_channel,
    progress_marker,
    register_stacks,
    user_frame,
)
from lockstep.heartbeat_message import note_to_text
from lockstep.launch.diagnosis.error_record import (
    ExitCall,
    Failure,
    caught_before,
    strip_own_frames,
)
from lockstep.launch.host.child_process import die_with_parent, name_process
from lockstep.launch.host.machine import cpus_beside_gpus
from lockstep.launch.job.program_sources import mentions_lockstep
from lockstep.launch.job.request import Executable, Function, Module, Program, Script
from lockstep.launch.run_dir.owned_directory import note_process
from lockstep.launch.timeouts import EXIT_HANDLERS_S
from lockstep.launch.workers.log_stream import LogStream
from lockstep.launch_contract import (
    BIND,
    CHANNEL,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USAGE,
    FAILURE,
    FAULT_NOTES,
    FAULTS,
    RANK_FILES,
    RUN_DIR,
    STACKS,
    STOP_SIGNALS,
    TERMINAL,
)
from lockstep.script_end import closing

#: The environment variable that says where a rank of a `Function` leaves what the function returned.
RESULT = "LOCKSTEP_RESULT"
#: The environment variable that names the option by which the script is told its local rank.
LOCAL_RANK_OPTION = "LOCKSTEP_LOCAL_RANK_OPTION"
_KINDS: Mapping[str, type[Script | Module | Executable]] = {
    "script": Script,
    "module": Module,
    "executable": Executable,
}
_SPAWN: Final = "torch.multiprocessing.spawn"


def become_rank(env: Mapping[str, str], log: str, parent: int, program: Program, *, uses_run: bool) -> None:
    """Make this process the rank that ``env`` describes, tied to its parent's life and writing to its own log.

    If ``uses_run``, random generators begin the same on all ranks and every time; else differently on each.
    """
    die_with_parent(parent)
    for signum in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Signals that came meanwhile are delivered now.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A session of its own, which is also a group: the rank can be killed together with all that it starts, and given a
    # terminal. Where Linux shares CPUs out among sessions (sched_autogroup), all ranks of one session would get, beside
    # other programs, what a single process gets.
    with contextlib.suppress(OSError):
        os.setsid()
    terminal = env.get(TERMINAL, "")
    os.environ.clear()
    os.environ.update(env)
    if env.get(BIND) == "1" and hasattr(os, "sched_setaffinity"):
        cpus = by_core(os.sched_getaffinity(0))
        beside = cpus_beside_gpus(env.get("CUDA_VISIBLE_DEVICES"), max(cpus) + 1)
        os.sched_setaffinity(0, own_cpus(cpus, env, beside))
    name_process(f"rank {env['RANK']}")
    if terminal:
        _attach_to(terminal)
    else:
        _redirect_to(log, env.get(CHANNEL, ""))
    if isinstance(program, Executable):
        return  # which takes this process's place, and could not go on with anything that is begun here
    _seed_start() if uses_run else _reseed()
    _keep_temporary_files(env)
    if STACKS in env:
        # A full disk must not keep the rank from working.
        with contextlib.suppress(OSError):
            register_stacks(Path(env[STACKS]))
    channel = env.get(CHANNEL, "")
    sender = HeartbeatSender(int(env["RANK"]), open_channel(channel), progress_marker(), LostPeers(channel).look)
    sender.start()
    tell_exit_calls(env)
    atexit.register(sender.beat)  # what it took at most, also of a program that ends soon
    if terminal:
        announce_input(sender)
    refuse_nested_ranks()


def run_program(program: Program) -> NoReturn:
    """Run ``program`` as Python would and leave with its exit code; never returns.

    It leaves by `os._exit`, since threads of gloo and NCCL otherwise abort the process while the interpreter shuts
    down, and SIGABRT would hide the cause. Before that the program's own exit handlers run, and all that was written is
    flushed; after a failure for at most 5 s.
    """
    code, failed = EXIT_OK, True
    # The program may change its environment, and may copy its process: such a copy can end here, too, and is no rank.
    env, process = dict(os.environ), os.getpid()
    try:
        _inject_faults(env)
        with closing():  # closes a run that the script leaves open, after an error too: `run.setup.shutdown`
            entry_point(program)()
        failed = False
    except SystemExit as ending:
        code = _exit_code(ending)
        failed = code not in (EXIT_OK, EXIT_NOT_SAVED, EXIT_STOPPED)
        if (caught := caught_before(ending)) is not None:
            add_advice(caught, attached=TERMINAL in env)
        if os.getpid() == process:
            if failed or code == EXIT_NOT_SAVED:
                _write_record(ending, env)
            else:
                _tell(ending, env)
    except KeyboardInterrupt as error:
        # The user who interrupts a run knows why it ends.
        code = EXIT_INTERRUPTED
        file, line = user_frame(error)
        _print_error(f"interrupted at {Path(file).name}:{line}")
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends here
        add_advice(error, attached=TERMINAL in env)
        # Some settings can be checked only once the script has made its data set, such as the size of the world.
        code = EXIT_USAGE if isinstance(error, SettingError | PlanError) else EXIT_FAILED
        if os.getpid() == process:
            _write_record(error, env)
        if not (TERMINAL in env and code == EXIT_USAGE):  # which is no fault of the program's
            _show(error)
    _leave(code, patient=not failed)


def _inject_faults(env: Mapping[str, str]) -> None:
    if FAULTS in env:
        local, node = int(env["LOCAL_RANK"]), int(env["GROUP_RANK"])
        notes = Path(env[RUN_DIR], FAULT_NOTES)
        FaultPlan.parse(env[FAULTS]).arm(notes, rank=int(env["RANK"]), node_rank=node, local_rank=local)


def entry_point(program: Program) -> Callable[[], object]:
    """What runs ``program`` as Python would, in this process; its arguments are set."""
    match program:
        case Script(name, args):
            sys.argv = [name, *_local_rank(), *args]
            file = Path(name).absolute()
            if zipfile.is_zipfile(file) or file.is_dir():
                return lambda: runpy.run_path(str(file), run_name="__main__")
            sys.path.insert(0, str(file.resolve().parent))
            return lambda: _run_file(file)
        case Module(name, args):
            sys.argv = [name, *_local_rank(), *args]
            sys.path.insert(0, str(Path.cwd()))
            return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
        case Executable(name, args):
            return lambda: _execute(name, [*_local_rank(), *args])
        case Function(call, args):
            return lambda: _keep_result(call(*args))


def _local_rank() -> list[str]:
    option = os.environ.get(LOCAL_RANK_OPTION)
    return [f"{option}={os.environ['LOCAL_RANK']}"] if option else []


def _run_file(file: Path) -> None:
    """Run ``file`` as ``__main__``, and keep it there for exit handlers and pickles; `runpy` would remove it."""
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), main.__dict__)


def _execute(name: str, args: list[str]) -> NoReturn:
    """Go on as another program.

    Raises:
        LaunchError: if it cannot be started.
    """
    # Python ignores them, and what a process ignores its next program ignores, too.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(name, [name, *args])
    except OSError as error:
        raise LaunchError(f"{name} cannot be started: {error.strerror}") from error


def _keep_result(value: object) -> None:
    path = Path(os.environ[RESULT])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value))


def _exit_code(ending: SystemExit) -> int:
    """The exit code as Python takes it: none is success, a number is itself, and the rest is printed and a failure."""
    if ending.code is None:
        return EXIT_OK
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    _print_error(str(ending.code))
    return EXIT_FAILED


def _print_error(text: str) -> None:
    with contextlib.suppress(Exception):  # a stream of the program's own may do anything
        sys.stderr.write(f"{text}\n")


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of a stream of the program's own, which may have no such method
            stream.flush()


def _write_record(error: BaseException, env: Mapping[str, str]) -> None:
    """Write the failure record before the traceback, so that its reader knows where in the log that begins."""
    if FAILURE not in env:
        return
    _flush_streams()
    # First to the launcher itself: a file system that is full, gone or does not answer must not hide the error.
    record = _tell(error, env, gpu=_gpu())
    with contextlib.suppress(OSError):
        record.write(Path(env[FAILURE]))


def _tell(error: BaseException, env: Mapping[str, str], *, gpu: str = "") -> Failure:
    """Tell the launcher by what this rank ends: also by an exit that looks well, at which others may need it still."""
    error.with_traceback(strip_own_frames(error.__traceback__))
    record = Failure.of(
        error,
        rank=int(env.get("RANK", "0")),
        host=socket.gethostname(),
        now_s=time.monotonic(),
        log_bytes=_log_bytes(),
        gpu=gpu,
        cut_off=LostPeers(env.get(CHANNEL, "")).told(),
    )
    if (line := open_channel(env.get(CHANNEL, ""))) is not None:
        with contextlib.closing(line), contextlib.suppress(OSError):
            line.send(record.to_message())
    return record


def tell_exit_calls(env: Mapping[str, str]) -> None:
    """Have a call of `os._exit` in the program tell the launcher its line, since it raises nothing and prints nothing.

    Lockstep's own calls, and those of processes that the program has forked, tell nothing.
    """
    plain, process = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        # Whatever fails here, the process is to end.
        with contextlib.suppress(Exception):
            frame = sys._getframe(1)
            if os.getpid() == process and find_user_frame(frame)[0].file:
                _tell(ExitCall.at(frame, status), env)
        plain(status)

    os._exit = told


def _log_bytes() -> int:
    """Length of this rank's log; 0 if the program has closed both streams."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            return os.fstat(descriptor).st_size
    return 0


def _gpu() -> str:
    """How much memory of its GPU this rank has used; "" if the program has used none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    with contextlib.suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info()
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        others = total - free - held
        beside = f", {size(others)} held by others" if others > total // 50 else ""
        return f"peak {size(peak)} of {size(total)} on {torch.cuda.get_device_name()}{beside}"
    return ""


def _show(error: BaseException) -> None:
    """Print ``error`` by the program's own hook, if it was replaced, as Python would; and if that fails, as Python."""
    try:
        sys.excepthook(type(error), error, strip_own_frames(error.__traceback__))
    except BaseException as failed:  # noqa: BLE001 - the process ends with what the program has raised
        _print_error(f"Error in sys.excepthook:\n{_text(failed)}\nOriginal exception was:\n{_text(error)}")


def _text(error: BaseException) -> str:
    trace = strip_own_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace, chain=False))


def _leave(code: int, *, patient: bool) -> NoReturn:
    progress_marker().set_phase("exit")
    if not patient:
        last = threading.Timer(EXIT_HANDLERS_S, os._exit, (code,))
        last.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started where memory or their number is limited
            last.start()
    try:
        if patient:
            # What the interpreter does first at its end: wait for threads that are not daemons.
            wait_for_threads()
        run_exit_handlers()
    finally:
        _flush_streams()
        ctypes.CDLL(None).fflush(None)
        os._exit(code)


def _redirect_to(log: str, channel: str) -> None:
    nothing, missing = os.open(os.devnull, os.O_RDONLY), ""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # its streams try again; what the rank has to say about a failure is heard in another way, too
        file, missing = os.open(os.devnull, os.O_WRONLY), log
    for descriptor, standard in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, standard)
    for descriptor in {nothing, file} - {0, 1, 2}:
        os.close(descriptor)
    tell = partial(_tell_launcher, channel)
    _open_streams(*(LogStream(descriptor, missing, tell) for descriptor in (1, 2)))


def _tell_launcher(channel: str, note: str) -> None:
    """Have the launcher tell the user ``note``."""
    if (line := open_channel(channel)) is not None:
        with contextlib.closing(line), contextlib.suppress(OSError):
            line.send(note_to_text(note).encode())


def _attach_to(terminal: str) -> None:
    device = os.open(terminal, os.O_RDWR)  # and thereby the terminal of this session
    for standard in (0, 1, 2):
        os.dup2(device, standard)
    if device > 2:
        os.close(device)
    _open_streams(*(io.FileIO(descriptor, "w", closefd=False) for descriptor in (1, 2)))


def _open_streams(out: io.FileIO, err: io.FileIO) -> None:
    # Line by line, since somebody may be reading the log; the objects of a copied process may not be files at all.
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8", errors="surrogateescape"
    )
    sys.stdout = sys.__stdout__ = _text_to(out, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_to(err, "backslashreplace")  # type: ignore[misc]
    faulthandler.enable(sys.stderr)


def _text_to(raw: io.FileIO, errors: str) -> io.TextIOWrapper:
    # UTF-8 whatever the locale: it is our own file, and a batch job's locale is often C.
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True)


def announce_input(sender: HeartbeatSender) -> None:
    """Have `input`, which debuggers use, too, say that this rank waits for its user, before it does and afterwards."""
    plain = builtins.input

    def announced(prompt: object = "", /) -> str:
        before = progress_marker().set_phase("input")
        sender.beat()
        try:
            return plain(prompt)
        finally:
            progress_marker().set_phase(before)
            sender.beat()

    builtins.input = announced


def _keep_temporary_files(env: Mapping[str, str]) -> None:
    """Have multiprocessing put its sockets where the launcher removes them: a rank that is killed cannot."""
    if env.get(CHANNEL, "").startswith("/"):
        with contextlib.suppress(OSError):
            home = tempfile.mkdtemp(prefix=RANK_FILES, dir=Path(env[CHANNEL]).parent)
            set_temporary_directory(home)
        note_process(Path(env[CHANNEL]).parent)


def _seed_start() -> None:
    """Let what the program draws before it opens a `Run` be the same on all ranks, and every time."""
    # Late: it imports torch, which the fork server and every program with a `Run` have anyway.
    from lockstep.seeding import seed_generators, seed_of

    seed_generators(seed_of(0, "start"))


def _reseed() -> None:
    """Let unseeded generators differ between ranks, as they would between processes.

    Scripts of plain torch count on that, such as one whose ranks each choose their samples. Python's own generator does
    so by itself.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


def program_from(argv: list[str]) -> Program:
    """The program that `program_to_args` turned into arguments."""
    kind, name, *args = argv
    return _KINDS[kind](name, tuple(args))


def program_to_args(program: Script | Module | Executable) -> list[str]:
    """``program`` as arguments of a command; a list of processes then shows what is run."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(program, cls))
    return [kind, program.name, *program.args]


def main(argv: list[str]) -> NoReturn:
    """Be the rank that the environment describes: ``PARENT LOG script|module|executable NAME ARGS...``."""
    parent, log, *args = argv
    program = program_from(args)
    become_rank(dict(os.environ), log, int(parent), program, uses_run=mentions_lockstep(program))
    run_program(program)


def refuse_nested_ranks() -> None:
    """From now on `torch.multiprocessing.spawn` and `start_processes` raise `UsageError` in this process.

    Torch is not loaded for that; where it is not yet, this waits for it.
    """
    module = sys.modules.get(_SPAWN)
    if module is None:
        sys.meta_path.insert(0, _WhenLoaded())
        return
    _refuse(module)
    sys.modules["torch.multiprocessing"].start_processes = module.start_processes  # type: ignore[attr-defined]


def _refuse(module: ModuleType) -> None:
    def start_processes(fn: object, *args: object, **kwargs: object) -> NoReturn:
        name = getattr(fn, "__name__", "main")
        raise UsageError(
            "the script starts ranks of its own by torch.multiprocessing, and lockstep run has started this rank "
            f'already: call {name}(int(os.environ["LOCAL_RANK"]), ...) in its place, or start the script with python; '
            "processes that are no ranks: multiprocessing.get_context('spawn')"
        )

    module.start_processes = start_processes  # type: ignore[attr-defined]


class _WhenLoaded(MetaPathFinder, Loader):
    """Waits for the module and changes it once it is loaded."""

    def __init__(self) -> None:
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SPAWN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None, "find_spec came first"
        self._loader.exec_module(module)
        _refuse(module)
