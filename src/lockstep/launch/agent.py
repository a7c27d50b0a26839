"""The launcher's loop on one node: look after its ranks, report to the store, do what the plan says.

    worker group ── exits, hangs ──►  report  ══►  store  ══►  node views  ──► (coordinator) decide ──► plan
      ▲                                              ║                                                  │
      └──── start, stop ──────────────────  plan  ◄══╝ ◄════════════════════════════════════════════════┘

A generation that loses a rank ends, and the next one has all ranks again, without devices that computed wrongly and
nodes that may be missing. `_place`, `_listen` and `_probe` come from `rendezvous.join`. With
several nodes the same loop runs on each, and one of them decides for all (see `rendezvous.membership`). A node that
does not hear the coordinator ends its ranks itself, before the others may go on without it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.formatting import relative_path
from lockstep.launch.diagnosis.root_cause import (
    Diagnosis,
    RankExit,
    diagnose,
    format_diagnosis,
    format_traceback,
    has_failed,
)
from lockstep.launch.host.child_process import without_ignored_hangup
from lockstep.launch.host.timed_calls import FileThread, ScreenThread
from lockstep.launch.rendezvous.connection import Connection, next_connection
from lockstep.launch.rendezvous.join import Joined
from lockstep.launch.rendezvous.membership import decide, missing_hosts
from lockstep.launch.rendezvous.membership_state import MembershipState, abandon, announce, initial_state
from lockstep.launch.rendezvous.notices import Message, Notice
from lockstep.launch.rendezvous.plan import Plan, StopMode
from lockstep.launch.rendezvous.takeover import NewCoordinator
from lockstep.launch.run_dir.run_directory import note_generation
from lockstep.launch.timeouts import FAREWELL_S
from lockstep.launch.workers.rank_exits import without_repeated_tracebacks
from lockstep.launch.workers.worker_group import WorkerGroup
from lockstep.launch_contract import EXIT_FAILED, EXIT_STOPPED, RUN_FILE, STOP_FILE, STOP_SIGNALS
from lockstep.report import StatusFile

_TICK_S = 0.1
#: While there is no plan, each tick is longer than the one before by this.
_FIRST_TICK_S = 0.001
#: See `Agent`.
AfterFailure = Callable[[Sequence[RankExit], int], bool]


class Stops:
    """How urgently, and first with which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.times = 0  #: 1: save and stop, 2: stop now, 3: kill
        self.first: int | None = None
        self._first_s = float("inf")  # when that was
        #: All nodes are meant: by a user at a terminal, or by a file in the run directory. Others mean this node only.
        self.of_job = False

    def ask(self, signum: int, *, of_job: bool = False) -> None:
        """Ask once more. Only a user at a terminal insists: a scheduler that warns and then asks wants the save."""
        insists = signum in (signal.SIGINT, signal.SIGQUIT)
        if self.first is None or insists:
            self.times += 1
        if self.first is None:
            self.first, self._first_s = signum, time.monotonic()
        self.of_job |= insists or of_job

    def waited(self, grace_s: float) -> bool:
        """Whether somebody who asked has insisted, or waited for ``grace_s``."""
        return self.times > 1 or time.monotonic() - self._first_s >= grace_s

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Count signals instead of ending with them; in the main thread only, where Python allows it.

        SIGHUP stays ignored where it is: under ``nohup`` a run outlives its terminal. Blocked signals do not stay so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = without_ignored_hangup(STOP_SIGNALS)
        before = {signum: signal.signal(signum, lambda signum, _: self.ask(signum)) for signum in handled}
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for signum, handler in before.items():
                signal.signal(signum, handler)


class Agent:
    """Carries out one job on this node; `run` is called once.

    Args:
        joined: this node's part of the job.
        workers: its ranks.
        screen: for the user.
        stops: signals that came.
        files: reads and writes the run directory.
        after_failure: is told how the ranks of a generation ended that failed without having been stopped, and its
            number; returns whether another one may follow.
    """

    def __init__(
        self,
        joined: Joined,
        workers: WorkerGroup,
        screen: ScreenThread,
        stops: Stops,
        files: FileThread,
        after_failure: AfterFailure = lambda exits, generation: True,
    ) -> None:
        self._job, self._store, self._limits = joined.job, joined.store, joined.limits
        self._place, self._probe, self._listen, self._look_after = (
            joined.place,
            joined.probe,
            joined.listen,
            joined.look_after,
        )
        self._report, self._coordinator = joined.report, joined.store.coordinator
        self._workers, self._screen, self._stops, self._files = workers, screen, stops, files
        self._state: MembershipState = initial_state(self._job.generation, time.monotonic())
        self._listening: socket.socket | None = None  # for the store of the next generation
        self._refused = 0  # nodes of which it was announced that they do not take part
        self._shown: int | None = None  # how many notices were shown, or are older than this node's part
        self._watched = -1  # the newest generation of which this node was seen to be no member
        self._connection = Connection.CONNECTED
        self._cut_off_since_s = 0.0  # when this node was cut off last
        self._after_failure, self._failures_told = after_failure, -1  # the newest generation of which it was told
        #: The failure that was shown last, "" if there was none.
        self.last_failure = ""
        self._takeover, self._suspended = joined.takeover(files), False
        self._without_coordinator = joined.without_coordinator
        #: Whether this node leaves a job that goes on without it.
        self.released = False
        #: The coordinator that the job has now, if it is another one; `run` has then returned to be called anew.
        self.moved: NewCoordinator | None = None

    def run(self) -> int:
        """Do what the plans say until the job is over; returns the launcher's exit code.

        Raises:
            LaunchError: if ranks cannot be started or watched here any more. The other nodes are told.
        """
        try:
            code = self._until_over()
        except LaunchError as error:
            if self._store.is_coordinator:
                self._state = abandon(self._state, f"{self._report.host}: {error}")
                self._publish()
            raise
        finally:
            self._leave()
        if self.moved is None:
            code = self._code_if_saved(code)
            self._say_farewell(code)
        return code

    def _until_over(self) -> int:
        rounds = 0
        while True:
            # First: a node that was stopped may have been replaced, and its leader's log is another one's then.
            code = self._look_at_lease()
            # A first plan comes within milliseconds, or when other nodes have come, which may take hours.
            self._workers.poll(_TICK_S if self._report.plan_seen else min(_TICK_S, rounds * _FIRST_TICK_S))
            rounds += 1
            self._store.beat()
            self._look_after()
            self._check_stop_file()
            self._tell_failure()
            self._send_report()
            if code is None and not self._suspended:
                if self._store.is_coordinator:
                    self._decide()
                code = self._follow(self._store.plan())
            if code is not None and not self._workers.current.running:
                return code

    def _look_at_lease(self) -> int | None:
        """See whether this node may go on as what it is; returns an exit code when it may not, once its ranks ended."""
        match self._takeover.poll(self._store.silent_s(), running=self._workers.current.running):
            case NewCoordinator() as moved:
                if self.moved is None:
                    who = "this node" if moved.listening else moved.lease.host
                    self._screen.say(f"{who} is the coordinator now (term {moved.lease.term})")
                self.moved, self._suspended = moved, True
                self._workers.output.leave_log()
            case "suspend":
                if not self._suspended:
                    self._screen.say(
                        "the run directory cannot be written; ending the ranks, since others may take over"
                    )
                self._suspended = True
            case "go on":
                self._suspended = self.moved is not None
        if not self._suspended:
            return None
        self._workers.stop(StopMode.KILL)
        if self._stops.first is not None:
            self.moved = None
            return 128 + self._stops.first
        return EXIT_STOPPED if self.moved is not None else None

    def _check_stop_file(self) -> None:
        # Ranks that use `Run` see it themselves; others are to stop too.
        file = self._job.run_dir / STOP_FILE
        if not self._stops.times and self._files.ask(lambda: _is_in(file), False, of=file.parent):
            self._screen.say(f"found {relative_path(file)}")
            self._stops.ask(signal.SIGTERM, of_job=True)

    def _tell_failure(self) -> None:
        current = self._workers.current
        is_new = bool(current.endings) and current.number > self._failures_told
        if is_new and not self._stops.times and any(map(has_failed, current.endings)):
            self._failures_told = current.number
            if not self._after_failure(current.endings, current.number):
                self._workers.final = True

    def _send_report(self) -> None:
        workers, current = self._workers, self._workers.current
        lost_peer, own_cause = current.causes
        self._report = replace(
            self._report,
            ranks=workers.devices.can_start,
            generation=current.number,
            # Until it can be reported, too, how they ended.
            running=current.running or (current.number >= 0 and not current.endings),
            failed=current.failed(time.monotonic()),
            lost_peer=lost_peer,
            own_cause=own_cause,
            step=current.tracker.step,
            places=current.places if current.running else "",
            hangs=current.hangs,
            severed=current.severed,
            left=current.left,
            final=workers.final,
            stops=self._stops.times,
            stopped_by=self._stops.first or 0,
            stops_job=self._stops.of_job,
        )
        self._store.report(self._report, without_repeated_tracebacks(current.endings))
        if self._report.places:
            current.note_elsewhere(self._store.places())

    def _decide(self) -> None:
        """The coordinator's part: decide until the phase stays, since a restart has to wait for nothing else."""
        for said in self._store.refused()[self._refused :]:
            self._refused += 1
            self._state = announce(self._state, Message(f"a node says that it cannot take part: {said}"))
        while True:
            phase = self._state.plan.phase
            self._state = decide(self._state, self._store.nodes(), self._limits, time.monotonic())
            if self._state.plan.phase == phase:
                break
            self._begin_phase(self._state.plan)
        self._publish()

    def _begin_phase(self, plan: Plan) -> None:
        """What the coordinator does when a phase begins."""
        if plan.phase == "generation":
            hosts = [member.host for member in plan.members]
            self._files.ask(
                lambda: note_generation(self._job, plan.generation, ranks=plan.ranks, hosts=hosts, now=datetime.now()),
                None,
                of=self._job.run_dir / RUN_FILE,
                urgent=True,
            )
            self._listening = self._listen()
            self._state = replace(self._state, plan=replace(plan, port=self._listening.getsockname()[1]))
        if self._state.gave_up:
            reasons = self._probe(missing_hosts(self._store.nodes(), self._limits))
            self._state = announce(self._state, *(Message(reason, failure=True) for reason in reasons))

    def _publish(self) -> None:
        self._store.publish(self._state.plan, self._state.notices)

    def _follow(self, plan: Plan) -> int | None:
        """Do what ``plan`` says; returns the exit code once that is known."""
        if self._store.coordinator != self._coordinator:
            # Another agent is the coordinator now. What is left of the old one's generations does not count.
            self._workers.stop(StopMode.KILL)
            if self._workers.current.running:
                return None
            self._workers.forget()
            self._coordinator, self._shown = self._store.coordinator, 0
            plan = self._store.plan()
        if (code := self._see_connection(plan)) is not None:
            return code
        if self._connection is Connection.CUT_OFF:
            return None
        self._show(self._store.notices())
        self._report = replace(self._report, plan_seen=plan.number)
        member = plan.phase == "generation" and plan.node_rank(self._report.node_id) is not None
        if member and plan.generation != self._workers.current.number and not self._workers.current.running:
            self._start_ranks(plan)
        elif member and plan.generation == self._workers.current.number:
            self._workers.stop(plan.stop_mode, plan.stop_reason, plan.addresses_of(plan.lost))
        elif self._workers.current.running:
            # The others go on, or will do so, without this node.
            self._workers.stop(StopMode.KILL)
        if plan.phase == "over":
            return plan.code
        if plan.phase == "generation" and not member and plan.generation > self._watched:
            self._watched = plan.generation
            hosts = ", ".join(each.host for each in plan.members)
            self._screen.say(f"generation {plan.generation} runs on {hosts}; this node waits until it is needed")
        self.released = self._report.node_id in plan.released
        # A coordinator stays until all ranks of its generation have ended.
        may_go = not self._workers.current.running and not (self._store.is_coordinator and plan.phase == "generation")
        return self._code_when_released() if self.released and may_go else None

    def _code_when_released(self) -> int:
        """The exit code of a node that leaves a job which goes on."""
        endings, stopped_by = self._workers.current.endings, self._stops.first
        return diagnose(endings, stopped_by=stopped_by).code if endings else EXIT_STOPPED

    def _start_ranks(self, plan: Plan) -> None:
        with contextlib.ExitStack() as stack:
            listening, self._listening = self._listening, None
            if listening is not None:
                stack.enter_context(listening)
            self._workers.start(plan, self._place(plan, listening))

    def _see_connection(self, plan: Plan) -> int | None:
        """Do what the silence of the coordinator asks for; returns an exit code when this node gives up."""
        before, silent_s = self._connection, self._store.silent_s()
        self._connection = next_connection(before, silent_s, self._limits, holds_state=self._ranks_hold_state())
        match self._connection:
            case Connection.CONNECTED if before is not Connection.CONNECTED:
                self._screen.say("the connection to the other nodes is back")
            case Connection.WAITING | Connection.LEAVING:
                if before is Connection.CONNECTED:
                    self._screen.say(
                        f"nothing heard of the coordinator for {silent_s:.0f} s; waiting up to "
                        f"{self._limits.lost_after_s:g} s, while the ranks hold their connections"
                    )
                if self._connection is Connection.LEAVING:
                    self._workers.stop(StopMode.PEER_LOST, lost=plan.addresses_of({self._store.coordinator}))
            case Connection.CUT_OFF:
                if before is not Connection.CUT_OFF:
                    self._cut_off_since_s = time.monotonic()
                    self._screen.say(
                        f"cut off: nothing heard of the coordinator for {silent_s:.0f} s; "
                        f"ending the ranks of {self._report.host}, and trying to come back"
                        + (f"\n    {self._without_coordinator}" if self._without_coordinator else "")
                    )
                return self._while_cut_off()
        return None

    def _ranks_hold_state(self) -> bool:
        """Whether ranks run that did not fail by themselves, and whose save nobody has waited for long enough."""
        current = self._workers.current
        failed = current.failed(time.monotonic()) and self._connection is not Connection.LEAVING  # by which they fail
        return current.running and not failed and not self._stops.waited(self._job.request.grace_s)

    def _while_cut_off(self) -> int | None:
        self._workers.stop(StopMode.KILL)
        if self._stops.first is not None:
            return 128 + self._stops.first
        if time.monotonic() - self._cut_off_since_s < self._limits.join_timeout_s:
            return None
        self._fail(f"run failed: {self._report.host} was cut off from the other nodes and found no way back")
        return EXIT_FAILED

    def _show(self, notices: Sequence[Notice]) -> None:
        """Show each notice once; a node that joins a job that runs already shows none of those before."""
        if self._shown is None:
            self._shown = 0 if self._store.is_coordinator else len(notices)
        for notice in notices[self._shown :]:
            match notice:
                case Diagnosis():
                    self._show_diagnosis(notice)
                case Message(text, failure=True):
                    self._fail(text)
                case Message(text):
                    self._screen.say(text)
        self._shown = len(notices)

    def _show_diagnosis(self, diagnosis: Diagnosis) -> None:
        # The attached rank has printed its own.
        shows = diagnosis.cause is not None and diagnosis.cause.rank != self._workers.output.attached
        if shows and (traceback := format_traceback(diagnosis)):
            self._screen.say(traceback)

        def log(rank: int) -> str:
            return relative_path(self._job.log(rank))

        self._fail(format_diagnosis(diagnosis, log=log, shown=relative_path, again=self._job.to_resume))

    def _fail(self, text: str) -> None:
        self._screen.close()
        self.last_failure = text
        self._screen.fail(text)

    def _leave(self) -> None:
        """Report that this node leaves; the coordinator leaves last."""
        self._report = replace(self._report, leaving=True, running=False)
        self._store.report(self._report, without_repeated_tracebacks(self._workers.current.endings))
        end_s = time.monotonic() + FAREWELL_S
        if self.released:
            self._takeover.leave()
        stays = self._store.is_coordinator and self.moved is None and not self.released
        while stays and time.monotonic() < end_s:
            self._store.beat()
            others = [node for node in self._store.nodes() if node.report.node_id != self._report.node_id]
            if not any(node.present(self._limits) for node in others):
                break
            time.sleep(_TICK_S)
        self._store.close()

    def _code_if_saved(self, code: int) -> int:
        """``code``; or 75, if ranks were interrupted after a stop was asked for, and their last step is saved."""
        if self.released or self._stops.first is None or code - 128 not in STOP_SIGNALS:
            return code
        status = self._files.ask(lambda: StatusFile.read(self._job.status), None, of=self._job.status)
        is_saved = status is not None and status.last_saved_step == status.step >= self._workers.current.tracker.step
        return EXIT_STOPPED if is_saved else code

    def _say_farewell(self, code: int) -> None:
        self._screen.close()
        if self.released:
            saved = "with a complete checkpoint" if code == EXIT_STOPPED else "without a checkpoint of this moment"
            self._screen.say(f"left the job {saved}; the other nodes continue")
            return
        if self._stops.times:
            # The request was carried out, and must not stop the next run too.
            file = self._job.run_dir / STOP_FILE
            self._files.ask(lambda: file.unlink(missing_ok=True), None, of=file)
        if code == EXIT_STOPPED:
            self._screen.say(f"stopped with a complete checkpoint; to go on: {self._job.to_resume}")
        elif code - 128 in STOP_SIGNALS:
            name = "Ctrl-C" if code - 128 == signal.SIGINT else signal.Signals(code - 128).name
            self._screen.say(f"stopped by {name}, without a checkpoint of this moment")


def _is_in(file: Path) -> bool:
    """Whether ``file`` is in its directory.

    Raises:
        FileNotFoundError: if that directory is gone.
    """
    if file.exists():
        return True
    file.parent.stat()
    return False
