"""A real kernel of Jupyter, as a notebook has it, and what its cells put out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.blocking import BlockingKernelClient

DEADLINE_S = 90


@dataclass
class Cell:
    """What one cell has put out, in its order."""

    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The contents of its messages of this type."""
        return [content for one, content in self.messages if one == kind]

    def text(self, name: str = "stdout") -> str:
        """What it has printed."""
        return "".join(content["text"] for content in self.of("stream") if content["name"] == name)

    @property
    def error(self) -> str:
        """The name and the text of the exception that ended it; "" if none did."""
        return "".join(f"{content['ename']}: {content['evalue']}" for content in self.of("error"))


class Kernel:
    """A kernel that runs."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self._client = manager, client

    def run(self, code: str, meanwhile: Callable[[Cell], None] = lambda cell: None) -> Cell:
        """Run a cell to its end; ``meanwhile`` sees it after each message."""
        cell, message_id = Cell(), self._client.execute(code)
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            message = self._client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if (kind, content.get("execution_state")) == ("status", "idle"):
                return cell
            cell.messages.append((kind, content))
            meanwhile(cell)
        raise AssertionError(f"the cell has not ended: {cell}")


@contextlib.contextmanager
def kernel_in(directory: Path, env: Mapping[str, str]) -> Iterator[Kernel]:
    """A kernel that works in ``directory``, with ``env``; it is ended after the block."""
    # Else the kernel would look for settings of the user's.
    own = {"IPYTHONDIR": str(directory / ".ipython"), "JUPYTER_CONFIG_DIR": str(directory / ".jupyter")}
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(directory), env={**env, **own})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
