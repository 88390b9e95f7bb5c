"""The Engine contract's part on adapters: several over one base in one process, each as if it were alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.config.activations import ActivationsConfig
from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine, OptimParams
from strop.engines.build import build_engine
from strop.errors import EngineError
from strop.models.lora import add_adapter, targets
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Prompt, SamplingParams, Want
from strop.weights.export import export_model
from strop.weights.publish import publish
from tests.conformance.test_engine import Scaled, pack, sequences
from tests.tiny_models import DENSE, tiny_config, tiny_model

Build = Callable[[str, torch.dtype, EngineConfig], Engine]
STEP = OptimParams(lr=1e-2, weight_decay=0.01)
BATCHES = [pack(sequences(4, seed=seed)) for seed in range(3)]


def frozen(family: str, dtype: torch.dtype = torch.float32, config: EngineConfig = EngineConfig()) -> Engine:  # noqa: B008
    return build_engine(config, tiny_model(family, dtype), trainable=False)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def train(engine: Engine, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        await engine.forward_backward([BATCHES[step % 3]], Scaled())
        await engine.forward_backward([BATCHES[(step + 1) % 3]], Scaled(entropy=0.1))
        assert not (await engine.optim_step(STEP)).skipped


def matrices(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.adapter_weights())


A = AdapterConfig(rank=4, alpha=8.0, seed=1)
B = AdapterConfig(rank=2, targets=("attention", "unembedding"), seed=2)


def first_for(family: str) -> AdapterConfig:
    return A.model_copy(update={"targets": ("attention", "experts")}) if family == "qwen3_moe" else A


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "qwen3_moe", "qwen3_next"])
def test_adapters_that_take_turns_are_each_as_if_alone(family: str) -> None:
    """To the bit: gradients accumulate, steps apply and moments grow in each, whatever the others do in between."""
    alone: dict[str, dict[str, Tensor]] = {}
    configs = {"a": first_for(family), "b": B}
    for name, config in configs.items():
        engine = frozen(family).adapter(name, config)
        run(train(engine, 3))
        alone[name] = matrices(engine)
    base = frozen(family)
    before = run(base.forward([BATCHES[0]]))[0].logprobs_T
    a, b = (base.adapter(name, config) for name, config in configs.items())

    async def turns() -> None:
        for step in range(3):
            await a.forward_backward([BATCHES[step % 3]], Scaled())
            await b.forward_backward([BATCHES[step % 3]], Scaled())
            await base.forward([BATCHES[2]])
            await b.forward_backward([BATCHES[(step + 1) % 3]], Scaled(entropy=0.1))
            await a.forward_backward([BATCHES[(step + 1) % 3]], Scaled(entropy=0.1))
            await a.optim_step(STEP)
            await b.optim_step(STEP)

    run(turns())
    for name, engine in (("a", a), ("b", b)):
        found = matrices(engine)
        assert all(torch.equal(found[key], alone[name][key]) for key in found), name
    assert torch.equal(run(base.forward([BATCHES[0]]))[0].logprobs_T, before), "the base is the reference, to the bit"
    assert not torch.equal(run(a.forward([BATCHES[0]]))[0].logprobs_T, before)


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe"])
@pytest.mark.parametrize("head", ["plain", "chunked", "fused"])
def test_gradients_are_those_of_the_merged_weights(family: str, head: str) -> None:
    """dA = s B^T G and dB = s G A^T, with G the merged model's own gradient, in float64."""
    config = EngineConfig.model_validate({"head": head})
    model = tiny_model(family, torch.float64)
    kinds = ["attention"] + ["mlp"] * (family in DENSE)
    kinds += ["unembedding"] * (
        not tiny_config(family).tie_word_embeddings
    )  # tied, its gradient is the embedding's too
    wanted = AdapterConfig.model_validate({"rank": 3, "alpha": 6.0, "targets": kinds})
    base = build_engine(config, model, trainable=False)
    engine = base.adapter("a", wanted)
    run(train(engine, 2))
    trained, merged = matrices(engine), dict(engine.weights())
    other = tiny_model(family, torch.float64)
    other.load_state(merged.items())
    whole = build_engine(config, other)
    run(whole.forward_backward(BATCHES, Scaled(entropy=0.1)))
    run(engine.forward_backward(BATCHES, Scaled(entropy=0.1)))
    own = dict(other.module.named_parameters())
    live = {name: p for name, p in model.module.named_parameters() if p.grad is not None}
    assert {name.replace(".a.", ".") for name in live} == set(trained)
    scale = wanted.alpha / wanted.rank
    for name, parameter in live.items():
        path, part = name.replace(".a.weight", "").rsplit(".", 1)
        g = own[f"{path}.weight"].grad
        assert g is not None and parameter.grad is not None
        g = g.T if family == "gpt2" and "lm_head" not in path else g
        a_RD, b_VR = (trained[f"{path}.{which}.weight"] for which in ("lora_A", "lora_B"))
        expected = scale * (b_VR.T @ g if part == "lora_A" else g @ a_RD.T)
        assert torch.allclose(parameter.grad, expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max()) + 1e-12), (
            name
        )
    assert all(p.grad is None for name, p in model.module.named_parameters() if "lora_" not in name)


def test_a_saved_adapter_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = frozen("qwen3").adapter("a", A)
    run(train(whole, 4))
    half = frozen("qwen3").adapter("a", A)
    run(train(half, 2))
    (tmp_path / "saved").mkdir()
    run(half.save(tmp_path / "saved"))
    again = frozen("qwen3").adapter("other", A.model_copy(update={"seed": 9}))
    run(again.load(tmp_path / "saved"))
    run(train(again, 2, first=2))
    expected, found = matrices(whole), matrices(again)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize(
    "activations", [ActivationsConfig(checkpoint_every=1), ActivationsConfig(offload=True, offload_min_kib=0)]
)
def test_activations_and_host_memory_change_no_bit(activations: ActivationsConfig) -> None:
    plain = frozen("qwen3").adapter("a", A)
    run(train(plain, 2))
    engine = frozen("qwen3", config=EngineConfig(activations=activations)).adapter("a", A)

    async def away() -> None:
        await train(engine, 1)
        await engine.resident(False)
        with pytest.raises(EngineError, match="host memory"):
            await engine.forward([BATCHES[0]])
        await engine.resident(True)
        await train(engine, 1, first=1)

    run(away())
    assert all(torch.equal(matrices(plain)[key], matrices(engine)[key]) for key in matrices(plain))


def test_an_adapter_needs_its_base() -> None:
    base = frozen("qwen3")
    engine = base.adapter("a", A)

    async def base_is_away() -> None:
        await base.resident(False)
        with pytest.raises(EngineError, match="host memory"):
            await engine.forward([BATCHES[0]])
        await base.resident(True)
        await engine.forward([BATCHES[0]])

    run(base_is_away())


def test_what_cannot_be_is_refused() -> None:
    whole = build_engine(EngineConfig(), tiny_model("qwen3"))
    with pytest.raises(EngineError, match="needs a frozen base"):
        whole.adapter("a", A)
    with pytest.raises(EngineError, match="no adapter"):
        list(whole.adapter_weights())
    base = frozen("qwen3")
    engine = base.adapter("a", A)
    with pytest.raises(EngineError, match="there already"):
        base.adapter("a", A)
    with pytest.raises(EngineError, match="needs a frozen base"):
        engine.adapter("b", A)
    still = base.adapter("c", A, trainable=False)
    with pytest.raises(EngineError, match="frozen"):
        run(still.forward_backward([BATCHES[0]], Scaled()))
    assert base.capabilities.lora


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gpt2"])
def test_a_sampler_serves_an_adapter_without_merging(family: str) -> None:
    """Two samplers and two trainers over one base: each sampler draws from its own adapter's published weights."""
    model = tiny_model(family)
    base = build_engine(EngineConfig(), model, trainable=False)
    configs = {"a": first_for(family), "b": B}
    engines = {name: base.adapter(name, config) for name, config in configs.items()}
    samplers = {
        name: BuiltinSampler(
            model, max_running=4, cache_tokens=512, adapter=add_adapter(model, f"{name}-sampled", config)
        )
        for name, config in configs.items()
    }
    prompt = Prompt(np.array([5, 6, 7, 8], np.int32))

    async def work() -> None:
        for name in ("a", "b"):
            await train(engines[name], 2)
            await publish(engines[name], samplers[name], version=3)
        for name in ("a", "b"):
            drawn = await asyncio.gather(
                *(samplers[name].sample(prompt, SamplingParams(max_tokens=6, seed=s)) for s in range(3))
            )
            for one in drawn:
                batch = pack(sequences(1))
                text = np.append(prompt.tokens, one.tokens).astype(np.int64)
                made = sequences(2)[1]
                mask = np.arange(len(text)) < len(text) - 1
                batch = pack([type(made)(text, mask, mask * 1.0, mask * 0.0)])
                (out,) = await engines[name].forward([batch], Want(every_row=True))
                ours = out.logprobs_T[3 : 3 + len(one.tokens)]
                assert torch.allclose(ours, torch.from_numpy(one.logprobs), atol=1e-5), name
                scores = await samplers[name].score(Prompt(text.astype(np.int32)))
                assert np.allclose(scores[4:], one.logprobs, atol=1e-5)
        await train(engines["a"], 1)  # what a sampler serves stays as it was published
        again = await samplers["a"].sample(prompt, SamplingParams(max_tokens=6, seed=0))
        first = await samplers["a"].sample(prompt, SamplingParams(max_tokens=6, seed=0))
        assert np.array_equal(again.logprobs, first.logprobs)
        assert samplers["a"].serves_adapter and again.versions.tolist() == [3] * len(again.tokens)

    run(work())


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gpt_oss"])
def test_a_merged_folder_is_a_model_for_everybody(family: str, tmp_path: Path) -> None:
    """E08: ties, head and experts right; the module is the same afterwards."""
    model = tiny_model(family)
    base = build_engine(EngineConfig(), model, trainable=False)
    kinds = tuple(kind for kind in ("attention", "experts", "unembedding") if _has(model.module, kind))
    engine = base.adapter("a", AdapterConfig.model_validate({"rank": 3, "targets": kinds}))
    run(train(engine, 2))
    before = {name: t.clone() for name, t in model.module.state_dict().items()}
    export_model(model, None, tmp_path / "out", engine.weights())
    assert all(torch.equal(before[name], t) for name, t in model.module.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert loaded.config.tie_word_embeddings == (tiny_config(family).tie_word_embeddings and "unembedding" not in kinds)
    texts = [t for t in sequences(3, seed=4) if len(t.tokens) > 3]
    for text in texts:
        (ours,) = run(engine.forward([pack([text])], Want(every_row=True)))
        with torch.no_grad():
            theirs = loaded(input_ids=torch.from_numpy(text.tokens)[None]).logits[0].log_softmax(-1)
        picked = theirs[:-1].gather(-1, torch.from_numpy(text.tokens)[1:, None])[:, 0]
        assert torch.allclose(ours.logprobs_T[:-1], picked, atol=2e-4)


def test_an_abandoned_export_leaves_the_model_and_the_folder_as_they_were(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    engine = build_engine(EngineConfig(), model, trainable=False).adapter("a", A)
    before = {name: t.clone() for name, t in model.module.state_dict().items()}

    def broken() -> Any:
        for i, pair in enumerate(engine.weights()):
            if i == 3:
                raise OSError("the disk is full")
            yield pair

    with pytest.raises(OSError, match="disk is full"):
        export_model(model, None, tmp_path / "out", broken())
    assert all(torch.equal(before[name], t) for name, t in model.module.state_dict().items())
    assert not (tmp_path / "out").exists()
    assert math.isfinite(float(run(engine.forward([BATCHES[0]]))[0].logprobs_T.sum()))


def _has(module: Any, kind: str) -> bool:
    try:
        targets(module, (kind,))
    except Exception:
        return False
    return True
