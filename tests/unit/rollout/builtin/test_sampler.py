"""What only the built-in sampler promises: how little it computes, how it keeps going, that it rests without work."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.errors import RolloutError
from strop.models.attention import AttentionContext
from strop.models.loading import LanguageModel
from strop.ops.paged import PAGE
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Completion, Int32s, Prompt, SamplingParams
from tests.tiny_models import tiny_model


class Watched(LanguageModel):
    """A model that counts the tokens it computes, and breaks when it is told to."""

    passes: list[int]
    fail_at: set[int]  # passes that raise
    spoil_at: set[int]  # passes whose first token's hidden state is NaN

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        self.passes.append(len(tokens_T))
        if len(self.passes) in self.fail_at:
            raise MemoryError("no room for this pass")
        assert torch.is_inference_mode_enabled()
        out_TD = super().hidden(tokens_T, positions_T, attention)
        if len(self.passes) in self.spoil_at:
            out_TD = out_TD.clone()
            out_TD[0] = torch.nan
        return out_TD


@pytest.fixture(params=["qwen3", "qwen3_5_text"])
def model(request: pytest.FixtureRequest) -> Watched:
    """A model of attention layers, and one with linear attention, whose states live beside the pages."""
    tiny = tiny_model(request.param)
    watched = Watched(module=tiny.module, impl=tiny.impl, cache_shape=tiny.cache_shape, fused=tiny.fused)
    watched.passes, watched.fail_at, watched.spoil_at = [], set(), set()
    return watched


def sampler_of(model: LanguageModel, *, max_running=8, cache_tokens=1024, prefill_tokens=256) -> BuiltinSampler:
    return BuiltinSampler(model, max_running=max_running, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens)


def tokens(count: int, seed: int = 0) -> Int32s:
    return np.random.default_rng(seed).integers(3, 96, count).astype(np.int32)


def ask(sampler: BuiltinSampler, prompts: list[Int32s], params: SamplingParams) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        requests = [sampler.sample(Prompt(p), replace(params, seed=n)) for n, p in enumerate(prompts)]
        return list(await asyncio.gather(*requests))

    return asyncio.run(all_at_once())


def test_a_groups_prompt_is_computed_once_and_no_dead_row_is(model: Watched):
    drawn = ask(sampler_of(model), [tokens(37)] * 8, SamplingParams(max_tokens=12, stop_tokens=(5, 6, 7)))
    assert model.passes[0] == 37
    alive = [sum(len(c.tokens) > step for c in drawn) for step in range(1, 12)]
    assert model.passes[1:] == [count for count in alive if count]


def test_members_that_come_later_and_later_turns_compute_only_what_is_new(model: Watched):
    sampler, prompt = sampler_of(model), tokens(2 * PAGE + 3)
    (first,) = ask(sampler, [prompt], SamplingParams(max_tokens=30))
    assert model.passes[0] == len(prompt)
    model.passes.clear()
    ask(sampler, [prompt], SamplingParams(max_tokens=1))
    assert model.passes == [3]
    model.passes.clear()
    turn = np.concatenate((prompt, first.tokens, tokens(4)))
    ask(sampler, [turn], SamplingParams(max_tokens=1))
    # pages are known to the end of the reply, a state to the last page of the prompt
    known = len(prompt) + 29 if model.cache_shape.states is None else len(prompt) - 1
    assert model.passes == [len(turn) - known // PAGE * PAGE]


def test_a_step_never_computes_more_than_its_budget(model: Watched):
    sampler = sampler_of(model, prefill_tokens=20)
    drawn = ask(sampler, [tokens(50 + n, n) for n in range(5)], SamplingParams(max_tokens=10))
    assert max(model.passes) <= 20 + 8
    roomy = ask(sampler_of(model), [tokens(50 + n, n) for n in range(5)], SamplingParams(max_tokens=10))
    assert [c.tokens.tolist() for c in drawn] == [c.tokens.tolist() for c in roomy]


def test_a_full_cache_interrupts_and_changes_no_result(model: Watched):
    prompts = [tokens(10, n) for n in range(6)]
    roomy = ask(sampler_of(model), prompts, SamplingParams(max_tokens=40))
    least = sum(model.passes)
    model.passes.clear()
    tight = ask(sampler_of(model, cache_tokens=112), prompts, SamplingParams(max_tokens=40))
    assert sum(model.passes) > least
    for one, other in zip(roomy, tight, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


def test_a_step_that_raises_fails_its_requests_and_no_others(model: Watched):
    sampler = sampler_of(model, max_running=2)
    model.fail_at = {3}

    async def four() -> list[Completion | BaseException]:
        requests = [sampler.sample(Prompt(tokens(20)), SamplingParams(max_tokens=6, seed=n)) for n in range(4)]
        return list(await asyncio.gather(*requests, return_exceptions=True))

    outcomes = asyncio.run(four())
    for failed in outcomes[:2]:
        assert isinstance(failed, RolloutError)
        assert "no room for this pass" in str(failed)
        assert isinstance(failed.__cause__, MemoryError)
    again = ask(sampler, [tokens(20)] * 4, SamplingParams(max_tokens=6))
    for survived, expected in zip(outcomes[2:], again[2:], strict=True):
        assert isinstance(survived, Completion)
        assert survived.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(survived.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_a_row_that_breaks_fails_alone_and_leaves_no_trace(model: Watched):
    sampler = sampler_of(model)
    model.spoil_at = {2}

    async def three() -> list[Completion | BaseException]:
        requests = [sampler.sample(Prompt(tokens(20, n)), SamplingParams(max_tokens=6)) for n in range(3)]
        return list(await asyncio.gather(*requests, return_exceptions=True))

    outcomes = asyncio.run(three())
    assert isinstance(outcomes[0], RolloutError)
    assert "not finite" in str(outcomes[0])
    assert all(isinstance(outcome, Completion) for outcome in outcomes[1:])
    model.passes.clear()
    model.spoil_at = set()
    ask(sampler, [tokens(20)], SamplingParams(max_tokens=1))
    assert model.passes == [20]  # nothing that a broken pass left behind is taken up


def test_it_works_while_there_is_work_and_only_then(model: Watched):
    """No step without a request, none after the last one ended, and another event loop later is fine."""
    sampler = sampler_of(model)

    async def one() -> int:
        await asyncio.sleep(0)
        await sampler.sample(Prompt(tokens(3)), SamplingParams(max_tokens=4))
        for _ in range(20):
            await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(one()) == 1
    assert asyncio.run(one()) == 1
    assert len(model.passes) == 8


def test_others_run_between_steps(model: Watched):
    """An environment that answers at once gets its turn while a long request is still being drawn."""
    sampler = sampler_of(model)

    async def both() -> bool:
        long = asyncio.ensure_future(sampler.sample(Prompt(tokens(3)), SamplingParams(max_tokens=60)))
        for turn in range(5):
            await sampler.sample(Prompt(tokens(4, turn)), SamplingParams(max_tokens=3))
        return long.done()

    assert asyncio.run(both()) is False


def test_requests_left_in_a_closing_loop_are_forgotten(model: Watched):
    sampler = sampler_of(model, max_running=2)

    async def leave() -> None:
        params = SamplingParams(max_tokens=50)
        left = [asyncio.ensure_future(sampler.sample(Prompt(tokens(9, n)), params)) for n in range(4)]
        await sampler.sample(Prompt(tokens(2)), SamplingParams(max_tokens=2))
        assert not all(task.done() for task in left)

    asyncio.run(leave())
    model.passes.clear()
    ask(sampler, [tokens(9)], SamplingParams(max_tokens=3))
    assert model.passes[1:] == [1, 1]


def test_sleep_gives_the_cache_back(model: Watched):
    sampler = sampler_of(model)
    layers = len(model.cache_shape.layers)
    size = 2 * layers * 1024 * 2 * 16 * 4  # keys and values, layers, tokens, heads, channels, float32
    if model.cache_shape.states is not None:  # 8 rows and 2 snapshots: 3 inputs of 96 channels, and 4 heads
        size += (8 + 2) * (3 * 96 + 4 * 8 * 16) * 4
    assert sampler.cache_bytes == size
    asyncio.run(sampler.sleep())
    assert sampler.cache_bytes == 0
    asyncio.run(sampler.wake())
    assert sampler.cache_bytes > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens=100), "cache_tokens is 64"),
        (SamplingParams(max_tokens=5, routes=True), "has no routers that strop knows"),
        (SamplingParams(max_tokens=5, stop_strings=("x",)), "`decode`"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_runs(model: Watched, params: SamplingParams, message: str):
    with pytest.raises(RolloutError, match=message):
        ask(sampler_of(model, cache_tokens=64), [tokens(10)], params)
    assert model.passes == []
