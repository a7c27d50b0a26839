"""Figures of matplotlib, which is loaded only when one is drawn."""

from __future__ import annotations

from typing import Any

from lockstep.errors import SettingError


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, without a window and outside of pyplot's own list, so that nothing is to be closed.

    Raises:
        SettingError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingError("pictures need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")
