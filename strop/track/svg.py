"""Charts as inline SVG: series of numbers -> text that needs no script, no font and no file beside it.

Colours are the page's CSS variables, so that one drawing serves light and dark. Hovering a step shows its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from strop.track.draw import resample

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 16, 24
_POINTS = 240  # drawn in one line at the most
_HOVERS = 120  # places that show numbers


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: for each span of the axis its points (step, value), in order; `color` counts from 1."""

    name: str
    points: Sequence[Points]
    color: int
    dots: bool = False  # few points: mark each
    smooth: bool = False  # many noisy points: draw them faintly, and their moving average over them

    @property
    def values(self) -> list[float]:
        return [value for part in self.points for _, value in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of the x axis with its own count of steps: a stage."""

    name: str
    first: float  # where its step 0 stands on the axis
    steps: int
    labelled: bool = False  # write its name into the chart

    @property
    def last(self) -> float:
        return self.first + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How values become heights: bounds, ticks, and how a value is written."""

    low: float
    high: float
    ticks: tuple[float, ...]
    write: Callable[[float], str]
    log: bool = False

    def y(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def percent(value: float) -> str:
    return f"{value:.0%}" if abs(value * 100 - round(value * 100)) < 0.05 else f"{value:.1%}"


def number(value: float) -> str:
    """Short: 1.5k, 0.25, 3e-06."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2g}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"


def linear(values: Sequence[float], write: Callable[[float], str] = number) -> Scale:
    """A scale around the values; it begins at 0 when that is not far."""
    low, high = min(values), max(values)
    if 0 <= low < 0.5 * high:
        low = 0.0
    if high == low:
        low, high = (0.0, high or 1.0) if high >= 0 else (high, 0.0)
    step = _nice((high - low) / 4)
    bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = tuple(bottom + i * step for i in range(round((top - bottom) / step) + 1))
    return Scale(low=bottom, high=top, ticks=ticks, write=write)


def fractions(values: Sequence[float]) -> Scale:
    """From 0 to 100 %."""
    return Scale(low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0), write=percent)


def logarithmic(values: Sequence[float]) -> Scale:
    """Powers of ten around the positive values; linear when there are none."""
    positive = [value for value in values if value > 0]
    if not positive:
        return linear(values)
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    high = max(high, low + 1)
    stride = max(1, (high - low) // 5)
    ticks = tuple(10.0**exponent for exponent in range(low, high + 1, stride))
    return Scale(low=10.0**low, high=10.0**high, ticks=ticks, write=lambda value: f"{value:.0e}", log=True)


def line_chart(series: Sequence[Series], scale: Scale, spans: Sequence[Span]) -> str:
    """Lines over the steps of one stage, or of several side by side."""
    axis = _Axis(spans)
    parts = [_grid(scale), axis.draw()]
    parts += [
        _line(line, [(span.first + step, value) for step, value in points], axis, scale)
        for line in series
        for span, points in zip(spans, line.points, strict=True)
    ]
    return _svg([*parts, _hovers(series, axis, scale.write)])


def area_chart(layers: Sequence[Series], scale: Scale, spans: Sequence[Span]) -> str:
    """Layers on top of each other, the first at the bottom, one column a step. All have points at the same steps."""
    axis = _Axis(spans)
    parts = [_grid(scale), axis.draw()]
    for index, span in enumerate(spans):
        places = resample([span.first + step for step, _ in layers[0].points[index]], _POINTS)
        if not places:
            continue
        wide = (places[-1] - places[0]) / (len(places) - 1) if len(places) > 1 else 1.0
        below = [0.0] * len(places)
        for layer in layers:
            means = resample([value for _, value in layer.points[index]], _POINTS)
            above = [a + b for a, b in zip(below, means, strict=True)]
            outline = [*_stairs(places, above, wide), *_stairs(places, below, wide)[::-1]]
            parts.append(f'<path d="{_path(outline, axis, scale)}Z" fill="var(--c{layer.color})" fill-opacity=".8"/>')
            below = above
    return _svg([*parts, _hovers(layers, axis, scale.write)])


def _stairs(places: Sequence[float], heights: Sequence[float], wide: float) -> list[tuple[float, float]]:
    """The outline of columns that end at their places: a step's time is spent before it is complete."""
    return [(x, y) for place, y in zip(places, heights, strict=True) for x in (place - wide, place)]


class _Axis:
    """Where the steps of each span stand between the left and the right edge."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._first, last = spans[0].first, spans[-1].last
        self._width = max(1.0, last - self._first)

    def x(self, place: float) -> float:
        return _LEFT + (place - self._first) / self._width * (WIDTH - _LEFT - _RIGHT)

    def draw(self) -> str:
        parts: list[str] = []
        for index, span in enumerate(self.spans):
            room = (self.x(span.last) - self.x(span.first)) / 60
            stride = max(1, round(_nice(span.steps / max(1.0, room))))
            steps = range(0 if index == 0 else stride, span.steps + 1, stride)
            parts += [_text(self.x(span.first + step), HEIGHT - 8, str(step), "middle") for step in steps]
            if index:
                x = self.x(span.first)
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{HEIGHT - _BOTTOM}" class="stage"/>')
            if span.labelled:
                parts.append(_text(self.x(span.first) + 4, 11, span.name, "start"))
        return "".join(parts)


def _line(line: Series, points: Points, axis: _Axis, scale: Scale) -> str:
    if not points:
        return ""
    xs, ys = (resample(values, _POINTS) for values in zip(*points, strict=True))
    drawn = list(zip(xs, ys, strict=True))
    stroke = f'fill="none" stroke="var(--c{line.color})"'
    if len(points) == 1 or line.dots:
        marks = "".join(
            f'<circle cx="{axis.x(x):.1f}" cy="{scale.y(y):.1f}" r="3" fill="var(--c{line.color})"/>' for x, y in drawn
        )
        return f'<path d="{_path(drawn, axis, scale)}" {stroke} stroke-width="1.8"/>{marks}'
    if not line.smooth or len(drawn) < 12:
        return f'<path d="{_path(drawn, axis, scale)}" {stroke} stroke-width="1.8"/>'
    faint = f'<path d="{_path(drawn, axis, scale)}" {stroke} stroke-width="1" stroke-opacity=".35"/>'
    trend = list(zip(xs, smoothed(ys), strict=True))
    return f'{faint}<path d="{_path(trend, axis, scale)}" {stroke} stroke-width="2.2"/>'


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred moving average over a tenth of the points; near the ends, over those that there are."""
    reach = max(1, len(values) // 20)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _hovers(series: Sequence[Series], axis: _Axis, write: Callable[[float], str]) -> str:
    """Invisible columns that tell the numbers at their place."""
    places = sorted({(index, step) for line in series for index, part in enumerate(line.points) for step, _ in part})
    places = places[:: math.ceil(len(places) / _HOVERS)] if places else []
    found: dict[tuple[int, float], list[str]] = {place: [] for place in places}
    for line in series:
        for index, points in enumerate(line.points):
            for step, value in points:
                if (index, step) in found:
                    shown = write(value) if write is percent else f"{value:.4g}"
                    found[index, step].append(f"{line.name}: {shown}")
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(places))
    parts: list[str] = []
    for index, step in places:
        span = axis.spans[index]
        title = "\n".join([f"{span.name} step {step:g}", *found[index, step]])
        parts.append(
            f'<rect class="hover" x="{axis.x(span.first + step) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{escape(title)}</title></rect>'
        )
    return "".join(parts)


def _grid(scale: Scale) -> str:
    parts: list[str] = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y + 3.5, scale.write(tick), "end"))
    return "".join(parts)


def _path(points: Points, axis: _Axis, scale: Scale) -> str:
    return "M" + "L".join(f"{axis.x(x):.1f} {scale.y(y):.1f}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
