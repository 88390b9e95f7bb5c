"""The map of a report that shows how evenly a mixture of experts was used: experts.jsonl -> a figure.

One cell a layer and expert; its colour says how many times its even share of the tokens the expert took.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from strop.track.rows import EXPERTS, Row, read_rows

WIDTH, LEFT, TOP, BOTTOM = 520.0, 50.0, 8.0, 20.0
BANDS: tuple[tuple[float, str, str, float], ...] = (  # up to so many even shares: colour and how much of it
    (0.1, "under a tenth", "--c2", 0.95),
    (0.5, "to half", "--c2", 0.5),
    (0.8, "to 0.8", "--c2", 0.2),
    (1.25, "even", "--dim", 0.12),
    (2.0, "to double", "--c1", 0.3),
    (4.0, "to 4 times", "--c1", 0.6),
    (float("inf"), "more", "--c1", 1.0),
)


def expert_maps(run_folder: Path) -> list[str]:
    """A figure for each stage that measured its experts, of its last measured step."""
    last: dict[str, Row] = {row["stage"]: row for row in read_rows(run_folder / EXPERTS)}
    return [_figure(stage, row) for stage, row in last.items()]


def _figure(stage: str, row: Row) -> str:
    counts: list[list[int]] = row["counts"]
    width, height = (WIDTH - LEFT) / len(counts[0]), min(18.0, max(4.0, 320.0 / len(counts)))
    paths: dict[int, list[str]] = {}
    for y, layer in enumerate(counts):
        for x, times in enumerate(_even_shares(layer)):
            at = f"M{LEFT + x * width:.1f} {TOP + y * height:.1f}"
            paths.setdefault(_band(times), []).append(f"{at}h{width:.2f}v{height:.1f}h-{width:.2f}z")
    bottom = TOP + len(counts) * height
    cells = "".join(
        f'<path style="fill:var({BANDS[band][2]})" fill-opacity="{BANDS[band][3]}" d="{"".join(cells)}"/>'
        for band, cells in sorted(paths.items())
    )
    every = max(1, round(12.0 / height))  # a label needs so much room
    labels = "".join(
        f'<text x="{LEFT - 6}" y="{TOP + (y + 0.5) * height + 3.5:.1f}" text-anchor="end">{layer}</text>'
        for y, layer in enumerate(row["layers"])
        if y % every == 0
    )
    axis = f'<text x="{LEFT}" y="{bottom + 14:.1f}">expert 0</text>' + (
        f'<text x="{WIDTH}" y="{bottom + 14:.1f}" text-anchor="end">{len(counts[0]) - 1}</text>'
    )
    drawn = f'<svg viewBox="0 0 {WIDTH:.0f} {bottom + BOTTOM:.0f}" role="img">{cells}{labels}{axis}</svg>'
    note = f"{stage}, step {row['step']}: tokens that each expert of each layer took, in even shares; a row is a layer"
    return (
        f'<figure class="card"><figcaption><h3>Load of the experts</h3>{_legend(counts)}</figcaption>'
        f'<p class="note">{escape(note)}</p>{drawn}</figure>'
    )


def _even_shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [count * len(counts) / total if total else 1.0 for count in counts]


def _legend(counts: Sequence[Sequence[int]]) -> str:
    """The bands that are there, and which part of the experts each has."""
    bands = [_band(times) for layer in counts for times in _even_shares(layer)]
    return "".join(
        f'<span class="key"><i style="background:var({color});opacity:{amount}"></i>{name} '
        f"<b>{bands.count(band) / len(bands):.0%}</b></span>"
        for band, (_, name, color, amount) in enumerate(BANDS)
        if band in bands
    )


def _band(times: float) -> int:
    return next(band for band, (limit, *_) in enumerate(BANDS) if times <= limit)
