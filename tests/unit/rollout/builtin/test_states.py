"""States of linear attention in the built-in sampler: the trainer's numbers, however prompts are cut, shared, copied
and taken up again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from strop.models.attention import PackedAttention
from strop.models.loading import LanguageModel, StateShape
from strop.ops.paged import PAGE
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.rollout.builtin.states import Snapshots, StateCache
from strop.types import Completion, Int32s, Layout, Prompt, SamplingParams
from tests.tiny_models import LINEAR_MODELS, tiny_model


def tokens(count: int, seed: int = 0) -> Int32s:
    return np.random.default_rng(seed).integers(3, 96, count).astype(np.int32)


def ask(sampler: BuiltinSampler, prompts: list[Int32s], params: SamplingParams) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        requests = [sampler.sample(Prompt(p), replace(params, seed=n)) for n, p in enumerate(prompts)]
        return list(await asyncio.gather(*requests))

    return asyncio.run(all_at_once())


@torch.no_grad()
def trained_logprobs(model: LanguageModel, prompt: Int32s, completion: Completion) -> np.ndarray:
    """The trainer's own: one packed forward pass over the whole text."""
    text = torch.from_numpy(np.concatenate((prompt, completion.tokens)).astype(np.int64))
    layout = Layout((len(text),))
    hidden = model.hidden(text, torch.arange(len(text)), PackedAttention(layout, model.impl))
    logprobs = model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, text[len(prompt) :, None])[:, 0].numpy()


def assert_trained(model: LanguageModel, prompts: list[Int32s], drawn: list[Completion]) -> None:
    for prompt, completion in zip(prompts, drawn, strict=True):
        np.testing.assert_allclose(completion.logprobs, trained_logprobs(model, prompt, completion), atol=1e-5, rtol=0)


@pytest.mark.parametrize("prefill_tokens", [256, 20, 7])
@pytest.mark.parametrize("family", LINEAR_MODELS)
def test_logprobs_are_the_trainers_however_prompts_are_cut(family: str, prefill_tokens: int):
    """Prompts below, at and above a page's end, computed whole, in parts, and in parts shorter than a page."""
    model = tiny_model(family)
    sampler = BuiltinSampler(model.clone(), max_running=5, cache_tokens=1024, prefill_tokens=prefill_tokens)
    prompts = [tokens(n, n) for n in (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 45)]
    assert_trained(model, prompts, ask(sampler, prompts, SamplingParams(max_tokens=20)))


def test_a_group_starts_from_one_prompt_and_its_late_members_from_a_snapshot():
    model = tiny_model("qwen3_5_text")
    sampler = BuiltinSampler(model.clone(), max_running=4, cache_tokens=1024)
    prompts = [tokens(PAGE * 2 + n // 6 * 5, n // 6) for n in range(12)]  # two groups of 6 in 4 rows
    assert_trained(model, prompts, ask(sampler, prompts, SamplingParams(max_tokens=12)))


def test_prompts_that_begin_alike_share_what_a_snapshot_covers():
    """A long common beginning, known from an earlier prompt that ended there, and one known nowhere."""
    model = tiny_model("qwen3_5_text")
    sampler = BuiltinSampler(model.clone(), max_running=8, cache_tokens=1024)
    system = tokens(3 * PAGE + 1)
    asked = [system, *(np.concatenate((system, tokens(5 + n, n))) for n in range(4)), tokens(50, 9)]
    for prompt in asked:
        assert_trained(model, [prompt], ask(sampler, [prompt], SamplingParams(max_tokens=5)))


def test_a_conversation_goes_on_from_its_last_prompt():
    model = tiny_model("qwen3_next")
    sampler = BuiltinSampler(model.clone(), max_running=2, cache_tokens=256)
    text = tokens(20)
    for turn in range(3):
        (completion,) = ask(sampler, [text], SamplingParams(max_tokens=18))
        assert_trained(model, [text], [completion])
        text = np.concatenate((text, completion.tokens, tokens(6, turn)))


def test_no_state_outlives_a_weight_update():
    """E14."""
    model, other = tiny_model("qwen3_5_text"), tiny_model("qwen3_5_text", seed=1)
    sampler, prompt = BuiltinSampler(model.clone(), max_running=4, cache_tokens=512), tokens(40)
    ask(sampler, [prompt], SamplingParams(max_tokens=4))
    asyncio.run(sampler.load_weights(other.state(), 1))
    for _ in range(2):  # the first computes the prompt's pages anew, the second finds them, and a snapshot
        assert_trained(other, [prompt] * 2, ask(sampler, [prompt] * 2, SamplingParams(max_tokens=10)))


def test_requests_that_are_interrupted_take_up_their_state_again():
    """A cache for two of six texts: rows are given up and entered anew, and left behind by cancelled requests."""
    model = tiny_model("qwen3_5_text")
    sampler = BuiltinSampler(model.clone(), max_running=6, cache_tokens=112, prefill_tokens=24)
    prompts = [tokens(21, n // 2) for n in range(6)]

    async def with_cancelled() -> list[Completion]:
        requests = [sampler.sample(Prompt(p), SamplingParams(max_tokens=40, seed=n)) for n, p in enumerate(prompts)]
        doomed = [asyncio.ensure_future(sampler.sample(Prompt(p), SamplingParams(max_tokens=60))) for p in prompts[:3]]
        kept = [asyncio.ensure_future(request) for request in requests]
        for _ in range(12):
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        return list(await asyncio.gather(*kept))

    assert_trained(model, prompts, asyncio.run(with_cancelled()))


def test_sleep_gives_the_states_back():
    model = tiny_model("qwen3_5_text")
    sampler, prompt = BuiltinSampler(model, max_running=4, cache_tokens=256), tokens(30)
    awake = sampler.cache_bytes
    shape = model.cache_shape.states
    assert shape is not None
    assert awake > 5 * 4 * (3 * shape.conv_channels + shape.heads * shape.key_channels * shape.value_channels)
    ask(sampler, [prompt], SamplingParams(max_tokens=4))
    asyncio.run(sampler.sleep())
    assert sampler.cache_bytes == 0
    asyncio.run(sampler.wake())
    assert sampler.cache_bytes == awake
    assert_trained(model, [prompt], ask(sampler, [prompt], SamplingParams(max_tokens=4)))


def test_a_snapshot_is_found_after_its_pass_and_the_oldest_goes_first():
    snapshots = Snapshots(first=10, count=2)
    a, b, c, d = (bytes([n]) for n in range(4))
    assert snapshots.take(a) == 10
    assert snapshots.find([a]) == (0, None)  # not written yet
    assert snapshots.take(a) is None
    snapshots.settle()
    assert snapshots.find([a, b]) == (1, 10)
    assert snapshots.take(b) == 11
    assert snapshots.take(c) == 10  # a is the least recently used; b is being written
    assert snapshots.take(d) is None
    snapshots.settle()
    assert snapshots.find([a]) == (0, None)
    assert snapshots.find([a, b, c]) == (3, 10)
    snapshots.forget_all()
    assert snapshots.find([a, b, c]) == (0, None)
    assert sorted(snapshots.take(x) or 0 for x in (a, b)) == [10, 11]


def test_slots_are_copied_and_cleared_in_every_layer():
    shape = StateShape(layers=(0, 2), taps=3, conv_channels=2, heads=1, key_channels=2, value_channels=2)
    cache = StateCache(shape, 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.states.dtype == torch.float32
    cache.states.copy_(torch.arange(4.0)[:, None, None, None] + 1)
    cache.tails.copy_(torch.arange(4.0)[:, None, None] + 1)
    cache.copy([(3, 0), (2, 1)])
    cache.clear([2])
    assert cache.states[:, :, 0, 0, 0].tolist() == cache.tails[:, :, 0, 0].tolist() == [[4, 3, 0, 4]] * 2
