"""Charts put every number where its axis says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from strop.track.rows import ASIDE
from strop.track.svg import (
    HEIGHT,
    WIDTH,
    Series,
    Span,
    area_chart,
    fractions,
    line_chart,
    linear,
    logarithmic,
    number,
    percent,
    smoothed,
)


def paths(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each path."""
    found = [element.attrib["d"] for element in ElementTree.fromstring(svg).iter("path")]
    return [[(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", d)] for d in found]


def series(*points: list[tuple[float, float]]) -> Series:
    return Series(name="a<b", points=points, color=1)


def test_a_line_goes_through_its_points() -> None:
    scale = linear([0.0, 1.0])
    svg = line_chart([series([(0, 0.0), (5, 1.0), (10, 0.5)])], scale, [Span(name="grpo", first=0, steps=10)])
    (points,) = paths(svg)
    assert [y for _, y in points] == [round(scale.y(v), 1) for v in (0.0, 1.0, 0.5)]
    (x0, bottom), (x5, top), (x10, _) = points
    assert top < bottom < HEIGHT and x10 < WIDTH
    assert x5 - x0 == pytest.approx(x10 - x5, abs=0.11)
    assert "a&lt;b: 0.5" in svg and "grpo step 5" in svg


def test_stages_stand_side_by_side_and_are_not_joined() -> None:
    spans = [Span(name="sft", first=0, steps=10, labelled=True), Span(name="grpo", first=10, steps=30, labelled=True)]
    svg = line_chart([series([(1, 1.0), (10, 2.0)], [(1, 3.0), (30, 4.0)])], linear([1.0, 4.0]), spans)
    first, second = paths(svg)
    assert first[-1][0] < second[0][0]
    texts = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert "sft" in texts and "grpo" in texts


def test_layers_lie_on_top_of_each_other() -> None:
    scale = linear([0.0, 6.0])
    spans = [Span(name="grpo", first=0, steps=2)]
    layers = [Series(name="a", points=[[(1, v), (2, v)]], color=1) for v in (2.0, 3.0)]
    below, above = paths(area_chart(layers, scale, spans))
    assert {y for _, y in below} == {round(scale.y(0.0), 1), round(scale.y(2.0), 1)}
    assert {y for _, y in above} == {round(scale.y(2.0), 1), round(scale.y(5.0), 1)}


@pytest.mark.parametrize(
    "values", [[0.0], [3.0], [-2.0], [1.0, 1.0], [-1.0, 5.0], [0.9, 1.0], [1e-9, 2e-9], [1e6, 3e9]]
)
def test_a_linear_scale_holds_its_values(values: list[float]) -> None:
    scale = linear(values)
    assert scale.low <= min(values) and max(values) <= scale.high and scale.low < scale.high
    assert 2 <= len(scale.ticks) <= 8
    assert scale.ticks[0] == pytest.approx(scale.low) and scale.ticks[-1] == pytest.approx(scale.high)
    assert all(0 <= scale.y(value) <= HEIGHT for value in values)


def test_a_logarithmic_scale_goes_by_powers_of_ten() -> None:
    scale = logarithmic([2e-6, 3e-4, 0.0])
    assert (scale.low, scale.high) == (pytest.approx(1e-6), pytest.approx(1e-3))
    heights = [scale.y(10.0**e) for e in (-6, -5, -4, -3)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2]) == pytest.approx(heights[2] - heights[3])
    assert scale.y(0.0) == scale.y(1e-6), "what has no logarithm lies on the floor"
    assert logarithmic([0.0, 0.0]).log is False
    assert logarithmic([1e-5]).low < logarithmic([1e-5]).high


def test_one_point_and_none() -> None:
    spans = [Span(name="grpo", first=0, steps=1)]
    assert "<circle" in line_chart([series([(1, 0.5)])], fractions([]), spans)
    assert paths(line_chart([series([])], fractions([]), spans)) == []
    assert paths(area_chart([series([])], linear([0.0]), spans)) == []


def test_many_points_are_thinned() -> None:
    points = [(float(i), float(i % 7)) for i in range(20_000)]
    svg = line_chart([series(points)], linear([0.0, 6.0]), [Span(name="grpo", first=0, steps=20_000)])
    assert len(svg) < 60_000


def test_a_moving_average_keeps_a_constant_and_flattens_noise() -> None:
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    wobbly = [float(i % 2) for i in range(100)]
    assert max(smoothed(wobbly)) - min(smoothed(wobbly)) < 0.4


def test_numbers_are_short() -> None:
    short = ["0", "1234", "12.35k", "0.25", "3e-06", "-2e+07"]
    assert [number(v) for v in (0, 1234.5, 12345.0, 0.25, 3e-6, -2e7)] == short
    assert [percent(v) for v in (0.5, 0.333, 1.0)] == ["50%", "33.3%", "100%"]
    assert all(phase.startswith("time/") for phase in ASIDE)
