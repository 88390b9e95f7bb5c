"""A tokenizer's own chat template as a Renderer: histories are rendered whole, only what follows a reply is encoded.

    messages -> template -> text -> tokens                      (the start of a segment, and nothing else)
    sampled tokens, kept as they are | end of turn, separator, new messages, next header -> tokens

A template is a program that may write earlier messages anew when later ones arrive: it drops old reasoning, or repeats
a system message. So `observe` renders the history twice, with a probe in the reply's place: the text before the probe
must not have changed, and the text behind it is what follows the reply. Sampled tokens are never decoded and encoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jinja2 import TemplateError

from strop.errors import ConfigError, DataError
from strop.tokens.parse import CLOSE_THINK, OPEN_THINK, as_arguments, split_reasoning
from strop.types import Int32s, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED_PROMPTS = 1024  # a group's attempts share one prompt


class TemplateRenderer:
    """Renders with `tokenizer`'s chat template, `system` put before every conversation.

    `end_tokens` are the model's ids that end a text; the template's own end-of-turn token is found by rendering. Raises
    ConfigError when there is no template, when it does not render an assistant's message, or when nothing ends a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, end_tokens: Sequence[int] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: set renderer.kind to plain, or name one that has")
        self._tokenizer = tokenizer
        self._system = system
        self._cached_start = lru_cache(maxsize=CACHED_PROMPTS)(self._start_of)
        self._parts = self._takes_parts()
        question = self._render([Message(role="user", content="?")], reply_next=True)
        self._opens_thinking = question.rstrip().endswith(OPEN_THINK)
        self._thinks = self._opens_thinking or CLOSE_THINK in str(tokenizer.get_chat_template())
        self._end = self._end_of_turn(end_tokens)
        ends = [*end_tokens] if self._end is None else [self._end, *end_tokens]
        self._stop_tokens = tuple(dict.fromkeys(ends))
        if not self._stop_tokens:
            raise ConfigError("no token ends a reply: the template has no end-of-turn token and the model lists none")

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop_tokens

    def start(self, messages: list[Message]) -> Int32s:
        return self._cached_start(json.dumps(messages))

    def _start_of(self, messages: str) -> Int32s:
        tokens = self._encode(self._render(json.loads(messages), reply_next=True))
        tokens.flags.writeable = False  # one array for all who ask
        return tokens

    def observe(self, history: list[Message], new: list[Message], last: Int32s) -> Int32s | None:
        reply, before = history[-1], history[:-1]
        tail = self._behind_probe(before, reply, new)
        if tail is None:
            return None
        tokens = self._encode(tail)
        closed = self._closes(tail)
        if len(last) and int(last[-1]) in self._stop_tokens:
            if self._end is None:
                return tokens
            if int(last[-1]) != self._end or not closed:
                return None  # the template's history holds another end than the one that was sampled
            return tokens[int(np.flatnonzero(tokens == self._end)[0]) + 1 :]
        return tokens  # cut by a stop string or a limit: the template closes the turn

    def answer(self, messages: list[Message], text: str) -> tuple[Int32s, int]:
        probe = _unused_word([*messages, Message(role="assistant", content=text)])
        start = self._render(messages, reply_next=True)
        whole = self._render([*messages, Message(role="assistant", content=probe)], reply_next=False)
        if not whole.startswith(start) or probe not in whole[len(start) :]:
            raise DataError(
                "the chat template renders an answer otherwise than it asks for one, so this model cannot be shown "
                f"answers: after {start[-40:]!r} it has {whole[-60:]!r}"
            )
        head, _, tail = whole[len(start) :].partition(probe)
        said = self._encode(head + text)
        if any(int(token) in self._stop_tokens for token in said):
            raise DataError(f"the answer {text!r:.80} holds a token that ends a reply: give its text alone")
        tokens, end = self._encode(tail), self._end
        if end is None or not self._closes(tail):
            return np.concatenate([said, np.array(self._stop_tokens[:1], np.int32), tokens]), len(said) + 1
        return np.concatenate([said, tokens[int(np.flatnonzero(tokens == end)[0]) :]]), len(said) + 1

    def parse(self, tokens: Int32s) -> Message:
        ids = cast("list[int]", tokens.tolist())
        if ids and ids[-1] in self._stop_tokens:
            ids.pop()
        text = self._decode(ids)
        reasoning, content = split_reasoning(text, opened=self._opens_thinking) if self._thinks else (None, text)
        if reasoning is None:
            return Message(role="assistant", content=content)
        return Message(role="assistant", content=content, reasoning_content=reasoning)

    def _behind_probe(self, before: list[Message], reply: Message, new: list[Message]) -> str | None:
        """What the template puts behind the reply, or None when it writes what came before it, or in it, anew."""
        word = _unused_word([*before, reply, *new])
        probe = Message(role="assistant", content=word)
        thought = f"thought{word}"
        if reply.get("reasoning_content"):
            probe["reasoning_content"] = thought
        start = self._render(before, reply_next=True)
        whole = self._render([*before, probe, *new], reply_next=True)
        if not whole.startswith(start):
            return None
        head, found, tail = whole[len(start) :].replace(thought, "\0").partition(word)
        if not found:
            return None
        # Beside the reply itself a template may put white space before it; anything else was not sampled.
        kept = "\0" in head if reply.get("reasoning_content") else not head.strip()
        return tail if kept else None

    def _closes(self, tail: str) -> bool:
        return self._end is not None and tail.lstrip().startswith(self._decode([self._end]))

    def _end_of_turn(self, end_tokens: Sequence[int]) -> int | None:
        """The special token that the template puts behind an assistant's message; None when that is plain text."""
        word = _unused_word([])
        asked = [Message(role="user", content="?"), Message(role="assistant", content=word)]
        tail = self._render(asked, reply_next=False).partition(word)[2]
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special} | set(end_tokens)
        for token in self._encode(tail).tolist():
            if token in special:
                return int(token)
            if self._decode([token]).strip():
                return None
        return None

    def _takes_parts(self) -> bool:
        """Whether contents must be lists of parts; text is tried first. Raises ConfigError when neither is rendered."""
        word = _unused_word([])
        faults: list[str] = []
        for parts in (False, True):
            self._parts = parts
            try:
                if word in self._render([Message(role="user", content=word)], reply_next=True):
                    return parts
                faults.append("leaves the text out")
            except DataError as error:
                faults.append(f"fails ({error})")
        raise ConfigError(
            f"the chat template cannot be used: given text, it {faults[0]}; given a list of parts, it {faults[1]}"
        )

    def _render(self, messages: list[Message], *, reply_next: bool) -> str:
        if self._system is not None:
            if messages and messages[0].get("role") == "system":
                raise DataError(
                    "a conversation has a system message of its own: take renderer.system out of the recipe"
                )
            messages = [Message(role="system", content=self._system), *messages]
        plain = [_as_template_takes(message, parts=self._parts) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=reply_next)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template refuses a conversation of roles {roles}: {error}") from error
        return cast("str", text)

    def _encode(self, text: str) -> Int32s:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _decode(self, ids: list[int]) -> str:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", decoded)


def _unused_word(messages: list[Message]) -> str:
    """A plain word that none of the messages contains."""
    text = repr(messages)
    number = 0
    while f"probe{number}x" in text:
        number += 1
    return f"probe{number}x"


def _as_template_takes(message: Message, *, parts: bool) -> dict[str, Any]:
    """The message with its content as text or as parts, None as "", and the arguments of its calls as objects."""
    plain: dict[str, Any] = dict(message)
    text = content_text(message)
    plain["content"] = [{"type": "text", "text": text}] if parts else text
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return plain


def content_text(message: Message) -> str:
    """A message's content as text, whether it came as text, as a list of text parts, or as None beside tool calls.

    Raises DataError for parts that are not text.
    """
    content = cast("object", message.get("content"))
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast("list[object]", content) if isinstance(content, list) else [content]:
        text = cast("Mapping[str, object]", part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise DataError(f"a message's content is text or a list of text parts; this one has {part!r:.80}")
        texts.append(text)
    return "".join(texts)


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_object_arguments(cast("Mapping[str, Any]", call["function"]))}
    arguments = as_arguments(call.get("arguments"))
    return {**call} if arguments is None else {**call, "arguments": arguments}
