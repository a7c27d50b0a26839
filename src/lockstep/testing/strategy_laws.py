"""The laws that every strategy must keep, as tests."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import list_checkpoints, load_tree
from lockstep.heartbeat import ProgressMarker, progress_marker
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.testing.hashes import state_hash
from lockstep.testing.ranks import run_each, run_ranks


@dataclass(frozen=True, slots=True)
class StrategyLaws:
    """The laws that a strategy must keep: one method for each, which raises AssertionError.

    Each law trains a small classifier on real ranks, through `Run`, and compares checkpoints: so it sees what a user
    would get, whatever lies where while it trains. A law takes one to five seconds.

    The reference is one rank without a strategy. A strategy that promises bits must end in the same ones; another one
    must not be further away than ``tolerance``, as a part of the way that training went: the 2-norm of the difference
    of parameters over that of what the reference changed. And it must have gone the same way: within 60 degrees of it,
    so that no tolerance forgives one that learns nothing.

    Args:
        strategy: the word, with options.
        directory: for checkpoints; each law makes its own below it.
        worlds: numbers of ranks to try, the first one is used where one will do.
        bits: whether it promises the reference's bits.
        tolerance: how far it may be away, if it does not.
        repeats: whether the same world gives the same bits again.
        worlds_agree: whether all worlds end in the same bits, if these are not the reference's.
        dropout: of the classifier; a strategy that computes in an order of its own draws other numbers.
        batchnorm: whether the classifier has it, else LayerNorm: for strategies that cut micro-batches into pieces.
        rehearse: whether CPU threads stand in for GPUs, or ranks share one.
    """

    strategy: str
    directory: Path
    worlds: tuple[int, ...] = (2, 3)
    bits: bool = True
    tolerance: float = 0.0
    repeats: bool = True
    worlds_agree: bool = False
    dropout: float = 0.2
    batchnorm: bool = True
    rehearse: bool = False

    #: The names of the laws.
    ALL: ClassVar[tuple[str, ...]] = (
        "equals_the_reference",
        "equals_plain_torch",
        "resumes_exactly",
        "moves_between_worlds",
        "moves_between_strategies",
        "survives_a_killed_rank",
        "respects_count",
        "clips_alike",
        "evaluates_exactly_once",
        "replays_leave_no_trace",
    )

    def equals_the_reference(self) -> None:
        """On each world, with momentum and with AdamW, buffers included; given a model, and how to make one."""
        for case in (self._case(optimizer="sgd"), self._case(optimizer="adamw", hands_over_function=True)):
            for world in self.worlds:
                found = self._trained(case, world)
                self._near(found, case, f"on {world} ranks, {case.optimizer}")
                self._agrees(found, case, f"on {world} ranks, {case.optimizer}")

    def equals_plain_torch(self) -> None:
        """Not only like another world: like a loop of plain torch on one process, but for rounding."""
        case, world = self._case(), self.worlds[0]
        (plain,) = run_ranks(_train_by_hand, 1, case, timeout_s=_LAW_S)
        found = _flat(self._trained(case, world), case)
        if self.bits:
            away = float((found - plain).abs().max())
            assert away <= _ROUNDING, f"{self.strategy} on {world} ranks: {away:.3g} away from plain torch"
        else:
            self._not_far(found, plain, case, f"on {world} ranks, from plain torch")

    def resumes_exactly(self) -> None:
        """Left after some steps, within an epoch, and started again: as if it had not been left."""
        case, world = self._case(), self.worlds[0]
        whole = self._trained(case, world)
        directory = self._begun(case, world)
        resumed = self._trained(case, world, directory)
        if self.repeats:
            assert state_hash(resumed) == state_hash(whole), f"{self.strategy}: resumed, it ends in other bits"
        self._near(resumed, case, "resumed")

    def moves_between_worlds(self) -> None:
        """Begun on one number of ranks, ended on another, and the other way round."""
        case = self._case()
        for before, after in permutations(self.worlds, 2):
            directory = self._begun(case, before)
            found = self._trained(case, after, directory)
            self._near(found, case, f"begun on {before} ranks, ended on {after}")
            self._agrees(found, case, f"begun on {before} ranks, ended on {after}")

    def moves_between_strategies(self) -> None:
        """Begun under ``ddp`` and ended under this one, and the other way round."""
        mine, other, world = self._case(), self._case(strategy="ddp"), self.worlds[0]
        for before, after in ((other, mine), (mine, other)):
            directory = self._begun(before, world)
            found = self._trained(after, world, directory)
            self._near(found, mine, f"begun under {before.strategy}, ended under {after.strategy}")

    def survives_a_killed_rank(self) -> None:
        """A rank is killed; no other hangs, and started again the run ends as if nothing had been."""
        case, world = self._case(), self.worlds[0]
        for victim in sorted({0, world - 1}):
            directory = self._begun(case, world, victim)
            found = self._trained(case, world, directory)
            if self.repeats:
                same = state_hash(found) == state_hash(self._trained(case, world))
                assert same, f"{self.strategy}: after rank {victim} was killed it ends in other bits"
            self._near(found, case, f"after rank {victim} was killed")

    def respects_count(self) -> None:
        """The mean is over the items that ``count=`` tells, not over micro-batches or samples."""
        case = self._case(counted=True)
        self._near(self._trained(case, self.worlds[-1]), case, "with count=")

    def clips_alike(self) -> None:
        """The norm of the gradient is that of the whole one, wherever its parts lie."""
        case = self._case(clip_norm=0.05)
        self._near(self._trained(case, self.worlds[-1]), case, "with clip_norm=0.05")

    def evaluates_exactly_once(self) -> None:
        """Each held-out sample counts once, over all ranks, and outputs are those of the trained model."""
        for world in self.worlds:
            case = self._case()
            met = run_ranks(_evaluate, world, case, timeout_s=_LAW_S)
            once = sum(2.0**i for i in range(_HELD_OUT)) / _HELD_OUT
            assert [m["met"] for m in met] == [once] * world, f"{self.strategy} on {world} ranks met {met}"
            assert len({repr(m) for m in met}) == 1, f"{self.strategy}: ranks have other measures: {met}"

    def replays_leave_no_trace(self) -> None:
        """A micro-batch of each step is computed twice: parameters and buffers are what they are without that."""
        case, world = self._case(), self.worlds[-1]
        without, always = (
            self._trained(replace(case, **how), world) for how in ({"replay": False}, {"check_every": 1})
        )
        if self.repeats:
            assert state_hash(always) == state_hash(without), f"{self.strategy}: replays change the bits"
        self._near(always, case, "with a replay in each step")

    def _case(self, **changes: Any) -> _Case:
        case = _Case(self.strategy, dropout=self.dropout, batchnorm=self.batchnorm, rehearse=self.rehearse)
        return replace(case, **changes)

    def _near(self, found: dict[str, object], case: _Case, when: str) -> None:
        reference = _undisturbed(replace(case, strategy="none", hands_over_function=False), 1)
        if self.bits:
            assert state_hash(found) == state_hash(reference), f"{self.strategy} {when}: other bits than one rank"
            return
        self._not_far(_flat(found, case), _flat(reference, case), case, f"{when}, from one rank")

    def _agrees(self, found: dict[str, object], case: _Case, when: str) -> None:
        if self.worlds_agree:
            first = _undisturbed(replace(case, hands_over_function=False), self.worlds[0])
            assert state_hash(found) == state_hash(first), (
                f"{self.strategy} {when}: other bits than on {self.worlds[0]}"
            )

    def _not_far(self, here: torch.Tensor, end: torch.Tensor, case: _Case, when: str) -> None:
        begin = _flat(_undisturbed(replace(case, strategy="none", epochs=0), 1), case)
        away = float((here - end).norm() / (end - begin).norm())
        assert away <= self.tolerance, f"{self.strategy} {when}: {away:.3g} away, over {self.tolerance:g}"
        along = float((here - begin) @ (end - begin) / (here - begin).norm() / (end - begin).norm())
        assert along >= _LEAST_COSINE, f"{self.strategy} {when}: went elsewhere, by a cosine of {along:.2g}"

    def _trained(self, case: _Case, world: int, directory: Path | None = None) -> dict[str, object]:
        """The state at the end of training; resumed from what ``directory`` holds, if that is given."""
        return _undisturbed(case, world) if directory is None else _trained_in(directory, case, world, resumed=True)

    def _begun(self, case: _Case, world: int, victim: int | None = None) -> Path:
        """A directory with a checkpoint of the first steps of training, which was then left, or killed."""
        directory = self._new_directory()
        case = replace(case, directory=str(directory), leave_after=4, victim=victim)
        outcomes = run_each(_train, world, case, timeout_s=_LAW_S)
        for outcome in outcomes:
            if victim is None:
                left = isinstance(outcome.error, _LeftEarly) or outcome.collateral
            else:
                left = isinstance(outcome.error, ChildProcessError) if outcome.rank == victim else outcome.collateral
            assert left, f"{self.strategy}: rank {outcome.rank} of {world} ended with {outcome}\n{outcome.trace}"
        saved = list_checkpoints(directory)
        assert saved, f"{self.strategy}: nothing was saved before it was left"
        assert 0 < saved[0].step < _STEPS
        return directory

    def _new_directory(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.directory))


_LAW_S = 60.0
_ROUNDING = 1e-6  # of parameters of about 1, in float32
_LEAST_COSINE = 0.5  # the cosine of 60 degrees; an unrelated way of as many parameters has one of 0 +- 0.04
_SAMPLES, _HELD_OUT, _EPOCHS, _STEPS = 40, 23, 2, 6
_SEED, _GLOBAL_BATCH, _MICRO_BATCH = 3, 16, 4


class _LeftEarly(Exception):
    """Training was left on purpose."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One training, on every rank of a world."""

    strategy: str
    directory: str | None = None
    optimizer: str = "sgd"
    dropout: float = 0.0
    batchnorm: bool = True
    rehearse: bool = False
    counted: bool = False
    hands_over_function: bool = False  #: whether `Run.model` is given the function that makes the model
    clip_norm: float | None = None
    replay: bool = True
    check_every: int = 500
    epochs: int = _EPOCHS
    leave_after: int = 0  #: steps; 0: not before the end
    victim: int | None = None  #: the rank that is killed then; None: all leave by themselves


def _model(case: _Case) -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(9, 4),
        nn.Flatten(),
        nn.Linear(12, 24),
        nn.BatchNorm1d(24) if case.batchnorm else nn.LayerNorm(24),
        nn.ReLU(),
        nn.Dropout(case.dropout),
        nn.Linear(24, 10),
        nn.Tanh(),
        nn.Linear(10, 5, bias=False),
    )
    # For strategies that divide layers: each style, and Dropout where activations are whole.
    styles = {"0": "embedding_colwise", "2": "colwise_gather_output", "6": "colwise", "8": "rowwise"}
    model.tensor_parallel_plan = styles  # type: ignore[assignment]  # nothing that is trained
    return model


def _words_and_labels(seed: int) -> tuple[torch.Generator, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(k, n, generator=random) for k, n in ((9, (_SAMPLES, 3)), (5, (_SAMPLES,))))
    return random, words, labels


def _samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is learned: words, labels and weights."""
    random, words, labels = _words_and_labels(5)
    return words, labels, torch.randint(1, 9, (_SAMPLES,), generator=random)


def _train_by_hand(case: _Case) -> torch.Tensor:
    """The parameters after what `_train` trains, without `Run` and what it is made of, in one long vector."""

    def seed(*key: object) -> int:
        digest = hashlib.blake2b("/".join(map(repr, key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") // 2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed(_SEED, "init"))
    model, (words, labels, _) = _model(case).to(device), _samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for epoch in range(case.epochs):
        order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(seed(_SEED, "order", epoch)))
        for rows in order.split(_GLOBAL_BATCH):
            for index, mine in enumerate(rows.split(_MICRO_BATCH)):
                torch.manual_seed(seed(_SEED, "step", step, index))
                loss = nn.functional.cross_entropy(model(words[mine].to(device)), labels[mine].to(device))
                (loss * (len(mine) / len(rows))).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return torch.cat([p.detach().cpu().double().reshape(-1) for p in model.parameters()])


def _train(case: _Case) -> dict[str, float]:
    words, labels, weights = _samples()
    make = torch.optim.AdamW if case.optimizer == "adamw" else partial(torch.optim.SGD, momentum=0.9)
    with Run(
        seed=_SEED,
        strategy=case.strategy,
        checkpoint=case.directory,
        save_every="2 steps" if case.leave_after else None,
        clip_norm=case.clip_norm,
        peer_timeout_s=20,
        rehearse=case.rehearse,
        replay=case.replay,
        check_every=case.check_every,
    ) as run:
        model = run.model((lambda: _model(case)) if case.hands_over_function else _model(case))
        run.optimizer(make(model.parameters(), lr=0.05))
        batches = run.loader(
            TensorDataset(words, labels, weights), global_batch=_GLOBAL_BATCH, micro_batch=_MICRO_BATCH
        )
        if case.leave_after:
            _leave_early(run, case)
        for _ in run.epochs(case.epochs):
            for x, y, w in run.train(batches):
                if case.counted:
                    run.step(_weighted_loss, x, (y, w), count=int(w.sum()))
                else:
                    run.step(nn.functional.cross_entropy, x, y)
    return run.metrics


def _weighted_loss(outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    each = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return (each * weights).sum() / weights.sum()


def _leave_early(run: Run, case: _Case) -> None:
    """This rank leaves, or is killed, after ``leave_after`` steps, once there is a checkpoint."""

    def follow(marker: ProgressMarker) -> None:
        if case.directory is None or case.victim not in (None, run.rank) or marker.step != case.leave_after:
            return
        deadline = time.monotonic() + _LAW_S
        while not list_checkpoints(Path(case.directory)) and time.monotonic() < deadline:
            time.sleep(0.005)
        if case.victim is None:
            raise _LeftEarly
        os.kill(os.getpid(), signal.SIGKILL)

    progress_marker().listeners += (follow,)


def _evaluate(case: _Case) -> dict[str, float]:
    _, words, labels = _words_and_labels(6)
    with Run(seed=3, strategy=case.strategy, peer_timeout_s=20, rehearse=case.rehearse) as run:
        model = run.model(_model(case))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader((words, labels), global_batch=16, micro_batch=4)
        held_out = run.loader((words[:_HELD_OUT], torch.arange(_HELD_OUT)), global_batch=6, shuffle=False)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(nn.functional.cross_entropy, x, y)
            for x, number in run.evaluate(held_out):
                run.measure(met=2.0 ** number.double(), output=model(x).square().sum(1))
        return run.metrics


@cache
def _undisturbed(case: _Case, world: int) -> dict[str, object]:
    """The state after ``case`` in one go; most laws compare with it, so each process computes it once."""
    with tempfile.TemporaryDirectory(prefix="lockstep-law-") as directory:
        return _trained_in(Path(directory), case, world, resumed=False)


def _trained_in(directory: Path, case: _Case, world: int, *, resumed: bool) -> dict[str, object]:
    """The state after ``case``, whose checkpoints lie in ``directory``."""
    case = replace(case, directory=str(directory))
    run_ranks(_train, world, case, timeout_s=_LAW_S, env={RESUME: str(int(resumed))})
    return _newest(directory, 0 if case.epochs == 0 else _STEPS)


def _newest(directory: Path, step: int = _STEPS) -> dict[str, object]:
    """What the newest checkpoint in ``directory`` holds of model and optimizer."""
    saved = list_checkpoints(directory)
    assert saved, f"nothing was saved in {directory}"
    assert saved[0].step == step, f"the last checkpoint is of step {saved[0].step}, not of {step}"
    tree = load_tree(saved[0].path)
    return {name: tree[name] for name in ("models", "optimizers")}


def _flat(state: Mapping[str, Any], case: _Case) -> torch.Tensor:
    (model,) = state["models"]
    names = [name for name, _ in _model(case).named_parameters()]
    return torch.cat([model[name].double().reshape(-1) for name in names])
