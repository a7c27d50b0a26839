"""What a failing rank says about itself."""

import json
import subprocess

import pytest
import torch.distributed as dist

from lockstep.errors import PeerLost
from lockstep.launch.diagnosis.error_record import Failure, is_collateral


def caught(deed):
    try:
        deed()
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    pytest.fail("it did not raise")


def record(error):
    return Failure.of(error, rank=3, host="n1", now_s=1.5, log_bytes=10)


def test_the_blame_is_on_the_users_line_and_not_inside_a_library():
    failure = record(caught(lambda: json.loads("{")))
    assert failure.file == __file__
    assert failure.source == 'failure = record(caught(lambda: json.loads("{")))'
    assert failure.kind == "json.decoder.JSONDecodeError"
    assert "Expecting property name" in failure.message


def test_a_syntax_error_is_blamed_on_its_own_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("x = 1\nif x\n")
    failure = record(caught(lambda: compile(script.read_text(), str(script), "exec")))
    assert (failure.file, failure.line, failure.source) == (str(script), 2, "if x")


def test_a_record_is_read_as_it_was_written_whatever_it_says(tmp_path):
    failure = record(caught(lambda: (_ for _ in ()).throw(ValueError("Größe \ud800 \x1b[31m"))))
    failure.write(tmp_path / "deep" / "failure.json")
    assert Failure.read(tmp_path / "deep" / "failure.json") == failure
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["failure.json"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rank": 1}'])
def test_what_is_no_record_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "failure.json").write_text(text)
    assert Failure.read(tmp_path / "failure.json") is None


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("rank 1 does not answer"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation"),
        RuntimeError("[gloo/transport/tcp/pair.cc:598] Connection reset by peer"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cuda//0, the store timed out"),
    ],
)
def test_words_that_only_mean_that_a_peer_is_gone(error):
    assert is_collateral(error)

    def wrapped():
        raise ValueError("while saving") from error

    assert is_collateral(caught(wrapped))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        ConnectionResetError(104, "Connection reset by peer"),  # the user's own download
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        subprocess.CalledProcessError(1, ["store", "timeout"]),
    ],
)
def test_words_that_are_a_cause(error):
    assert not is_collateral(error)


def test_an_error_raised_while_handling_a_lost_peer_is_collateral_unless_it_says_otherwise():
    def handling():
        try:
            raise PeerLost("gone")
        except PeerLost:
            raise KeyError("x")  # noqa: B904

    def otherwise():
        try:
            raise PeerLost("gone")
        except PeerLost:
            raise KeyError("x") from None

    assert is_collateral(caught(handling))
    assert not is_collateral(caught(otherwise))


def test_a_circle_of_causes_is_no_trouble():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_collateral(first)
