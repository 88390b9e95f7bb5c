"""`make recipes`: every recipe is among its runs, each run is a recipe that loads, the table goes where it belongs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from strop.config.loader import load_recipe
from tools import recipes

FOLDER = recipes.ROOT / "recipes"


def test_every_recipe_is_run() -> None:
    """But the quickstart, which fetches a model, and the reference, which is no run."""
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"quickstart.yaml", "reference.yaml"}
    assert {short.recipe for short in recipes.RUNS} == files - {"async.yaml"}
    assert any(Path(argument).name == "async.yaml" for short in recipes.RUNS for argument in short.over)
    laid_over = {Path(short.over[0]).name for short in recipes.RUNS if short.name.startswith("grpo: ")}
    assert laid_over == {path.name for path in (FOLDER / "variants").glob("*.yaml")}


@pytest.mark.parametrize("short", recipes.RUNS, ids=lambda short: short.name)
def test_a_run_is_a_recipe_whose_last_loop_is_compared(short: recipes.Short, tmp_path: Path) -> None:
    over = [argument.replace("{out}", str(tmp_path)) for argument in short.over]
    recipe = load_recipe(FOLDER / short.recipe, over)
    assert list(recipe.loops())[-1] == short.stage
    assert recipe.threads == 1 and recipe.tasks.holdout > 0
    order = [one.name for one in recipes.RUNS]
    assert all(order.index(needed) < order.index(short.name) for needed in short.needs)
    for path in (recipe.model.path, *(t.model.path for t in (recipe.distill.teachers if recipe.distill else ()))):
        assert path is None or Path(path).parts[-2] in short.needs


def test_names_bring_what_they_need() -> None:
    assert [short.name for short in recipes.chosen(["distill"])] == ["scratch", "distill"]
    with pytest.raises(SystemExit, match="there is no run 'x'"):
        recipes.chosen(["x"])


@pytest.mark.parametrize(
    ("accuracies", "code", "error"),
    [
        ([0.1, 0.9, 0.7], 0, ""),
        ([0.1, 0.9, 0.2], 0, "did not learn"),
        ([0.1], 0, "did not learn"),
        ([0.1, 0.9], 1, "failed"),
    ],
)
def test_first_and_last_accuracy_are_compared(
    accuracies: list[float], code: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = recipes.Short(name="grpo: x", recipe="scratch.yaml", stage="grpo", margin=0.5)

    def train(command: list[str], **_: object) -> object:
        folder = tmp_path / "grpo-x"
        assert f"run.folder={folder}" in command
        folder.mkdir()
        rows = [{"stage": "sft", "step": 0, "sampled_accuracy": 0.0}]
        rows += [{"stage": "grpo", "step": step, "sampled_accuracy": a} for step, a in enumerate(accuracies)]
        (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return type("Done", (), {"returncode": code})

    monkeypatch.setattr(recipes.subprocess, "run", train)
    result = recipes.run(short, tmp_path)
    assert result.error.startswith(error) and bool(result.error) == bool(error)
    assert (result.before, result.after) == ((0.1, accuracies[-1]) if len(accuracies) > 1 else (None, None))
    assert result.row().startswith("| grpo: x | `scratch.yaml` |")


def test_the_table_replaces_what_is_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "results.md"
    page.write_text(recipes.RESULTS.read_text())
    monkeypatch.setattr(recipes, "RESULTS", page)
    rows = page.read_text().split(recipes.BEGIN)[1].split(recipes.END)[0].splitlines()[3:]
    first, second = (short for short in recipes.RUNS if short.name in ("scratch", "distill"))
    made = recipes.Result(short=second, before=0.0, after=0.5, steps=3, cpu_s=60.0, error="")
    recipes.write([made])
    recipes.write([dataclasses.replace(made, short=first), dataclasses.replace(made, after=0.75)])
    text = page.read_text()
    (table,) = [part.split(recipes.END)[0] for part in text.split(recipes.BEGIN)[1:]]
    shown = table.strip().splitlines()
    assert "\n".join(shown[:2]) == recipes.HEADER
    assert "| distill | `distill.yaml` | 3 | 0.0% | 75.0% | 1.0 | learned |" in shown
    others = [row for row in rows if not row.startswith(("| scratch |", "| distill |"))]
    assert [row for row in shown[2:] if not row.startswith(("| scratch |", "| distill |"))] == others
    assert shown[2].startswith("| scratch |"), "in the order of the runs"
    assert text.split(recipes.BEGIN)[0] == (recipes.ROOT / "docs" / "results.md").read_text().split(recipes.BEGIN)[0]
