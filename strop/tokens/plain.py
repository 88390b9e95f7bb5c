"""Contents joined as they are, without roles, headers or separators: for models trained from scratch on bare text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from strop.errors import ConfigError, DataError
from strop.tokens.template import CACHED_PROMPTS, content_text
from strop.types import Int32s, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainRenderer:
    """Renders the contents of messages one after the other; the first of `end_tokens` ends a reply.

    Raises ConfigError when `end_tokens` is empty.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], system: str | None = None
    ) -> None:
        if not end_tokens:
            raise ConfigError("renderer.kind plain needs a tokenizer with an eos token: nothing else ends a reply")
        self._tokenizer = tokenizer
        self._stop_tokens = tuple(end_tokens)
        self._system = system or ""
        self._cached_start = lru_cache(maxsize=CACHED_PROMPTS)(self._start_of)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop_tokens

    def start(self, messages: list[Message]) -> Int32s:
        return self._cached_start(self._system + _joined(messages))

    def _start_of(self, text: str) -> Int32s:
        tokens = self._encode(text)
        tokens.flags.writeable = False  # one array for all who ask
        return tokens

    def observe(self, history: list[Message], new: list[Message], last: Int32s) -> Int32s | None:
        return self._encode(_joined(new))

    def answer(self, messages: list[Message], text: str) -> tuple[Int32s, int]:
        said = self._encode(text)
        if any(int(token) in self._stop_tokens for token in said):
            raise DataError(f"the answer {text!r:.80} holds a token that ends a reply: give its text alone")
        tokens = np.append(said, np.int32(self._stop_tokens[0]))
        return tokens, len(tokens)

    def parse(self, tokens: Int32s) -> Message:
        ids = cast("list[int]", tokens.tolist())
        if ids and ids[-1] in self._stop_tokens:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Message(role="assistant", content=cast("str", text))

    def _encode(self, text: str) -> Int32s:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


def _joined(messages: list[Message]) -> str:
    return "".join(content_text(message) for message in messages)
