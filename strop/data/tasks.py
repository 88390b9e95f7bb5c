"""Tasks: rows of any source, checked, and split into the ones to train on and the ones to measure with.

read_rows -> Task, or one sentence for each mistake -> distinct problems -> TaskSet(train, held_out)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from strop.config.recipe import TasksConfig
from strop.data.sources import Row, read_rows, shown
from strop.errors import ConfigError, DataError
from strop.types import Message

REWARDS_BY_ANSWER = ("exact", "number", "math")
"""The built-in rewards that compare a reply with the task's answer, so every task needs one."""

_MESSAGE_FIELDS = frozenset(Message.__annotations__)
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem to attempt."""

    id: str  # unique among all sources
    messages: list[Message]  # the conversation up to where the policy speaks
    answer: str | None  # the expected answer; None where the row has none, or one that is not text or a number
    source: str  # the source's kind and path
    meta: Mapping[str, Any]  # the row as its source gave it; for reasoning-gym the entry that its scorer takes
    chosen: str | None = None  # the better of two replies, or one that is good; None where the row has none
    rejected: str | None = None  # the worse of two replies, or one that is bad
    margin: float = 0.0  # by how much the chosen reply is better than the rejected one


@dataclass(frozen=True, slots=True)
class TaskSet:
    """What is trained on and what is measured with. No conversation is in both."""

    train: list[Task]
    held_out: list[Task]
    repeated: int = 0  # further rows with a held-out problem, which are in neither part


def load_tasks(config: TasksConfig, base: Path) -> TaskSet:
    """Read, check and split the tasks that a recipe in the folder `base` names.

    `config.holdout` distinct problems are held out, drawn by `config.holdout_seed` alone; both parts keep the source's
    order. Training keeps repeated rows; a held-out problem is measured once, and its further rows are counted in
    `repeated`.

    Raises DataError naming up to 20 bad rows at once, each with its file, line, field and value; ConfigError when the
    source does not exist or is too small for `config.holdout`.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    for row in islice(read_rows(config, base), config.limit):
        task = row if isinstance(row, str) else _task(row, config)
        if isinstance(task, Task):
            tasks.append(task)
        else:
            problems.append(task)
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = [f"... and {more} more rows like these"] if more > 0 else []
        raise DataError("\n".join(problems[:_SHOWN_PROBLEMS] + tail))
    if not tasks:
        raise DataError(f"tasks.path: {config.path} holds no tasks; give it at least one row")
    return _split(tasks, config)


def _split(tasks: list[Task], config: TasksConfig) -> TaskSet:
    problem_of = [json.dumps(task.messages, sort_keys=True) for task in tasks]
    distinct = list(dict.fromkeys(problem_of))
    if config.holdout >= len(distinct):
        raise ConfigError(
            f"tasks.holdout is {config.holdout} and {config.path} has {len(distinct)} distinct problems, which leaves "
            f"none to train on; lower it to {len(distinct) - 1} at most, or give more tasks"
        )
    words = np.random.Philox(key=np.array([config.holdout_seed % 2**64, 0], np.uint64)).random_raw(len(distinct))
    chosen = {distinct[i] for i in np.argsort(words, kind="stable")[: config.holdout]}
    held_out: dict[str, Task] = {}
    train: list[Task] = []
    for task, problem in zip(tasks, problem_of, strict=True):
        if problem in chosen:
            held_out.setdefault(problem, task)
        else:
            train.append(task)
    return TaskSet(train, list(held_out.values()), len(tasks) - len(train) - len(held_out))


def _task(row: Row, config: TasksConfig) -> Task | str:
    """The row as a task, or the sentence that says what is wrong with it."""
    gym = config.source == "reasoning_gym"
    prompt_key, answer_key = ("question", "answer") if gym else (config.prompt_key, config.answer_key)
    if prompt_key not in row.fields:
        return f"{row.where}: no field {prompt_key!r} among {sorted(row.fields)}; set tasks.prompt_key to the right one"
    messages = _messages(row.fields[prompt_key])
    if isinstance(messages, str):
        return f"{row.where}, field {prompt_key!r}: {messages}"
    replies = _replies(row, config)
    if isinstance(replies, str):
        return replies
    needed = config.env == "single_turn" and config.reward in REWARDS_BY_ANSWER
    needed &= not config.has_labels or config.holdout > 0  # single replies are learned from without an answer
    answers = row.fields if answer_key in row.fields or not config.has_pairs else {answer_key: replies.chosen}
    if needed and answer_key not in answers:
        return f"{row.where}: no field {answer_key!r} among {sorted(row.fields)}; set tasks.answer_key to the right one"
    answer = _answer_text(answers[answer_key]) if answer_key in answers else None
    if needed and not answer:
        return (
            f"{row.where}, field {answer_key!r}: {shown(answers[answer_key])} is no answer; tasks.reward "
            f"{config.reward!r} compares with text or a number"
        )
    return Task(
        id=row.id.rsplit("/", 1)[-1],  # without folders: a project that moves keeps its tasks' names, and its runs
        messages=messages,
        answer=answer,
        source=f"{config.source}/{config.path}",
        meta=row.fields,
        chosen=replies.chosen,
        rejected=replies.rejected,
        margin=replies.margin,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replies:
    """What a row says of better and worse replies."""

    chosen: str | None = None
    rejected: str | None = None
    margin: float = 0.0


def _replies(row: Row, config: TasksConfig) -> _Replies | str:
    """The row's pair, or its one reply on the side that its label names; or what is wrong with them."""
    keys = {
        "tasks.chosen_key": config.chosen_key,
        "tasks.rejected_key": config.rejected_key,
        "tasks.margin_key": config.margin_key,
        "tasks.reply_key": config.reply_key,
        "tasks.label_key": config.label_key,
    }
    values: dict[str, object] = {}
    for name, key in keys.items():
        if key is not None and key not in row.fields:
            return f"{row.where}: no field {key!r} among {sorted(row.fields)}; set {name} to the right one"
        values[name] = None if key is None else row.fields[key]
    for name in ("tasks.chosen_key", "tasks.rejected_key", "tasks.reply_key"):
        if keys[name] is not None and not isinstance(values[name], str):
            return f"{row.where}, field {keys[name]!r}: {shown(values[name])} is no reply; {name} names one as text"
    if config.has_labels:
        reply, good = cast("str", values["tasks.reply_key"]), values["tasks.label_key"]
        if not isinstance(good, bool):
            return f"{row.where}, field {config.label_key!r}: {shown(good)} is no label; it must be true or false"
        return _Replies(chosen=reply) if good else _Replies(rejected=reply)
    margin = values["tasks.margin_key"]
    if config.margin_key is not None and (isinstance(margin, str) or _answer_text(margin) is None):
        return f"{row.where}, field {config.margin_key!r}: {shown(margin)} is no margin; it must be a number"
    return _Replies(
        chosen=cast("str | None", values["tasks.chosen_key"]),
        rejected=cast("str | None", values["tasks.rejected_key"]),
        margin=0.0 if margin is None else float(cast("float", margin)),
    )


def _answer_text(value: object) -> str | None:
    """Text as it is, a number as JSON writes it; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return json.dumps(value)


def _messages(value: object) -> list[Message] | str:
    """A prompt as messages, or what is wrong with it."""
    if isinstance(value, str):
        if not value.strip():
            return "it is empty; a prompt needs text"
        return [Message(role="user", content=value)]
    if not isinstance(value, list) or not value:
        return f"{shown(value)} is no prompt; give text, or a list of messages"
    messages: list[Message] = []
    role = ""
    for i, item in enumerate(cast("list[object]", value)):
        message = _message(item)
        if isinstance(message, str):
            return f"message {i}: {message}"
        messages.append(message)
        role = message.get("role")
    if role == "assistant":
        return "the last message is the assistant's, which is the one to be written; end with the user's"
    return messages


def _message(value: object) -> Message | str:
    if not isinstance(value, Mapping):
        return f"{shown(value)} is no message; it needs role and content"
    # Columnar files fill in fields that a message does not have.
    fields = {key: part for key, part in cast("Mapping[str, object]", value).items() if part is not None}
    unknown = sorted(set(fields) - _MESSAGE_FIELDS)
    if unknown:
        return f"unknown fields {unknown}; a message has {sorted(_MESSAGE_FIELDS)}"
    for key in ("role", "content"):
        if key not in fields:
            return f"no field {key!r} in {shown(dict(fields))}"
        if not isinstance(fields[key], str):
            return f"{key} is {shown(fields[key])} and must be text"
    return cast("Message", fields)
