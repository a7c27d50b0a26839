"""Compares the numbers that two ranks print in lines of the same form.

    rank 0      epoch 3: accuracy 0.531, 12.1 s
    rank 1      epoch 3: accuracy 0.611, 12.3 s         other accuracies: that of one rank's own micro-batches

Ranks run the same script, so what a script computes from all samples of a step is printed alike by all ranks. Times,
rates, memory and names of devices and processes may differ.
"""

from __future__ import annotations

import re
from typing import Final

from lockstep.launch.terminal.console import Tail

_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_WORDS: Final = (
    *("local", "rank", "worker", "process", "pid", "thread", "node", "host", "port", "device", "gpu", "cuda", "cpu"),
    *("time", "took", "takes", "elapsed", "eta", "duration", "speed", "throughput", "fps", "clock", "date", "left"),
    *("s", "sec", "secs", "seconds?", "ms", "us", "min", "mins", "minutes?", "hours?", "latency", "wait", "waited"),
    *("data", "mem", "memory", "peak", "rss", "bytes", "ram", "[kmgt]i?b"),
)
#: Before a number that is a rank's own: such a word, after the number or the sign before it.
_OWN_NAME: Final = re.compile(rf"(?<![a-z])(?:{'|'.join(_WORDS)})(?![a-z])[^|,;()\[\]{{}}]*$", re.IGNORECASE)
#: Directly after it: a unit of time, of memory, or one per time.
_OWN_UNIT: Final = re.compile(
    r"\s?(?:n|u|µ|m)?s(?:ec(?:ond)?s?)?(?![a-z])|\s?(?:min(?:ute)?s?|h(?:ours?)?)(?![a-z])|\s?[kmgt]?i?b(?:ytes)?(?![a-z])"
    r"|\s?[a-z]*\s?(?:/|per )\s?(?:s|sec|second|min|minute|h|hour)(?![a-z])|\s?fps(?![a-z])",
    re.IGNORECASE,
)
_CLOCK: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]?|\d+(?::\d\d)+(?:[.,]\d+)?")
_MOST_FORMS: Final = 200
_MOST_WAITING: Final = 100  # lines of a form that one rank has printed before the other


class OutputComparison:
    """Compares lines of rank 0 and of another rank: the n-th line of a form with the n-th line of the same form.

    Args:
        rank: the other one.
        log: of that rank.
    """

    def __init__(self, rank: int, log: Tail) -> None:
        self.rank: Final = rank
        self.log: Final = log
        self._waiting: Final[dict[str, tuple[list[str], list[str]]]] = {}  # by form: lines of both

    def differing(self, leader: str, other: str) -> tuple[str, str] | None:
        """Take the next lines of both ranks; returns two lines of one form that have other numbers; None for none."""
        for number, text in enumerate((leader, other)):
            for line in text.splitlines():
                if _NUMBER.search(line) and (pair := self._pair(number, line)) and self._differ(*pair):
                    return pair
        return None

    def _pair(self, number: int, line: str) -> tuple[str, str] | None:
        """The lines of both ranks, if ``line`` is the one that the other's line has waited for."""
        form = _NUMBER.sub("0", _CLOCK.sub("", line))
        if form not in self._waiting and len(self._waiting) >= _MOST_FORMS:
            return None
        lines = self._waiting.setdefault(form, ([], []))
        if _MOST_WAITING in map(len, lines):  # from now on nobody knows which lines of this form belong together
            return None
        lines[number].append(line)
        return (lines[0].pop(0), lines[1].pop(0)) if all(lines) else None

    def _differ(self, leader: str, other: str) -> bool:
        """Whether the lines have other numbers, beside those that may be a rank's own."""
        leader, other = _CLOCK.sub("", leader), _CLOCK.sub("", other)
        before = 0
        for one, another in zip(_NUMBER.finditer(leader), _NUMBER.finditer(other), strict=True):
            between, after = leader[before : one.start()], leader[one.end() :]
            before = one.end()
            is_rank = (one.group(), another.group()) == ("0", str(self.rank))
            is_own = is_rank or _OWN_NAME.search(between) or _OWN_UNIT.match(after)
            if one.group() != another.group() and not is_own:
                return True
        return False
