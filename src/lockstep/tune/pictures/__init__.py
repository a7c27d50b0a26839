"""Pictures of a search, as SVG with their numbers as CSV and JSON beside them. matplotlib is loaded only to draw.

What only this search has, progress, workers and descent, is drawn here; the rest by Optuna, if it is installed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

from lockstep.tune.pictures import descent, optuna_pictures, progress, timeline
from lockstep.tune.pictures.drawing import Picture
from lockstep.tune.record.journal import SearchRecord

PICTURES: Final[tuple[Picture, ...]] = (
    progress.PICTURE,
    timeline.PICTURE,
    descent.PICTURE,
)


def draw_pictures(record: SearchRecord, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write all pictures of a search to ``directory``, which is made; returns the paths of the files.

    Without Optuna, those that it draws are left out.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    own = tuple(path for picture in PICTURES for path in picture.write(record, Path(directory)))
    return own + (optuna_pictures.draw_with_optuna(record, Path(directory)) if has_optuna() else ())


def has_optuna() -> bool:
    """Whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None
