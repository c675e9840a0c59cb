"""What the benchmark makes of what it has measured."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks.figures import Estimate, estimate, quantile, ratio
from benchmarks.report import Run, wanted_rows
from benchmarks.rounds import Measured
from benchmarks.setups import setups
from benchmarks.wanted import WANTED, Wanted
from benchmarks.works import WORKS


def test_interval_leaves_out_as_many_values_at_each_end_as_90_percent_allow() -> None:
    # The ranks of the tables for the sign test, at a two-sided level of 10%.
    assert estimate(range(5)) == Estimate(2, 0, 4)
    assert estimate(range(8)) == Estimate(3.5, 1, 6)
    assert estimate(range(20)) == Estimate(9.5, 5, 14)
    assert estimate(range(30)) == Estimate(14.5, 10, 19)


def test_interval_holds_the_true_median_in_nine_runs_of_ten() -> None:
    dice = random.Random(0)
    runs = [estimate([dice.lognormvariate(0, 1) for _ in range(20)]) for _ in range(2000)]
    held = sum(run.low <= 1 <= run.high for run in runs) / len(runs)
    assert 0.9 <= held < 0.99


def test_order_of_the_values_does_not_matter_to_an_estimate_and_does_to_a_ratio() -> None:
    assert estimate([3, 1, 2]) == Estimate(2, 1, 3)
    assert ratio([2, 20], [1, 10]) == Estimate(2, 2, 2)
    assert ratio([20, 2], [1, 10]).median == statistics.median([20, 0.2])


def test_quantile_is_a_value_that_was_measured() -> None:
    values = list(range(1, 1001))
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1)] == [500, 990, 999, 1000]
    assert quantile([7], 0.999) == 7
    assert math.isnan(quantile([], 0.5))


def measured(cpu: float = 1.0, throughput: float = 1.0, p50: float = 1.0) -> Measured:
    result = Measured("some set-up")
    result.cpu_us, result.throughput, result.p50_us = [cpu] * 5, [throughput] * 5, [p50] * 5
    return result


@pytest.mark.parametrize(
    ("ours", "theirs", "figure", "found"),
    [
        (measured(cpu=3), measured(cpu=2), "cpu", 1.5),
        (measured(throughput=3), measured(throughput=2), "throughput", 1.5),
        (measured(p50=4), measured(p50=3), "added p50", 1.5),
    ],
)
def test_what_is_wanted_is_a_ratio(ours: Measured, theirs: Measured, figure: str, found: float) -> None:
    results = {"work": {"ours": ours, "theirs": theirs, "one": measured(p50=1)}}
    wanted = Wanted("a figure", "work", "theirs", figure, 1.0)  # type: ignore[arg-type]  # a parameter
    assert wanted.found(results, "ours") == Estimate(found, found, found)
    assert wanted.found(results, "another") is None
    results["work"]["ours"].fault = "a wrong answer"
    assert wanted.found(results, "ours") is None


@pytest.mark.parametrize(
    ("low", "high", "at_most", "at_least"),
    [(0.8, 0.9, True, False), (0.9, 1.1, True, True), (1.1, 1.2, False, True), (1.0, 1.0, True, True)],
)
def test_figure_is_reached_where_it_lies_within_the_interval(
    low: float, high: float, at_most: bool, at_least: bool
) -> None:
    found = Estimate((low + high) / 2, low, high)
    assert Wanted("a cost", "work", "theirs", "cpu", 1.0).reached(found) is at_most
    assert Wanted("a speed", "work", "theirs", "throughput", 1.0).reached(found) is at_least


def test_all_that_is_wanted_is_of_works_that_there_are() -> None:
    for wanted in WANTED:
        assert wanted.work in WORKS
        assert wanted.against in setups()


def remembering(*mib: int) -> list[Measured]:
    return [Measured("some set-up", cpu_us=[1], memory=size * 2**20) for size in mib]


def test_memory_of_the_routing_is_judged_where_it_is_most_and_of_set_ups_that_have_done_the_same() -> None:
    stock, ours = remembering(50, 60), remembering(52, 76)
    results = {
        "events": {"stock": stock[0], "ours-framed": ours[0]},
        "create": {"stock": stock[1], "ours-framed": ours[1], "ours-balanced": ours[0]},
        "websocket": {"one": ours[0]},
    }
    run = Run("a machine", "its software", 1, 0.3, 1.0, "one", {}, results)
    assert [row[2:] for row in wanted_rows(run)] == [("some set-up", "16.0 MiB (2.0 to 16.0)", "no")]
    ours[1].memory = 75 * 2**20
    assert [row[-1] for row in wanted_rows(run)] == ["yes"]
    ours[1].fault = "a wrong answer"
    assert wanted_rows(run) == []
