"""What the doctor says: findings, each with a level, a text and a remedy, and how they are shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning", "note", "ok"]

# The most serious first.
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")

_INDENT = " " * 9


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    ``code`` names it for scripts and never changes. ``level``: "error" where sessions will
    be lost or the server will not start, "warning" where they may be or somebody will be
    surprised, "note" for what is to be known, "ok" for what is as it should be.
    """

    level: Level
    code: str
    text: str
    remedy: str = ""


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with the most serious first, and otherwise in their order."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def as_text(title: str, findings: Sequence[Finding]) -> str:
    """Return the findings for a reader: one line each, with its remedy below it."""
    lines = [title, ""]
    for finding in sorted_findings(findings):
        lines.append(f"{finding.level:8} {_one_line(finding.text)}")
        if finding.remedy:
            lines.append(f"{_INDENT}-> {_one_line(finding.remedy)}")
    lines += ["", summary(findings)]
    return "\n".join(lines)


def as_json(app: str, status: int, findings: Sequence[Finding]) -> str:
    """Return the findings for a script."""
    found = [asdict(finding) for finding in sorted_findings(findings)]
    return json.dumps({"app": app, "exit_status": status, "findings": found}, indent=2)


def summary(findings: Sequence[Finding]) -> str:
    """Return how many findings there are that are worse than notes."""
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    parts = [f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count]
    return " and ".join(parts) if parts else "nothing worse than notes"


def exit_status(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return the command's exit status for what could be loaded: 1 for errors, with ``strict`` for warnings too."""
    levels = {finding.level for finding in findings}
    return int("error" in levels or (strict and "warning" in levels))


def _one_line(text: str) -> str:
    # What comes from an app or its configuration may hold line ends and control characters.
    shown = "".join(character if character.isprintable() else " " for character in text)
    return textwrap.shorten(shown, 600, placeholder=" ...")
