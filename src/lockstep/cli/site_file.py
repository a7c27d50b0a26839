"""What the files of a project and of a user say to single commands."""

from __future__ import annotations

import math
import os
from typing import Any

from lockstep.errors import SettingError
from lockstep.project_files import project_files, table


def site_table(name: str) -> dict[str, object]:
    """The table ``[name]`` of these files; empty where there is none.

    Raises:
        SettingError: as `project_files` does.
    """
    return table(name, project_files(os.environ))


def site_prices() -> Any:
    """The table ``[prices]``, of one device for one hour.

    Raises:
        SettingError: as `site_table`, and for a price that is no number from 0.
    """
    from lockstep.scale import Prices

    files = project_files(os.environ)
    prices = table("prices", files)
    currency = str(prices.pop("currency", "")) or "per hour"
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            place = next(file.place("prices", name) for file in files if name in file.table("prices"))
            raise SettingError(f"{place}: {name} = {price!r}; give a number, of one device for one hour")
    return Prices(prices, currency if prices else "")
