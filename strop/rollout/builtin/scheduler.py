"""Who waits, who runs, and what the next forward pass computes.

Every step, each running request that has drawn a token computes it, and up to `prefill_tokens` tokens of prompts are
computed beside them; so requests join and leave at every step and a long prompt never stalls the others for long.

Pages are taken as texts grow. When none is free, the request that was admitted last gives up its pages and goes back to
the front of the queue, its text kept. The oldest is never interrupted and any single request fits the whole cache, so
some request always ends: there is no deadlock. A request is admitted only while a page for each running one would
remain free, so that it can run for some steps before anybody is interrupted.

Requests with the same prompt that are admitted in one step are twins: one of them computes the prompt, all draw from
its last hidden state, and only the last, partly filled page is copied; and the state, where the model has linear
attention. Such a model can start from known pages only where a snapshot of its state is known too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from strop.ops.paged import PAGE
from strop.rollout.builtin.draw import Int64s
from strop.rollout.builtin.pages import PagePool, extend_digests, pages_for
from strop.rollout.builtin.routes import RouteCache
from strop.rollout.builtin.rows import Request, Rows
from strop.rollout.builtin.states import Snapshots, StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One forward pass of T tokens; M of their hidden states give logits, from which N rows draw a token each."""

    token_T: Int64s
    position_T: Int64s
    row_T: Int64s
    slot_T: Int64s  # where each token's key and value go
    last_M: Int64s  # index into T
    row_N: Int64s
    of_N: Int64s | None  # index into M for each drawing row; None when they are the same
    copies: list[tuple[int, int]]  # pages to copy after the pass
    states: StatePlan | None  # None for a model without linear attention


@dataclass(slots=True)
class _Prefill:
    """The prompts of one step: spans of rows that are computed, and twins that share their last hidden state."""

    budget: int
    spans: list[tuple[int, int, int]]  # (row, first position, end)
    leaders: dict[bytes, int]  # text -> the row that computes its end in this step
    twins: list[tuple[int, int]]  # (row, its leader's row)
    cuts: dict[int, tuple[int, int]]  # row -> the position whose state is kept, and its slot
    restores: list[tuple[int, int]]  # (slot of a state, row that starts from it)


class Scheduler:
    """The queue of waiting requests and the rows of running ones, oldest first."""

    def __init__(self, pool: PagePool, rows: Rows, prefill_tokens: int, snapshots: Snapshots | None = None) -> None:
        self.pool = pool
        self.rows = rows
        self.routes: RouteCache | None = None  # while somebody asks for them
        self._snapshots = snapshots  # for a model with linear attention: its states cannot be found in pages
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[int] = []
        self._running_N: Int64s | None = None  # the same, as an array; None when it is out of date

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def plan(self) -> Plan:
        """The next forward pass. Call only while `busy`; its tokens count as computed from here on."""
        self._make_room()
        if self._snapshots is not None:
            self._snapshots.settle()
        rows, running_N = self.rows, self._as_array()
        pending_N = rows.length_R[running_N] - rows.computed_R[running_N]
        steady_N = running_N[pending_N == 1]
        prefill = _Prefill(self._prefill_tokens, [], {}, [], {}, [])
        for row in running_N[pending_N > 1].tolist():
            self._compute_prompt(row, prefill)
        while self._waiting and rows.num_free and self._admit(self._waiting[0], prefill):
            self._waiting.popleft()
        return self._assemble(steady_N, prefill)

    def finish(self, row: int) -> Request:
        """Take a request out of its row. Its full pages stay known to those who continue its text."""
        full = int(self.rows.computed_R[row]) // PAGE
        request, pages = self._leave(row)
        extend_digests(request.digests, request.text.tokens, full)
        for page, digest in zip(pages[:full], request.digests[:full], strict=True):
            self.pool.publish(page, digest)
        self.pool.release(pages)
        return request

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it is; nothing happens when it has ended."""
        if request in self._waiting:
            self._waiting.remove(request)
        for row in [row for row in self._running if self.rows.requests[row] is request]:
            self.finish(row)

    def interrupt_all(self) -> None:
        """Send the running requests back to the queue, oldest in front, and forget what the pages hold."""
        while self._running:
            self._interrupt()
        self.forget_all()

    def forget_all(self) -> None:
        """Nobody may continue from what was computed before."""
        self.pool.forget_all()
        if self._snapshots is not None:
            self._snapshots.forget_all()

    def abandon(self) -> list[Request]:
        """Drop the requests that a failed step took part in: the running ones, or all when it failed before any ran."""
        failed: list[Request] = []
        for row in list(self._running):
            request, pages = self._leave(row)
            self.pool.release(pages)
            failed.append(request)
        self.forget_all()  # pages that the step should have filled were published before it ran
        if not failed:
            failed, self._waiting = list(self._waiting), deque()
        return failed

    def _leave(self, row: int) -> tuple[Request, list[int]]:
        self._running.remove(row)
        self._running_N = None
        computed = int(self.rows.computed_R[row])
        request, pages = self.rows.leave(row)
        if self.routes is not None and request.params.routes:
            request.keep_routes(self.routes.of(pages, computed))
        return request, pages

    def _interrupt(self) -> None:
        self._waiting.appendleft(self.finish(self._running[-1]))

    def _as_array(self) -> Int64s:
        if self._running_N is None:
            self._running_N = np.array(self._running, np.int64)
        return self._running_N

    def _make_room(self) -> None:
        """Give a page to each row whose next token begins one; interrupt the youngest while there are too few."""
        rows = self.rows
        while True:
            running_N = self._as_array()
            short_N = running_N[rows.computed_R[running_N] >= rows.num_pages_R[running_N] * PAGE]
            if len(short_N) <= self.pool.num_free:
                break
            self._interrupt()
        for row, page in zip(short_N.tolist(), self.pool.take(len(short_N)), strict=True):
            rows.add_pages(row, [page])

    def _admit(self, request: Request, prefill: _Prefill) -> bool:
        """Give a waiting request its pages and a row; False when it has to wait longer."""
        tokens = request.text.tokens
        text = tokens.tobytes()
        leader, slot = prefill.leaders.get(text), None
        if leader is None and prefill.budget == 0:
            return False
        if leader is None:
            # The last token is always computed: its hidden state draws the next one.
            known = (len(tokens) - 1) // PAGE
            extend_digests(request.digests, tokens, known)
            shared = self.pool.match(request.digests[:known])
            if self._snapshots is not None:  # pages are of use as far as a state is known
                count, slot = self._snapshots.find(request.digests[: len(shared)])
                self.pool.release(shared[count:])
                shared = shared[:count]
        else:
            shared = self.rows.pages[leader][: len(tokens) // PAGE]
            self.pool.share(shared)
        needed = pages_for(len(tokens)) - len(shared)
        if self.pool.num_free < needed + len(self._running):
            self.pool.release(shared)
            return False
        row = self.rows.enter(request, shared + self.pool.take(needed), len(shared) * PAGE)
        self._running.append(row)
        self._running_N = None
        if slot is not None:
            prefill.restores.append((slot, row))
        if leader is None:
            self._compute_prompt(row, prefill)
        else:
            self.rows.computed_R[row] = len(tokens)
            prefill.twins.append((row, leader))
        return True

    def _compute_prompt(self, row: int, prefill: _Prefill) -> None:
        """Plan as much of a row's text as the budget allows, and publish the full pages that this fills."""
        rows, request = self.rows, self.rows.request(row)
        first, length = int(rows.computed_R[row]), int(rows.length_R[row])
        end = min(length, first + prefill.budget)
        prefill.budget -= end - first
        prefill.spans.append((row, first, end))
        if end == length:
            prefill.leaders[request.text.tokens.tobytes()] = row
        extend_digests(request.digests, request.text.tokens, end // PAGE)
        for page in range(first // PAGE, end // PAGE):
            self.pool.publish(rows.pages[row][page], request.digests[page])
        if self._snapshots is not None:
            # the last page's end that others with this prompt can start from: they compute its last token themselves
            page = (request.num_prompt - 1) // PAGE
            if first < page * PAGE <= end and (slot := self._snapshots.take(request.digests[page - 1])) is not None:
                prefill.cuts[row] = page * PAGE, slot
        rows.computed_R[row] = end

    def _assemble(self, steady_N: Int64s, prefill: _Prefill) -> Plan:
        rows = self.rows
        row_T, position_T = steady_N, rows.computed_R[steady_N]
        rows.computed_R[steady_N] += 1
        last_M, row_N, of_N = np.arange(len(steady_N)), steady_N, None
        if prefill.spans:
            span_S, first_S, end_S = np.array(prefill.spans, np.int64).T
            count_S = end_S - first_S
            ends_S = len(steady_N) + np.cumsum(count_S)
            row_T = np.concatenate((steady_N, np.repeat(span_S, count_S)))
            offset_T = np.arange(count_S.sum()) - np.repeat(np.cumsum(count_S) - count_S, count_S)
            position_T = np.concatenate((position_T, np.repeat(first_S, count_S) + offset_T))
            done_S = end_S == rows.length_R[span_S]
            last_M = np.concatenate((last_M, ends_S[done_S] - 1))
            row_N = np.concatenate((steady_N, span_S[done_S]))
        if prefill.twins:
            twin_N, leader_N = np.array(prefill.twins, np.int64).T
            m_of_row = {row: m for m, row in enumerate(row_N.tolist())}
            of_N = np.concatenate((np.arange(len(row_N)), [m_of_row[row] for row in leader_N.tolist()]))
            row_N = np.concatenate((row_N, twin_N))
        page_T = rows.tables_RB[row_T, position_T // PAGE].astype(np.int64)
        return Plan(
            token_T=rows.tokens(row_T, position_T),
            position_T=position_T,
            row_T=row_T,
            slot_T=page_T * PAGE + position_T % PAGE,
            last_M=last_M,
            row_N=row_N,
            of_N=of_N,
            copies=[
                (rows.pages[leader][-1], rows.pages[twin][-1])
                for twin, leader in prefill.twins
                if rows.length_R[twin] % PAGE
            ],
            states=None
            if self._snapshots is None
            else StatePlan(steady_N, prefill.spans, prefill.cuts, prefill.restores, prefill.twins),
        )
