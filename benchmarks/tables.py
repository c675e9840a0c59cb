"""Rows as text: in columns, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(table: Sequence[tuple[str, ...]]) -> str:
    """Return rows as columns; a row that is short of cells takes what room it needs."""
    whole = [row for row in table if len(row) == len(table[0])]
    widths = [max(len(row[column]) for row in whole) for column in range(len(table[0]))]
    widths[0] = max(len(row[0]) for row in table)
    lines = []
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([row[0].ljust(widths[0]), *(cells if row in whole else row[1:])]))
    return "\n".join(lines)


def piped(table: Sequence[tuple[str, ...]]) -> str:
    """Return rows as a Markdown table."""
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    lines.insert(1, "|" + " --- |" * len(table[0]))
    return "\n".join(lines)
