"""Laws of taking over from a lost coordinator, on nodes that are values: they sleep, lose the network and the files."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.launch.rendezvous.lease import Lease, LeaseFiles, follower_acts, holder_acts
from lockstep.launch.timeouts import NodeTimeouts, Silence

TICK_S = 0.5
TIMES = NodeTimeouts(lost_after_s=6.0)


@dataclass
class Node:
    """A launcher with ranks. The ranks live on while it sleeps, until their own lease ends."""

    name: str
    held: Lease | None = None
    followed: int = 1
    renewed_s: float = 0.0
    heard_s: float = 0.0  # of the coordinator
    seen: Silence = field(default_factory=lambda: Silence(None))
    running: bool = False
    lease_end_s: float = 0.0  # of the ranks, which the fork server keeps
    sleeps: bool = False
    files: bool = True
    linked: bool = True


@dataclass
class World:
    nodes: list
    leases: dict
    now_s: float = 100.0
    order: tuple = (0, 1, 2)

    def tick(self):
        self.now_s += TICK_S
        for node in self.nodes:
            if node.running and self.now_s >= node.lease_end_s:
                node.running = False  # by its fork server
        for number in self.order:
            if not self.nodes[number].sleeps:
                self.act(self.nodes[number])
            self.obey_the_law()

    def newest(self):
        return self.leases[max(self.leases)]

    def act(self, node):
        newest = self.newest() if node.files else None
        if node.held is not None:
            began_s = self.now_s
            if node.files and newest.term == node.held.term:
                node.held = replace(node.held, beat=node.held.beat + 1)
                self.leases[node.held.term] = newest = node.held
            duty = holder_acts(node.held, newest, began_s if newest == node.held else node.renewed_s, TIMES, began_s)
            if newest == node.held:
                node.renewed_s = began_s
            node.running = duty == "lead"
            if duty == "follow":
                node.held, node.followed, node.heard_s = None, newest.term, self.now_s
        else:
            coordinator = next((n for n in self.nodes if n.held and n.held.term == node.followed), None)
            if coordinator and coordinator.running and not coordinator.sleeps and coordinator.linked and node.linked:
                node.heard_s, node.running = self.now_s, True
            silent_s = self.now_s - node.heard_s
            node.running &= silent_s < TIMES.lost_after_s
            if newest is not None and silent_s >= TIMES.every_s:
                node.seen = node.seen.after(newest, self.now_s)
                match follower_acts(node.followed, node.seen, silent_s, node.running, TIMES, self.now_s):
                    case "claim":
                        assert newest.term == max(self.leases)
                        node.held = Lease(newest.term + 1, node.name, node.name, node.name)
                        self.leases[node.held.term] = node.held
                        node.renewed_s, node.running = self.now_s, True
                    case "follow":
                        node.followed, node.heard_s = newest.term, self.now_s
        if node.running:
            node.lease_end_s = self.now_s + TIMES.lost_after_s

    def obey_the_law(self):
        terms = {node.held.term if node.held else node.followed for node in self.nodes if node.running}
        assert len(terms) <= 1, f"ranks of two worlds live at once: {terms}"


events = st.tuples(
    st.sampled_from(["sleep", "wake", "lose files", "find files", "cut", "mend"]),
    st.integers(0, 2),
    st.integers(0, 60),
    st.permutations([0, 1, 2]),
)


@settings(max_examples=150)
@given(st.lists(events, max_size=14))
def test_never_do_ranks_of_two_worlds_live_at_once_and_one_coordinator_leads_in_the_end(happens):
    nodes = [Node("n0", held=Lease(1, "n0", "n0", "n0"), renewed_s=100.0, running=True), Node("n1"), Node("n2")]
    world = World([*nodes], {1: nodes[0].held})
    for node in nodes:
        node.heard_s, node.lease_end_s = 100.0, 106.0
    for what, number, ticks, order in happens:
        node, world.order = world.nodes[number], tuple(order)
        match what:
            case "sleep" | "wake":
                node.sleeps = what == "sleep"
            case "lose files" | "find files":
                node.files = what == "find files"
            case "cut" | "mend":
                node.linked = what == "mend"
        for _ in range(ticks):
            world.tick()
    asleep = world.nodes[0]
    for node in world.nodes[1:]:
        node.sleeps, node.files, node.linked = False, True, True
    asleep.sleeps = True
    for _ in range(200):
        world.tick()
    leaders = [node for node in world.nodes if node.held is not None and node.running]
    assert len(leaders) == 1, "the coordinator's host is lost, and another node has its place"
    assert leaders[0].held == world.newest()


def test_a_term_is_made_by_one_node_only_and_renewed_by_its_holder(tmp_path):
    files = LeaseFiles(tmp_path)
    assert files.newest() is None
    first = files.claim("a", "n1", "n1:29400")
    assert (first.term, files.newest()) == (1, first)
    assert files.claim("b", "n2", "n2:29400", after=0) is None, "another one was quicker"
    assert files.renew(replace(first, beat=5)) == replace(first, beat=5) == files.newest()
    second = files.claim("b", "n2", "[fd77::2]:29400", after=1)
    assert second.term == 2
    assert files.renew(replace(first, beat=6)) == second, "who sleeps for long learns it when it wakes up"
    files._file(3).write_text("{}")
    assert files.newest() is None, "not understood, so nobody acts on it"
    assert sorted(path.name for path in files.path.iterdir()) == ["term-000001", "term-000002", "term-000003"]


def test_a_holder_that_leaves_is_not_waited_for():
    seen = Silence(None).after(Lease(2, "n0", "n0", "n0:1", left=True), 50.0)
    assert follower_acts(2, seen, 1.0, False, TIMES, 50.0) == "claim"
    assert follower_acts(1, seen, 1.0, False, TIMES, 50.0) == "claim", "nobody answers where it was"
    assert follower_acts(2, seen, 1.0, True, TIMES, 50.0) == "wait"
