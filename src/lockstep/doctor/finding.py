"""What the doctor has found: one finding a line, and all of them as text, JSON, or a block for an issue."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final, Literal

from lockstep.formatting import harmless, plural, without_secrets
from lockstep.launch_contract import EXIT_BLOCKED, EXIT_OK

Level = Literal["ok", "note", "problem"]

_WIDTH: Final = 16  # of the name of a section


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what is to be done about it."""

    section: str
    level: Level  #: a problem prevents a training, or makes its result wrong
    what: str
    why: str = ""
    command: str = ""  #: one command, option or line of code that helps


ok = partial(Finding, level="ok")
note = partial(Finding, level="note")
problem = partial(Finding, level="problem")


@dataclass(frozen=True, slots=True)
class Report:
    """All findings."""

    subject: str  #: the machine, or the script
    tested: str  #: how many ranks and nodes really took part, and in what
    findings: tuple[Finding, ...]
    variables: Mapping[str, str] = field(default_factory=dict)  #: of the environment, for an issue
    private: Mapping[str, str] = field(default_factory=dict)  #: what stands for names of users and hosts in an issue

    @property
    def exit_code(self) -> int:
        """3 where something blocks, else 0."""
        return EXIT_BLOCKED if any(finding.level == "problem" for finding in self.findings) else EXIT_OK

    def text(self) -> str:
        """For a terminal."""
        lines = []
        for finding, after in itertools.zip_longest(self.findings, self.findings[1:]):
            lines.append(f"{finding.level:<9}{finding.section:<{_WIDTH}}{finding.what}")
            # What several lines have in common stands under the last one.
            same = after is not None and (finding.why, finding.command) == (after.why, after.command)
            for name, words in (("why", finding.why), ("do", finding.command)):
                shown = words and finding.level != "ok" and not same
                lines += [f"{'':<{9 + _WIDTH}}{name + ':':<5}{words}"] if shown else []
        return harmless("\n".join([*lines, "", f"{self.verdict}; really tested: {self.tested}"]), keep="\n")

    @property
    def verdict(self) -> str:
        """Such as ``1 problem, 2 notes``."""
        counts = [plural(sum(f.level == level for f in self.findings), level) for level in ("problem", "note")]
        return ", ".join(words for words in counts if not words.startswith("0 ")) or "nothing found"

    def to_json(self) -> str:
        """For a program; its keys are those of `Report` and `Finding`."""
        shown = {"subject": self.subject, "tested": self.tested, "exit_code": self.exit_code}
        return json.dumps({**shown, "findings": [asdict(finding) for finding in self.findings]}, indent=1)

    def issue(self) -> str:
        """A block of Markdown to be pasted: without secrets, and without names of users and hosts."""
        variables = without_secrets([f"{name}={value}" for name, value in sorted(self.variables.items())])
        lines = [f"lockstep doctor: {self.subject}", "", self.text(), "", *map(harmless, variables)]
        text = "\n".join(lines)
        for name in sorted(self.private, key=len, reverse=True):
            # A word of its own, or the beginning of a longer one such as n1.example.org.
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.private[name], text) if name else text
        return f"```text\n{text}\n```"
