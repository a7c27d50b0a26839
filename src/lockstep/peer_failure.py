"""Whether an error only says that another rank is gone: then the rank that raised it is a victim, never the cause.

    type of the exception              message               verdict
    PeerLost                           any                   another rank is gone
    DistNetworkError                   any but "cannot       another rank is gone
                                       listen here"
    RuntimeError, other Dist...Error   one of the patterns   another rank is gone
    anything else                      any                   this rank's own error, such as a broken download

torch's types are known by name, so that a launcher can ask without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.errors import PeerLost

# What torch raises when the other end is gone. Only these types: the same words in, say, a ConnectionResetError of the
# user's own download are a cause.
# AcceleratorError is what CUDA says, also where NCCL was aborted because a rank is gone.
_TORCH_ERRORS = frozenset(
    {"RuntimeError", "AcceleratorError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|socket (timeout|closed)|broken pipe|timed out waiting \d+ms|"
    r"gloo/transport.*(read error|writev |timed out|no route to host|unreachable)|"  # whatever the kernel says of it
    r"pair closure|connectfullmesh|failed to recv, got 0 bytes|client socket has timed out|remote process exited|"
    r"nccl.*(watchdog|remote process|abort|system error|remote error)|watchdog caught collective|"
    r"store.*(timeout|timed out)|(timeout|timed out).*store|"
    r"this error originated at tensorpipe|rpc ran for more than set timeout",
    re.IGNORECASE | re.DOTALL,
)
_OWN_SOCKET = re.compile(r"failed to (listen|bind)|EADDRINUSE|address already in use", re.IGNORECASE)


def is_peer_failure(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, only says that another rank is gone or silent."""
    return any(_says_peer_is_gone(link) for link in _chain(error))


def _says_peer_is_gone(error: BaseException) -> bool:
    if isinstance(error, PeerLost):
        return True
    name = type(error).__name__
    # An error of the program's own class may not even say what it is.
    text = str(error) if name in _TORCH_ERRORS else ""
    if name == "DistNetworkError" and not _OWN_SOCKET.search(text):
        return True
    return name in _TORCH_ERRORS and _PEER_GONE.search(text) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and the errors that Python would print above it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
