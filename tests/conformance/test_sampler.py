"""The Sampler contract (strop/rollout/base.py), against the protocol: a new backend adds a factory to FACTORIES.

What a sampler reports is held to transformers' own forward pass, in its eager form, over the whole text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from strop.errors import RolloutError, StropError
from strop.ops.select import Impl
from strop.rollout.base import Sampler
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Completion, Int32s, Prompt, SamplingParams, Stop
from tests.tiny_models import DENSE, EXPERT_MODELS, tiny_model, tiny_module

VOCAB, CONTEXT = 96, 128
LETTERS = "abcdefghijkl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend is asked to keep to. Small by default, so that requests wait, leave and are interrupted."""

    max_running: int = 6
    cache_tokens: int = 256


Factory = Callable[[str, int, Limits], Sampler]


def decode(ids: list[int]) -> str:
    """Two letters a token."""
    return "".join(LETTERS[i // 8] + LETTERS[i % 8] for i in ids)


def builtin_torch(family: str, seed: int, limits: Limits) -> Sampler:
    return builtin(family, seed, limits, Impl.TORCH)


def builtin_native(family: str, seed: int, limits: Limits) -> Sampler:
    return builtin(family, seed, limits, Impl.NATIVE)


def builtin(family: str, seed: int, limits: Limits, impl: Impl) -> Sampler:
    return BuiltinSampler(
        tiny_model(family, impl=impl, seed=seed),
        max_running=limits.max_running,
        cache_tokens=limits.cache_tokens,
        decode=decode,
        prefill_tokens=48,
    )


FACTORIES: dict[str, Factory] = {"builtin-torch": builtin_torch, "builtin-native": builtin_native}


@pytest.fixture(params=FACTORIES.values(), ids=list(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return request.param


@pytest.fixture
def sampler(factory: Factory) -> Sampler:
    return factory("qwen3", 0, Limits())


@cache
def plain(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """The same weights in transformers alone, in float64."""
    module = tiny_module(family, attention="eager", seed=seed).double().eval()
    if family in EXPERT_MODELS:
        module.set_experts_implementation("eager")  # grouped matrix multiplications refuse float64
    return module


@torch.no_grad()
def logprobs_NV(text: np.ndarray, temperature: float = 1.0, family: str = "qwen3", seed: int = 0) -> np.ndarray:
    """Row t: the model's distribution of the token after the first t + 1."""
    logits = plain(family, seed)(input_ids=torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    return (logits.double() / temperature).log_softmax(-1).numpy()


def expected_logprobs(prompt: Int32s, completion: Completion, temperature: float = 1.0, **which) -> np.ndarray:
    text = np.concatenate((prompt, completion.tokens))
    rows = logprobs_NV(text, temperature, **which)[len(prompt) - 1 : -1]
    return rows[np.arange(len(rows)), completion.tokens]


def tokens(count: int, seed: int = 0) -> Int32s:
    return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.int32)


def run(*requests: Coroutine[object, object, Completion]) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        return list(await asyncio.gather(*requests))

    return asyncio.run(all_at_once())


def same(a: Completion, b: Completion) -> bool:
    return a.tokens.tolist() == b.tokens.tolist() and bool(np.allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0))


# What is reported is what the model says


@pytest.mark.parametrize("family", [*DENSE, *EXPERT_MODELS])
def test_logprobs_are_those_of_the_model(factory: Factory, family: str):
    sampler = factory(family, 0, Limits())
    prompts = [tokens(n, n) for n in (1, 15, 16, 17, 40)]
    params = SamplingParams(max_tokens=24)
    drawn = run(*(sampler.sample(Prompt(p), replace(params, seed=s)) for p in prompts for s in range(2)))
    for index, completion in enumerate(drawn):
        expected = expected_logprobs(prompts[index // 2], completion, family=family)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(completion.sampling_logprobs, expected, atol=1e-5, rtol=0)


def test_every_length_of_prompt(sampler: Sampler):
    """Below, at and above the sizes of pages and of prefill parts."""
    prompts = [tokens(n, n) for n in range(1, 70)]
    drawn = run(*(sampler.sample(Prompt(p), SamplingParams(max_tokens=3, seed=len(p))) for p in prompts))
    for prompt, completion in zip(prompts, drawn, strict=True):
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(prompt, completion), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_at_the_temperature(sampler: Sampler, temperature: float):
    """A41, A46."""
    prompt, params = tokens(20), SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    (completion,) = run(sampler.sample(Prompt(prompt), params))
    expected = expected_logprobs(prompt, completion, temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(completion.sampling_logprobs, expected, atol=2e-5, rtol=0)


def test_truncation_shows_in_the_sampling_logprobs_alone(sampler: Sampler):
    prompt = tokens(9)
    params = SamplingParams(max_tokens=30, temperature=1.2, top_k=5, seed=1)
    (completion,) = run(sampler.sample(Prompt(prompt), params))
    text = np.concatenate((prompt, completion.tokens))
    rows = logprobs_NV(text, 1.2)[len(prompt) - 1 : -1]
    best = -np.sort(-rows, axis=1)[:, :5]
    chosen = rows[np.arange(len(rows)), completion.tokens]
    assert (chosen >= best[:, -1] - 1e-6).all()
    np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-5, rtol=0)
    renormalised = chosen - np.log(np.exp(best).sum(1))
    np.testing.assert_allclose(completion.sampling_logprobs, renormalised, atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token(sampler: Sampler):
    prompt = tokens(12)
    (completion,) = run(sampler.sample(Prompt(prompt), SamplingParams(max_tokens=30, temperature=0.0, seed=9)))
    text = np.concatenate((prompt, completion.tokens))
    assert completion.tokens.tolist() == logprobs_NV(text)[len(prompt) - 1 : -1].argmax(1).tolist()
    np.testing.assert_allclose(completion.logprobs, expected_logprobs(prompt, completion), atol=1e-5, rtol=0)
    assert completion.sampling_logprobs.tolist() == [0.0] * 30


def test_score_gives_each_prompt_token_its_logprob(sampler: Sampler):
    for count in (1, 2, 33):
        text = tokens(count)
        scored = asyncio.run(sampler.score(Prompt(text)))
        rows = logprobs_NV(text)
        assert scored.dtype == np.float32
        assert scored[0] == 0
        np.testing.assert_allclose(scored[1:], rows[np.arange(count - 1), text[1:]], atol=1e-5, rtol=0)


def test_first_tokens_are_distributed_as_the_model_says(factory: Factory):
    """chi-square over 4,000 seeds, tokens expected less than 5 times pooled; passed in 999 of 1,000 models."""
    sampler, prompt, count = factory("qwen3", 0, Limits(max_running=256, cache_tokens=8192)), tokens(5), 4000
    params = SamplingParams(max_tokens=1, temperature=0.8)
    drawn = run(*(sampler.sample(Prompt(prompt), replace(params, seed=seed)) for seed in range(count)))
    expected = np.exp(logprobs_NV(prompt, 0.8)[-1]) * count
    observed = np.bincount([int(c.tokens[0]) for c in drawn], minlength=VOCAB).astype(float)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty, 1931
    assert ((observed - expected) ** 2 / expected).sum() < bound


# A result is a function of the request alone


def test_a_seed_decides_and_seeds_differ(sampler: Sampler):
    """J07."""
    prompt, params = tokens(10), SamplingParams(max_tokens=20)
    drawn = run(*(sampler.sample(Prompt(prompt), replace(params, seed=seed)) for seed in (1, 2, 3, 1)))
    assert same(drawn[0], drawn[3])
    assert len({tuple(c.tokens.tolist()) for c in drawn}) == 3


def test_neighbours_and_order_of_arrival_change_nothing(factory: Factory):
    """Many more requests than rows, in two orders, and each alone where nothing is shared or interrupted."""
    prompts = [tokens(1 + 7 * (n % 5), n % 5) for n in range(25)]
    asked = [
        SamplingParams(
            max_tokens=5 + n % 30, seed=n, temperature=0.5 + n % 3 / 2, top_k=n % 4 * 8, stop_tokens=(n % 9,)
        )
        for n in range(25)
    ]
    crowded, roomy = factory("qwen3", 0, Limits()), factory("qwen3", 0, Limits(max_running=1, cache_tokens=4096))
    there = run(*(crowded.sample(Prompt(p), q) for p, q in zip(prompts, asked, strict=True)))
    back = run(*(crowded.sample(Prompt(p), q) for p, q in zip(prompts[::-1], asked[::-1], strict=True)))
    alone = [run(roomy.sample(Prompt(p), q))[0] for p, q in zip(prompts, asked, strict=True)]
    for one, other, single in zip(there, back[::-1], alone, strict=True):
        assert same(one, other)
        assert same(one, single)
        assert one.stop is other.stop is single.stop


def test_a_conversation_that_goes_on_is_scored_as_a_whole(sampler: Sampler):
    """Later turns continue texts that the sampler has seen, while other conversations run."""

    async def talk(seed: int) -> list[tuple[Int32s, Completion]]:
        text, turns = tokens(18, seed // 2), []
        for turn in range(3):
            completion = await sampler.sample(Prompt(text), SamplingParams(max_tokens=14, seed=seed + 100 * turn))
            turns.append((text, completion))
            text = np.concatenate((text, completion.tokens, tokens(5, turn)))
        return turns

    async def everybody() -> list[list[tuple[Int32s, Completion]]]:
        return list(await asyncio.gather(*(talk(seed) for seed in range(6))))

    for turns in asyncio.run(everybody()):
        for prompt, completion in turns:
            np.testing.assert_allclose(completion.logprobs, expected_logprobs(prompt, completion), atol=1e-5, rtol=0)


# When a completion ends


def test_a_stop_token_ends_the_completion_and_is_part_of_it(sampler: Sampler):
    prompt, params = tokens(10), SamplingParams(max_tokens=30, seed=4)
    (free,) = run(sampler.sample(Prompt(prompt), params))
    assert free.stop is Stop.LENGTH and len(free.tokens) == 30
    stop = int(free.tokens[11])
    first = free.tokens.tolist().index(stop)
    absent = sorted(set(range(VOCAB)) - set(free.tokens.tolist()))[:2]
    (cut,) = run(sampler.sample(Prompt(prompt), replace(params, stop_tokens=(*absent, stop))))
    assert cut.stop is Stop.TOKEN
    assert cut.tokens.tolist() == free.tokens[: first + 1].tolist()
    np.testing.assert_allclose(cut.logprobs, free.logprobs[: first + 1], atol=1e-5, rtol=0)
    (again,) = run(sampler.sample(Prompt(prompt), params))
    assert same(again, free)  # its stop tokens ended with the request


def test_a_stop_string_may_cross_tokens(sampler: Sampler):
    prompt, params = tokens(10), SamplingParams(max_tokens=30, seed=4)
    (free,) = run(sampler.sample(Prompt(prompt), params))
    text = decode(free.tokens.tolist())
    across = text[21:24]  # the second half of token 10, and token 11
    end = text.index(across) + len(across)
    (cut,) = run(sampler.sample(Prompt(prompt), replace(params, stop_strings=("zzz", across))))
    assert cut.stop is Stop.TOKEN
    assert cut.tokens.tolist() == free.tokens[: -(-end // 2)].tolist()


def test_length_is_told_apart_from_a_stop_at_the_same_place(sampler: Sampler):
    """G14: five tokens where three are allowed ended for their length; a stop as the third is a stop."""
    prompt, params = tokens(10), SamplingParams(max_tokens=5, seed=4)
    (free,) = run(sampler.sample(Prompt(prompt), params))
    three = replace(params, max_tokens=3)
    assert len(set(free.tokens.tolist())) == 5
    cut, stopped, later = run(
        sampler.sample(Prompt(prompt), three),
        sampler.sample(Prompt(prompt), replace(three, stop_tokens=(int(free.tokens[2]),))),
        sampler.sample(Prompt(prompt), replace(three, stop_tokens=(int(free.tokens[4]),))),
    )
    assert (cut.stop, stopped.stop, later.stop) == (Stop.LENGTH, Stop.TOKEN, Stop.LENGTH)
    for completion in (cut, stopped, later):
        assert completion.tokens.tolist() == free.tokens[:3].tolist()


def test_columns_are_of_one_length_and_of_the_declared_types(sampler: Sampler):
    (completion,) = run(sampler.sample(Prompt(tokens(3)), SamplingParams(max_tokens=7)))
    assert [len(c) for c in (completion.tokens, completion.logprobs, completion.sampling_logprobs)] == [7, 7, 7]
    assert completion.tokens.dtype == completion.versions.dtype == np.int32
    assert completion.logprobs.dtype == completion.sampling_logprobs.dtype == np.float32
    assert completion.versions.tolist() == [sampler.version] * 7


# New weights


def other_weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in tiny_model("qwen3", seed=1).state()]


def test_no_cache_outlives_a_weight_update(factory: Factory):
    """E14: a prompt, new weights, the same prompt: as a sampler that never had the old ones."""
    sampler, fresh = factory("qwen3", 0, Limits()), factory("qwen3", 1, Limits())
    prompt, params = Prompt(tokens(40)), SamplingParams(max_tokens=10, seed=5)
    (old,) = run(sampler.sample(prompt, params))
    asyncio.run(sampler.load_weights(iter(other_weights()), 7))
    assert sampler.version == 7
    again, expected = run(sampler.sample(prompt, params), fresh.sample(prompt, params))
    assert again.versions.tolist() == [7] * 10
    assert again.tokens.tolist() == expected.tokens.tolist() != old.tokens.tolist()
    np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_running_requests_go_on_with_new_weights(sampler: Sampler):
    """Each token has the version that drew it, and its logprob is that version's, over everything before it.

    B23: a request that is interrupted by the update goes on with what is left of its budget.
    """
    prompts = [tokens(n, n) for n in (5, 33, 20, 20)] * 4  # more than run at once: some wait, however fast it draws
    new = other_weights()

    async def update_midway() -> list[Completion]:
        running = [
            asyncio.ensure_future(sampler.sample(Prompt(p), SamplingParams(max_tokens=50, seed=n)))
            for n, p in enumerate(prompts[:4])
        ]
        short = asyncio.ensure_future(sampler.sample(Prompt(tokens(4)), SamplingParams(max_tokens=12)))
        running += [
            asyncio.ensure_future(sampler.sample(Prompt(p), SamplingParams(max_tokens=50, seed=n)))
            for n, p in enumerate(prompts[4:], 4)
        ]
        await short
        await sampler.load_weights(iter(new), 1)
        return list(await asyncio.gather(*running))

    drawn = asyncio.run(update_midway())
    assert {0, 1} in [set(completion.versions.tolist()) for completion in drawn]
    assert drawn[0].versions[0] == 0 and drawn[-1].versions[-1] == 1
    for prompt, completion in zip(prompts, drawn, strict=True):
        assert len(completion.tokens) == 50
        assert (np.diff(completion.versions) >= 0).all()
        by_version = np.stack([expected_logprobs(prompt, completion, seed=version) for version in (0, 1)])
        expected = by_version[completion.versions, np.arange(50)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape", "dtype"])
def test_wrong_weights_change_nothing(sampler: Sampler, spoil: str):
    weights = dict(other_weights())
    name = next(reversed(weights))
    if spoil == "missing":
        del weights[name]
    elif spoil == "unknown":
        weights["no.such.weight"] = torch.zeros(1)
    elif spoil == "shape":
        weights[name] = torch.zeros(3, 3)
    else:
        weights[name] = weights[name].to(torch.float16)
    (before,) = run(sampler.sample(Prompt(tokens(9)), SamplingParams(max_tokens=9)))
    with pytest.raises(StropError, match="no.such.weight" if spoil == "unknown" else name):
        asyncio.run(sampler.load_weights(weights.items(), 1))
    (after,) = run(sampler.sample(Prompt(tokens(9)), SamplingParams(max_tokens=9)))
    assert sampler.version == 0
    assert same(before, after)


# What goes wrong


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (tokens(0), SamplingParams(max_tokens=4), "empty prompt"),
        (tokens(100), SamplingParams(max_tokens=CONTEXT - 99), "129 positions"),
        (tokens(5), SamplingParams(max_tokens=0), "max_tokens=0"),
        (tokens(5), SamplingParams(max_tokens=4, temperature=-1.0), "temperature"),
        (tokens(5), SamplingParams(max_tokens=4, top_p=0.0), "top_p"),
        (np.array([VOCAB], np.int32), SamplingParams(max_tokens=4), "ids"),
    ],
)
def test_impossible_requests_are_refused_and_others_go_on(sampler: Sampler, prompt, params, message: str):
    async def both() -> list[Completion | BaseException]:
        good = sampler.sample(Prompt(tokens(5)), SamplingParams(max_tokens=10))
        bad = sampler.sample(Prompt(prompt), params)
        return list(await asyncio.gather(good, bad, return_exceptions=True))

    fine, refused = asyncio.run(both())
    assert isinstance(refused, RolloutError)
    assert message in str(refused)
    assert isinstance(fine, Completion)
    assert len(fine.tokens) == 10


def test_the_whole_context_can_be_used(sampler: Sampler):
    prompt = tokens(100)
    (completion,) = run(sampler.sample(Prompt(prompt), SamplingParams(max_tokens=CONTEXT - 100)))
    assert len(completion.tokens) == 28
    np.testing.assert_allclose(completion.logprobs, expected_logprobs(prompt, completion), atol=1e-5, rtol=0)


def test_cancelled_requests_leave_nothing_behind(factory: Factory):
    """Cancelled while they wait and while they run, again and again, in a cache that holds two of them."""
    sampler = factory("qwen3", 0, Limits(max_running=2, cache_tokens=128))
    prompt, params = Prompt(tokens(30)), SamplingParams(max_tokens=30, seed=2)

    async def cancel_most() -> tuple[Completion, Completion]:
        before = await sampler.sample(prompt, params)
        for n in range(12):
            tasks = [
                asyncio.ensure_future(sampler.sample(Prompt(tokens(40, n + m)), replace(params, seed=m)))
                for m in range(4)
            ]
            await sampler.sample(Prompt(tokens(2)), SamplingParams(max_tokens=1 + n % 5))
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
            )
        return before, await sampler.sample(prompt, params)

    before, after = asyncio.run(cancel_most())
    assert same(before, after)


def test_sleep_waits_for_nobody_and_wake_restores(sampler: Sampler):
    prompt, params = Prompt(tokens(30)), SamplingParams(max_tokens=20, seed=2)

    async def nap() -> tuple[Completion, Completion]:
        running = asyncio.ensure_future(sampler.sample(prompt, params))
        await sampler.sample(Prompt(tokens(2)), SamplingParams(max_tokens=2))
        with pytest.raises(RolloutError, match="while requests run"):
            await sampler.sleep()
        before = await running
        await sampler.sleep()
        with pytest.raises(RolloutError, match="wake"):
            await sampler.sample(prompt, params)
        await sampler.wake()
        return before, await sampler.sample(prompt, params)

    before, after = asyncio.run(nap())
    assert same(before, after)
