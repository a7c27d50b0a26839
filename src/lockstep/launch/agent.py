"""The launcher's loop on one node: look after its ranks, tell the table, do what the plan says.

    crew  ── what fell, who hangs ──►  line  ══►  table  ══►  seats  ──► (chair) decide ──► plan
      ▲                                             ║                                        │
      └──── begin, end ──────────────────  plan  ◄══╝ ◄══════════════════════════════════════┘

Ranks are never fewer than asked for: a generation that loses one ends, and the next has them all. With several nodes
the same loop runs on each, and they decide alike, for one of them decides (see `rendezvous.membership`). A node that
hears nothing of the chair ends its ranks itself, before the others may go on without it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from lockstep.errors import LaunchError
from lockstep.launch.child_process import STOPS
from lockstep.launch.console import Screen
from lockstep.launch.diagnosis.root_cause import (
    RankExit,
    find_root_cause,
    format_failure,
    format_not_saved,
    format_traceback,
    has_failed,
)
from lockstep.launch.rendezvous.join import Joined
from lockstep.launch.rendezvous.membership import How, Minutes, Plan, Word, abandon, decide, missing, opened
from lockstep.launch.run_directory import note_generation, shown
from lockstep.launch.workers.worker_group import Crew, told_by
from lockstep.launch_contract import EXIT_FAILED, EXIT_STOPPED, STOP_FILE

_TICK_S = 0.1
#: How long the chair stays after all is over, for the others to hear of it.
_FAREWELL_S = 5.0


class Stops:
    """How urgently, and first with which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.times = 0  #: 1: save and stop, 2: stop now, 3: kill
        self.first: int | None = None

    def ask(self, signum: int) -> None:
        """Ask once more. Only a user at a terminal insists: a scheduler that warns and then asks wants the save."""
        if self.first is None or signum in (signal.SIGINT, signal.SIGQUIT):
            self.times += 1
        self.first = self.first or signum

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Count signals instead of dying of them; in a main thread only, as Python has it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, lambda signum, _: self.ask(signum)) for signum in STOPS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class Agent:
    """Carries out one job on this node; `run` is called once.

    Args:
        joined: this node's place in the job.
        crew: its ranks.
        screen: for the user.
        stops: signals that came.
    """

    def __init__(self, joined: Joined, crew: Crew, screen: Screen, stops: Stops) -> None:
        self._job, self._table, self._rules = joined.job, joined.table, joined.rules
        self._spot, self._inquire, line = joined.spot, joined.inquire, joined.line
        self._crew, self._screen, self._stops = crew, screen, stops
        self._line, self._chair = line, self._table.chair
        self._minutes: Minutes = opened(self._job.generation, time.monotonic())
        self._meeting: socket.socket | None = None
        self._words: tuple[Word, ...] | None = None  # that were shown
        self._cut_off_since_s: float | None = None
        #: The block that was shown last, "" if none was.
        self.last_words = ""

    def run(self) -> int:
        """Do what the plans say until it is over; returns the launcher's exit code.

        Raises:
            LaunchError: if ranks cannot be started or watched here any more. The other nodes are told.
        """
        try:
            code = self._until_over()
        except LaunchError as error:
            if self._table.chairs:
                self._table.publish(abandon(self._minutes, f"{self._line.host}: {error}").plan)
            raise
        finally:
            self._leave()
        self._farewell(code)
        return code

    def _until_over(self) -> int:
        while True:
            self._crew.look(_TICK_S if self._line.heeded else 0.0)
            self._look_for_stop_file()
            self._report()
            if self._table.chairs:
                self._decide()
            code = self._follow(self._table.plan())
            if code is not None and not self._crew.running:
                return code

    def _look_for_stop_file(self) -> None:
        # Ranks that use `Run` see it themselves; others are to stop too.
        file = self._job.run_dir / STOP_FILE
        if not self._stops.times and file.exists():
            self._screen.say(f"found {shown(file)}")
            self._stops.ask(signal.SIGTERM)

    def _report(self) -> None:
        crew = self._crew
        self._line = replace(
            self._line,
            generation=crew.generation,
            # Until how they ended can be told too.
            running=crew.running or (crew.generation >= 0 and not crew.endings),
            trouble=crew.trouble,
            hangs=crew.hangs,
            final=crew.final,
            stops=self._stops.times,
            stopped_by=self._stops.first or 0,
        )
        self._table.post(self._line, told_by(crew.endings))

    def _decide(self) -> None:
        while True:
            before = self._minutes.plan.phase
            self._minutes = decide(self._minutes, self._table.seats(), self._rules, time.monotonic(), self._tell)
            plan = self._minutes.plan
            if plan.phase == before:
                break
            # Another phase may follow at once: nobody has to wait for a restart.
            self._turn(plan)
        self._table.publish(plan)

    def _turn(self, plan: Plan) -> None:
        """The chair's deeds when a phase begins."""
        if plan.phase == "generation":
            hosts = [member.host for member in plan.members]
            note_generation(self._job, plan.generation, ranks=plan.ranks, hosts=hosts, now=datetime.now())
            place = "127.0.0.1" if self._rules.most == 1 else ""
            self._meeting = socket.create_server((place, 0), backlog=1024)
            self._minutes = replace(self._minutes, plan=replace(plan, port=self._meeting.getsockname()[1]))
        if self._minutes.missing:
            away = [self._inquire(host) for host in missing(self._table.seats(), self._rules)]
            words: tuple[Word, ...] = tuple(("fail", text) for text in away)
            self._minutes = replace(self._minutes, plan=replace(plan, words=(*plan.words, *words)))

    def _follow(self, plan: Plan) -> int | None:
        """Do what ``plan`` says; the exit code once that is known."""
        if self._table.chair != self._chair:
            # Another agent took the chair. Nothing that is left of the old one's generations counts.
            self._crew.end(How.KILL)
            if self._crew.running:
                return None
            self._crew.forget()
            self._chair = self._table.chair
        if (code := self._while_cut_off()) is not None:
            return code
        if self._cut_off_since_s is not None:
            return None
        self._show(plan)
        self._line = replace(self._line, heeded=plan.number)
        place = plan.place(self._line.seat) if plan.phase == "generation" else None
        if place is not None and plan.generation != self._crew.generation and not self._crew.running:
            with contextlib.ExitStack() as stack:
                meeting, self._meeting = self._meeting, None
                if meeting is not None:
                    stack.enter_context(meeting)
                self._crew.begin(plan, self._spot(plan, meeting))
        elif place is not None and plan.generation == self._crew.generation:
            self._crew.end(plan.how)
        elif self._crew.running:
            # Others go on, or will, without this node.
            self._crew.end(How.KILL)
        return plan.code if plan.phase == "over" else None

    def _while_cut_off(self) -> int | None:
        """End the ranks of a node that hears nothing of the chair, and give up in the end."""
        silent_s = self._table.silent_s()
        if silent_s < self._rules.lost_after_s:
            if self._cut_off_since_s is not None:
                self._screen.say("the other nodes are heard again")
                self._cut_off_since_s = None
            return None
        if self._cut_off_since_s is None:
            self._cut_off_since_s = time.monotonic()
            self._screen.say(
                f"cut off: nothing heard of the node that decides for {silent_s:.0f} s; "
                f"ending the ranks of {self._line.host}, and trying to come back"
            )
        self._crew.end(How.KILL)
        if self._stops.first is not None:
            return 128 + self._stops.first
        if time.monotonic() - self._cut_off_since_s < self._rules.join_timeout_s:
            return None
        self._fail(f"run failed: {self._line.host} was cut off from the other nodes and found no way back")
        return EXIT_FAILED

    def _tell(self, endings: Sequence[RankExit], ranks: int) -> Sequence[Word]:
        def log(rank: int) -> str:
            return shown(self._job.log(rank))

        if not any(map(has_failed, endings)):
            return [("fail", format_not_saved(endings, ranks=ranks, log=log, again=self._job.to_resume))]
        diagnosis = find_root_cause(endings)
        told = format_failure(diagnosis, ranks=ranks, log=log, shown=shown)
        trace = format_traceback(diagnosis.cause)
        traced: list[Word] = [("say", trace)] if trace else []
        return [*traced, ("fail", told)]

    def _show(self, plan: Plan) -> None:
        if self._words is None:
            # Of what happened before it came a node knows nothing.
            self._words = () if self._table.chairs else plan.words
        known = len(self._words) if plan.words[: len(self._words)] == self._words else 0
        for manner, text in plan.words[known:]:
            if manner == "fail":
                self._fail(text)
            else:
                self._screen.say(text)
        self._words = plan.words

    def _fail(self, text: str) -> None:
        self._screen.close()
        self.last_words = text
        self._screen.fail(text)

    def _leave(self) -> None:
        """Say that this node leaves; the chair is the last."""
        self._line = replace(self._line, leaving=True, running=False)
        self._table.post(self._line, told_by(self._crew.endings))
        end_s = time.monotonic() + _FAREWELL_S
        while self._table.chairs and time.monotonic() < end_s:
            others = [seat for seat in self._table.seats() if seat.line.seat != self._line.seat]
            if all(seat.gone(self._rules) for seat in others):
                break
            time.sleep(_TICK_S)
        self._table.close()

    def _farewell(self, code: int) -> None:
        self._screen.close()
        if self._stops.times:
            # It was heeded, and must not stop the next run too.
            with contextlib.suppress(OSError):
                (self._job.run_dir / STOP_FILE).unlink(missing_ok=True)
        if code == EXIT_STOPPED:
            self._screen.say(f"stopped with a complete checkpoint; to go on: {self._job.to_resume}")
        elif code - 128 in STOPS:
            name = signal.Signals(code - 128).name
            self._screen.say(f"stopped by {name}, without a checkpoint of this moment")
