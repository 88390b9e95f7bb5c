"""What is known of each request, as columns: one row a running request, so that a step touches arrays and no objects.

    R rows    W tokens a row can hold    B pages a row can hold    N rows that draw a token in this step

A request that waits keeps its text with itself; it gets a row to run in, and takes its text back when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from strop.data.routes import unknown
from strop.rollout.builtin.draw import Drawn, Float64s, Int64s, Settings, uniforms
from strop.rollout.builtin.pages import Digest, pages_for
from strop.tokens.stops import StopState
from strop.types import Bools, Completion, Float32s, Int32s, Routes, SamplingParams, Stop

ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(slots=True)
class Text:
    """A request's tokens [T] and, for those that were sampled, how; prompt positions hold 0 and version -1."""

    tokens: Int32s
    logprobs: Float32s
    sampling_logprobs: Float32s
    versions: Int32s


@dataclass(slots=True, eq=False)
class Request:
    """One completion on its way."""

    params: SamplingParams
    num_prompt: int
    text: Text  # as of the moment it last left its row
    answer: asyncio.Future[Completion]
    matcher: StopState | None  # follows the stop strings; None without any
    digests: list[Digest] = field(default_factory=list)  # of the text's first full pages
    routes: Routes | None = None  # of the tokens that had been computed when it last left its row; if it asks for them

    @classmethod
    def new(
        cls, prompt: Int32s, params: SamplingParams, answer: asyncio.Future[Completion], matcher: StopState | None
    ) -> Request:
        nothing = np.zeros(len(prompt), np.float32)
        text = Text(np.asarray(prompt, np.int32), nothing, nothing, np.full(len(prompt), -1, np.int32))
        return cls(params, len(prompt), text, answer, matcher)

    def keep_routes(self, routes: Routes) -> None:
        """Experts that drew a token stay on record, also when newer weights compute its text again."""
        self.routes = routes if self.routes is None else self.routes.resumed(routes)

    def completion(self, stop: Stop) -> Completion:
        """What was sampled, once its text is back from its row."""
        sampled = slice(self.num_prompt, None)
        routes = self.routes
        if routes is not None:  # the last token was drawn, and never computed
            routes = routes.resumed(unknown(len(self.text.tokens), routes.layers, routes.experts_TLK.shape[2]))
        return Completion(
            tokens=self.text.tokens[sampled],
            logprobs=self.text.logprobs[sampled],
            sampling_logprobs=self.text.sampling_logprobs[sampled],
            versions=self.text.versions[sampled],
            stop=stop,
            routes=routes,
        )


class Rows:
    """The columns of running requests. Columns of rows that nobody runs in hold anything."""

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.requests: list[Request | None] = [None] * num_rows
        self.pages: list[list[int]] = [[] for _ in range(num_rows)]
        self._free = list(range(num_rows))[::-1]
        self.length_R = np.zeros(num_rows, np.int64)  # tokens of the text, prompt and sampled
        self.computed_R = np.zeros(num_rows, np.int64)  # of these, how many have keys and values in the cache
        self.num_pages_R = np.zeros(num_rows, np.int64)
        self.tables_RB = np.full((num_rows, pages_for(max_tokens)), -1, np.int32)
        self.matched_R = np.zeros(num_rows, np.bool_)  # follows stop strings
        self._limit_R = np.zeros(num_rows, np.int64)  # length at which a request ends
        self._temperature_R = np.zeros(num_rows)
        self._top_k_R = np.zeros(num_rows, np.int64)
        self._top_p_R = np.zeros(num_rows)
        self._min_p_R = np.zeros(num_rows)
        self._stops_RK = np.full((num_rows, 1), -1, np.int32)
        self._tokens_RW = np.zeros((num_rows, 0), np.int32)
        self._logprobs_RW = np.zeros((num_rows, 0), np.float32)
        self._sampling_logprobs_RW = np.zeros((num_rows, 0), np.float32)
        self._versions_RW = np.zeros((num_rows, 0), np.int32)
        self._uniforms_RW = np.zeros((num_rows, 0))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request(self, row: int) -> Request:
        """Who runs in this row."""
        request = self.requests[row]
        if request is None:
            raise LookupError(f"nobody runs in row {row}")
        return request

    def enter(self, request: Request, pages: list[int], computed: int) -> int:
        """Give a request a row; its first `computed` tokens are in its pages already."""
        row = self._free.pop()
        text, params = request.text, request.params
        length, limit = len(text.tokens), request.num_prompt + params.max_tokens
        self._fit(limit, len(params.stop_tokens))
        self.requests[row] = request
        self.pages[row] = []
        self.add_pages(row, pages)
        self.length_R[row], self.computed_R[row], self._limit_R[row] = length, computed, limit
        self._temperature_R[row], self._top_k_R[row] = params.temperature, params.top_k
        self._top_p_R[row], self._min_p_R[row] = params.top_p, params.min_p
        self._stops_RK[row] = -1
        self._stops_RK[row, : len(params.stop_tokens)] = params.stop_tokens
        self.matched_R[row] = request.matcher is not None
        self._tokens_RW[row, :length] = text.tokens
        self._logprobs_RW[row, :length] = text.logprobs
        self._sampling_logprobs_RW[row, :length] = text.sampling_logprobs
        self._versions_RW[row, :length] = text.versions
        self._uniforms_RW[row, request.num_prompt : limit] = uniforms(params.seed, params.max_tokens)
        return row

    def leave(self, row: int) -> tuple[Request, list[int]]:
        """Take a request out of its row, its text up to date; also its pages."""
        request, pages, end = self.request(row), self.pages[row], slice(int(self.length_R[row]))
        request.text = Text(
            self._tokens_RW[row, end].copy(),
            self._logprobs_RW[row, end].copy(),
            self._sampling_logprobs_RW[row, end].copy(),
            self._versions_RW[row, end].copy(),
        )
        self.tables_RB[row, : len(pages)] = -1
        self.requests[row], self.pages[row] = None, []
        self.num_pages_R[row] = 0
        self._free.append(row)
        return request, pages

    def add_pages(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row's table."""
        held = self.pages[row]
        self.tables_RB[row, len(held) : len(held) + len(pages)] = pages
        held.extend(pages)
        self.num_pages_R[row] = len(held)

    def tokens(self, row_T: Int64s, position_T: Int64s) -> Int64s:
        return self._tokens_RW[row_T, position_T].astype(np.int64)

    def settings(self, row_N: Int64s) -> Settings:
        return Settings(
            temperature_N=self._temperature_R[row_N],
            top_k_N=self._top_k_R[row_N],
            top_p_N=self._top_p_R[row_N],
            min_p_N=self._min_p_R[row_N],
        )

    def next_uniforms(self, row_N: Int64s) -> Float64s:
        """The number that draws each row's next token."""
        return self._uniforms_RW[row_N, self.length_R[row_N]]

    def append(self, row_N: Int64s, drawn: Drawn, version: int) -> None:
        """Add the token that was drawn for each row."""
        at_N = self.length_R[row_N]
        self._tokens_RW[row_N, at_N] = drawn.tokens_N
        self._logprobs_RW[row_N, at_N] = drawn.logprobs_N
        self._sampling_logprobs_RW[row_N, at_N] = drawn.sampling_logprobs_N
        self._versions_RW[row_N, at_N] = version
        self.length_R[row_N] = at_N + 1

    def hit_stop(self, row_N: Int64s, token_N: Int64s) -> Bools:
        """Whether each token is among its row's stop tokens."""
        return (self._stops_RK[row_N] == token_N[:, None]).any(1)

    def full(self, row_N: Int64s) -> Bools:
        """Whether each row has drawn all the tokens that it may."""
        return self.length_R[row_N] >= self._limit_R[row_N]

    def _fit(self, width: int, num_stops: int) -> None:
        if num_stops > self._stops_RK.shape[1]:
            self._stops_RK = _wider(self._stops_RK, num_stops, -1)
        if width > self._tokens_RW.shape[1]:
            width += width // 2
            self._tokens_RW = _wider(self._tokens_RW, width)
            self._logprobs_RW = _wider(self._logprobs_RW, width)
            self._sampling_logprobs_RW = _wider(self._sampling_logprobs_RW, width)
            self._versions_RW = _wider(self._versions_RW, width)
            self._uniforms_RW = _wider(self._uniforms_RW, width)


def _wider(array: NDArray[ScalarT], width: int, fill: int = 0) -> NDArray[ScalarT]:
    wide = np.full((len(array), width), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
