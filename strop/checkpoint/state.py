"""What a run's state is, beside the engine's own: where it stands, and for which recipe. Recipe, counters <-> JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from strop.checkpoint.secrets import flatten, hide_secrets
from strop.config.recipe import Recipe
from strop.errors import CheckpointError
from strop.types import StreamState

FORMAT = 2

# Keys that may differ on resume: where things go, how they are shown, and guard rails. None of them changes a number.
_PLAY = ("grpo", "async_grpo", "ppo", "distill", "best_of_n")
_FREE = ("run.", "threads", "sampler.max_gap", "engine.max_skipped_steps", *(f"{loop}.max_failures" for loop in _PLAY))
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Exactly what a run needs to go on, beside what `Engine.save` wrote."""

    stage: str  # the loop that was running: "sft", "grpo"
    step: int  # steps of that loop that are complete
    done: bool  # that was its last step
    updates: int  # optimizer steps of that loop that were applied
    skipped_in_row: int  # optimizer steps skipped since the last applied one
    stream: StreamState  # the task stream's position
    carried: dict[str, float]  # numbers that the loop takes from step to step, like a coefficient that is led
    best_accuracy: float | None  # the best held-out sampled accuracy so far, over all loops
    recipe: dict[str, Any]  # the resolved recipe as dotted keys, secrets hidden

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), allow_nan=False, indent=1)

    def check_recipe(self, recipe: Recipe) -> None:
        """CheckpointError naming every key that differs between `recipe` and the run that this state belongs to."""
        now = recipe_values(recipe)
        changed = [
            f"{key} was {_shown(self.recipe, key)} and is now {_shown(now, key)}"
            for key in sorted(self.recipe.keys() | now.keys())
            if not key.startswith(_FREE) and self.recipe.get(key, _ABSENT) != now.get(key, _ABSENT)
        ]
        if changed:
            raise CheckpointError(
                "the checkpoint belongs to another recipe: "
                + "; ".join(changed)
                + ". Resume with the recipe it was made with, or start a new run in another folder"
            )


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as dotted keys, secrets hidden: what checkpoints and sinks may hold."""
    return flatten(hide_secrets(recipe).model_dump(mode="json"))


def parse_state(text: str) -> RunState:
    """Read back `to_json`. CheckpointError for another format, or for fields missing, unknown or of a wrong type."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the run state is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"the run state is a {type(values).__name__}, not an object")
    version = values.pop("format", None)
    if version != FORMAT:
        raise CheckpointError(
            f"the run state has format {version!r}, this strop reads format {FORMAT}: use the strop that wrote it"
        )
    expected = {field.name for field in fields(RunState)}
    if wrong := sorted(expected ^ values.keys()):
        raise CheckpointError(f"the run state has not the keys of format {FORMAT}; they differ in {', '.join(wrong)}")
    state = RunState(**values)
    _check_types(state)
    return state


def _check_types(state: RunState) -> None:
    counters: list[tuple[str, object]] = [
        ("step", state.step),
        ("updates", state.updates),
        ("skipped_in_row", state.skipped_in_row),
    ]
    for name, value in state.stream.items():
        counters += [(f"stream.{name}", one) for one in (value if isinstance(value, list) else [value])]
    wrong = [f"{name} is {value!r}, not a whole number" for name, value in counters if type(value) is not int]
    wrong += [
        f"carried.{name} is {value!r}, not a number"
        for name, value in state.carried.items()
        if type(value) not in (int, float)
    ]
    if type(state.done) is not bool:
        wrong.append(f"done is {state.done!r}, not true or false")
    if type(state.stage) is not str:
        wrong.append(f"stage is {state.stage!r}, not a name")
    if wrong:
        raise CheckpointError("the run state is damaged: " + "; ".join(wrong))


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
