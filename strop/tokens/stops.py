"""Stop strings over sampled tokens: ids go in one at a time, and the id that completes a stop string is told.

A stop string may begin and end inside tokens, and a token may hold a part of a character only. So what is matched is
always the decoding of a stretch of real tokens, long enough to hold any stop string that ends in the newest one.
"""

from __future__ import annotations

from collections.abc import Callable

from strop.errors import ConfigError

_EDGE = 8  # characters at the start of a decoded stretch that may be wrong: half a character, a space that was dropped
_BYTES = 4  # the most tokens that one character is ever spread over: byte-level tokenizers, UTF-8


class StopStrings:
    """Stop strings of a request and the decoding that they are looked for in.

    `decode` turns token ids into text and must keep special tokens and spaces as they are. Requests with the same stop
    strings should share one of these: it remembers which tokens can end one. Raises ConfigError for an empty string,
    which every text contains.
    """

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        if "" in strings:
            raise ConfigError("a stop string is empty: every reply would end at once; leave it out")
        self.strings = strings
        self.decode = decode
        self.reach = max(map(len, strings), default=0) + _EDGE  # characters to keep
        self._last_characters = {string[-1] for string in strings}
        self._can_end: dict[int, bool] = {}

    def start(self) -> StopState:
        """A matcher for one reply, before its first token."""
        return StopState(self)

    def can_end(self, token_id: int) -> bool:
        """Whether some stop string may end inside this token; most tokens hold the last character of none."""
        if token_id not in self._can_end:
            text = self.decode([token_id])
            # Alone, a part of a character decodes to U+FFFD, and a leading space may be missing.
            unsure = not text or "\ufffd" in text or " " in self._last_characters
            self._can_end[token_id] = unsure or any(c in text for c in self._last_characters)
        return self._can_end[token_id]


class StopState:
    """What is left of one reply's tokens: the newest ones, as far back as a stop string can reach."""

    __slots__ = ("_ids", "_shorten_at", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._ids: list[int] = []
        self._shorten_at = 2 * _EDGE

    def push(self, token_id: int) -> bool:
        """Take the next sampled id; True when some stop string is complete. Not to be called again after that."""
        self._ids.append(token_id)
        if self._stops.can_end(token_id):
            text = self._stops.decode(self._ids)
            if any(string in text for string in self._stops.strings):
                return True
        if len(self._ids) >= self._shorten_at:
            self._shorten()
        return False

    def _shorten(self) -> None:
        """Forget the older half if the newer one is long enough, seldom enough to cost next to nothing."""
        newer = self._ids[len(self._ids) // 2 :]
        if len(newer) >= _BYTES * self._stops.reach or len(self._stops.decode(newer)) >= self._stops.reach:
            self._ids = newer
        self._shorten_at = 2 * len(self._ids)
