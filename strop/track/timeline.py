"""Who waited for whom: the spans of a run's last steps, end to end, a lane for samplers and one for the trainer.

rows of metrics.jsonl -> phases, in the order in which a step runs them -> one figure in seconds
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from strop.track import rows
from strop.track.history import History, Stage
from strop.track.rows import Row
from strop.track.svg import HEIGHT, WIDTH, number

STEPS = 8  # the last ones of a stage
DRAWING = ("sample", "evaluate")  # phases in which samplers work, and the trainer waits
BOTH = ("publish",)
_COLORS = {"sample": 1, "learn": 2, "publish": 3, "score": 4, "pack": 5, "evaluate": 6, "save": 7}
_OTHER = 8
_LEFT, _RIGHT, _LANE, _GAP = 64, 10, 44, 26
_LANES = {"samplers": 40, "trainer": 40 + _LANE + _GAP}


@dataclass(frozen=True, slots=True)
class Piece:
    """A phase of a step, in seconds from the first step shown."""

    step: int
    phase: str
    start: float
    seconds: float

    @property
    def lanes(self) -> tuple[str, ...]:
        """Who works in it."""
        if self.phase in BOTH:
            return tuple(_LANES)
        return ("samplers",) if self.phase in DRAWING else ("trainer",)


def pieces(metrics: Iterable[Row]) -> list[Piece]:
    """The phases of these rows, laid end to end."""
    found: list[Piece] = []
    now = 0.0
    for row in metrics:
        for phase, seconds in rows.phase_seconds(row).items():
            found.append(Piece(int(row["step"]), phase, now, seconds))
            now += seconds
    return found


def waits(found: Sequence[Piece]) -> dict[str, float]:
    """The share of the time in which a lane does not work."""
    whole = sum(piece.seconds for piece in found) or 1.0
    return {
        lane: 1 - sum(piece.seconds for piece in found if lane in piece.lanes) / whole
        for lane in ("samplers", "trainer")
    }


def draws_ahead(history: History, stage: Stage) -> bool:
    """Whether attempts go on while the trainer works: they are open ahead, and the two are in different processes."""
    loop, sampler = history.recipe.get(stage.name) or {}, history.recipe.get("sampler") or {}
    parallel = (history.recipe.get("engine") or {}).get("parallel") or {}
    apart = (
        sampler.get("actors")
        or sampler.get("kind", "builtin") != "builtin"
        or any(isinstance(n, int) and n > 1 for n in parallel.values())
    )
    return bool(apart and loop.get("max_lag"))


def timeline(history: History) -> str:
    """The figure for the last stage that sampled and learned; empty when none did."""
    for stage in reversed(history.stages):
        timed = [row for row in stage.metrics if "time/sample" in row and "time/learn" in row]
        if timed:
            return _figure(stage, timed[-STEPS:], ahead=draws_ahead(history, stage))
    return ""


def _figure(stage: Stage, timed: Sequence[Row], *, ahead: bool) -> str:
    found = pieces(timed)
    last = max(found[-1].start + found[-1].seconds, 1e-9)
    waited = waits(found)
    parts = [_lane(name, y) for name, y in _LANES.items()]
    if ahead:  # how long of it they had open attempts is not recorded
        parts += [_block(p, last, "samplers", color=1, opacity=0.25) for p in found if "samplers" not in p.lanes]
    parts += [_block(piece, last, lane) for piece in found for lane in piece.lanes]
    parts += _steps(found, last)
    phases = list(dict.fromkeys(piece.phase for piece in found))
    whole = sum(piece.seconds for piece in found) or 1.0
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{_COLORS.get(phase, _OTHER)})"></i>{escape(phase)} '
        f"<b>{sum(p.seconds for p in found if p.phase == phase) / whole:.0%}</b></span>"
        for phase in phases
    )
    upto = "up to " if ahead else ""
    note = (
        f"the last {len(timed)} steps of {stage.name}: the trainer waits for attempts {waited['trainer']:.0%} of the "
        f"time, samplers for weights {upto}{waited['samplers']:.0%}"
        + (" (pale: attempts opened ahead go on)" if ahead else "")
    )
    return (
        f'<figure class="card"><figcaption><h3>Who waits for whom</h3>{keys}</figcaption>'
        f'<p class="note">{escape(note)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg></figure>'
    )


def _x(seconds: float, last: float) -> float:
    return _LEFT + seconds / last * (WIDTH - _LEFT - _RIGHT)


def _lane(name: str, y: int) -> str:
    line = f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y + _LANE}" y2="{y + _LANE}" class="grid"/>'
    return f'<text x="{_LEFT - 6}" y="{y + _LANE / 2 + 3.5}" text-anchor="end">{name}</text>{line}'


def _block(piece: Piece, last: float, lane: str, color: int | None = None, opacity: float = 0.85) -> str:
    x, end = _x(piece.start, last), _x(piece.start + piece.seconds, last)
    color = _COLORS.get(piece.phase, _OTHER) if color is None else color
    title = f"step {piece.step} {piece.phase}: {number(piece.seconds)} s"
    return (
        f'<rect x="{x:.1f}" y="{_LANES[lane]}" width="{max(end - x, 0.3):.1f}" height="{_LANE}" '
        f'fill="var(--c{color})" fill-opacity="{opacity:g}"><title>{escape(title)}</title></rect>'
    )


def _steps(found: Sequence[Piece], last: float) -> list[str]:
    """Where each step ends, and the seconds there."""
    ends = {piece.step: piece.start + piece.seconds for piece in found}
    parts: list[str] = []
    bottom = _LANES["trainer"] + _LANE
    for step, end in ends.items():
        x = _x(end, last)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{bottom + 6}" class="stage"/>')
        parts.append(f'<text x="{x:.1f}" y="22" text-anchor="end">{step}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="end">{number(round(end, 2))} s</text>')
    return parts
