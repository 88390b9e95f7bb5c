"""A run's state survives JSON, refuses other recipes by key, and holds no secrets."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from strop.checkpoint.secrets import HIDDEN, hide_secrets, refuse_hidden
from strop.checkpoint.state import RunState, parse_state, recipe_values
from strop.config.recipe import Recipe
from strop.errors import CheckpointError, ConfigError
from strop.types import StreamState


def recipe(lr: float = 1e-6, arguments: dict[str, Any] | None = None, **others: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "models/base"},
            "tasks": {"source": "python", "path": "tasks.py:make", "arguments": arguments or {}},
            "grpo": {"steps": 10, "schedule": {"lr": lr}},
        }
        | others
    )


def state_of(recipe: Recipe) -> RunState:
    return RunState(
        stage="grpo",
        step=3,
        done=False,
        updates=6,
        skipped_in_row=1,
        carried={"kl_coefficient": 0.05},
        stream=StreamState(seed=0, epoch=1, position=7, ended=[9, 11], fingerprint=7),
        best_accuracy=0.25,
        recipe=recipe_values(recipe),
    )


def test_a_state_survives_json() -> None:
    state = state_of(recipe(arguments={"sizes": [1, 2], "nested": {"a": None}, "empty": {}}))
    assert parse_state(state.to_json()) == state


def test_the_same_recipe_goes_on_and_so_do_free_keys() -> None:
    state = parse_state(state_of(recipe()).to_json())
    state.check_recipe(recipe())
    state.check_recipe(recipe(threads=2, run={"keep": 5, "live": False}))


def test_another_recipe_is_refused_by_key() -> None:
    with pytest.raises(CheckpointError, match=r"schedule.lr was 1e-06 and is now 0.001; seed was 0 and is now 1\."):
        state_of(recipe()).check_recipe(recipe(lr=1e-3, seed=1))
    with pytest.raises(CheckpointError, match=r"tasks.arguments.n was absent and is now 3"):
        state_of(recipe(arguments={"k": 1})).check_recipe(recipe(arguments={"k": 1, "n": 3}))
    with pytest.raises(CheckpointError, match=r"sft was None and is now absent.*sft.steps was absent and is now 100"):
        state_of(recipe()).check_recipe(recipe(sft={}))


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(state_of(recipe()).to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "a list, not an object"),
        ("{}", "format None"),
        (edited(format=99), "format 99, this strop reads format 2"),
        (edited(extra=1), "differ in extra"),
        (edited(step="3"), "step is '3', not a whole number"),
        (edited(stream={"position": 0.5}), "stream.position is 0.5"),
        (edited(stream={"ended": [3, "4"]}), "stream.ended is '4'"),
        (edited(done=1), "done is 1"),
    ],
)
def test_a_damaged_state_says_how(text: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        parse_state(text)


@pytest.mark.parametrize("name", [field.name for field in fields(RunState)])
def test_every_field_is_needed(name: str) -> None:
    values = json.loads(state_of(recipe()).to_json())
    del values[name]
    with pytest.raises(CheckpointError, match=f"differ in {name}"):
        parse_state(json.dumps(values))


def test_a_state_without_a_best_accuracy_yet() -> None:
    state = replace(state_of(recipe()), best_accuracy=None)
    assert parse_state(state.to_json()) == state


SECRETS = {
    "api_key": "secret-1",
    "judge": {"HF_TOKEN": "secret-2", "headers": {"Authorization": "Bearer secret-3"}, "urls": ["sk-secret-4"]},
    "passwords": "no secret: not the name of one",
    "password": ["secret-5"],
    "credentials": {"user": "secret-6"},
    "note": "hf_secret-7",
}


def test_secrets_are_hidden_by_key_and_by_kind() -> None:
    """K05."""
    values = json.dumps(recipe_values(recipe(arguments=SECRETS)))
    for number in range(1, 8):
        assert f"secret-{number}" not in values
    assert values.count(HIDDEN) == 7


def test_what_is_no_secret_stays() -> None:
    plain = {"tokens": 5, "max_tokens": "12", "tokenizer": "t", "token": 7, "key": "k", "password": "", "risk": "sk"}
    assert hide_secrets(recipe(arguments=plain)) == recipe(arguments=plain)


def test_a_hidden_secret_must_be_given_again() -> None:
    """K05: the recipe of a run folder cannot be run as it is when something was hidden from it."""
    written = hide_secrets(recipe(arguments=SECRETS))
    with pytest.raises(ConfigError) as caught:
        refuse_hidden(written)
    assert "tasks.arguments.api_key was hidden" in caught.value.problems[0]
    assert len(caught.value.problems) == 7
    refuse_hidden(recipe(arguments=SECRETS))
    state_of(written).check_recipe(recipe(arguments=SECRETS))
