"""Trials as a journal would tell them."""

from collections.abc import Sequence

from lockstep.tune.record.trial import Reported, Trial


def trial(
    number: int,
    curve: Sequence[float] = (),
    state: str = "done",
    *,
    losses: tuple[float, ...] | None = None,
    began: float | None = None,
    ended: float | None = None,
    **more: object,
) -> Trial:
    """A trial that reported the losses of ``curve``, one each second; its loss is the last one if none is given."""
    began = float(number) if began is None else began
    if losses is None:
        losses = tuple(curve[-1:]) if state in ("done", "stopped") else ()
    if ended is None and state != "running":
        ended = began + max(len(curve), 1)
    return Trial(
        number=number,
        state=state,
        losses=losses,
        reports=tuple(Reported(step, loss, began + step + 1) for step, loss in enumerate(curve)),
        began_at_s=began,
        ended_at_s=ended,
        run_s=(ended or began) - began,
        **{"params": {}, "point": (0.5, 0.0), **more},
    )
