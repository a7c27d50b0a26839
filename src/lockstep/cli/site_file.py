"""What ``lockstep.toml`` in the working directory says to `lockstep bench` and `lockstep predict`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lockstep.errors import SettingError
from lockstep.records import read_bytes, toml_in


def site_table(name: str) -> dict[str, Any]:
    """The table ``[name]`` of the file; empty where there is none.

    Raises:
        SettingError: if the file cannot be read, or ``name`` is no table in it.
    """
    # Late, for what it loads is not needed to list options.
    from lockstep.launch import SITE_FILE

    site = Path(SITE_FILE)
    try:
        found = toml_in(read_bytes(site).decode()).get(name, {}) if site.exists() else {}
    except (ValueError, OSError) as error:
        raise SettingError(f"{SITE_FILE}: {error}") from None
    if not isinstance(found, dict):
        raise SettingError(f"{SITE_FILE}: {name} = {found!r}; write a table, [{name}]")
    return found


def site_prices() -> Any:
    """The table ``[prices]``, of one device for one hour.

    Raises:
        SettingError: as `site_table`, and for a price that is no number from 0.
    """
    from lockstep.launch import SITE_FILE
    from lockstep.scale import Prices

    prices = dict(site_table("prices"))
    currency = str(prices.pop("currency", "")) or "per hour"
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise SettingError(f"{SITE_FILE}, [prices]: {name} = {price!r}; give a number, of one device for one hour")
    return Prices(prices, currency if prices else "")
