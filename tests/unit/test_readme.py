"""The README's Python runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.unit.loops.test_recipe import RECIPE

ROOT = Path(__file__).parents[2]


def test_the_loop_in_the_readme_runs(tmp_path: Path) -> None:
    """Only the recipe and the number of steps are other ones: the real model takes minutes."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 36
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    small = code.replace("recipes/quickstart.yaml", str(tmp_path / "tiny.yaml")).replace("steps=20", "steps=2")
    assert small != code
    (tmp_path / "loop.py").write_text(small)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "loop.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step \d: reward 0\.\d+, gradient norm \d", done.stdout).__len__() == 2
