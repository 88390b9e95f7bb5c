"""The Renderer protocol: messages to tokens and back. Text is parsed from tokens and is never re-encoded."""

from __future__ import annotations

from typing import Protocol

from strop.types import Int32s, Message


class Renderer(Protocol):
    """Knows one model family's chat format."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an assistant's turn."""
        ...

    def start(self, messages: list[Message]) -> Int32s:
        """Tokens of an opening conversation, up to where the assistant begins to write."""
        ...

    def observe(self, history: list[Message], new: list[Message], last: Int32s) -> Int32s | None:
        """Tokens that follow a sampled reply: what the template puts after it, `new`, and the next assistant header.

        `history` ends with that reply, `last` are its sampled tokens. None when the template rewrites history, so that
        the new prompt does not extend the old tokens: the caller then opens a new segment with `start`.
        """
        ...

    def answer(self, messages: list[Message], text: str) -> tuple[Int32s, int]:
        """Tokens that follow `start(messages)` when the assistant says `text`, and how many of them it writes itself.

        Those it writes are the text and one end token, at the front; the rest is what the template puts after them.
        """
        ...

    def parse(self, tokens: Int32s) -> Message:
        """The assistant's message in sampled tokens; total: any tokens give a message."""
        ...
