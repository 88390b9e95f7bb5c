"""The loop in docs/engine.md runs as it stands, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.unit.loops.test_recipe import RECIPE

ROOT = Path(__file__).parents[2]


def test_the_loop_by_hand_runs_and_learns(tmp_path: Path) -> None:
    """Only the recipe and the number of steps are other ones."""
    page = (ROOT / "docs/engine.md").read_text()
    (code,) = re.findall(r"## A loop by hand.*?```python\n(.*?)```", page, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    small = code.replace("recipes/scratch.yaml", str(tmp_path / "tiny.yaml")).replace("steps=20", "steps=12")
    assert small.count("tiny.yaml") == 1 and "steps=12" in small
    (tmp_path / "loop.py").write_text(small)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "loop.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+), norm \d+\.\d+ None", done.stdout)]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
