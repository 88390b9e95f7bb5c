"""A run folder read back: recipe, sessions, rows and evaluations by stage, and answers before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.config import yaml12
from strop.errors import ConfigError
from strop.track import rows
from strop.track.evaluation import Measured
from strop.track.rows import Row


@dataclass(slots=True)
class Stage:
    """What one loop recorded, in order. Evaluations are without their answers."""

    name: str
    metrics: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    first_answers: list[Row] = field(default_factory=list)
    last_answers: list[Row] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return max((int(row["step"]) for row in (*self.metrics, *self.evaluations)), default=0)


@dataclass(slots=True, kw_only=True)
class History:
    """Everything that a report or a summary speaks of."""

    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    sessions: list[Row]
    stages: list[Stage]
    samples: list[Row]  # those of the last recorded step

    @property
    def seconds(self) -> float:
        """Wall seconds of all recorded steps."""
        return sum(float(row.get(rows.STEP_TIME, 0.0)) for stage in self.stages for row in stage.metrics)

    @property
    def measured(self) -> Stage | None:
        """The last stage with an evaluation both before and after: the one that the headline speaks of."""
        return next((stage for stage in reversed(self.stages) if len(stage.evaluations) > 1), None)

    @property
    def accuracy_of(self) -> str:
        """What the accuracies are of: `sampled` attempts, or `pairs` for a reward model."""
        found = {str(row.get("measured", Measured.ATTEMPTS)) for stage in self.stages for row in stage.evaluations}
        return Measured.PAIRS if found == {Measured.PAIRS} else Measured.ATTEMPTS

    @property
    def solved_at(self) -> float:
        """The reward at which a held-out task counts as solved."""
        return float(self.recipe.get("evaluate", {}).get("solved_at", 1.0))


def read_history(folder: Path) -> History:
    """Read a run folder, finished or not. ConfigError when `folder` is not one."""
    recipe_file = folder / rows.RECIPE
    if not recipe_file.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {rows.RECIPE}")
    text = recipe_file.read_text("utf-8")
    recipe = yaml12.parse(text, str(recipe_file))
    stages: dict[str, Stage] = {}
    for row in rows.read_rows(folder / rows.METRICS):
        stages.setdefault(row["stage"], Stage(row["stage"])).metrics.append(row)
    for row in rows.read_rows(folder / rows.EVALUATIONS):
        stage = stages.setdefault(row["stage"], Stage(row["stage"]))
        answers = row.pop("answers")
        stage.evaluations.append(row)
        stage.first_answers = stage.first_answers or answers
        stage.last_answers = answers
    return History(
        folder=folder,
        recipe=recipe if isinstance(recipe, dict) else {},
        recipe_text=text,
        sessions=list(rows.read_rows(folder / rows.SESSIONS)),
        stages=list(stages.values()),
        samples=_last_samples(folder),
    )


def _last_samples(folder: Path) -> list[Row]:
    last: list[Row] = []
    for row in rows.read_rows(folder / rows.SAMPLES):
        if last and (last[0]["stage"], last[0]["step"]) != (row["stage"], row["step"]):
            last = []
        last.append(row)
    return last


class Change(StrEnum):
    """What became of one held-out task."""

    GAINED = "became right"
    KEPT = "stayed right"
    FAILED = "stayed wrong"
    LOST = "became wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The answer to the same held-out task before and after."""

    change: Change
    before: Row
    after: Row


def pair_answers(stage: Stage, solved_at: float) -> list[Pair]:
    """Answers of a stage's first and last evaluation by task: greedy ones where both have them, else sampled."""
    for greedy in (True, False):
        before = {row["task_id"]: row for row in stage.first_answers if row["greedy"] is greedy}
        after = {row["task_id"]: row for row in stage.last_answers if row["greedy"] is greedy}
        common = [task_id for task_id in before if task_id in after]
        if common:
            return [_pair(before[task_id], after[task_id], solved_at) for task_id in common]
    return []


def _pair(before: Row, after: Row, solved_at: float) -> Pair:
    was, now = (row["reward"] is not None and row["reward"] >= solved_at for row in (before, after))
    change = (Change.KEPT if was else Change.GAINED) if now else (Change.LOST if was else Change.FAILED)
    return Pair(change=change, before=before, after=after)


def show_pairs(pairs: list[Pair], count: int) -> list[Pair]:
    """`count` pairs with every kind of change in it: half of them gained, the rest of the other kinds in turn."""
    gained = [pair for pair in pairs if pair.change is Change.GAINED]
    others = [[pair for pair in pairs if pair.change is kind] for kind in (Change.FAILED, Change.LOST, Change.KEPT)]
    room = max(count - len(gained), count // 2)
    chosen: list[Pair] = []
    while len(chosen) < room and any(others):
        for kind in others:
            if kind and len(chosen) < room:
                chosen.append(kind.pop(0))
    return gained[: count - len(chosen)] + chosen
