"""Laws of what the coordinator decides, on nodes that exist only as values: they die, are cut off, fail, come back."""

import signal
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import Diagnosis, RankExit
from lockstep.launch.rendezvous.membership import decide, lost_members, missing_hosts
from lockstep.launch.rendezvous.membership_state import MembershipState, initial_state
from lockstep.launch.rendezvous.notices import Message, notice_from_json, notice_to_json
from lockstep.launch.rendezvous.plan import ElasticLimits, Member, NodeReport, NodeView, Plan, StopMode

TICK_S = 0.25
LOST_PEER = Failure(0, "n", "PeerLost", "gone", "", 0, "", "", True, 0.0, 0)
CANNOT_START = {
    name: Failure(0, "n", f"lockstep.errors.{name}", "away", "", 0, "", "", False, 0.0, 0)
    for name in ("RendezvousError", "UnreadableCheckpoint")
}
LEFT_WITH_3 = Failure(0, "n", "SystemExit", "3", "", 0, "", "", False, 0.0, 0)


def ready(*node_ranks, silent_s=0.0):
    """Nodes that have joined in this order, each with the number that its user gave it."""
    return [NodeView(NodeReport(f"id{i}", f"n{i}", 1, node_rank=n), silent_s) for i, n in enumerate(node_ranks)]


@pytest.mark.parametrize(
    ("node_ranks", "order"),
    [((None, None, None), "012"), ((0, 2, 1), "021"), ((0, 3, 1, 2), "0231"), ((None, None, 1), "021")],
)
def test_nodes_have_the_numbers_that_their_user_gave_them(node_ranks, order):
    limits = ElasticLimits(min_nodes=len(node_ranks), max_nodes=len(node_ranks))
    plan = decide(initial_state(0, 0.0), ready(*node_ranks), limits, 0.0).plan
    assert plan.phase == "generation"
    assert "".join(member.host[1:] for member in plan.members) == order


def test_a_number_given_twice_is_refused_with_the_names_of_both():
    limits = ElasticLimits(min_nodes=3, max_nodes=3)
    state = decide(initial_state(0, 0.0), ready(0, 1, 1), limits, 0.0)
    assert (state.plan.phase, state.plan.code) == ("over", 1)
    assert "n1, n2 all have --node-rank 1; give each its own" in state.notices[-1].text
    came_back = [*ready(0, 1, silent_s=3.0), *ready(0, 1, 1)[2:]]
    assert decide(initial_state(0, 0.0), came_back, limits, 0.0).plan.phase != "over", "the one before was killed"


@dataclass
class Node:
    """One machine with its agent, which decides little by itself and follows the plan."""

    name: str
    report: NodeReport
    alive: bool = True
    linked: bool = True
    said_s: float = 0.0
    heard_s: float = 0.0
    plan: Plan = field(default_factory=Plan)
    slow: int = 0  # ticks until it reacts
    asked_for: int = 0  # ticks since its ranks were asked to end
    closed: int = -1  # the generation in which the connections of its ranks were closed, so that others notice
    broken_for: int = 0  # ticks since another one's were
    endings: tuple = ()
    will: int | None = None  # how its ranks end by themselves
    told: tuple = ()  # its report and its endings, as it wrote them last

    def live(self, now_s, plan, limits):
        """One tick of an agent; as the real one, it knows of the coordinator only what arrives."""
        if self.linked:
            self.plan, self.heard_s = plan, now_s
        # Some nodes are slower than others to see something and to end their ranks.
        nothing_to_keep = self.report.failed or self.report.stops > 1
        patience_s = limits.suspect_after_s if nothing_to_keep else limits.lost_after_s
        cut_off = now_s - self.heard_s >= patience_s + self.slow * TICK_S
        self.asked_for = self.asked_for + 1 if self.plan.stop_mode > StopMode.NONE else 0
        if self.report.running:
            if (
                cut_off
                or self.plan.node_rank(self.report.node_id) is None
                or self.plan.generation != self.report.generation
            ):
                self.end(-signal.SIGKILL, now_s, by_us=True)
            elif self.will is not None:
                self.end(self.will, now_s, by_us=False)
            elif self.asked_for <= self.slow:
                pass
            elif self.plan.stop_mode is StopMode.GRACEFUL:
                self.end(75, now_s, by_us=True)
            elif self.plan.stop_mode > StopMode.NONE:
                self.end(-signal.SIGTERM, now_s, by_us=True)
        elif self.report.node_id in self.plan.released:
            self.report = replace(self.report, leaving=True)
        elif (
            not cut_off
            and self.plan.phase == "generation"
            and self.plan.node_rank(self.report.node_id) is not None
            and self.report.generation != self.plan.generation
        ):
            self.report = replace(
                self.report,
                generation=self.plan.generation,
                running=True,
                failed=False,
                lost_peer=False,
                own_cause=False,
            )
            self.endings, self.will, self.broken_for = (), None, 0

    def feel(self, others):
        """Ranks whose connection to another one breaks fail, and say so; a network that is cut tells nobody."""
        generation = self.report.generation
        if self.linked and any(other.closed == generation and other.linked for other in others):
            self.broken_for += 1
        if self.broken_for > self.slow and self.report.running and self.will is None:
            self.end(1, 0.0, by_us=False, lost_peer=True)

    def end(self, status, now_s, *, by_us, lost_peer=False):
        failure = LOST_PEER if lost_peer else LEFT_WITH_3 if status == 3 else None
        self.endings = (RankExit(0, status, now_s, ended_by_us=by_us, failure=failure),)
        failed = not by_us and status not in (0, 74, 75)
        self.report = replace(
            self.report, running=False, failed=failed, lost_peer=lost_peer, own_cause=failed and not lost_peer
        )
        self.close()

    def close(self):
        if self.linked:
            self.closed = self.report.generation

    def ask(self):
        """A scheduler wants this node back."""
        self.report = replace(self.report, stops=1, stopped_by=signal.SIGTERM)

    def die(self):
        self.close()
        self.lose_power()

    def lose_power(self):
        self.alive = False
        self.report = replace(self.report, running=False)


@dataclass
class World:
    limits: ElasticLimits
    now_s: float = 100.0
    state: MembershipState = field(default_factory=lambda: initial_state(0, 100.0))
    nodes: list = field(default_factory=list)
    began: list = field(default_factory=list)

    def come(self):
        number = len(self.nodes)
        self.nodes.append(
            Node(
                f"n{number}",
                NodeReport(f"s{number}", f"n{number}", 2),
                said_s=self.now_s,
                heard_s=self.now_s,
                slow=(number + 2) % 3,
            )
        )

    def views(self):
        for node in self.nodes:
            if (node.alive and node.linked) or not node.told:
                node.told = node.report, node.endings
        return [NodeView(report, self.now_s - n.said_s, endings) for n in self.nodes for report, endings in [n.told]]

    def tick(self):
        self.now_s += TICK_S
        for node in self.nodes:
            if node.alive:
                node.live(self.now_s, self.state.plan, self.limits)
        for node in self.nodes:
            if node.alive:
                node.feel([other for other in self.nodes if other is not node])
            if node.alive and node.linked:
                node.said_s = self.now_s
        views, before = self.views(), self.state
        self.state = decide(before, views, self.limits, self.now_s)
        assert self.state == decide(before, views, self.limits, self.now_s)
        self.obey_the_laws(before, self.state)

    def obey_the_laws(self, before, after):
        assert after.plan.number >= before.plan.number
        assert (after.plan == before.plan) == (after.plan.number == before.plan.number)
        assert after.notices[: len(before.notices)] == before.notices
        assert after.plan.notices == len(after.notices)
        assert after.notices[-2:-1] != after.notices[-1:] or not after.notices, "nothing is said twice in a row"
        for notice in after.notices[len(before.notices) :]:
            assert notice_from_json(notice_to_json(notice)) == notice
        assert after.failures <= self.limits.max_restarts
        assert after.changes <= self.limits.max_changes
        assert Plan.from_text(after.plan.to_text()) == after.plan
        if before.plan.phase == "over":
            assert after == before
        if after.plan.generation == before.plan.generation and before.plan.phase == "generation":
            assert after.plan.stop_mode >= before.plan.stop_mode
            assert after.plan.members == before.plan.members
        if before.plan.phase == "gather" and after.plan.phase == "generation":
            self.began.append(after.plan.generation)
            assert self.began == list(range(len(self.began)))
            ids = [member.node_id for member in after.plan.members]
            assert len(set(ids)) == len(ids)
            assert self.limits.min_nodes <= len(ids) <= self.limits.max_nodes
            assert not [node.name for node in self.nodes if node.alive and node.report.running], "two worlds at once"
            assert ids[0] == "s0", "the coordinator's ranks come first: only they commit"
            for node in self.nodes:
                assert node.report.node_id not in ids or self.now_s - node.said_s < self.limits.suspect_after_s
            assert not set(ids) & set(after.plan.released), "a node that was let go has left"

    def until(self, done, within_s=500.0):
        end_s = self.now_s + within_s
        while not done():
            assert self.now_s < end_s, f"stuck in {self.state}"
            self.tick()

    @property
    def plan(self):
        return self.state.plan

    @property
    def said(self):
        return "\n".join(notice.text for notice in self.state.notices if isinstance(notice, Message))

    @property
    def failures(self):
        return [n for n in self.state.notices if isinstance(n, Diagnosis) or n.failure]

    def running(self):
        members = {member.node_id for member in self.plan.members}
        own = [node for node in self.nodes if node.report.node_id in members]
        return self.plan.phase == "generation" and all(n.report.running and n.alive and n.linked for n in own)


def world(nodes, min_nodes, max_nodes=None, **limits):
    made = World(ElasticLimits(min_nodes=min_nodes, max_nodes=max_nodes or min_nodes, **limits))
    for _ in range(nodes):
        made.come()
    return made


events = st.one_of(
    st.tuples(st.sampled_from(["die", "lose power", "cut", "mend"]), st.integers(1, 5)),
    st.tuples(st.just("ask"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["fail", "finish", "unsaved", "usage"]), st.integers(0, 5)),
    st.tuples(st.just("come"), st.just(0)),
    st.tuples(st.just("stop"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.lists(events, max_size=12),
)
def test_whatever_happens_the_laws_hold_and_it_ends_or_runs(here, least, more, max_restarts, max_changes, happens):
    job = World(
        ElasticLimits(
            min_nodes=least,
            max_nodes=least + more,
            max_restarts=max_restarts,
            max_changes=max_changes,
            join_timeout_s=60.0,
        )
    )
    for _ in range(here):
        job.come()
    for _ in range(16):  # the last call is over, and those that are enough run
        job.tick()
    for what, which in happens:
        node = job.nodes[which % len(job.nodes)]
        coordinator = node is job.nodes[0]
        match what:
            case "die" if not coordinator:
                node.die()
            case "lose power" if not coordinator:
                node.lose_power()
            case "cut" if not coordinator:
                node.linked = False
            case "mend":
                node.linked = True
            case "come":
                job.come()
            case "finish" | "unsaved":
                for each in job.nodes:  # ranks that were together until the end
                    each.will = {"finish": 0, "unsaved": 74}[what]
            case "fail" | "usage":
                node.will = {"fail": 1, "usage": 2}[what]
            case "stop" if node.alive:
                stops = node.report.stops + 1
                node.report = replace(node.report, stops=stops, stopped_by=signal.SIGINT, stops_job=True)
            case "ask" if node.alive:
                node.ask()
            case "wait":
                for _ in range(which * 4):
                    job.tick()
        job.tick()
    job.until(lambda: job.plan.phase == "over" or job.running())
    if job.plan.phase == "over":
        job.until(lambda: not any(node.report.running for node in job.nodes if node.alive))
        assert job.state.notices or job.plan.code in (0, 75), "nothing ends badly without a word"


def test_a_job_of_one_node_begins_at_once_and_ends_with_its_ranks():
    alone = world(1, 1)
    alone.tick()
    assert (alone.plan.phase, alone.plan.generation, alone.state.notices) == ("generation", 0, ())
    alone.tick()
    alone.nodes[0].will = 0
    alone.until(lambda: alone.plan.phase == "over")
    assert (alone.plan.code, alone.state.notices) == (0, ())


@pytest.mark.parametrize("code", [1, 3])
def test_a_failure_is_listened_to_told_and_restarted_within_its_budget(code):
    """Also where the script has chosen its exit code."""
    pair = world(2, 2, max_restarts=2)
    for generation in range(3):
        pair.until(pair.running)
        assert (pair.plan.generation, pair.plan.restart, pair.state.failures) == (generation,) * 3
        pair.nodes[1].will = code
        pair.tick()
        assert pair.plan.stop_mode is StopMode.NONE, "the true cause may still come"
        pair.until(lambda: pair.plan.stop_mode is StopMode.TERMINATE or pair.plan.phase != "generation")
        pair.until(lambda: pair.plan.phase != "generation")
    assert (pair.plan.phase, pair.plan.code) == ("over", code)
    assert [(failure.ranks, failure.cause.status) for failure in pair.failures] == [(4, code)] * 3
    assert "restarting all ranks as generation 2 (restart 2 of 2)" in pair.said
    assert pair.state.failures == 2
    assert pair.state.changes == 0


def fails_to_start(job, kind, *, other=LOST_PEER):
    """The ranks of the generation cannot start; returns after how long the next one begins, None if none does."""
    job.until(job.running)
    began_s = job.now_s
    job.nodes[0].end(1, 0.0, by_us=False)
    job.nodes[1].end(1, 0.0, by_us=False)
    for node, failure in zip(job.nodes, (CANNOT_START[kind], other), strict=True):
        node.endings = tuple(replace(ending, failure=failure) for ending in node.endings)
    job.until(lambda: job.plan.phase == "over" or (job.plan.phase == "generation" and job.running()))
    return None if job.plan.phase == "over" else job.now_s - began_s


def has_trained(job):
    """A generation makes a step, and fails by itself."""
    job.until(job.running)
    for node in job.nodes:
        node.report = replace(node.report, step=3)
    job.tick()
    job.nodes[1].will = 1
    job.until(lambda: job.plan.phase != "generation")


@pytest.mark.parametrize("kind", CANNOT_START)
def test_a_start_that_may_work_a_little_later_is_waited_for_and_costs_no_restart(kind):
    pair = world(2, 2, max_restarts=1)
    has_trained(pair)
    assert pair.state.failures == 1
    pauses = [fails_to_start(pair, kind) for _ in range(8)]
    for number, pause_s in enumerate(pauses):
        assert min(60, 2**number) <= pause_s <= min(60, 2**number) + 6, pauses
    assert pair.state.failures == 1, "none of the restarts was left"
    assert "starting all ranks again in 8 s" in pair.said
    while pair.plan.phase != "over" and pair.state.failed_starts < 30:
        fails_to_start(pair, kind)
    assert (pair.plan.phase, pair.plan.code) == ("over", 1), "not for ever"
    assert 10 < pair.state.failed_starts < 30


def test_what_has_never_trained_or_fails_for_another_reason_costs_restarts():
    pair = world(2, 2, max_restarts=1)
    assert fails_to_start(pair, "RendezvousError") is not None
    assert pair.state.failures == 1
    assert fails_to_start(pair, "RendezvousError") is None, "a wrong address is wrong for ever"
    pair = world(2, 2, max_restarts=2)
    has_trained(pair)
    assert fails_to_start(pair, "RendezvousError", other=LEFT_WITH_3) is not None
    assert pair.state.failures == 2
    assert fails_to_start(pair, "RendezvousError", other=None) is None


@pytest.mark.parametrize("comes", [False, True])
def test_a_run_that_could_not_save_its_end_is_told_and_not_restarted(comes):
    pair = world(2, 2, 3, max_restarts=5, max_changes=5)
    pair.until(pair.running)
    if comes:
        pair.come()
        pair.until(lambda: pair.plan.stop_mode is StopMode.GRACEFUL)  # for the newcomer
    for node in pair.nodes:
        node.will = 74
    pair.until(lambda: pair.plan.phase == "over")
    assert (pair.plan.code, pair.plan.generation) == (74, 0)
    assert (pair.state.notices[-1].ranks, pair.state.notices[-1].cause.status) == (4, 74)


def test_a_lost_node_is_named_waited_for_and_replaced():
    pair = world(2, 2, max_changes=3)
    pair.until(pair.running)
    pair.nodes[1].die()
    pair.until(lambda: pair.plan.phase == "gather", within_s=7)
    assert "lost node n1 (ranks 2, 3 of 4); going on as generation 1 with 2 nodes (change 1 of at most 3)" in pair.said
    pair.until(lambda: "waiting for 1 of 2 nodes: here n0 (" in pair.said, within_s=5)
    pair.come()
    pair.until(pair.running, within_s=2)
    assert [member.host for member in pair.plan.members] == ["n0", "n2"]
    assert (pair.plan.generation, pair.state.failures, pair.state.changes) == (1, 0, 1)


def test_a_fixed_job_without_restarts_ends_with_its_first_loss():
    pair = world(2, 2)
    pair.until(pair.running)
    pair.nodes[1].die()
    pair.until(lambda: pair.plan.phase == "over", within_s=7)
    assert pair.plan.code == 1
    assert "lost node n1" in pair.state.notices[-1].text
    assert pair.state.notices[-1].failure


def test_a_coordinator_does_not_say_of_itself_that_it_died():
    pair = world(2, 2)
    pair.until(pair.running)
    for node in pair.nodes:  # as where their store answers none of them
        node.end(-signal.SIGKILL, pair.now_s, by_us=True)
    pair.until(lambda: pair.plan.phase == "over", within_s=7)
    said = pair.state.notices[-1].text
    assert "the store where the launchers meet, on n0, did not answer for too long" in said
    assert "died" not in said


@pytest.mark.parametrize("cut_s", [4, 12, 25])
def test_a_network_that_is_silent_for_less_than_tcp_bears_costs_nothing(cut_s):
    pair = world(2, 1, 2, max_changes=3)
    pair.until(pair.running)
    pair.nodes[1].linked = False
    for _ in range(int(cut_s / TICK_S)):
        pair.tick()
    pair.nodes[1].linked = True
    for _ in range(40):
        pair.tick()
    assert (pair.plan.generation, pair.state.changes, pair.running()) == (0, 0, True)
    waited = "nothing heard of n1 for 5 s; waiting up to 30 s, while the ranks hold their connections"
    assert (waited in pair.said, "n1 is heard again" in pair.said) == (cut_s > 5, cut_s > 5)


@pytest.mark.parametrize(("ends", "after_s"), [("die", 5), ("lose_power", 30)])
def test_a_silent_node_is_lost_early_only_if_the_connections_to_it_broke(ends, after_s):
    some = world(3, 1, 3, max_changes=3)
    some.until(some.running)
    getattr(some.nodes[2], ends)()
    began_s = some.now_s
    if ends == "lose_power":
        some.until(lambda: some.plan.lost == ("s2",))
        assert some.plan.stop_mode is StopMode.PEER_LOST
    some.until(lambda: some.plan.generation == 1)
    assert after_s <= some.now_s - began_s < after_s + 3
    assert some.plan.lost == ()
    told = f"lost node n2 (ranks 4, 5 of 6): nothing heard for {after_s} s; ending all ranks" in some.said
    assert told == (after_s == 30), "where connections broke they have ended"


def member(number, silent_s=0.0, **report):
    return NodeView(NodeReport(f"s{number}", f"n{number}", 1, generation=0, running=True, **report), silent_s)


def test_a_plan_tells_the_addresses_by_which_one_reaches_lost_members_and_no_others():
    bridge = "172.17.0.1"  # that of containers, on every host
    members = tuple(Member(f"s{n}", f"n{n}", 1, "", (f"10.0.0.{n}", f"fd77::{n}", bridge)) for n in range(3))
    plan = Plan(phase="generation", members=members).with_lost(("s1",))
    assert (plan.number, plan.with_lost(("s1",)).number) == (1, 1)
    read = Plan.from_text(plan.to_text())
    assert read == plan
    assert read.addresses_of(read.lost) == {"10.0.0.1", "fd77::1"}
    one_host = replace(plan, members=tuple(replace(member, addresses=(bridge,)) for member in members))
    assert one_host.addresses_of(one_host.lost) == set(), "as in a rehearsal"


PEER = {"failed": True, "lost_peer": True}
OTHERS_GONE = [member(0, **PEER), member(1, **PEER)]


@pytest.mark.parametrize(
    ("members", "failed_for_s", "lost"),
    [
        ([*OTHERS_GONE, member(2, 6.0)], 5.0, {"s2"}),
        ([*OTHERS_GONE, member(2, 6.0)], 0.0, set()),
        ([*OTHERS_GONE, member(2, 4.0)], 5.0, set()),
        ([member(0), member(1), member(2, 6.0)], 0.0, set()),
        ([member(0), member(1), member(2, 6.0, failed=True)], 0.0, {"s2"}),
        ([member(0), member(1), member(2, 30.0)], 0.0, {"s2"}),
        ([member(0), member(1), member(2, leaving=True)], 0.0, {"s2"}),
        ([member(0, **PEER), member(1, failed=True, own_cause=True), member(2, 6.0)], 5.0, set()),
        ([member(0, **PEER), member(1, 4.7), member(2, 6.0)], 5.0, set()),
        ([member(0, **PEER), member(1, 6.0), member(2, 6.0)], 5.5, set()),
        ([member(0, **PEER), member(1)], 0.0, {"s2"}),
    ],
    ids=[
        "its connections broke",
        "it has not been listened for long enough",
        "it is not suspected yet",
        "it is silent",
        "it has said that one of its ranks failed",
        "it is silent for long",
        "it says that it leaves",
        "another one has a cause of its own",
        "another one may have a cause of its own, which has not arrived",
        "another one is silent, too: its ranks may live and wait",
        "the coordinator does not know it",
    ],
)
def test_a_member_is_lost_only_if_its_ranks_must_be_dead_when_the_others_go_on(members, failed_for_s, lost):
    plan = Plan(phase="generation", members=tuple(Member(f"s{n}", f"n{n}", 1) for n in range(3)))
    limits = ElasticLimits(max_nodes=3)
    found = lost_members(plan, members, set(), set(), limits, failed_for_s=failed_for_s, patience_s=limits.lost_after_s)
    assert found == lost
    if lost == {"s2"} and failed_for_s:
        before = {"s1"}
        again = lost_members(plan, members, set(), before, limits, failed_for_s=failed_for_s, patience_s=30.0)
        assert again == set(), "what broke may have been the connections to the one that was lost before"


def test_a_node_that_is_told_to_stop_leaves_with_a_checkpoint_and_the_others_go_on():
    some = world(3, 1, 3, max_changes=3)
    some.until(some.running)
    some.nodes[2].ask()
    some.tick()
    assert (some.plan.stop_mode, some.plan.released) == (StopMode.GRACEFUL, ("s2",))
    assert "n2, which leaves the job," in some.plan.stop_reason
    some.until(lambda: some.plan.generation == 1 and some.running(), within_s=8)
    assert [member.host for member in some.plan.members] == ["n0", "n1"]
    assert [ending.status for ending in some.nodes[2].endings] == [75]
    assert some.nodes[2].report.leaving
    assert (some.state.changes, some.state.failures) == (1, 0)
    assert "n2 was told to stop (SIGTERM) and leaves: stopping at a checkpoint" in some.said


@pytest.mark.parametrize(
    ("least", "asked", "max_changes"),
    [(2, [2, 1], 5), (1, [2, 0], 5), (1, [0], 5), (3, [1], 5), (1, [2], 0)],
    ids=["too few stay", "the coordinator, too", "the coordinator", "a fixed number", "no change is left"],
)
def test_the_whole_job_stops_where_the_others_cannot_go_on(least, asked, max_changes):
    some = world(3, least, 3, max_changes=max_changes, max_restarts=5)
    some.until(some.running)
    for number in asked:
        some.nodes[number].ask()
    some.until(lambda: some.plan.phase == "over")
    assert (some.plan.generation, some.plan.code) == (0, 75)


def test_a_coordinator_that_has_not_read_its_own_report_yet_waits():
    state = initial_state(0, 0.0)
    assert decide(state, [], ElasticLimits(max_nodes=2), 0.0) == state


def test_a_coordinator_from_which_others_take_over_may_leave_too():
    some = world(3, 1, 3, max_changes=3, hands_over=True)
    some.until(some.running)
    some.nodes[0].ask()
    some.until(lambda: some.plan.phase == "gather")
    assert [node.endings[0].status for node in some.nodes] == [75, 75, 75]
    for _ in range(100):
        some.tick()
    assert (some.plan.phase, some.plan.released) == ("gather", ("s0",)), "it begins nothing any more"


def test_a_spare_that_is_told_to_stop_disturbs_nobody():
    some = world(3, 2, max_changes=3)
    some.until(some.running)
    some.nodes[2].ask()
    for _ in range(40):
        some.tick()
    assert (some.plan.generation, some.plan.stop_mode, some.plan.released) == (0, StopMode.NONE, ("s2",))
    assert some.nodes[2].report.leaving


def test_training_at_new_steps_fills_the_limits_up_again_and_repeating_old_ones_does_not():
    pair = world(2, 1, 2, max_changes=2, refill_after_s=60.0)

    def train(step, for_s):
        pair.until(pair.running)
        for _ in range(int(for_s / TICK_S)):
            for node in pair.nodes:
                node.report = replace(node.report, step=step)
            pair.tick()

    def lose():
        pair.nodes[-1].die()
        generation = pair.plan.generation
        pair.until(lambda: pair.plan.generation > generation)
        pair.come()

    train(100, 61)
    lose()
    assert pair.state.changes == 1
    train(100, 120)
    assert pair.state.changes == 1, "the same steps once more"
    train(101, 61)
    assert (pair.state.changes, pair.state.failures) == (0, 0)
    assert "60 s of training at new steps: restarts and changes of nodes count from 0 again" in pair.said


def test_spares_take_the_place_of_a_lost_node_at_once():
    some = world(4, 2, 2, max_changes=9)
    some.until(some.running)
    assert "generation 0: 4 ranks on 2 nodes: n0 (2), n1 (2); spare: n2, n3" in some.said
    for number in (1, 2):
        began_s = some.now_s
        some.nodes[number].die()
        some.until(lambda number=number: some.plan.generation == number and some.running())
        assert some.now_s - began_s < 5 + 3, "after the silence a moment, not longer with each change"
    assert [member.host for member in some.plan.members] == ["n0", "n3"]


def test_a_node_that_is_cut_off_ends_its_ranks_before_the_others_go_on():
    # `World.obey_the_laws` sees at each begin that no rank of an older generation lives.
    some = world(3, 1, 3, max_changes=5)
    some.until(some.running)
    some.nodes[2].linked = False
    some.until(lambda: some.plan.generation == 1 and some.running())
    assert [member.host for member in some.plan.members] == ["n0", "n1"]
    assert not some.nodes[2].report.running
    some.nodes[2].linked = True
    some.until(lambda: some.plan.generation == 2 and some.running())
    assert [member.host for member in some.plan.members] == ["n0", "n1", "n2"]
    assert "n2 came: stopping at a checkpoint" in some.said


def test_a_spare_does_not_begin_before_the_one_that_was_cut_off_has_ended():
    some = world(3, 2, max_changes=1)
    for node, slow in zip(some.nodes, (0, 4, 0), strict=True):
        node.slow = slow
    some.until(some.running)
    some.nodes[1].linked = False
    some.until(lambda: some.plan.generation == 1 and some.running())
    assert [member.host for member in some.plan.members] == ["n0", "n2"]


def test_a_node_whose_ranks_still_end_is_not_counted_as_ready():
    pair = world(2, 2)
    pair.nodes[1].report = replace(pair.nodes[1].report, running=True)
    assert decide(pair.state, pair.views(), pair.limits, pair.now_s).plan.phase == "gather"


def test_a_node_that_comes_and_goes_costs_a_bounded_number_of_restarts():
    pair = world(2, 1, 2, max_changes=4)
    for _ in range(20):
        pair.until(pair.running)
        pair.nodes[1].linked = False
        for _ in range(400):
            pair.tick()
        if pair.plan.phase == "over":
            break
        pair.nodes[1].linked = True
        for _ in range(400):
            pair.tick()
    assert pair.state.changes == 4
    assert len(pair.began) <= 5


def test_more_nodes_than_asked_for_wait_as_spares():
    many = world(4, 2, 3, max_changes=2)
    many.until(many.running)
    assert [member.host for member in many.plan.members] == ["n0", "n1", "n2"]
    for _ in range(400):
        many.tick()
    assert many.plan.stop_mode is StopMode.NONE, "a spare stops nobody"
    many.nodes[1].die()
    many.until(lambda: many.plan.generation == 1 and many.running())
    assert [member.host for member in many.plan.members] == ["n0", "n2", "n3"]


def test_the_last_call_waits_for_more_but_not_for_ever():
    two = world(2, 2, 4, last_call_s=3.0)
    two.tick()
    assert two.plan.phase == "gather"
    two.until(two.running, within_s=4)
    assert "4 ranks on 2 of at most 4 nodes: n0 (2), n1 (2)" in two.said
    four = world(4, 2, 4, last_call_s=3.0)
    four.tick()
    assert four.plan.phase == "generation"


def test_who_does_not_come_is_named_and_given_up_at_the_deadline():
    one = world(1, 3, join_timeout_s=30.0, expected=("n0.cluster", "n7", "n8.cluster"))
    one.until(lambda: one.plan.phase == "over", within_s=31)
    assert "waiting for 2 of 3 nodes: here n0; still missing: n7, n8.cluster (3 s)" in one.said
    assert one.said.endswith("gave up waiting for 2 of 3 nodes: here n0; still missing: n7, n8.cluster (30 s)")
    assert (one.plan.code, one.state.gave_up) == (124, True)
    assert missing_hosts(one.views(), one.limits) == ("n7", "n8.cluster")


@pytest.mark.parametrize(("times", "mode"), [(1, StopMode.GRACEFUL), (2, StopMode.INTERRUPT), (3, StopMode.KILL)])
def test_a_stop_on_any_node_stops_all_and_two_nodes_that_are_asked_once_are_asked_once(times, mode):
    pair = world(2, 2, max_restarts=5)
    pair.until(pair.running)
    for node in pair.nodes:
        node.report = replace(node.report, stops=times if node.name == "n1" else 1, stopped_by=signal.SIGTERM)
    views = pair.views()
    assert decide(pair.state, views, pair.limits, pair.now_s).plan.stop_mode is mode
    pair.until(lambda: pair.plan.phase == "over")
    assert pair.plan.code == (75 if times == 1 else 143)


def died_while_asked_to_stop(pair, *, insists=False, left=True):
    """A rank of n1 is killed while the job stops; n0's, which survives it, leaves its state."""
    pair.until(pair.running)
    pair.nodes[1].will = -9
    times = 1 + insists
    for node in pair.nodes:
        node.report = replace(node.report, stops=times, stopped_by=signal.SIGTERM)
    pair.nodes[0].report = replace(pair.nodes[0].report, left=left)
    return pair


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_stop_and_a_death_together_start_a_generation_that_saves_what_survivors_left(restarts):
    pair = died_while_asked_to_stop(world(2, 2, max_restarts=restarts))
    pair.until(lambda: pair.plan.save_only and pair.running())
    assert (pair.plan.generation, pair.plan.save_only, pair.plan.stop_mode) == (1, "SIGTERM", StopMode.NONE)
    assert "was killed by SIGKILL; saving the last finished step before the job ends" in pair.said
    for node in pair.nodes:
        node.will = 75
    pair.until(lambda: pair.plan.phase == "over")
    assert (pair.plan.code, pair.failures, pair.state.failures) == (75, [], 0)


def test_what_could_not_be_saved_so_is_said_and_the_first_cause_is_the_last_word():
    pair = died_while_asked_to_stop(world(2, 2))
    pair.until(lambda: pair.plan.save_only and pair.running())
    for node in pair.nodes:
        node.will = 3
    pair.until(lambda: pair.plan.phase == "over")
    assert (pair.plan.code, pair.failures[-1].cause.status) == (137, -9)
    assert (
        "the last finished step is not saved: all 4 ranks" in pair.said or "the last finished step is not" in pair.said
    )


@pytest.mark.parametrize("case", [{"insists": True}, {"left": False}])
def test_nothing_is_started_to_save_for_who_insists_or_where_nothing_is_left(case):
    pair = died_while_asked_to_stop(world(2, 2, max_restarts=2), **case)
    pair.until(lambda: pair.plan.phase == "over")
    assert pair.plan.generation == 0
    assert pair.plan.code == 137


def test_the_last_step_is_saved_when_no_restart_is_left_and_the_code_is_that_of_the_failure():
    pair = world(2, 2, max_restarts=0, max_changes=1)
    pair.until(pair.running)
    pair.nodes[1].will = -9
    pair.nodes[0].report = replace(pair.nodes[0].report, left=True)
    pair.until(lambda: pair.plan.save_only and pair.running())
    for node in pair.nodes:
        node.will = 75
    pair.until(lambda: pair.plan.phase == "over")
    assert (pair.plan.code, pair.failures[-1].cause.status) == (137, -9)


def test_a_node_whose_ranks_are_given_up_since_the_network_is_cut_is_not_lost_and_costs_a_restart():
    trio = world(3, 3, max_restarts=1, max_changes=1)
    trio.until(trio.running)
    trio.nodes[2].report = replace(trio.nodes[2].report, severed=True)
    trio.tick()
    assert trio.plan.stop_mode is StopMode.PEER_LOST
    assert trio.plan.lost == ("s2",), "the others close their connections to it"
    trio.nodes[2].report = replace(trio.nodes[2].report, severed=False)
    trio.until(lambda: trio.plan.phase != "generation")
    assert (trio.state.failures, trio.state.changes) == (1, 0)


def test_a_cause_of_its_own_outweighs_a_loss():
    pair = world(2, 2, max_restarts=1, max_changes=1)
    pair.until(pair.running)
    pair.nodes[0].will = 1
    pair.tick()
    pair.nodes[1].die()
    pair.until(lambda: pair.plan.phase != "generation")
    assert pair.state.failures == 1
    assert pair.state.changes == 0
    assert isinstance(pair.failures[0], Diagnosis)
