"""Learning curves of several runs as one SVG file: python tools/curves.py OUT.svg TITLE RUN [RUN ...]

Dots are held-out accuracies; the faint line behind them is the mean reward of each step's own attempts, a moving mean
of nine. One colour for each run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 260, 44, 30, 30
COLORS = ("#2563eb", "#d97706", "#059669")


def rows(file: Path) -> list[dict[str, Any]]:
    return [row for line in file.read_text("utf-8").splitlines() if (row := json.loads(line))["stage"] == "grpo"]


def polyline(points: list[tuple[float, float]], last: float, style: str) -> str:
    placed = " ".join(f"{place(x, last):.1f},{height(y):.1f}" for x, y in points)
    return f'<polyline fill="none" points="{placed}" {style}/>'


def place(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - 12) * step / last


def height(value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value


def draw(title: str, runs: list[Path]) -> str:
    last = max(row["step"] for run in runs for row in rows(run / "metrics.jsonl"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><text x="{LEFT}" y="18" font-size="13">{title}</text>',
    ]
    for tenth in (0, 2, 4, 6, 8, 10):
        y = height(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tenth * 10} %</text>')
    for step in sorted({0, last // 2, last}):
        x = place(step, last)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#555">{step}</text>')
    for color, run in zip(COLORS, runs, strict=False):
        rewards = [(row["step"], row["reward/mean"]) for row in rows(run / "metrics.jsonl")]
        windows = [rewards[max(0, i - 4) : i + 5] for i in range(len(rewards))]
        smooth = [(rewards[i][0], sum(r for _, r in near) / len(near)) for i, near in enumerate(windows)]
        parts.append(polyline(smooth, last, f'stroke="{color}" stroke-opacity="0.35"'))
        accuracies = [(row["step"], row["sampled_accuracy"]) for row in rows(run / "evaluations.jsonl")]
        parts.append(polyline(accuracies, last, f'stroke="{color}" stroke-width="2"'))
        parts += [
            f'<circle cx="{place(x, last):.1f}" cy="{height(y):.1f}" r="3" fill="{color}"/>' for x, y in accuracies
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    if len(sys.argv) < 4 or len(sys.argv) > 3 + len(COLORS):
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(draw(sys.argv[2], [Path(run) for run in sys.argv[3:]]), "utf-8")


if __name__ == "__main__":
    main()
