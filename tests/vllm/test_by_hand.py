"""A vLLM host that was started by hand: reached over TCP, in bfloat16, and sent changes only."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.vllm import VllmConfig
from strop.environment import child_environment
from strop.models.loading import LanguageModel
from strop.rollout.vllm import VllmSampler, _scored
from strop.rollout.vllm_link import HOST
from strop.types import Prompt, SamplingParams
from tests import tiny_models
from tests.conformance.test_sampler import run, tokens
from tests.tiny_models import tiny_model
from tests.vllm.servers import PYTHON, wider

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs VLLM_PYTHON, the Python of an environment that has vLLM")
ROUNDING = 0.05  # of logprobs in bfloat16, whose numbers are 1/256 apart, by two programs
PART = 0.03  # of a logprob, where it is large


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where a host listens; it has ended when its one caller hung up."""
    (tmp_path / "key").write_text("what both know\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [PYTHON, "-E", str(HOST), "--listen", listen, "--key-file", str(tmp_path / "key")],
        env=child_environment({"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}),
    )
    yield listen
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()


def test_a_host_started_by_hand_draws_in_bfloat16_and_is_sent_changes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, "qwen3", wider("qwen3"))
    sampler = VllmSampler.start(
        tiny_model("qwen3", torch.bfloat16),
        VllmConfig(address=address, key_file=str(tmp_path / "key"), start_timeout_s=1800),
        max_running=2,
        cache_tokens=256,
        casts=True,
        deltas=True,
    )
    sent = 0
    ask = sampler._link.ask

    def counting(message: dict[str, Any], body: bytes = b"") -> Any:
        nonlocal sent
        sent += len(body)
        return ask(message, body)

    monkeypatch.setattr(sampler._link, "ask", counting)

    def load(model: LanguageModel, version: int) -> int:
        nonlocal sent
        sent = 0
        asyncio.run(sampler.load_weights(model.state(), version))
        return sent

    try:
        first, other, text = tiny_model("qwen3"), tiny_model("qwen3", seed=1), tokens(30)
        whole = sum(tensor.numel() * 2 for _, tensor in first.state())
        assert load(first, 1) == 0  # in bfloat16 they are those of the start
        before = asyncio.run(sampler.score(Prompt(text)))
        with torch.no_grad():
            first.head.weight[int(text[3])] *= 4  # one row, and one token's logprobs
        assert 0 < load(first, 2) <= first.head.weight[0].numel() * 10
        after = asyncio.run(sampler.score(Prompt(text)))
        assert np.abs(after - before).max() > 10 * ROUNDING
        np.testing.assert_allclose(after, in_bfloat16(first, text), atol=ROUNDING, rtol=PART)
        assert load(other, 3) >= whole * 0.9  # all of it is less than all of its changes
        np.testing.assert_allclose(
            asyncio.run(sampler.score(Prompt(text))), in_bfloat16(other, text), atol=ROUNDING, rtol=PART
        )
        load(first, 4)
        np.testing.assert_allclose(asyncio.run(sampler.score(Prompt(text))), after, atol=1e-6, rtol=0)
        (drawn,) = run(sampler.sample(Prompt(text), SamplingParams(max_tokens=5)))
        assert drawn.versions.tolist() == [4] * 5
    finally:
        sampler.close()


def in_bfloat16(model: LanguageModel, text: np.ndarray) -> np.ndarray:
    coarse = tiny_model("qwen3", torch.bfloat16)
    coarse.load_state((name, tensor.bfloat16()) for name, tensor in model.state())
    return _scored(coarse, torch.from_numpy(text.astype(np.int64)))
