"""The routes that the built-in sampler returns: those of the model over the whole text, whoever computed it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from strop.errors import EngineError
from strop.models.attention import PackedAttention
from strop.models.loading import LanguageModel
from strop.models.moe import Routing, find_routers
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Completion, Int32s, Layout, Prompt, Routes, SamplingParams, Segment
from tests.tiny_models import EXPERT_MODELS, tiny_model


def tokens(count: int, seed: int = 0) -> Int32s:
    return np.random.default_rng(seed).integers(3, 96, count).astype(np.int32)


def asked(count: int, seed: int = 0, *, routes: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, routes=routes)


def sampler_of(model: LanguageModel, *, max_running: int = 6, cache_tokens: int = 1024) -> BuiltinSampler:
    return BuiltinSampler(model, max_running=max_running, cache_tokens=cache_tokens, prefill_tokens=48)


def ask(sampler: BuiltinSampler, *requests: tuple[Int32s, SamplingParams]) -> list[Completion]:
    async def every() -> list[Completion]:
        return await asyncio.gather(*(sampler.sample(Prompt(prompt), params) for prompt, params in requests))

    return asyncio.run(every())


@torch.no_grad()
def routed(model: LanguageModel, text: Int32s) -> Routes:
    routing = Routing(find_routers(model.module), len(text))
    with routing.bound():
        model.hidden(
            torch.from_numpy(text.astype(np.int64)),
            torch.arange(len(text)),
            PackedAttention(Layout((len(text),)), model.impl),
        )
    return routing.taken()


def check(model: LanguageModel, prompts: Sequence[Int32s], completions: Sequence[Completion]) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        text, got = np.concatenate([prompt, completion.tokens]), completion.routes
        assert got is not None and len(got) == len(text) and got.experts_TLK.dtype == np.int16
        expected = routed(model, text)
        assert got.layers == expected.layers
        assert np.array_equal(got.experts_TLK[:-1], expected.experts_TLK[:-1])
        assert (got.experts_TLK[-1] == -1).all()


@pytest.mark.parametrize("family", EXPERT_MODELS)
def test_routes_are_the_models_own(family: str) -> None:
    """H05: rows of the prompt's tokens and of the sampled ones; the last was never routed."""
    model = tiny_model(family)
    prompts = [tokens(5, 1), tokens(19, 2), tokens(40, 3), tokens(1, 4)]
    completions = ask(sampler_of(model), *((prompt, asked(6, n)) for n, prompt in enumerate(prompts)))
    check(model, prompts, completions)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_routes_survive_interruptions_and_shared_pages(family: str) -> None:
    """Twins with one prompt, prompts that begin alike, and a cache that cannot hold them all."""
    model = tiny_model(family)
    sampler = sampler_of(model, cache_tokens=160)
    whole, begin = tokens(37, 1), tokens(34, 1)
    prompts = [whole, whole, begin, tokens(20, 5), whole, tokens(9, 6), np.concatenate([begin, tokens(9, 7)])]
    completions = ask(sampler, *((prompt, asked(24, n)) for n, prompt in enumerate(prompts)))
    check(model, prompts, completions)
    again = ask(sampler, (whole, asked(3, 9)), (begin, asked(1, 9)))  # from pages that are known
    check(model, [whole, begin], again)


def test_routes_do_not_change_what_is_drawn() -> None:
    model, prompts = tiny_model("qwen3_moe"), [tokens(9, n) for n in range(4)]
    plain = ask(sampler_of(model), *((prompt, asked(8, n, routes=False)) for n, prompt in enumerate(prompts)))
    told = ask(sampler_of(model), *((prompt, asked(8, n)) for n, prompt in enumerate(prompts)))
    for one, other in zip(plain, told, strict=True):
        assert one.routes is None and np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs)


def test_nothing_is_recorded_until_somebody_asks_and_nobody_starts_from_what_was_not() -> None:
    model = tiny_model("qwen3_moe")
    found, sampler, prompt = find_routers(model.module), sampler_of(model), tokens(37, 1)
    ask(sampler, (prompt, asked(4, routes=False)))
    plain = sampler.cache_bytes

    async def beside() -> list[Completion]:
        running = [asyncio.ensure_future(sampler.sample(Prompt(prompt), asked(20, 1, routes=False)))]
        for _ in range(5):
            await asyncio.sleep(0)
        assert sampler.cache_bytes == plain and not any("forward" in vars(r.module) for r in found)
        running.append(asyncio.ensure_future(sampler.sample(Prompt(prompt), asked(20, 2))))
        return await asyncio.gather(*running)

    without, told = asyncio.run(beside())
    assert without.routes is None
    check(model, [prompt], [told])
    assert sampler.cache_bytes == plain + 1024 * 2 * 2 * 2  # tokens, layers, experts of each, bytes
    asyncio.run(sampler.sleep())
    assert sampler.cache_bytes == 0
    asyncio.run(sampler.wake())
    assert sampler.cache_bytes == plain
    check(model, [prompt], ask(sampler, (prompt, asked(4))))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_routes_of_tokens_that_older_weights_drew_stay(family: str) -> None:
    """H04: new weights compute the text again, and the rows that were there are kept."""
    old, new = tiny_model(family), tiny_model(family, seed=1)
    before, prompt = old.clone(), tokens(21, 1)
    sampler = sampler_of(old)

    async def update() -> Completion:
        running = asyncio.ensure_future(sampler.sample(Prompt(prompt), asked(16)))
        while not sampler._scheduler.num_running or sampler._scheduler.rows.length_R.max() < 27:  # pyright: ignore
            await asyncio.sleep(0)
        await sampler.load_weights(new.state(), 1)
        return await running

    completion = asyncio.run(update())
    drawn = int((completion.versions == 0).sum())
    assert 3 < drawn < 14 and completion.routes is not None
    text, kept = np.concatenate([prompt, completion.tokens]), len(prompt) + drawn - 1
    first, then = routed(before, text).experts_TLK, routed(new, text).experts_TLK
    assert not np.array_equal(first, then)
    assert np.array_equal(completion.routes.experts_TLK[:kept], first[:kept])
    assert np.array_equal(completion.routes.experts_TLK[kept:-1], then[kept:-1])


def test_turns_append_to_a_segment() -> None:
    """A tool's answer is routed when the next turn reads it, and so is the token that the first turn ended with."""
    model, segment = tiny_model("qwen3_moe"), Segment()
    sampler = sampler_of(model)
    for turn in range(3):
        segment.observe(tokens(7, turn))
        segment.act(ask(sampler, (segment.tokens, asked(5, turn)))[0])
    segment.observe(tokens(4, 9))
    assert segment.routes is not None and len(segment) == 40 and len(segment.routes) == 36
    expected = routed(model, segment.tokens).experts_TLK
    assert np.array_equal(segment.routes.experts_TLK[:35], expected[:35])
    assert (segment.routes.experts_TLK[35] == -1).all()


def test_a_coarser_sampler_takes_the_trainers_weights_in_its_own_format() -> None:
    model, trained = tiny_model("qwen3_moe", torch.bfloat16), tiny_model("qwen3_moe", seed=1)
    plain = sampler_of(model)
    with pytest.raises(EngineError, match="float32 but the model has"):
        asyncio.run(plain.load_weights(trained.state(), 1))
    casting = BuiltinSampler(model, max_running=2, cache_tokens=64, casts=True)
    asyncio.run(casting.load_weights(trained.state(), 1))
    own = dict(model.state())
    assert all(torch.equal(own[name], tensor.to(torch.bfloat16)) for name, tensor in trained.state())
    with pytest.raises(EngineError, match="unknown x"):
        asyncio.run(casting.load_weights([*trained.state(), ("x", torch.zeros(1))], 2))
    check(model, [tokens(5)], ask(casting, (tokens(5), asked(6))))
