"""How long the launcher waits for whom before it acts: all these times in one place, and which follows from which.

    a rank, by its heartbeats              `diagnosis`
      SILENT_S            2    four beats did not come: it is silent, and its process state says why
      ABSENT_S            1.5  the launcher itself stood still: for so long its clocks of ranks do not run
      STILL_S             1    it has not moved: other nodes are told where it is, before it is overdue
      HangTimeouts        30 in a step, 120 elsewhere: the ranks hang
      ELSEWHERE_S         3    ... and other nodes have not said where their ranks are: judged without them
      STACKS_S, WORKERS_S 1.5  ... and it has not written its stack: reported without it

    a process that all ranks need          `diagnosis.part_monitor`, `workers`
      PART_LOOKS          4    looks, one each PART_LOOK_EVERY_S, find it stopped: it is told to go on
                          8    ... and still: it is lost, and all ranks end
      ANSWER_S            2    the fork server owes an answer: the launcher signals and kills the ranks itself

    a rank that is to end                  `workers`
      EXIT_HANDLERS_S     5    after its error: the rank ends whatever its exit handlers do
      FAILED_S            15   after its error: it has failed, whether it ends or not
      --grace                  after SIGTERM: it is killed
      TO_LEAVE_S          0.75 before that: a silent one is killed, so that others can leave what they hold
      PEER_LOST_GRACE_S   3    the same, where the peers that it waits for are gone
      GONE_S, UNKILLABLE_S     after SIGKILL: it is not waited for any more

    a node, by its reports                 `rendezvous`; with lost_after=L, 30 unless given, see `NodeTimeouts`
      STARTED_AGAIN_S     2    its launcher may have been killed and started again
      suspect_after            5, at most L / 2: lost, if its ranks must be dead
      leave_after_s            L - 3, at least 3 L / 4: its ranks leave what they hold, where it hears nobody either
      lost_after               L: lost; by then it has ended its ranks, or its fork server has, if it stands still
      over_after_s             2 L + 2: another node may take over from the coordinator

The clocks on which they are measured are `Silence`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Generic, Self, TypeVar

from lockstep.heartbeat import BEAT_EVERY_S

Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class Silence(Generic[Said]):
    """What somebody has said last, and since when nothing else was heard, on the listener's own clock.

    It is never compared with the clock of another machine: whoever lives says something new, such as a higher number.
    """

    said: Said
    since_s: float = 0.0

    def after(self, said: Said, now_s: float) -> Self:
        """After ``said`` was heard; the same once more does not end the silence."""
        return self if said == self.said else replace(self, said=said, since_s=now_s)

    def restarted(self, now_s: float) -> Self:
        """As if what was said last had been heard now."""
        return replace(self, since_s=now_s)

    def for_s(self, now_s: float) -> float:
        """For how long it has lasted."""
        return max(0.0, now_s - self.since_s)


# ---- ranks, by their heartbeats --------------------------------------------------------------------------------------

#: A rank from which no heartbeat came for longer than this is silent.
SILENT_S: Final = 4 * BEAT_EVERY_S
#: After a longer pause of the listener itself, heartbeats that it missed meanwhile do not count against the ranks.
ABSENT_S: Final = 3 * BEAT_EVERY_S
#: Ranks that have stood still for so long may be about to hang, so that other nodes should know where they are.
STILL_S: Final = 2 * BEAT_EVERY_S
#: How long the launchers of other nodes may take to say where their ranks are.
ELSEWHERE_S: Final = 3 * STILL_S
#: How long all ranks together may take to write their stacks.
STACKS_S: Final = 1.5
#: How long all processes of their data loaders together may take, since the launcher's loop waits for them.
WORKERS_S: Final = 2.0

# ---- processes that all ranks need -----------------------------------------------------------------------------------

PART_LOOK_EVERY_S: Final = 0.5
#: Number of looks that find a process stopped before it gets SIGCONT, and again before it counts as failed.
PART_LOOKS: Final = 4
#: How long the fork server and the store may take to answer. An idle one does within milliseconds.
ANSWER_S: Final = 2.0

# ---- ranks that are to end -------------------------------------------------------------------------------------------

#: How long the exit handlers of a rank that failed may take: they may wait for ranks that are gone.
EXIT_HANDLERS_S: Final = 5.0
#: How long a rank that has told why it fails may take to end.
FAILED_S: Final = 3 * EXIT_HANDLERS_S
#: Grace for ranks whose peers are gone: enough to begin to leave what each of them holds, which has the whole grace.
PEER_LOST_GRACE_S: Final = 3.0
#: Of any grace, what is kept for ranks that wait for one that is stopped, to leave what they hold.
TO_LEAVE_S: Final = PEER_LOST_GRACE_S / 4
#: How long processes that were killed may take to be gone, where the launcher waits for them.
GONE_S: Final = 10.0
#: How long a killed rank may take to end. A large process takes seconds; one blocked in the kernel may never end.
UNKILLABLE_S: Final = 60.0

# ---- nodes, by their reports -----------------------------------------------------------------------------------------

#: How long a silent machine is waited for, and after how long it is suspected.
LOST_AFTER_S: Final = 30.0
SUSPECT_AFTER_S: Final = 5.0
#: A node that was silent for so long may have been killed, and started again.
STARTED_AGAIN_S: Final = 2.0
#: How long the coordinator stays after the job is over, so that the others read the last plan.
FAREWELL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class NodeTimeouts:
    """What follows from how long a silent node is waited for, in seconds."""

    lost_after_s: float = LOST_AFTER_S

    @property
    def every_s(self) -> float:
        """Between two beats of a lease, whoever keeps it, and between two looks at them."""
        return min(1.0, self.lost_after_s / 4)

    @property
    def suspect_after_s(self) -> float:
        """A node that is silent for so long may be lost, unless the user says otherwise."""
        return min(SUSPECT_AFTER_S, self.lost_after_s / 2)

    @property
    def leave_after_s(self) -> float:
        """A node that has not heard the coordinator for so long has its ranks leave what they hold."""
        return self.lost_after_s - min(PEER_LOST_GRACE_S, self.lost_after_s / 4)

    @property
    def over_after_s(self) -> float:
        """The same beat of a lease for so long means that no rank of its holder's world lives.

        Its own ranks end after `lost_after_s`; those of a node that heard it until then, after as long again.
        """
        return 2 * self.lost_after_s + 2.0
