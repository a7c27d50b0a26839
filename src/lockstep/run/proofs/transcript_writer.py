"""The transcript of a run that is compared with other runs: checksums of its steps, after which the run ends.

    the first micro-batch of a step is handed out    the state that the steps before have left, by parts; what was
                                                     measured and logged since
    each micro-batch                                 samples, losses, gradients, buffers, random numbers: its `Play`
    of one step, on request                outputs of modules, forward and backward; variables of the script

Micro-batches are written by their index and tensors by their name, so that runs on any number of ranks compare.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Final

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import TensorShard
from lockstep.errors import CheckpointError
from lockstep.launch_contract import EXIT_OK
from lockstep.nested import leaves
from lockstep.run.checks.divergence import checksum, plain_in, tensors_in
from lockstep.run.proofs.replay import Play
from lockstep.run.proofs.resume_proof import bit_sums
from lockstep.run.setup.run_context import RunContext
from lockstep.run.source.reachable import look, script_roots
from lockstep.run.state.snapshot import RunSnapshot
from lockstep.torch_private import pytree
from lockstep.transcript import ABOUT, MICRO_BATCH, SAID, SECONDS, STATE, STOPPED, VARIABLES, TranscriptRequest, line_of

_COMMIT_S: Final = 60.0  # how long a checkpoint may take that is waited for
_SHOWN: Final = 60  # characters of a value


class TranscriptWriter:
    """The writer of this rank's transcript.

    Args:
        context: of the run.
        request: steps and details to be recorded.
        snapshot: of the content of a checkpoint.
    """

    def __init__(self, context: RunContext, request: TranscriptRequest, snapshot: RunSnapshot) -> None:
        self._context: Final = context
        self._request: Final = request
        self._snapshot: Final = snapshot
        self._file: Final[IO[str]] = request.file(context.group.rank).open("w", encoding="utf-8")
        self._step = -1  # the step whose micro-batches are handed out
        self._began_s = 0.0
        self._logged: list[tuple[str, object]] = []  # values since the state was written last
        self._play: Play | None = None  # of the micro-batch whose modules are watched
        self._calls: Counter[str] = Counter()  # of each module in this micro-batch
        self._unhook: Callable[[], None] = lambda: None

    def begins(self, step: int) -> None:
        """Begin a micro-batch after ``step`` steps. Collective if the micro-batch is the first of its step.

        Raises:
            SystemExit: with code 0, after the last requested step.
        """
        if step == self._step:
            return
        request = self._request
        if self._step < 0:
            self._began_s = time.monotonic()
            self._write_about()
        self._step = step
        self._write_state(step)
        self._unhook()
        is_late = step >= request.least_steps and time.monotonic() - self._began_s > request.budget_s
        if step >= request.steps or is_late:
            self._write(ABOUT, step, 0, {STOPPED: ("True", ""), SECONDS: self._seconds()})
            raise SystemExit(EXIT_OK)
        if request.kill_after is not None and step > request.kill_after and self._context.group.leads:
            self._die(request.kill_after)
        if step == request.detail:
            self._unhook = register_module_forward_hook(self._note_output, always_call=False).remove

    def hand_out(self, position: MicroBatchPosition, play: Play | None) -> None:
        """Hand out the micro-batch at ``position``, whose results go into ``play``, if it counts."""
        self._play = play if self._step == self._request.detail else None
        self._calls.clear()
        if self._play is not None:
            marks = look(script_roots(sys._getframe()), skip={id(p) for p in self._parameters()})
            seen = {path: (f"{mark.rank} {mark.seen!r}", repr(mark.seen)[:_SHOWN]) for path, mark in marks.items()}
            self._write(VARIABLES, self._step, position.index, seen)

    def note_samples(self, play: Play, position: MicroBatchPosition, data: object) -> None:
        """Note the samples of ``data`` one by one, if the tensors of the micro-batch have a row per sample."""
        leaves = pytree.tree_leaves(data)
        rows = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.is_cpu]
        if rows and all(leaf.layout is torch.strided and len(leaf) == position.samples for leaf in rows):
            for number in range(position.samples):
                play.note(f"sample {number}", _mark([int(checksum(leaf[number])) for leaf in rows]))

    def note_draws(self, play: Play) -> None:
        """Note the states of random generators as the body gives a loss."""
        play.note("the random numbers drawn from torch", torch.get_rng_state())
        play.note("the random numbers drawn from NumPy", _mark(np.random.get_state(legacy=False)))
        play.note("the random numbers drawn from Python", _mark(random.getstate()))
        if self._context.device.type == "cuda":
            play.note("the random numbers drawn on the GPU", torch.cuda.get_rng_state(self._context.device))

    def ended(self, position: MicroBatchPosition, play: Play) -> None:
        """The body of the micro-batch at ``position`` is over. Waits for the GPU."""
        self._play = None
        self._write(MICRO_BATCH, self._step, position.index, _as_text(play.notes()))

    def logged(self, values: Mapping[str, object]) -> None:
        """Note the ``values`` logged by the script, equal on all ranks."""
        self._logged += values.items()

    def finish(self) -> None:
        """The training has come to its end. Collective."""
        if 0 <= self._step < self._context.position.progress.step:
            self._write_state(self._context.position.progress.step)
            self._write(ABOUT, self._step, 0, {SECONDS: self._seconds()})

    def close(self) -> None:
        """Write no more."""
        self._unhook()
        self._file.close()

    # ---- what it writes ------------------------------------------------------------------------------------------

    def _write_about(self) -> None:
        plan, length = self._context.plan.plan, self._context.position.length
        values = {
            "micro_batches": plan.micro_batches if plan else 1,
            "micro_batch": plan.micro_batch if plan else 1,
            "global_batch": plan.global_batch if plan else 1,
            "steps_per_epoch": length.steps_per_epoch or 0,
            "gpu": int(self._context.device.type == "cuda"),
        }
        self._write(ABOUT, 0, 0, {name: (str(value), str(value)) for name, value in values.items()})

    def _write_state(self, step: int) -> None:
        leads = self._context.group.leads
        tree = self._snapshot.objects()
        held: dict[str, tuple[torch.Tensor, int]] = {
            name: (shard.tensor, shard.start[0] if shard.start else 0)
            for name, shard in leaves(tree)
            if isinstance(shard, TensorShard) and shard.tensor is not None
        }
        plain: dict[str, tuple[str, str]] = {}
        if leads:
            held |= {name: (tensor, 0) for name, tensor in tensors_in(tree) if not hasattr(tensor, "to_local")}
            found = plain_in({name: value for name, value in tree.items() if name != "about_models"}, "state")
            plain = {name: (repr(value), repr(value)[:_SHOWN]) for name, value in found}
        sums = {f"state.{name}": (str(mark), "") for name, mark in bit_sums(held).items()}
        names = self._names_of_optimizers()
        self._write(STATE, step, 0, {_named(name, names): note for name, note in (plain | sums).items()})
        said: list[tuple[str, object]] = [
            (f"run.metrics[{name!r}]", value) for name, value in self._context.position.metrics.items()
        ]
        said += [(f"run.log({name}=...)", value) for name, value in self._logged]
        self._logged.clear()
        counted: Counter[str] = Counter()
        notes = {}
        for name, value in said if leads else ():
            counted[name] += 1
            number = f" of call {counted[name]}" if counted[name] > 1 else ""
            notes[f"{name}{number}"] = repr(value), repr(value)[:_SHOWN]
        self._write(SAID, step, 0, notes)

    def _seconds(self) -> tuple[str, str]:
        return f"{time.monotonic() - self._began_s:.3f}", ""

    def _write(self, kind: str, step: int, index: int, notes: Mapping[str, tuple[str, str]]) -> None:
        self._file.write(f"{line_of(kind, step, index, notes)}\n")
        self._file.flush()  # the rank may be killed

    def _names_of_optimizers(self) -> dict[str, str]:
        """The prefixes of each parameter's optimizer state in the tree, with readable prefixes to replace them."""
        known = {id(p): name for model in self._context.state.models for name, p in model.named_parameters()}
        return {
            f"state.optimizers.{number}.state.{place}.": f"state.optimizers.{number}.{known.get(id(p), place)}."
            for number, optimizer in enumerate(self._context.state.optimizers)
            for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for model in self._context.state.models:
            yield from model.parameters()

    def _note_output(self, module: torch.nn.Module, _inputs: object, output: object) -> None:
        play = self._play
        if play is None:
            return
        known = (name for model in self._context.state.models for name, each in model.named_modules() if each is module)
        name = f"{next(known, 'a module beside the models') or 'the model'} ({type(module).__name__})"
        self._calls[name] += 1
        call = f", call {self._calls[name]}" if self._calls[name] > 1 else ""
        leaves, _ = pytree.tree_flatten(output)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            which = f" {number}" if len(leaves) > 1 else ""
            play.note(f"the output{which} of {name}{call}", leaf)
            if leaf.requires_grad:
                text = f"the gradient at the output{which} of {name}{call}"
                leaf.register_hook(lambda gradient, text=text: play.note(text, gradient))

    def _die(self, saved: int) -> None:
        """As by ``kill -9``, once the checkpoint of the step ``saved`` is complete."""
        deadline = time.monotonic() + _COMMIT_S
        while (self._context.checkpointer.committed_step() or 0) < saved:
            if time.monotonic() > deadline:
                raise CheckpointError(f"the checkpoint of step {saved} was not complete after {_COMMIT_S:g} s")
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def _mark(value: object) -> bytes:
    return b"%08x" % zlib.crc32(repr(value).encode())


def _as_text(notes: Mapping[str, tuple[object, object]]) -> dict[str, tuple[str, str]]:
    return {
        name: (str(mark), str(value)[:_SHOWN] if isinstance(value, bool | int | float) else "")
        for name, (mark, value) in notes.items()
    }


def _named(name: str, names: Mapping[str, str]) -> str:
    for number in range(name.count(".")):
        head = ".".join(name.split(".")[: number + 1]) + "."
        if head in names:
            return names[head] + name[len(head) :]
    return name
