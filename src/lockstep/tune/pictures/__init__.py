"""Pictures of a search, as SVG with their numbers as CSV and JSON beside them. matplotlib is loaded only to draw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lockstep.tune.journal import SearchRecord
from lockstep.tune.pictures import descent, importance, parallel_coordinates, progress, timeline
from lockstep.tune.pictures.drawing import Picture

PICTURES: Final[tuple[Picture, ...]] = (
    progress.PICTURE,
    timeline.PICTURE,
    parallel_coordinates.PICTURE,
    importance.PICTURE,
    descent.PICTURE,
)


def draw_pictures(record: SearchRecord, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write all pictures of a search to ``directory``, which is made; returns the paths of the files."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    return tuple(path for picture in PICTURES for path in picture.write(record, Path(directory)))
