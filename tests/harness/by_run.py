"""The trainings of `by_hand`, as a user of the library writes them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from by_hand import Trained, Training, look, state_of
from lockstep.launch_contract import STOP_FILE
from lockstep.run import Run


@dataclass(frozen=True)
class Manner:
    """How the script is written, and what becomes of it."""

    strategy: str = "ddp"
    checkpoint: str | None = None
    save_every: str | None = None
    leave: str | None = None  #: how it ends before its end: "break", "stop" (the STOP file) or "kill"; None: not at all
    leave_after: int = 0  #: once so many steps were made, or it was asked for a stop then
    naive_ema: bool = False  #: updated in every body
    asks_counts: bool = True  #: whether rows are noted of micro-batches that count only
    replay: bool = True
    check_every: int = 500


def train(training: Training, manner: Manner = Manner()) -> Trained:
    """With `lockstep.Run`, on every rank; what it was resumed from is in none of the lists."""
    trained = Trained()
    with Run(
        seed=training.seed,
        strategy=manner.strategy,
        precision=training.precision,
        clip_norm=training.clip_norm,
        checkpoint=manner.checkpoint,
        save_every=manner.save_every,
        replay=manner.replay,
        check_every=manner.check_every,
    ) as run:
        own = training.models()
        for parameter in (p for model in own for p in model.parameters() if training.hook is not None):
            parameter.register_hook(training.hook)
        models = [run.model(model, find_unused_parameters=training.find_unused) for model in own]
        optimizers = [run.optimizer(optimizer) for optimizer in training.optimizers(own)]
        sizes = {"global_batch": training.global_batch, "micro_batch": training.micro_batch}
        data = training.data()
        batches = run.loader(data, shuffle=training.shuffle, drop_last=training.drop_last, workers=0, **sizes)
        schedulers = training.schedulers(optimizers, len(batches))
        for number, scheduler in enumerate(schedulers):
            if training.stepped == "run":
                run.scheduler(scheduler)
            elif training.stepped == "kept":
                run.keep(**{f"scheduler_{number}": scheduler})
        held_out = None if training.held_out is None else run.loader(training.held_out(), shuffle=False, **sizes)
        ema = AveragedModel(own[0], multi_avg_fn=get_ema_multi_avg_fn(0.9)) if training.ema else None
        if ema is not None:
            run.keep(ema=ema)
        told: list[tuple[int, list[Any]]] = []
        rows: list[torch.Tensor] = []
        gathers = False
        left = False
        seen: list[int] = []  # the step of the last look; of an object a replay puts nothing back

        def see() -> None:
            """What a step has left; one in which an optimizer has no loss is made where its last body ends."""
            if seen and run.progress.step > seen[0]:
                trained.trail.append(look(own, optimizers))
            seen[:] = [run.progress.step]

        def evaluate() -> None:
            mine = []
            for batch in run.evaluate(held_out):
                seen = training.predict(models, batch)
                run.measure(**seen.measured)
                mine.extend(seen.outputs)
            trained.predictions.append(torch.stack([row for part in run.gather(mine) for row in part]))

        for epoch in run.epochs(training.epochs):
            if training.begin is not None:
                training.begin(own, optimizers, data, epoch)
            if training.arrange is not None:
                training.arrange(own, optimizers, run.progress.step)
            for batch in run.train(batches):
                see()
                step, notes, counts = run.progress.step, [], run.counts
                if manner.leave == "stop" and step == manner.leave_after and run.leads:
                    Path(manner.checkpoint, STOP_FILE).touch()
                done = False
                learn = training.learn if training.learn_at is None else training.learn_at(step)
                for number, part in enumerate(learn(models, batch)):
                    optimizer = _named(training, optimizers)[number if part.optimizer is None else part.optimizer]
                    run.measure(**part.measured)
                    for name, (value, count) in part.means.items():
                        run.measure(**{name: value}, count=count)
                    gathers |= part.rows is not None
                    if part.rows is not None and not (manner.asks_counts and not run.counts):
                        rows.append(part.rows.detach())
                    done = _step(run, training, part, optimizer, optimizers)
                    notes.append(part.told)
                if counts:
                    told.append((step, notes))
                for scheduler in schedulers if done and training.stepped in ("script", "kept") else ():
                    scheduler.step()
                if done and training.after is not None:
                    training.after(own, optimizers)
                if ema is not None and (done or manner.naive_ema):
                    ema.update_parameters(own[0])
                if not done:
                    continue
                see()
                if gathers:
                    trained.rows.append(torch.cat([each for part in run.gather(rows) for each in part]))
                    rows.clear()
                if training.arrange is not None:
                    training.arrange(own, optimizers, run.progress.step)
                if held_out is not None and training.evaluates == "steps":
                    evaluate()
                left = manner.leave is not None and run.progress.step >= manner.leave_after
                if left and _leaves(run, manner):
                    break
            see()
            seen.clear()  # a resume may stand further on
            if left and manner.leave == "break":
                break
            if held_out is not None and training.evaluates == "epochs":
                evaluate()
            trained.metrics.append(dict(run.metrics))
            for scheduler in schedulers if training.stepped == "epochs" else ():
                scheduler.step()
            if training.end is not None:
                training.end(own, optimizers)
            if training.between is not None:
                training.between(own)
        trained.told = [
            notes for _, notes in sorted((n for part in run.gather(told) for n in part), key=lambda n: n[0])
        ]
    trained.end = look(own, optimizers)
    trained.optimizers = [optimizer.state_dict()["state"] for optimizer in optimizers]
    trained.ema = None if ema is None else state_of(ema.module)
    return trained


def _named(training: Training, optimizers: list[Any]) -> list[Any]:
    """What `run.step(optimizer=...)` is told for each loss."""
    if training.together:
        return [optimizers]
    return [None] if len(optimizers) == 1 else optimizers


def _step(run: Run, training: Training, part: Any, optimizer: Any, optimizers: list[Any]) -> bool:
    """Whether the step is complete."""
    if training.clamp is None and training.noise is None:
        return run.step(part.loss, count=part.items, optimizer=optimizer)
    steps = run.progress.step
    if run.backward(part.loss, count=part.items, optimizer=optimizer):
        groups = [group for o in optimizers for group in o.param_groups]
        for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
            if training.clamp is not None:
                parameter.grad.clamp_(-training.clamp, training.clamp)
            if training.noise is not None and not parameter.grad.is_sparse:
                parameter.grad.add_(torch.randn_like(parameter), alpha=training.noise)
    run.update(optimizer)
    return run.progress.step > steps


def _leaves(run: Run, manner: Manner) -> bool:
    """Whether the loop is to be left now; the other ways come by themselves."""
    if manner.leave == "kill" and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return manner.leave == "break"
