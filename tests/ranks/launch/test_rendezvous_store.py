"""The store of a job on several machines, and what happens when it does not answer."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from lockstep.errors import LaunchError, SettingError
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.root_cause import RankExit, diagnose
from lockstep.launch.host.timed_calls import StoppedWaiting
from lockstep.launch.job.program_sources import source_hashes
from lockstep.launch.job.request import Module, NodeOptions, Nodes, Request, Script
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.job_contract import (
    COORDINATOR_FILE,
    SECRET_FILE,
    JobContract,
    Signature,
    differences,
    make_signature,
    read_signature,
)
from lockstep.launch.rendezvous.join import StoreProcess, limits_of, probe
from lockstep.launch.rendezvous.notices import Message
from lockstep.launch.rendezvous.plan import Member, NodeReport, Plan
from lockstep.launch.rendezvous.store import LocalStore
from lockstep.launch.rendezvous.store_connection import open_store, read_contract, tell_refused
from lockstep.launch.rendezvous.tcp_store_client import TcpStoreClient, _contract_in, create_store
from lockstep.network_interface import interface_of
from waiting import wait_until

DEADLINE_S = 60
SIGNED = Signature(b"of this run").of_launch("c")
RAISED = Failure(3, "n2", "ValueError", "bad label", "train.py", 5, "x", "Traceback...", False, 10.0, 7)


@pytest.fixture(scope="module")
def store():
    """An endpoint with a store; its process can be stopped."""
    with serving() as served:
        yield served


@pytest.fixture
def new_store():
    """As `store`, for one test only."""
    with serving() as served:
        yield served


@contextlib.contextmanager
def serving():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1])
        process = StoreProcess(listening, print)
    with contextlib.closing(process):
        yield endpoint, process


def contract(coordinator="c", generation=4, run_dir="/r"):
    return JobContract(coordinator, "n1", {"torch": "2", "lockstep": "1"}, str(run_dir), "new", generation)


@contextlib.contextmanager
def clients(endpoint, *ids, suspect_after_s=30.0, run_dir="/r"):
    """The coordinator's client and those of others."""
    job = contract(ids[0], run_dir=run_dir)
    made = [create_store(endpoint, job, NodeReport(ids[0], "n1", 2), SIGNED, suspect_after_s=suspect_after_s)]
    made += [
        TcpStoreClient(endpoint, job, NodeReport(n, n, 2), SIGNED, suspect_after_s=suspect_after_s) for n in ids[1:]
    ]
    with beating(made):
        yield made
    for client in made:
        client.close()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "lockstep store client"])


@contextlib.contextmanager
def beating(clients):
    """What agents' loops do all the time."""
    over = threading.Event()

    def loops():
        while not over.wait(0.02):
            for client in clients:
                client.beat()

    agents = threading.Thread(target=loops)
    agents.start()
    try:
        yield
    finally:
        over.set()
        agents.join()


def test_what_one_node_writes_the_others_read(store):
    endpoint, _ = store
    with clients(endpoint, "c", "other") as (coordinator, other):
        assert coordinator.is_coordinator
        assert not other.is_coordinator
        wait_until(lambda: len(coordinator.nodes()) == 2)
        assert [node.report.host for node in coordinator.nodes()] == ["n1", "other"]
        members = (Member("c", "n1", 2), Member("other", "n2", 2))
        plan = Plan(3, "generation", 4, 1, members=members, port=77)
        coordinator.publish(plan, ())
        assert wait_until(lambda: other.plan() == plan and other.plan()) == plan
        assert other.silent_s() < 30

        ending = RankExit(3, 1, 11.0, failure=RAISED, host="n2")
        other.report(NodeReport("other", "n2", 2, generation=4, failed=True), [ending])
        node = wait_until(lambda: next((n for n in coordinator.nodes() if n.endings), None))
        assert node.report.failed
        # One machine has one clock: what is added is at most how long the record was on its way.
        assert 11.0 <= node.endings[0].at_s < 11.0 + DEADLINE_S
        assert node.endings[0].failure.message == "bad label"
        other.report(NodeReport("other", "n2", 2, generation=5, running=True), ())
        wait_until(lambda: coordinator.nodes()[1].report.generation == 5)
        assert coordinator.nodes()[1].endings == (), "those of another generation"


def test_a_node_that_does_not_fit_can_say_so_without_the_secret_in_plain_text_of_bounded_length(store):
    endpoint, _ = store
    with clients(endpoint, "c") as (coordinator,):
        assert coordinator.refused() == ()
        tell_refused(endpoint, "lockstep is 1 here,\n  2 there \x1b[31mred")
        wait_until(coordinator.refused, "what was refused")
        (said,) = coordinator.refused()
        assert said == f"{socket.gethostname()}: lockstep is 1 here, 2 there [31mred"
        raw = open_store(endpoint)
        raw.append("refused", "\n".join(f"{number}{'x' * 5000}" for number in range(20)))
        wait_until(lambda: len(coordinator.refused()) > 1)
        assert len(coordinator.refused()) <= 8
        assert all(len(line) <= 400 for line in coordinator.refused())


def test_notices_are_written_once_and_read_by_all_also_by_nodes_that_join_late(store):
    endpoint, _ = store
    failed = diagnose([RankExit(3, 1, 11.0, failure=RAISED, host="n2"), RankExit(1, 0, 10.0)], ranks=4)
    with clients(endpoint, "c", "other") as (coordinator, other):
        coordinator.publish(Plan(1, notices=1), [Message("waiting, é")])
        wait_until(lambda: other.plan().notices == 1)
        assert other.notices() == (Message("waiting, é"),)
        coordinator.publish(Plan(2, notices=2), [Message("waiting, é"), failed])
        wait_until(lambda: other.plan().notices == 2)
        assert other.notices() == (Message("waiting, é"), failed)
        with contextlib.closing(
            TcpStoreClient(endpoint, contract(), NodeReport("late", "n3", 2), SIGNED, suspect_after_s=30.0)
        ) as late:
            wait_until(lambda: late.plan().number == 2)
            assert late.notices() == (Message("waiting, é"), failed)
        raw = open_store(endpoint)
        raw.set("notice/0", "untouched")
        coordinator.publish(Plan(3, notices=2), [Message("waiting, é"), failed])
        wait_until(lambda: other.plan().number == 3)
        assert raw.get("notice/0") == b"untouched"


def test_a_node_that_says_nothing_grows_silent_and_one_that_left_says_so(store):
    endpoint, _ = store
    with clients(endpoint, "c", "quiet", "leaves") as (coordinator, quiet, leaves):
        wait_until(lambda: len(coordinator.nodes()) == 3)
        quiet.beat = lambda: None  # its loop stands still; its thread does not
        leaves.report(NodeReport("leaves", "leaves", 2, leaving=True), ())
        leaves.close()

        def nodes():
            return {node.report.node_id: node for node in coordinator.nodes()}

        wait_until(lambda: {name for name, node in nodes().items() if node.report.leaving} == {"leaves"})
        wait_until(lambda: nodes()["quiet"].silent_s > 1.0)
        assert nodes()["c"].silent_s < nodes()["quiet"].silent_s


def test_a_store_that_does_not_answer_is_noticed_and_asked_again(store):
    endpoint, process = store
    with clients(endpoint, "c", "other", suspect_after_s=0.5) as (_, other):
        wait_until(lambda: other.silent_s() < 0.4)
        process._process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: other.silent_s() > 1.0)
        finally:
            process._process.send_signal(signal.SIGCONT)
        wait_until(lambda: other.silent_s() < 0.4)


def test_a_new_agent_may_become_the_coordinator_and_the_others_follow_it_as_the_run_directory_says(store, tmp_path):
    endpoint, _ = store
    with clients(endpoint, "c", "other", suspect_after_s=0.5, run_dir=tmp_path) as (old, other):
        wait_until(lambda: len(old.nodes()) == 2)
        old.publish(Plan(1, notices=1), [Message("the old one's")])
        wait_until(lambda: other.notices() == (Message("the old one's"),))
        old.close()
        job, signed = contract("new", 9, tmp_path), SIGNED.of_launch("new")
        new = create_store(endpoint, job, NodeReport("new", "n1", 2), signed, suspect_after_s=0.5)
        with pytest.raises(OSError, match="another launch"):  # perhaps an earlier one's, written again
            _contract_in(signed.sign("contract", job.to_text()).encode(), contract(run_dir=tmp_path), SIGNED)
        (tmp_path / COORDINATOR_FILE).write_text("new")
        # A store that was restarted would have closed the connections.
        other._start_thread()
        wait_until(lambda: other.coordinator == "new" and len(new.nodes()) == 2)
        wait_until(lambda: other.plan().generation == 9)
        assert other.notices() == ()
        new.publish(Plan(1, generation=9, notices=1), [Message("the new one's")])
        wait_until(lambda: other.notices() == (Message("the new one's"),))
        new.close()


def test_a_store_that_dies_is_started_anew_and_filled_again(new_store):
    endpoint, process = new_store
    with clients(endpoint, "c", "other", suspect_after_s=5.0) as (coordinator, other):
        coordinator.publish(Plan(7, notices=1), [Message("before")])
        wait_until(lambda: other.plan().number == 7 and len(coordinator.nodes()) == 2)
        process._process.kill()
        process._process.wait()
        process.look_after()
        coordinator.publish(Plan(8, notices=2), [Message("before"), Message("after")])
        wait_until(lambda: other.plan().number == 8)
        assert other.notices() == (Message("before"), Message("after"))
        other.report(NodeReport("other", "n2", 2, generation=5), ())
        wait_until(lambda: coordinator.nodes()[1].report.generation == 5)


@pytest.mark.parametrize(
    "value",
    [
        "no json",
        "[" * 100_000,
        "{}",
        '{"report": {"node_id": "c", "host": "h", "ranks": 1, "unknown": 1}, "beat": 99, "now_s": 0, "written": []}',
        '{"number": 99, "phase": "over", "members": [], "stop_mode": 0, "code": 0}',
    ],
)
def test_what_a_stranger_writes_to_the_store_counts_for_nothing(store, value):
    endpoint, _ = store
    with clients(endpoint, "c", "other", suspect_after_s=30.0) as (coordinator, other):
        coordinator.publish(Plan(1), ())
        wait_until(lambda: other.plan().number == 1 and len(coordinator.nodes()) == 2)
        raw = open_store(endpoint)
        raw.append("nodes", "without-record stranger ")
        for text in (value, Signature(b"another secret").sign("plan", value), SIGNED.sign("another key", value)):
            for key in ("node/stranger", "plan", "node/c", "node/other", "endings/-1/other", "notice/0"):
                raw.set(key, text)
        assert raw.check(["plan"])  # and all that was set before is there now
        coordinator.publish(Plan(2, notices=1), [Message("goes on")])
        wait_until(lambda: other.plan().number == 2 and other.notices() == (Message("goes on"),))
        other.report(NodeReport("other", "n2", 2, generation=6), ())
        wait_until(lambda: coordinator.nodes()[1].report.generation == 6)
        assert [node.report.node_id for node in coordinator.nodes()] == ["c", "other"]


def test_values_of_another_version_lose_what_is_not_known_here():
    text = contract().to_text()
    assert JobContract.from_text(text.replace("{", '{"epoch": {"of": 3}, ', 1)) == contract()
    plan = Plan(3, members=(Member("c", "n1", 2),))
    assert Plan.from_text(plan.to_text().replace('{"node_id"', '{"colour": 1, "node_id"')) == plan
    for broken in ("[]", "1", '{"must_match": 3}', '{"members": 1}', '{"members": [1], "stop_mode": 0}'):
        for kind in (JobContract, Plan):
            with pytest.raises(ValueError, match="no "):
                kind.from_text(broken)


def test_the_secret_of_a_run_is_its_users_alone(tmp_path):
    made = make_signature(tmp_path, {})
    file = tmp_path / SECRET_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_signature(tmp_path, {}) == make_signature(tmp_path, {}) == made
    assert made.text_of("k", made.sign("k", "text of any kind\n")) == "text of any kind\n"
    assert "0x" not in repr(made)
    assert str(made.secret) not in repr(made)
    assert read_signature(tmp_path, {"LOCKSTEP_SECRET": "s" * 16}) == make_signature(
        tmp_path / "no", {"LOCKSTEP_SECRET": "s" * 16}
    )
    file.chmod(0o640)
    with pytest.raises(SettingError, match="chmod 600"):
        read_signature(tmp_path, {})
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(SettingError, match="cannot be read"):
        read_signature(tmp_path, {})


@pytest.mark.parametrize("secret", ["", " ", "s" * 15, "\n" * 40])
def test_a_secret_that_can_be_found_by_trying_is_refused(tmp_path, secret):
    for read in (read_signature, make_signature):
        with pytest.raises(SettingError, match=r"LOCKSTEP_SECRET has \d+ bytes; give at least 16"):
            read(tmp_path, {"LOCKSTEP_SECRET": secret})


def test_what_an_earlier_launch_has_signed_is_not_signed(tmp_path):
    kept = make_signature(tmp_path, {})
    earlier, later = kept.of_launch("first coordinator"), kept.of_launch("second coordinator")
    recorded = earlier.sign("plan", Plan(7, phase="over").to_text())
    assert earlier.text_of("plan", recorded)
    for other in (later, kept):
        with pytest.raises(ValueError, match="not signed by a launcher of this run"):
            other.text_of("plan", recorded)


def test_the_files_of_a_program_are_those_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "train.py": "import models.unet, torch\nfrom losses import dice\nimport models",
        "losses.py": "import absent",
        "other.py": "",
        "models/__init__.py": "",
        "models/unet.py": "from . import blocks\nfrom ..losses import x",
        "models/blocks.py": "import train",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = source_hashes(Script("train.py"))
    assert sorted(found) == ["losses.py", "models/__init__.py", "models/blocks.py", "models/unet.py", "train.py"]
    (tmp_path / "models" / "blocks.py").write_text("import train  # another")
    now = source_hashes(Script("train.py"))
    assert {name for name in found if now[name] != found[name]} == {"models/blocks.py"}
    assert source_hashes(Module("models.unet")) == {name: now[name] for name in now if name.startswith("models")} | {
        "losses.py": now["losses.py"],
        "train.py": now["train.py"],
    }


@pytest.mark.skipif(not socket.has_ipv6 or interface_of("::1") == "", reason="no IPv6 here")
def test_launchers_meet_over_ipv6_too():
    with Endpoint("::1", 0).claim() as listening:
        assert listening.family == socket.AF_INET6
        endpoint = Endpoint("::1", listening.getsockname()[1])
        process = StoreProcess(listening, print)
    with contextlib.closing(process), clients(endpoint, "c") as (coordinator,):
        wait_until(lambda: len(coordinator.nodes()) == 1)
        assert endpoint.local_address() == "::1"
        assert str(endpoint) == f"[::1]:{endpoint.port}"


def read(endpoint, *, version="1", within_s=DEADLINE_S, say=print, stopped=lambda: False):
    return read_contract(endpoint, lambda _: SIGNED, version=version, within_s=within_s, say=say, stopped=stopped)


def test_a_node_that_joins_reads_what_must_be_equal(store):
    endpoint, _ = store
    with clients(endpoint, "c"):
        assert read(endpoint) == (contract(), SIGNED)
        with pytest.raises(SettingError, match=r"lockstep is 2 on .*, 1 there; install the same version"):
            read(endpoint, version="2")
    assert differences({"torch": "3", "python": "3.11"}, "n2", {"torch": "2", "python": "3.11"}, "n1") == [
        "torch is 3 on n2, 2 on n1"
    ]


def test_a_node_that_finds_no_store_says_so_and_gives_up():
    said = []
    # Bound but not listening: refused, and nobody else gets the port meanwhile.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        free = Endpoint("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(
            LaunchError, match=r"found no store of this job at 127.0.0.1:\d+ within 4 s \(Connection refused"
        ):
            read(free, within_s=3.6, say=said.append)
        assert "where the nodes meet: Connection refused" in said[0]
        with pytest.raises(StoppedWaiting):
            read(free, stopped=lambda: True)


def test_who_waits_for_a_store_that_never_answers_can_be_stopped():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        mute = Endpoint("127.0.0.1", deaf.getsockname()[1])
        begin_s = time.monotonic()
        stopped = lambda: time.monotonic() > begin_s + 0.3  # noqa: E731
        for wait in (
            lambda: read(mute, stopped=stopped),
            lambda: create_store(
                mute, contract(), NodeReport("c", "n1", 1), SIGNED, suspect_after_s=1.0, stopped=stopped
            ),
        ):
            with pytest.raises(StoppedWaiting):
                wait()
    # Until the connections were closed, their threads were inside torch; see `lockstep.cli.run_command`.
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "lockstep store connection"])


def test_an_endpoint_knows_whether_it_is_here():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"port {port} of this machine is used by process {os.getpid()} "):
            Endpoint("127.0.0.1", port).claim()
    with Endpoint("localhost", port).claim() as listening:
        assert listening.getsockname()[1] == port
    assert Endpoint("192.0.2.1", port).claim() is None, "an address of documentation is never here"
    assert Endpoint("127.0.0.1", port).local_address() == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    with pytest.raises(SettingError, match=r"cannot resolve 'nohost\.invalid' from node"):
        Endpoint("nohost.invalid", port).addresses()


def test_the_store_of_one_machine_gives_back_what_it_was_given():
    alone = LocalStore()
    report = NodeReport("local", "n1", 2, generation=0)
    ending = RankExit(0, 0, 1.0)
    alone.report(report, [ending])
    alone.publish(Plan(generation=3, notices=1), [Message("up")])
    assert alone.is_coordinator
    assert [(node.report, node.endings) for node in alone.nodes()] == [(report, (ending,))]
    assert (alone.plan().generation, alone.notices(), alone.silent_s()) == (3, [Message("up")], 0.0)


def test_it_is_found_out_why_a_host_did_not_join():
    assert probe("nohost.invalid", "n1:1").startswith("nohost.invalid is missing: its name cannot be resolved here (")
    assert "the network reaches it, but no lockstep run came from there" in probe("127.0.0.1", "n1:1")
    assert "the network does not reach it (" in probe("255.255.255.255", "n1:1")


@pytest.mark.parametrize(
    ("nnodes", "restarts", "given", "allowed"),
    [("2", 0, None, 0), ("2", 1, None, 10), ("1:2", 0, None, 10), ("2", 0, 3, 3), ("1:2", 4, 0, 0)],
)
def test_changes_that_a_user_allows_count_whatever_else_is_asked_for(nnodes, restarts, given, allowed):
    nodes = Nodes.of(nnodes, "n1", None, NodeOptions(max_changes=given))
    assert limits_of(Request(Script("train.py"), max_restarts=restarts), nodes).max_changes == allowed
