"""A moment as people write it on a command line."""

from __future__ import annotations

import contextlib
from datetime import datetime, time, timedelta

from lockstep.errors import SettingError


def moment(text: str, now: datetime) -> float:
    """The next time that ``text`` tells, in seconds since 1970.

    Raises:
        SettingError: if it tells none.
    """
    if text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    with contextlib.suppress(ValueError):
        today = datetime.combine(now.date(), time.fromisoformat(text))
        return (today if today > now else today + timedelta(days=1)).timestamp()
    raise SettingError(f"--ends-at {text}: give a time as 18:30, a date and time as 2030-12-31T18:30, or date +%s")
