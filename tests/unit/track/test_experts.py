"""The map of experts: each cell in the colour of its load, and nothing for a run without experts."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from strop.config.recipe import Recipe
from strop.track.experts import BANDS, expert_maps
from strop.track.report import write_report
from strop.track.run import Run


def measured(folder: Path, counts: list[list[int]], *, steps: int = 2) -> Path:
    recipe = Recipe.model_validate(
        {
            "model": {"path": "m"},
            "tasks": {"source": "jsonl", "path": "t"},
            "grpo": {"steps": 4, "tasks_per_step": 4},
            "run": {"folder": "r"},
        }
    )
    with Run.start(folder / "run", recipe, decode=lambda tokens: "") as run:
        run.stage = "grpo"
        for step in range(1, steps + 1):
            run.expert_load(step, [1, 4][: len(counts)], np.array(counts) * step)
    return folder / "run"


def test_cells_have_the_colour_of_their_load(tmp_path: Path) -> None:
    (figure,) = expert_maps(measured(tmp_path, [[0, 5, 25, 70], [25, 25, 25, 25]]))
    assert "grpo, step 2" in figure and ElementTree.fromstring(figure).tag == "figure"
    drawn = {
        (color, float(amount)): cells.count("z")
        for color, amount, cells in re.findall(r'fill:var\((.*?)\)" fill-opacity="(.*?)" d="(.*?)"', figure)
    }
    # of an even share: 0, 0.2, 1, 2.8; then four times 1
    expected = {0: 1, 1: 1, 3: 5, 5: 1}
    assert drawn == {(BANDS[band][2], BANDS[band][3]): count for band, count in expected.items()}
    assert re.findall(r"<b>(\d+)%</b>", figure) == ["12", "12", "62", "12"]
    assert [">1</text>" in figure, ">4</text>" in figure, ">3</text>" in figure] == [True, True, True]


def test_a_layer_that_counted_nothing_is_even(tmp_path: Path) -> None:
    (figure,) = expert_maps(measured(tmp_path, [[0, 0, 0, 0]]))
    assert re.findall(r"<b>(\d+)%</b>", figure) == ["100"]


def test_the_report_has_it_and_a_large_model_stays_small(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 100, (2, 256)).tolist()
    page = write_report(measured(tmp_path, counts)).read_text()
    assert "Load of the experts" in page
    assert len(expert_maps(tmp_path / "run")[0]) < 40 * 2 * 256


@pytest.mark.parametrize("made", [True, False])
def test_a_run_without_experts_has_none(tmp_path: Path, made: bool) -> None:
    folder = measured(tmp_path, [[1, 1]], steps=0) if made else tmp_path / "nothing"
    assert expert_maps(folder) == [] and not (folder / "experts.jsonl").exists()
