"""The tasks that come with the recipes: complete, solvable, and scored as they say."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from strop.config.loader import load_recipe
from strop.config.recipe import RendererConfig, TasksConfig
from strop.data.tasks import Task, load_tasks
from strop.data.user_code import load_object
from strop.envs.build import make_env
from strop.tokens.build import build_renderer
from strop.tokens.example import encode_example
from strop.types import Message

RECIPES = Path(__file__).parents[3] / "recipes"


def tasks(path: str, **arguments: int) -> list[Task]:
    return load_tasks(TasksConfig(source="python", path=path, arguments=arguments), RECIPES).train


def test_arithmetic_is_every_sum_once() -> None:
    rows = tasks("arithmetic.py:addition", largest=19)
    asked = [tuple(map(int, re.findall(r"\d+", str(row.messages[0].get("content"))))) for row in rows]
    assert sorted(asked) == [(a, b) for a in range(20) for b in range(20)]
    assert [row.answer for row in rows] == [str(a + b) for a, b in asked]


@pytest.mark.parametrize("recipe", ["quickstart.yaml", "scratch.yaml"])
def test_right_answers_are_worth_1_and_wrong_ones_less(recipe: str) -> None:
    config = load_recipe(RECIPES / recipe).tasks
    new_env = make_env(config, RECIPES)
    for task in load_tasks(config, RECIPES).held_out[:20]:
        right, wrong = (
            asyncio.run(new_env(task).step(Message(role="assistant", content=text)))
            for text in (task.answer or "", f"{task.answer}1")
        )
        assert right.done and right.reward == 1.0 and wrong.reward == 0.0


def test_scratch_problems_fit_their_tokenizer() -> None:
    rows = tasks("scratch_task.py:addition")
    assert len(rows) == 10_000
    by_prompt = {row.messages[0].get("content"): row.answer for row in rows}
    assert by_prompt["12+34="] == "64" and by_prompt["99+01="] == "001" and by_prompt["00+05="] == "5"
    tokenizer = load_object("scratch_task.py:tokenizer", RECIPES)()
    renderer = build_renderer(RendererConfig(kind="plain"), tokenizer, [tokenizer.eos_token_id])
    tokens, trained = encode_example(renderer, rows[1234].messages, rows[1234].answer)
    assert len(tokens) == len("12+34=") + len("64") + 1 and trained.tolist() == [False] * 6 + [True] * 3
    assert renderer.parse(tokens[trained]) == {"role": "assistant", "content": "64"}
    assert np.all(tokens < len(tokenizer)) and len(tokenizer) == 14
    assert max(len(row.answer or "") for row in rows) + 1 <= 6  # what the recipe lets it sample
    with pytest.raises(Exception, match="UNK"):  # the tokenizers library raises nothing narrower
        tokenizer.encode("a")


@pytest.mark.parametrize("recipe", ["dpo.yaml", "reward_model.yaml"])
def test_scratch_preferences_are_right_and_wrong_in_one_digit(recipe: str) -> None:
    config = load_recipe(RECIPES / recipe).tasks
    rows = load_tasks(config, RECIPES)
    assert len(rows.held_out) == 500 and len(rows.train) == 9_500
    for row in (*rows.held_out, *rows.train):
        assert row.chosen == row.answer and row.rejected is not None and row.chosen is not None
        assert len(row.rejected) == len(row.chosen)
        assert sum(a != b for a, b in zip(row.chosen, row.rejected, strict=True)) == 1


def test_scratch_score() -> None:
    score = load_object("scratch_task.py:score", RECIPES)
    task = Task(id="t", messages=[], answer="64", source="", meta={})
    assert [score(task, reply) for reply in ("64", "46", "640", "64 ", "")] == [1.0, 0.0, 0.0, 0.0, 0.0]
