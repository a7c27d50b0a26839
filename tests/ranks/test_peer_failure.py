"""Which errors only say that another rank is gone."""

import json
import subprocess

import pytest
import torch.distributed as dist

from lockstep.errors import PeerLost
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.peer_failure import is_peer_failure
from lockstep.run.setup.shutdown import write_torchelastic_error
from lockstep.testing import run_each

OWN_ERRORS = [
    ValueError("hub download: broken pipe"),
    ValueError("Connection closed by peer"),
    ConnectionResetError(104, "Connection reset by peer"),  # the user's own download
    BrokenPipeError(32, "Broken pipe"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("timed out waiting for the license server"),
    dist.DistNetworkError("The server socket has failed to listen on any local network address. port: 29500"),
    subprocess.CalledProcessError(1, ["store", "timeout"]),
]


def caught(deed):
    with pytest.raises(Exception) as info:  # noqa: PT011 - whatever it raises is looked at
        deed()
    return info.value


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("rank 1 does not answer"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation"),
        RuntimeError("[gloo/transport/tcp/pair.cc:598] Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:35202: Connection timed out."),
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:35202: No route to host."),
        RuntimeError(
            "[gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:35202: Software caused connection abort."
        ),
        RuntimeError("[gloo/transport/tcp/pair.cc:403] writev [10.77.0.1]:35202: Network is down"),
        RuntimeError("eof: end of file (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"),
        RuntimeError("RPCErr:1:RPC ran for more than set timeout (60000 ms) and will now be marked with an error"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistNetworkError("recvValueWithTimeout failed on SocketImpl(fd=3)"),
        dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cuda//0, the store timed out"),
    ],
)
def test_what_torch_raises_when_a_peer_is_gone(error):
    assert is_peer_failure(error)

    def wrapped():
        raise ValueError("while saving") from error

    assert is_peer_failure(caught(wrapped))


@pytest.mark.parametrize("error", OWN_ERRORS)
def test_a_ranks_own_error_is_a_cause_whatever_it_says(error):
    assert not is_peer_failure(error)


@pytest.mark.parametrize("error", OWN_ERRORS)
def test_lockstep_run_and_torchrun_are_told_the_same(error, tmp_path):
    """torchrun takes the earliest second for the cause: an own error must not be dated to the second after."""
    file = tmp_path / "error.json"
    write_torchelastic_error(error, {"TORCHELASTIC_ERROR_FILE": str(file)}, now_s=100.0)
    assert json.loads(file.read_text())["message"]["extraInfo"]["timestamp"] == "100"
    assert not Failure.of(error, rank=0, host="n1", now_s=0.0, log_bytes=0).collateral


def loses_its_download():
    raise ValueError("hub download: broken pipe")


def test_run_ranks_takes_a_broken_download_for_a_cause():
    (outcome,) = run_each(loses_its_download, 1)
    assert not outcome.collateral


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

    assert is_peer_failure(caught(handling))
    assert not is_peer_failure(caught(otherwise))


def test_a_circle_of_causes_is_no_trouble():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_peer_failure(first)
