"""The plots, as SVG: ratios with their intervals, and lines of how something grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.figures import Estimate

_COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#efb118", "#97bbf5", "#ff8ab7")
_STYLE = "<style>text{font:12px sans-serif;fill:#333} .title{font-weight:bold} .small{font-size:10px;fill:#777}</style>"


@dataclass(frozen=True)
class Line:
    """A line of estimates over numbers; each point is (number, estimate)."""

    title: str
    points: Sequence[tuple[float, Estimate]]


def ratios(title: str, panels: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return a plot with a panel for each work, and in it a row for each set-up: a dot and its interval.

    The scale is logarithmic, so that a half is as far from 1 as the double is.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colours = dict(zip(names, _COLOURS * 9, strict=False))
    values = [value for panel in panels.values() for found in panel.values() for value in (found.low, found.high)]
    low, high = min([0.5, *values]), max([2.0, *values])
    left, width, top = 260, 560, 50.0

    def x(value: float) -> float:
        return left + width * math.log(max(value, low) / low) / math.log(high / low)

    parts, y = [_text(10, 24, title, "title")], float(top)
    for panel, found in panels.items():
        parts.append(_text(10, y + 4, panel, "title"))
        y += 20
        for name, estimate in found.items():
            colour = colours[name]
            parts.append(_text(left - 12, y + 4, name, anchor="end"))
            parts.append(_stroke(x(estimate.low), y, x(estimate.high), y, colour, 3))
            parts.append(f'<circle cx="{x(estimate.median):.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
            parts.append(_text(left + width + 12, y + 4, f"{estimate.median:.2f}"))
            y += 17
        y += 12
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20) if low <= tick <= high]
    grid = []
    for tick in ticks:
        grid.append(_stroke(x(tick), top - 8, x(tick), y - 8, "#999" if tick == 1 else "#e5e5e5", 1))
        grid.append(_text(x(tick), y + 8, f"{tick:g}", "small", "middle"))
    return _svg(left + width + 70, y + 20, [*grid, *parts])


def growth(title: str, panels: Mapping[str, Sequence[Line]]) -> str:
    """Return a plot with a panel for each thing that grows: its number to the right, the cost upwards from 0."""
    width, height, left, gap = 300.0, 200.0, 60.0, 80.0
    parts = [_text(10, 24, title, "title")]
    names = list(dict.fromkeys(line.title for lines in panels.values() for line in lines))
    above = 70 + 18 * len(names)
    for row, name in enumerate(names):
        y = 50 + 18 * row
        parts.append(_stroke(20, y - 4, 44, y - 4, _COLOURS[row % len(_COLOURS)], 3))
        parts.append(_text(52, y, name))
    # Two side by side, as wide as a page.
    for position, (panel, lines) in enumerate(panels.items()):
        x0 = left + position % 2 * (width + gap)
        top = above + position // 2 * (height + gap)
        numbers = sorted({number for line in lines for number, _ in line.points})
        highest = max((found.high for line in lines for _, found in line.points), default=1.0) * 1.05

        def y_of(value: float, highest: float = highest, top: float = top) -> float:
            return top + 20 + height - height * value / highest

        # A step for each number: they are far apart, and each about as interesting as the next.
        place = {number: x0 + width * (index + 0.5) / len(numbers) for index, number in enumerate(numbers)}
        parts.append(_text(x0, top, panel, "title"))
        for share in (0, 0.25, 0.5, 0.75, 1):
            value = highest * share
            parts.append(_stroke(x0, y_of(value), x0 + width, y_of(value), "#e5e5e5", 1))
            parts.append(
                _text(x0 - 6, y_of(value) + 4, f"{value:,.3g}" if value < 100 else f"{value:,.0f}", "small", "end")
            )
        for number in numbers:
            parts.append(_text(place[number], top + 38 + height, f"{number:,.0f}", "small", "middle"))
        for line in lines:
            colour = _COLOURS[names.index(line.title) % len(_COLOURS)]
            points = " ".join(f"{place[number]:.1f},{y_of(found.median):.1f}" for number, found in line.points)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            for number, found in line.points:
                at = place[number]
                parts.append(_stroke(at, y_of(found.low), at, y_of(found.high), colour, 3))
                parts.append(f'<circle cx="{at:.1f}" cy="{y_of(found.median):.1f}" r="4" fill="{colour}"/>')
    return _svg(left + min(len(panels), 2) * (width + gap), above + (len(panels) + 1) // 2 * (height + gap), parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, background, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
