"""What the nodes of a job do next, decided from what each of them last said.

    each node:   its line  ──►  table  ──►  its seat                          the chair, one of the nodes:
                 the plan  ◄──  table  ◄──  decide(minutes, seats, now)  ──►  minutes, whose plan all follow

                  enough came                  all have ended
        gather  ──────────────►  generation  ──────────────────►  over: the same exit code on every node
           ▲                      │  how its ranks are to end: not yet, gently, hard, kill
           └──────────────────────┘  budget left

No clock, no socket, no process: all of it is a function of values. One machine is a council of one.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Literal, Self

from lockstep.launch.diagnosis.hang_report import format_ranks
from lockstep.launch.diagnosis.root_cause import RankExit, exit_code, has_failed
from lockstep.launch_contract import EXIT_FAILED, EXIT_KILLED, EXIT_NOT_SAVED, EXIT_OK, EXIT_STOPPED, EXIT_TIMEOUT

_FIRST_WORD_S = 3.0  #: of waiting, until it is said who is waited for; then at twice the time, and so on
_BACK_OFF_S = (1.0, 60.0)  #: pause after the first change of nodes, doubled with each up to the second
_SETTLED_S = 10.0  #: how long a generation runs undisturbed before it is stopped for newcomers

Phase = Literal["gather", "generation", "over"]
Manner = Literal["say", "fail"]
Word = tuple[Manner, str]
"""What every agent shows: by the way, or as the last block of a generation that failed."""
Tell = Callable[[Sequence[RankExit], int], Sequence[Word]]
"""What to show of a generation with these endings that failed or could not save, and of so many ranks."""


class How(IntEnum):
    """How ranks are to end; it only ever grows within a generation."""

    NOT = 0
    GENTLY = 1  #: TERM, and all the time they need to save
    NOW = 2  #: INT, and KILL after the grace: the user has no time for a checkpoint
    HARD = 3  #: TERM, and KILL after the grace: they have failed
    BROKEN = 4  #: as HARD with little grace: what they wait for is gone
    KILL = 5


@dataclass(frozen=True, slots=True)
class Rules:
    """What was asked for."""

    least: int = 1  #: nodes without which nothing runs
    most: int = 1
    max_restarts: int = 0  #: generations that may be started after failures
    max_changes: int = 0  #: generations that may be started after nodes were lost or came
    join_timeout_s: float = 600.0  #: how long ``least`` nodes are waited for
    lost_after_s: float = 5.0  #: a node that has said nothing for so long is lost
    last_call_s: float = 3.0  #: how long ``most`` nodes are waited for once ``least`` are there
    listen_s: float = 0.5  #: how long ranks may fall by themselves after the first, for the cause to be among them
    expected: tuple[str, ...] = ()  #: hosts, where an allocation tells them


@dataclass(frozen=True, slots=True)
class Line:
    """What one node says of itself."""

    seat: str  #: unique, one for each agent
    host: str
    ranks: int  #: that it can start
    address: str = ""  #: by which other nodes can reach it
    generation: int = -1  #: that its ranks are of, or were
    running: bool = False  #: some of its ranks live
    trouble: bool = False  #: a rank of this generation fell badly
    hangs: bool = False  #: its ranks do not get on, and are to be ended
    final: bool = False  #: nothing is to be started after this generation
    stops: int = 0  #: how often it was asked to stop
    stopped_by: int = 0  #: the first signal that did
    leaving: bool = False
    heeded: int = 0  #: number of the last plan it has seen


@dataclass(frozen=True, slots=True)
class Seat:
    """A node, as the chair sees it."""

    line: Line
    silent_s: float = 0.0  #: since it last said anything
    endings: tuple[RankExit, ...] = ()  #: of its ranks of ``line.generation``, once they have all ended

    def gone(self, rules: Rules) -> bool:
        """Whether it counts as lost."""
        return self.line.leaving or self.silent_s >= rules.lost_after_s


@dataclass(frozen=True, slots=True)
class Member:
    """A node of one generation."""

    seat: str
    host: str
    ranks: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every node does."""

    number: int = 0  #: grows with every change
    phase: Phase = "gather"
    generation: int = 0  #: the one that runs, or the next
    restart: int = 0  #: generations of this job before it, since it was started
    how: How = How.NOT
    members: tuple[Member, ...] = ()  #: in the order of their ranks
    port: int = 0  #: where the ranks meet
    code: int = 0  #: of all agents, once it is over
    words: tuple[Word, ...] = ()  #: all that was to be said so far

    @property
    def ranks(self) -> int:
        """Of all members."""
        return sum(member.ranks for member in self.members)

    def place(self, seat: str) -> int | None:
        """The node rank of ``seat``; None if it has none in this generation."""
        return next((place for place, member in enumerate(self.members) if member.seat == seat), None)

    def first_rank(self, place: int) -> int:
        """Of the node at ``place``."""
        return sum(member.ranks for member in self.members[:place])

    def to_json(self) -> str:
        """For a table."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` gave."""
        told = json.loads(text)
        members = tuple(Member(**member) for member in told["members"])
        words = tuple((manner, text) for manner, text in told["words"])
        return cls(**{**told, "how": How(told["how"]), "members": members, "words": words})


@dataclass(frozen=True, slots=True)
class Minutes:
    """What the chair remembers: the plan, and why it is so."""

    plan: Plan = field(default_factory=Plan)
    since_s: float = 0.0  #: when this phase began
    enough_since_s: float | None = None  #: when the last call began
    not_before_s: float = 0.0  #: back-off
    waited_words: int = 0  #: how often it was said who is waited for
    trouble_since_s: float | None = None
    growing: bool = False  #: the generation is stopped for newcomers
    lost: tuple[str, ...] = ()  #: seats of members that were lost
    failures: int = 0  #: restarts that failures have cost
    changes: int = 0  #: restarts that changes of nodes have cost
    missing: bool = False  #: it is over because too few nodes came


def opened(generation: int, now_s: float) -> Minutes:
    """Before anything was decided; ``generation`` will be the first."""
    return Minutes(Plan(generation=generation), since_s=now_s)


def decide(minutes: Minutes, seats: Sequence[Seat], rules: Rules, now_s: float, tell: Tell) -> Minutes:
    """What is to be done now.

    Args:
        minutes: what this function returned last; `opened` at the beginning.
        seats: all nodes that ever came, in the order of their coming; the chair is the first.
        rules: what was asked for.
        now_s: on the chair's clock.
        tell: puts a failure into words.
    """
    match minutes.plan.phase:
        case "gather":
            return _gather(minutes, seats, rules, now_s)
        case "generation":
            return _see_it_through(minutes, seats, rules, now_s, tell)
        case "over":
            return minutes


def abandon(minutes: Minutes, why: str) -> Minutes:
    """It is over, for a reason outside of the council."""
    return _over(_say(minutes, ("fail", f"run failed: {why}")), EXIT_FAILED)


def _gather(minutes: Minutes, seats: Sequence[Seat], rules: Rules, now_s: float) -> Minutes:
    if (asked := _first_stop(seats)) is not None:
        return _over(minutes, 128 + asked, f"stopped by {_signal_name(asked)} while waiting for nodes")
    here = [seat for seat in seats if not seat.gone(rules) and not seat.line.running]
    if len(here) >= rules.least:
        enough = now_s if minutes.enough_since_s is None else minutes.enough_since_s
        ready_s = enough if len(here) >= rules.most else enough + rules.last_call_s
        if now_s >= max(ready_s, minutes.not_before_s):
            return _begin(minutes, here[: rules.most], rules, now_s)
        return replace(minutes, enough_since_s=enough)
    minutes = replace(minutes, enough_since_s=None)
    waited_s = now_s - minutes.since_s
    if waited_s >= rules.join_timeout_s:
        return replace(_over(minutes, EXIT_TIMEOUT, _waiting(here, rules, waited_s, "gave up waiting")), missing=True)
    if waited_s >= _FIRST_WORD_S * 2**minutes.waited_words:
        minutes = replace(minutes, waited_words=minutes.waited_words + 1)
        return _say(minutes, ("say", _waiting(here, rules, waited_s, "waiting")))
    return minutes


def missing(seats: Iterable[Seat], rules: Rules) -> tuple[str, ...]:
    """Hosts that are expected and not there."""
    here = {_short(seat.line.host) for seat in seats if not seat.gone(rules)}
    return tuple(host for host in rules.expected if _short(host) not in here)


def _waiting(here: Sequence[Seat], rules: Rules, waited_s: float, does: str) -> str:
    wanted = rules.least - len(here)
    hosts = ", ".join(seat.line.host for seat in here)
    away = missing(here, rules)
    named_away = f"; still missing: {', '.join(away)}" if away else ""
    of = f"{rules.least} node{'s' * (rules.least > 1)}"
    return f"{does} for {wanted} of {of}: here {hosts}{named_away} ({waited_s:.0f} s)"


def _begin(minutes: Minutes, here: Sequence[Seat], rules: Rules, now_s: float) -> Minutes:
    members = tuple(Member(s.line.seat, s.line.host, s.line.ranks, s.line.address) for s in here)
    plan = replace(
        minutes.plan, number=minutes.plan.number + 1, phase="generation", members=members, how=How.NOT, port=0
    )
    minutes = replace(minutes, plan=plan, since_s=now_s, trouble_since_s=None, growing=False, lost=())
    if rules.most == 1:
        return minutes
    fewer = f" of at most {rules.most}" if len(members) < rules.most else ""
    hosts = ", ".join(f"{member.host} ({member.ranks})" for member in members)
    words = f"generation {plan.generation}: {plan.ranks} ranks on {len(members)}{fewer} nodes: {hosts}"
    return _say(minutes, ("say", words))


def _see_it_through(minutes: Minutes, seats: Sequence[Seat], rules: Rules, now_s: float, tell: Tell) -> Minutes:
    plan = minutes.plan
    by_name = {seat.line.seat: seat for seat in seats}
    own = [by_name[member.seat] for member in plan.members if member.seat in by_name]
    gone = {member.seat for member in plan.members if member.seat not in by_name}
    done = {seat.line.seat for seat in own if seat.line.generation == plan.generation and seat.endings}
    if plan.how is How.NOT:
        # A node that ended its ranks unasked was cut off, for a moment that was just short enough not to be seen here.
        gone |= {s.line.seat for s in own if s.line.seat in done and any(e.ended_by_us for e in s.endings)}
    # What has ended and told so is not missed any more.
    gone |= {seat.line.seat for seat in own if seat.gone(rules) and seat.line.seat not in done}
    if new := sorted(gone - set(minutes.lost)):
        minutes = replace(minutes, lost=(*minutes.lost, *new))
    if {member.seat for member in plan.members} <= done | set(minutes.lost):
        endings = [ending for seat in own if seat.line.seat in done for ending in seat.endings]
        return _judge(minutes, endings, seats, rules, now_s, tell)
    if minutes.trouble_since_s is None and any(s.line.trouble and s.line.generation == plan.generation for s in own):
        minutes = replace(minutes, trouble_since_s=now_s)
    stops = max((seat.line.stops for seat in seats if not seat.gone(rules)), default=0)
    if stops > 2:
        return _end(minutes, How.KILL, "killing all ranks")
    if any(seat.line.hangs and seat.line.generation == plan.generation for seat in own):
        # Nobody who is asked would hear it: they wait for each other.
        return _end(minutes, How.KILL)
    if minutes.lost:
        return _end(
            minutes, How.BROKEN, f"{_lost(minutes)}: nothing heard for {rules.lost_after_s:g} s; ending all ranks"
        )
    if minutes.trouble_since_s is not None and now_s >= minutes.trouble_since_s + rules.listen_s:
        return _end(minutes, How.HARD)
    if stops > 1:
        return _end(minutes, How.NOW, "stopping now, without another checkpoint; Ctrl-C once more kills all ranks")
    if stops:
        return _end(
            minutes, How.GENTLY, "stopping: waiting for the ranks to save and leave; Ctrl-C now: without saving"
        )
    if newcomers := _newcomers(minutes, seats, rules, now_s):
        minutes = replace(minutes, growing=True)
        hosts = ", ".join(seat.line.host for seat in newcomers)
        return _end(minutes, How.GENTLY, f"{hosts} came: stopping at a checkpoint, to go on with more nodes")
    return minutes


def _newcomers(minutes: Minutes, seats: Sequence[Seat], rules: Rules, now_s: float) -> list[Seat]:
    """Nodes for whom the generation should be stopped now."""
    room = rules.most - len(minutes.plan.members)
    if not room or minutes.changes >= rules.max_changes or minutes.plan.how is not How.NOT:
        return []
    if now_s < minutes.since_s + max(_SETTLED_S, _back_off_s(minutes.changes)):
        return []
    members = {member.seat for member in minutes.plan.members}
    return [s for s in seats if s.line.seat not in members and not s.gone(rules) and not s.line.running][:room]


def _judge(
    minutes: Minutes, endings: Sequence[RankExit], seats: Sequence[Seat], rules: Rules, now_s: float, tell: Tell
) -> Minutes:
    plan = minutes.plan
    asked = _first_stop(seats)
    failed = [ending for ending in endings if has_failed(ending)]
    if minutes.lost and not any(not ending.collateral for ending in failed):
        return _after_a_loss(minutes, asked, rules, now_s)
    at_its_end = {ending.status for ending in endings} <= {EXIT_OK, EXIT_NOT_SAVED}
    if minutes.growing and asked is None and not failed and not at_its_end:
        return _again(minutes, rules, now_s, changes=1)
    code = exit_code(endings, stopped_by=asked)
    ends_badly = failed and code not in (EXIT_OK, EXIT_STOPPED) and (asked is None or code != 128 + asked)
    if ends_badly or code == EXIT_NOT_SAVED:
        minutes = _say(minutes, *tell(endings, plan.ranks))
    # A usage error is the same again the next time.
    spent = minutes.failures >= rules.max_restarts or any(seat.line.final for seat in seats)
    if code not in (EXIT_FAILED, EXIT_KILLED) or asked is not None or spent:
        return _over(minutes, code)
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    who = f"all {ranks}" if rules.most == 1 else "all ranks"
    return _again(
        minutes,
        rules,
        now_s,
        f"restarting {who} as generation {plan.generation + 1} (restart {minutes.failures + 1} of "
        f"{rules.max_restarts}), from the newest checkpoint if there is one",
        failures=1,
    )


def _after_a_loss(minutes: Minutes, asked: int | None, rules: Rules, now_s: float) -> Minutes:
    plan = minutes.plan
    said = f"{_lost(minutes)}: it died, or the network does not carry its word any more"
    if asked is not None:
        return _over(minutes, 128 + asked, said)
    if minutes.changes < rules.max_changes:
        return _again(
            minutes,
            rules,
            now_s,
            f"{_lost(minutes)}; going on as generation {plan.generation + 1} with {_how_many(rules)} "
            f"(change {minutes.changes + 1} of at most {rules.max_changes})",
            changes=1,
        )
    spent = (
        f"{rules.max_changes} changes of nodes are spent"
        if rules.max_changes
        else "a job of a fixed number of nodes goes on without --max-restarts only with all of them"
    )
    return _over(_say(minutes, ("fail", f"run failed: {said}\n    {spent}")), EXIT_FAILED)


def _lost(minutes: Minutes) -> str:
    plan = minutes.plan
    words = []
    for place, member in enumerate(plan.members):
        if member.seat in minutes.lost:
            first = plan.first_rank(place)
            words.append(f"{member.host} ({format_ranks(range(first, first + member.ranks))} of {plan.ranks})")
    return f"lost node{'s' * (len(words) > 1)} {', '.join(words)}"


def _how_many(rules: Rules) -> str:
    return f"{rules.least} nodes" if rules.least == rules.most else f"{rules.least} to {rules.most} nodes"


def _again(
    minutes: Minutes, rules: Rules, now_s: float, words: str = "", *, failures: int = 0, changes: int = 0
) -> Minutes:
    """Gather for the next generation."""
    plan = minutes.plan
    # Not only against a node that comes and goes: one that was cut off may need a moment to end its ranks.
    pause_s = _back_off_s(minutes.changes) if changes or minutes.lost else 0.0
    said = _say(minutes, ("say", words)) if words else minutes
    return replace(
        said,
        plan=replace(
            said.plan,
            number=plan.number + 1,
            phase="gather",
            generation=plan.generation + 1,
            restart=plan.restart + 1,
            members=(),
            how=How.NOT,
        ),
        since_s=now_s,
        enough_since_s=None,
        not_before_s=now_s + pause_s,
        waited_words=0,
        failures=minutes.failures + failures,
        changes=minutes.changes + changes,
    )


def _over(minutes: Minutes, code: int, words: str = "") -> Minutes:
    said = _say(minutes, ("say", words)) if words else minutes
    return replace(said, plan=replace(said.plan, number=said.plan.number + 1, phase="over", code=code))


def _end(minutes: Minutes, how: How, words: str = "") -> Minutes:
    plan = minutes.plan
    if how <= plan.how:
        return minutes
    said = _say(minutes, ("say", words)) if words else minutes
    return replace(said, plan=replace(said.plan, number=plan.number + 1, how=how))


def _say(minutes: Minutes, *words: Word) -> Minutes:
    plan = minutes.plan
    return replace(minutes, plan=replace(plan, number=plan.number + 1, words=(*plan.words, *words)))


def _first_stop(seats: Iterable[Seat]) -> int | None:
    return next((seat.line.stopped_by for seat in seats if seat.line.stops), None)


def _back_off_s(changes: int) -> float:
    first_s, longest_s = _BACK_OFF_S
    return min(longest_s, first_s * 2.0**changes)


def _signal_name(signum: int) -> str:
    return signal.Signals(signum).name


def _short(host: str) -> str:
    return host.partition(".")[0]
