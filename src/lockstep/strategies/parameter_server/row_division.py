"""Which rows of which table lie on which server: a plan, which all ranks make alike without talking.

    words: 9 rows     server 0: 0 to 4     server 1: 5 to 8         a large table is divided equally
    tags: 3 rows                           server 1: 0 to 2         a small one is whole where least is

A table is placed when it is made, whatever tables follow, so that none need be moved afterwards.
"""

from __future__ import annotations

from typing import Final

#: A table of fewer bytes is not divided: each look-up asks all servers that have rows of it.
WHOLE_BYTES: Final = 1 << 16


class RowDivision:
    """Divides tables between servers, one after the other.

    Args:
        servers: their ranks.
    """

    def __init__(self, servers: range) -> None:
        self._bytes: Final = dict.fromkeys(servers, 0)  # on each server

    def place(self, rows: int, row_bytes: int) -> dict[int, range]:
        """The rows of the next table on each server that holds some, in order; one server if there are no rows.

        Of a large table no server holds more than one row more than another, and the one that has least gets it.
        """
        least_first = sorted(self._bytes, key=lambda server: (self._bytes[server], server))
        if rows * row_bytes < WHOLE_BYTES:
            lengths = {least_first[0]: rows}
        else:
            each, rest = divmod(rows, len(least_first))
            lengths = {server: each + (server in least_first[:rest]) for server in self._bytes}
        found, first = {}, 0
        for server, length in lengths.items():
            if length or len(lengths) == 1:
                found[server] = range(first, first + length)
                self._bytes[server] += length * row_bytes
                first += length
        return found
