"""Numbers and model text as characters for a terminal: curves in braille, bars of shares, text that cannot steer it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise

from rich.text import Text

_DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))  # braille bits of a cell, from the bottom row up
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")


def clean(text: str) -> str:
    """Model text without power over the terminal: control and direction characters become visible or are replaced."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    if character < "\x20":
        return chr(0x2400 + ord(character))  # the control character's own picture
    joiner = character in "\u200c\u200d"  # inside words of some scripts, and emoji
    hostile = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and not joiner
    return "\ufffd" if hostile else character


class Curve:
    """The whole history of one number in bounded memory: when it is full, neighbours are averaged."""

    def __init__(self, points: int = 256) -> None:
        self._points = 2 * points
        self._stride = 1
        self._means: list[float] = []
        self._sum, self._count = 0.0, 0
        self.last: float | None = None

    def add(self, value: float) -> None:
        self.last = value
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._stride:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == self._points:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stride *= 2

    @property
    def values(self) -> list[float]:
        """At most `2 * points` means over equal stretches of the history, the unfinished last one included."""
        return self._means + ([self._sum / self._count] if self._count else [])


def resample(values: Sequence[float], count: int) -> list[float]:
    """`values` as at most `count` means over equal stretches."""
    if len(values) <= count:
        return list(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A line plot of `height` rows of `width` braille cells (2 x 4 dots each), top row first; all of it in view."""
    points = resample(values, 2 * width)
    cells = [[0] * width for _ in range(height)]
    low, high = min(points, default=0.0), max(points, default=1.0)
    tall = 4 * height - 1
    ys = [round((value - low) / (high - low) * tall) if high > low else tall // 2 for value in points]
    xs = [round(i * (2 * width - 1) / max(1, len(points) - 1)) for i in range(len(points))]
    for x, y in _joined(xs, ys):
        cells[height - 1 - y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def _joined(xs: list[int], ys: list[int]) -> list[tuple[int, int]]:
    """Dots along the straight lines between neighbouring points."""
    dots = list(zip(xs[:1], ys[:1], strict=True))
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots += [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
    return dots


def shares(seconds: Mapping[str, float], width: int) -> Text:
    """A bar of `width` cells divided like `seconds`, and what each colour stands for."""
    total = sum(seconds.values())
    bar, legend = Text(), Text()
    if total <= 0:
        return bar
    reached, drawn = 0.0, 0
    for (name, value), color in zip(seconds.items(), cycle(COLORS), strict=False):
        reached += value
        end = round(width * reached / total)
        bar.append("\u2588" * (end - drawn), style=color)
        drawn = end
        if value / total >= 0.005:
            legend.append("  \u25a0 ", style=color).append(f"{name} {value / total:.0%}")
    return bar.append_text(legend)


def duration(seconds: float) -> str:
    """`3 s`, `4m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
