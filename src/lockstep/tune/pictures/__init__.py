"""Pictures of a search, as SVG with their numbers as CSV and JSON beside them. matplotlib is loaded only to draw.

What only this search has, progress, workers and descent, is drawn here; the rest by Optuna, if it is installed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lockstep.report import new_figure, save_svg
from lockstep.tune.pictures import descent, importance, progress, timeline
from lockstep.tune.pictures.drawing import Figure, Picture, say_nothing, styled
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.importance import has_optuna
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
    own = importance.PICTURE.write(record, directory)
    return tuple(directory / f"{name}.svg" for name in OPTUNA_TITLES) + own
