"""A conversation and its right answer as one text to imitate: tokens, and which of them the assistant writes."""

from __future__ import annotations

import numpy as np

from strop.errors import DataError
from strop.tokens.base import Renderer
from strop.types import Bools, Int32s, Message


def encode_example(renderer: Renderer, messages: list[Message], answer: str | None) -> tuple[Int32s, Bools]:
    """(tokens [T] int32, trained [T] bool): True on the answer's own tokens and its one end token, by their position.

    The prompt, the assistant's header and what the template puts behind the end token are not trained. Raises DataError
    when there is no answer, or when it cannot be rendered as one.
    """
    if answer is None:
        raise DataError(
            "a task without an answer cannot be imitated: give its rows the field that tasks.answer_key names"
        )
    prompt = renderer.start(messages)
    following, written = renderer.answer(messages, answer)
    tokens = np.concatenate([prompt, following])
    trained = np.zeros(len(tokens), np.bool_)
    trained[len(prompt) : len(prompt) + written] = True
    return tokens, trained
