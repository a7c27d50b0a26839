"""Pictures of a search, as SVG with their numbers as CSV and JSON beside them. matplotlib is loaded only to draw.

What only this search has, progress, workers and descent, is drawn here; the rest by Optuna, if it is installed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lockstep.report import new_figure, save_svg
from lockstep.tune.pictures import descent, progress, timeline
from lockstep.tune.pictures.drawing import BLUE, INK, Figure, Picture, Row, say_nothing, styled
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.importance import LEAST, PART, RESAMPLES, has_optuna, importances
from lockstep.tune.results.optuna_study import study_of

PICTURES: Final[tuple[Picture, ...]] = (
    progress.PICTURE,
    timeline.PICTURE,
    descent.PICTURE,
)
#: The names of the files that Optuna draws, and what each shows.
OPTUNA_TITLES: Final = {
    "parallel_coordinates": "Each trial as a line across its parameters to its loss",
    "slices": "The loss over each parameter by itself",
}


def draw_pictures(record: SearchRecord, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write all pictures of a search to ``directory``, which is made; returns the paths of the files.

    Without Optuna, those that it draws are left out.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    own = tuple(path for picture in PICTURES for path in picture.write(record, Path(directory)))
    return own + (_draw_with_optuna(record, Path(directory)) if has_optuna() else ())


def _draw_with_optuna(record: SearchRecord, directory: Path) -> tuple[Path, ...]:
    """``NAME.svg`` in ``directory`` for each of `OPTUNA_TITLES`; returns the paths.

    Trials that were stopped early or have failed are left out. What was computed by Optuna is drawn here, with numbers.

    Raises:
        SettingError: if Optuna or matplotlib is not installed.
    """
    study = study_of(record)
    from matplotlib import pyplot
    from optuna import visualization
    from optuna.exceptions import ExperimentalWarning

    plots: Any = visualization.matplotlib
    loss: dict[str, Any] = {"target": lambda trial: trial.values[0], "target_name": "loss"}
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of all that it draws so
        warnings.simplefilter("ignore", UserWarning)  # of axes that it shares between parameters
        draw: dict[str, Callable[[], Figure]] = {
            "parallel_coordinates": lambda: plots.plot_parallel_coordinate(study, **loss),
            "slices": lambda: plots.plot_slice(study, **loss),
        }
        for name, title in OPTUNA_TITLES.items():
            try:
                drawn = draw[name]()
                figure: Figure = (drawn if hasattr(drawn, "figure") else drawn.flat[0]).figure
            except (ValueError, RuntimeError) as error:  # of so few trials that it has nothing to say
                figure = new_figure(6.0, 1.6)
                say_nothing(figure.subplots(), str(error).splitlines()[0])
            save_svg(figure, directory / f"{name}.svg", title)
            pyplot.close(figure)
    own = IMPORTANCE.write(record, directory)
    return tuple(directory / f"{name}.svg" for name in OPTUNA_TITLES) + own


_IMPORTANCE_TITLE = "How much each parameter matters to the loss"


def _importance_rows(record: SearchRecord) -> Sequence[Row]:
    """One for each parameter, the most important first."""
    return [asdict(one) for one in importances(record)]


def _draw_importance(rows: Sequence[Row]) -> Figure:
    """A bar for each parameter, with a line from the lower to the upper limit."""
    figure = new_figure(6.0, 1.0 + 0.3 * max(len(rows), 2))
    axes = figure.subplots()
    if not rows:
        say_nothing(axes, f"fewer than {LEAST} trials were trained to their end")
        return figure
    places = range(len(rows))
    axes.barh(places, [row["share"] for row in rows], color=BLUE, height=0.6)
    axes.hlines(places, [row["low"] for row in rows], [row["high"] for row in rows], color=INK, lw=1.5)
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the importance")
    axes.set_title(_IMPORTANCE_TITLE)
    return figure


IMPORTANCE = Picture(
    "importance",
    _IMPORTANCE_TITLE,
    "PED-ANOVA (Watanabe et al. 2023) by Optuna, of the first loss of trials that were trained to their end; "
    f"low and high: the limits of {PART:.0%} of the shares in {RESAMPLES} bootstrap samples of the trials.",
    _importance_rows,
    _draw_importance,
)
