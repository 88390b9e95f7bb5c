"""strop's own sampler: a prompt and its sampling parameters in, a completion out; many at once, over one model.

`sample` puts a request into the scheduler's queue and waits. One task runs steps while there is work:

    scheduler.plan -> model.hidden -> copy shared pages and states -> model.logits -> draw -> append -> who has ended?

A step is a plain function, and between two steps the event loop runs everybody else. So whatever happens to the sampler
(new weights, a cancelled request) happens at a token boundary, without locks or threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from strop.errors import RolloutError
from strop.models.attention import PackedAttention
from strop.models.moe import has_routers
from strop.models.saved import import_weights
from strop.ops.logprobs import Head, HeadImpl, score_targets
from strop.ops.paged import PagedKV
from strop.rollout.base import check_bounds
from strop.rollout.builtin.attention import CachedAttention
from strop.rollout.builtin.draw import Drawn, draw
from strop.rollout.builtin.pages import PagePool, pages_for
from strop.rollout.builtin.routes import RouteCache
from strop.rollout.builtin.rows import Request, Rows
from strop.rollout.builtin.scheduler import Plan, Scheduler
from strop.rollout.builtin.states import Snapshots, StateCache, StatePass, num_snapshots
from strop.tokens.stops import StopStrings
from strop.types import Completion, Float32s, Layout, Prompt, SamplingParams, Stop

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.loading import LanguageModel
    from strop.models.lora import Adapter


class BuiltinSampler:
    """A `Sampler` over a model of its own: nobody else may change the model's weights while requests run.

    `cache_tokens` bounds the keys and values kept, rounded up to pages; `max_running` the requests decoded together;
    `prefill_tokens` the prompt tokens computed in one step beside them. `decode` turns tokens into text: requests with
    stop strings need it. With an `adapter` of the model the sampler serves that, never merged, and its base may be
    shared with a trainer and with other samplers: only the adapter's own matrices ever change.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_running: int,
        cache_tokens: int,
        decode: Callable[[list[int]], str] | None = None,
        prefill_tokens: int = 2048,
        adapter: Adapter | None = None,
        casts: bool = False,
    ) -> None:
        self._model = model
        self._casts = casts
        self._adapter = adapter
        self._decode = decode
        self._version = 0
        self._cache_tokens = cache_tokens
        self._max_tokens = min(model.max_length, cache_tokens)  # of one request, prompt included
        self._place = {layer: place for place, layer in enumerate(model.cache_shape.layers)}
        self._num_slots = max_running + num_snapshots(max_running)
        snapshots = Snapshots(max_running, self._num_slots - max_running) if model.cache_shape.states else None
        pool = PagePool(pages_for(cache_tokens))
        self._scheduler = Scheduler(pool, Rows(max_running, self._max_tokens), prefill_tokens, snapshots)
        self._cache: PagedKV | None = self._new_cache()
        self._states: StateCache | None = self._new_states()
        self._routes: RouteCache | None = None
        self._driver: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def serves_adapter(self) -> bool:
        return self._adapter is not None

    @property
    def cache_bytes(self) -> int:
        """Memory that keys, values, states and routes take now: 0 asleep."""
        return sum(cache.num_bytes for cache in (self._cache, self._states, self._routes) if cache is not None)

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self._check(prompt, params)
        if params.routes and self._routes is None:
            self._record_routes()
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        matcher = self._stop_strings(params)
        request = Request.new(prompt.tokens, params, answer, None if matcher is None else matcher.start())
        self._scheduler.add(request)
        if self._driver is None or self._driver.done():
            self._drive()
        try:
            return await answer
        except asyncio.CancelledError:
            self._scheduler.drop(request)
            raise

    async def score(self, prompt: Prompt) -> Float32s:
        self._check_tokens(prompt, 0)
        model, count = self._model, len(prompt.tokens)
        with torch.inference_mode(), self._adapted():
            token_T = torch.from_numpy(np.asarray(prompt.tokens, np.int64)).to(model.device)
            position_T = torch.arange(count, device=model.device)
            hidden_TD = model.hidden(token_T, position_T, PackedAttention(Layout((count,)), model.impl))
            low_rank = None if self._adapter is None else self._adapter.head()
            head = Head(weight_VD=model.head.weight, bias_V=model.head.bias, softcap=model.softcap, low_rank=low_rank)
            scored = score_targets(hidden_TD[:-1], head, token_T[1:], impl=HeadImpl.CHUNKED)
        return np.concatenate((np.zeros(1, np.float32), scored.logprobs_N.float().cpu().numpy()))

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._adapter is None:
            self._model.load_state(self._cast(weights) if self._casts else weights)
        else:
            self._adapter.load(dict(weights))
        self._version = version
        self._scheduler.interrupt_all()

    def _cast(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Floating-point weights in the model's own format; the other checks are the model's."""
        dtypes = {name: tensor.dtype for name, tensor in self._model.state()}
        for name, tensor in import_weights(self._model.module, weights):
            own = dtypes.get(name, tensor.dtype)
            yield name, tensor.to(own) if tensor.is_floating_point() and own.is_floating_point else tensor

    async def sleep(self) -> None:
        if self._scheduler.busy:
            raise RolloutError("the sampler was told to sleep while requests run; await or cancel them first")
        self._scheduler.forget_all()
        self._cache = self._states = self._routes = self._scheduler.routes = None

    async def wake(self) -> None:
        if self._cache is None:
            self._cache = self._new_cache()
            self._states = self._new_states()

    def close(self) -> None:
        """It runs here: nothing was started."""

    def _record_routes(self) -> None:
        """From the first request that asks for routes on, until the sampler sleeps. What was computed before has none,
        so nobody may start from it."""
        self._scheduler.interrupt_all()
        self._routes = self._scheduler.routes = RouteCache(self._model, self._scheduler.pool.num_pages)

    def _new_states(self) -> StateCache | None:
        model, shape = self._model, self._model.cache_shape.states
        return None if shape is None else StateCache(shape, self._num_slots, dtype=model.dtype, device=model.device)

    def _new_cache(self) -> PagedKV:
        model, shape = self._model, self._model.cache_shape
        return PagedKV(
            num_layers=shape.num_layers,
            num_pages=self._scheduler.pool.num_pages,
            num_kv_heads=shape.num_kv_heads,
            key_channels=shape.key_channels,
            value_channels=shape.value_channels,
            dtype=model.dtype,
            device=model.device,
            impl=model.impl,
        )

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RolloutError for a request that cannot be run, before anything runs."""
        if self._cache is None:
            raise RolloutError("the sampler sleeps; call wake() before sample()")
        if params.max_tokens < 1:
            raise RolloutError(f"max_tokens={params.max_tokens}: a completion has at least one token")
        if params.routes and not has_routers(self._model.module):
            name = type(self._model.module).__name__
            raise RolloutError(f"{name} has no routers that strop knows: leave SamplingParams.routes off")
        if params.stop_strings and self._decode is None:
            raise RolloutError(f"stop strings {params.stop_strings} need a sampler that was given `decode`")
        check_bounds(params)
        self._check_tokens(prompt, params.max_tokens)

    def _check_tokens(self, prompt: Prompt, max_tokens: int) -> None:
        count = len(prompt.tokens)
        if count == 0:
            raise RolloutError("an empty prompt has nothing to continue; give at least one token")
        if count + max_tokens > self._model.max_length:
            raise RolloutError(
                f"a prompt of {count} tokens and max_tokens={max_tokens} need {count + max_tokens} positions; "
                f"the model has {self._model.max_length}"
            )
        if max_tokens and count + max_tokens > self._max_tokens:
            raise RolloutError(
                f"a prompt of {count} tokens and max_tokens={max_tokens} need a cache of {count + max_tokens} tokens; "
                f"cache_tokens is {self._cache_tokens}"
            )
        low, high, last = int(prompt.tokens.min()), int(prompt.tokens.max()), self._model.vocab_size - 1
        if low < 0 or high > last:
            raise RolloutError(f"a prompt with token ids from {low} to {high}; the model has ids 0 to {last}")

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings or self._decode is None:
            return None
        return StopStrings(params.stop_strings, self._decode)

    def _drive(self) -> None:
        self._driver = asyncio.get_running_loop().create_task(self._run())
        self._driver.add_done_callback(self._driver_ended)

    async def _run(self) -> None:
        while self._scheduler.busy:
            self._step()
            await asyncio.sleep(0)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """A step that raised fails the requests that took part in it; the others go on."""
        if self._driver is driver:
            self._driver = None
        if driver.cancelled():  # the event loop is closing: nobody will run what is left
            while failed := self._scheduler.abandon():
                _fail(failed, "the event loop closed while the request ran")
            return
        error = driver.exception()
        if error is not None:
            _fail(self._scheduler.abandon(), f"a sampling step failed: {error!r}", error)
        if self._scheduler.busy and self._driver is None:
            self._drive()

    def _adapted(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapter is None else self._adapter.on()

    @torch.inference_mode()
    def _step(self) -> None:
        """One forward pass, one token for each row that is ready."""
        plan, rows = self._scheduler.plan(), self._scheduler.rows
        with self._adapted():
            logits_MV = self._forward(plan)
        if not len(plan.row_N):
            return  # all of it was the middle of a long prompt
        logits_NV = logits_MV if plan.of_N is None else logits_MV[self._tensor(plan.of_N)]
        drawn = draw(logits_NV, rows.settings(plan.row_N), rows.next_uniforms(plan.row_N))
        rows.append(plan.row_N, drawn, self._version)
        self._end(plan.row_N, drawn)

    def _forward(self, plan: Plan) -> Tensor:
        """Logits [M, V] of the planned pass."""
        if self._cache is None:
            raise RolloutError("the sampler sleeps; call wake() before sample()")
        states = None
        if plan.states is not None and self._states is not None:
            states = StatePass.of(plan.states, self._states, self._model.impl)
        attention = CachedAttention(
            cache=self._cache,
            place=self._place,
            states=states,
            tables_RB=self._tensor(self._scheduler.rows.tables_RB),
            row_T=self._tensor(plan.row_T),
            slot_T=self._tensor(plan.slot_T),
            context_T=self._tensor(plan.position_T + 1),
        )
        with nullcontext() if self._routes is None else self._routes.recording(attention.slot_T):
            hidden_TD = self._model.hidden(self._tensor(plan.token_T), self._tensor(plan.position_T), attention)
        for src, dst in plan.copies:
            self._cache.copy_page(src, dst)
            if self._routes is not None:
                self._routes.copy_page(src, dst)
        if plan.states is not None and self._states is not None:
            self._states.copy([(leader, twin) for twin, leader in plan.states.twins])
        if len(plan.last_M) < len(plan.token_T):
            hidden_TD = hidden_TD[self._tensor(plan.last_M)]
        return self._model.logits(hidden_TD)

    def _tensor(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _end(self, row_N: NDArray[np.int64], drawn: Drawn) -> None:
        """Answer the requests whose last token this was."""
        rows = self._scheduler.rows
        broken_N = np.isnan(drawn.logprobs_N)
        stopped_N = rows.hit_stop(row_N, drawn.tokens_N)
        for n in np.flatnonzero(rows.matched_R[row_N]).tolist():
            matcher = rows.request(int(row_N[n])).matcher
            stopped_N[n] |= matcher is not None and matcher.push(int(drawn.tokens_N[n]))
        ended_N = stopped_N | rows.full(row_N) | broken_N
        for n in np.flatnonzero(ended_N).tolist():
            request = self._scheduler.finish(int(row_N[n]))
            if broken_N[n]:
                _fail([request], "the model's logits were not finite numbers; look at its weights")
                self._scheduler.forget_all()  # nobody may continue from what such a request left
            elif not request.answer.done():
                request.answer.set_result(request.completion(Stop.TOKEN if stopped_N[n] else Stop.LENGTH))


def _fail(requests: list[Request], message: str, cause: BaseException | None = None) -> None:
    for request in requests:
        if not request.answer.done():
            error = RolloutError(message)
            error.__cause__ = cause
            request.answer.set_exception(error)
