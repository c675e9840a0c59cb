"""Medians, their intervals, and quantiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A median, and an interval that holds the true one with a probability of at least 90%."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"  # noqa: RUF001  # a range


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median with its interval from order statistics: nothing is assumed of how the values spread.

    Of fewer than five values the interval is all of their range, and holds the median less often than that.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Estimate(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Return the median of the rounds' ratios: a round's values were taken at nearly the same time."""
    return estimate([value / against for value, against in zip(values, base, strict=True)])


def _rank(count: int) -> int:
    """Return the largest number of values to leave out at each end so that the interval still holds 90%."""
    rank, outside = 0, 0.0
    for left_out in range(count // 2):
        # That the median lies beyond the next value is as likely as that many heads, or fewer, of ``count`` coins.
        outside += math.comb(count, left_out) / 2**count
        if 2 * outside > 0.1:
            break
        rank = left_out
    return rank


def quantile(ordered: Sequence[int], share: float) -> float:
    """Return the value that ``share`` of the ordered values don't exceed."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
