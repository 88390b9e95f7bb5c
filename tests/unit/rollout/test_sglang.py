"""What goes wrong between strop and an sglang server, with a stand-in for one; `tests/sglang` is the contract."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.adapter import AdapterConfig
from strop.config.loader import load_recipe, read_recipe
from strop.config.recipe import SamplerConfig
from strop.config.sglang import SglangConfig
from strop.errors import ConfigError, EngineError, RolloutError, StropError
from strop.parts import build_parts
from strop.rollout.build import build_sampler
from strop.rollout.router import Router, SamplerLost
from strop.rollout.sglang import SglangSampler
from strop.rollout.sglang_link import Link
from strop.rollout.sglang_wire import generate_body
from strop.types import Completion, Prompt, SamplingParams, Stop
from tests.conformance.test_sampler import decode
from tests.sglang.sglang_server import Json, StandIn, edited, http
from tests.tiny_models import tiny_model
from tests.unit.loops.test_recipe import RECIPE

GIVEN = ["sampler.kind=sglang", "sampler.sglang={address: localhost:30000}"]
PROMPT = Prompt(np.array([5, 9, 33], np.int32))
PARAMS = SamplingParams(max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StandIn, SglangSampler]]:
    yield from serve()


@pytest.fixture
def own() -> Iterator[tuple[StandIn, SglangSampler]]:
    """For tests that leave it broken."""
    yield from serve()


@pytest.fixture
def server(served: tuple[StandIn, SglangSampler]) -> StandIn:
    served[0].heard.clear()
    served[0].faults.clear()
    return served[0]


@pytest.fixture
def sampler(served: tuple[StandIn, SglangSampler]) -> SglangSampler:
    return served[1]


def serve(**config: Any) -> Iterator[tuple[StandIn, SglangSampler]]:
    server = StandIn(tiny_model("qwen3", seed=7), decode=decode)
    sampler = start(server, **config)
    yield server, sampler
    sampler.close()
    server.close()


def start(server: StandIn, **config: Any) -> SglangSampler:
    given: dict[str, Any] = {"start_timeout_s": 5.0, **config}
    settings = SglangConfig(address=server.address, **given)
    return SglangSampler.start(tiny_model("qwen3"), settings, max_running=6, decode=decode)


def sample(sampler: SglangSampler, params: SamplingParams = PARAMS) -> Completion:
    return asyncio.run(sampler.sample(PROMPT, params))


def other_weights() -> dict[str, torch.Tensor]:
    return dict(tiny_model("qwen3", seed=1).state())


# What is said


def test_a_request_says_all_that_it_is_drawn_with(server: StandIn, sampler: SglangSampler) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.5, top_k=3, top_p=0.9, seed=-1, stop_tokens=(7,))
    sample(sampler, params)
    ((path, body),) = server.heard
    assert path == "/generate"
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": [5, 9, 33],
        "sampling_params": {
            "max_new_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.0,
            "sampling_seed": 2**63 - 1, "ignore_eos": False, "skip_special_tokens": False, "stop_token_ids": [7],
        },
        "return_logprob": True, "return_sampling_mask": True, "sampling_logprobs_mode": "selected",
    }  # fmt: skip
    plain = generate_body("x", [1], SamplingParams(max_tokens=1), 1)
    assert plain["sampling_params"]["ignore_eos"] is True, "its end tokens are not asked for"
    assert "return_sampling_mask" not in plain and "stop" not in plain["sampling_params"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens=4, min_p=0.1), "min_p 0.1: sglang does not"),
        (SamplingParams(max_tokens=4, top_p=0.9), "top_p 0.9 without top_k"),
        (SamplingParams(max_tokens=4, temperature=1e-7), "takes it for 0"),
        (SamplingParams(max_tokens=4, routes=True), "experts"),
        (SamplingParams(max_tokens=4, top_k=-2), "top_k out of bounds"),
        (SamplingParams(max_tokens=126), "129 positions; the model has 128"),
    ],
)
def test_what_it_cannot_draw_is_not_asked(
    server: StandIn, sampler: SglangSampler, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        sample(sampler, params)
    assert server.heard == []


def test_truncations_are_no_matter_to_greedy_draws(sampler: SglangSampler) -> None:
    plain = sample(sampler, SamplingParams(max_tokens=4, temperature=0.0))
    assert (
        plain.tokens.tolist()
        == sample(sampler, SamplingParams(max_tokens=4, temperature=0.0, top_p=0.5, min_p=0.3)).tokens.tolist()
    )


def test_an_end_token_that_nobody_asked_for_ends_nothing(server: StandIn, sampler: SglangSampler) -> None:
    """sglang cannot ignore its model's end tokens and heed stop tokens at once, so the request is sent again."""
    free = sample(sampler)
    tokens = free.tokens.tolist()
    absent = next(t for t in range(3, 96) if t not in tokens)
    server.heard.clear()
    server.end_tokens = (tokens[2], tokens[7])
    try:
        again = sample(sampler, SamplingParams(max_tokens=12, seed=3, stop_tokens=(absent,)))
        asked = [body["sampling_params"]["max_new_tokens"] for _, body in server.heard]
        short = sample(sampler, SamplingParams(max_tokens=3, seed=3, stop_tokens=(absent,)))
    finally:
        server.end_tokens = (2,)
    assert again.tokens.tolist() == tokens
    np.testing.assert_allclose(again.logprobs, free.logprobs, atol=1e-5, rtol=0)
    assert again.stop is Stop.LENGTH
    assert len(asked) >= 2 and asked[0] == 12 and asked == sorted(asked, reverse=True)
    assert short.stop is Stop.LENGTH and short.tokens.tolist() == tokens[:3]


def test_a_stop_string_that_the_server_sees_late_is_cut(server: StandIn, sampler: SglangSampler) -> None:
    text = decode(sample(sampler).tokens.tolist())
    params = SamplingParams(max_tokens=12, seed=3, stop_strings=(text[5:8],))
    right = sample(sampler, params)
    decoding, server.sampler._decode = server.sampler._decode, lambda ids: ""
    try:
        late = sample(sampler, params)
    finally:
        server.sampler._decode = decoding
    assert late.tokens.tolist() == right.tokens.tolist()
    assert late.stop is right.stop is Stop.TOKEN
    assert len(right.tokens) < 12


# What is answered


def finish(reason: Json) -> Callable[[Json], object]:
    return lambda meta: meta.update(finish_reason=reason)


def cut(name: str) -> Callable[[Json], object]:
    return lambda meta: meta[name].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (finish({"type": "abort", "message": "Abort in waiting queue"}), "aborted a request: Abort in waiting queue"),
        (finish({"type": "content_filter"}), "does not know.*content_filter"),
        (finish({}), "does not know"),
        (finish({"type": "stop", "matched": "NaN happened"}), "NaN happened"),
        (lambda meta: meta.update(finish_reason=None), "no finish_reason"),
        (lambda meta: meta.pop("output_token_logprobs"), "no output_token_logprobs"),
        (cut("output_token_logprobs"), "drew 12 tokens of at most 12, with 11 logprobs"),
        (lambda meta: meta["output_token_logprobs"].append([-1.0, 5, None]), "with 13 logprobs"),
        (lambda meta: meta.update(output_token_logprobs=[[-1.0]] * 12), "not rows of a logprob and a token"),
        (lambda meta: meta.update(output_token_logprobs=[["x", 5]] * 12), "not rows"),
        (lambda meta: meta.update(output_token_logprobs=[[None, 5, None]] * 12), "not finite"),
        (lambda meta: meta.update(output_token_logprobs=[], completion_tokens=0), "drew 0 tokens"),
        (lambda meta: meta.pop("weight_versions"), "no weight_versions"),
        (lambda meta: meta["weight_versions"][0].update(end=11), "of 11 tokens, and 12 were drawn"),
        (lambda meta: meta["weight_versions"][0].update(start=1), "do not follow each other"),
        (lambda meta: meta["weight_versions"][0].update(version="default"), "'default', which this run did not give"),
        (lambda meta: meta["weight_versions"][0].update(version="00000000-0"), "serves one run at a time"),
    ],
)
def test_a_wrong_answer_is_an_error_and_never_a_completion(
    server: StandIn, sampler: SglangSampler, change: Callable[[Json], object], message: str
) -> None:
    server.faults["/generate"] = edited(change)
    with pytest.raises(RolloutError, match=message) as caught:
        sample(sampler)
    assert not isinstance(caught.value, SamplerLost)
    assert len(sample(sampler).tokens) == 12, "the next one is fine"


def test_a_reply_cut_at_the_servers_own_limit_is_no_reply(server: StandIn, sampler: SglangSampler) -> None:
    server.info["max_req_input_len"], room = 4, server.info["max_req_input_len"]  # it cuts without an error
    try:
        with pytest.raises(RolloutError, match="stopped after 5 of 12 tokens at a limit of its own"):
            sample(sampler)
    finally:
        server.info["max_req_input_len"] = room


def test_sampling_logprobs_that_are_missing_are_an_error(server: StandIn, sampler: SglangSampler) -> None:
    params = SamplingParams(max_tokens=4, top_k=5)
    for change, message in (
        (cut("output_token_sampling_logprobs"), "3 sampling logprobs for 4"),
        (lambda meta: meta.pop("output_token_sampling_logprobs"), "no output_token_sampling_logprobs"),
    ):
        server.faults["/generate"] = edited(change)
        with pytest.raises(RolloutError, match=message):
            sample(sampler, params)


def test_scores_of_another_prompt_are_an_error(server: StandIn, sampler: SglangSampler) -> None:
    server.faults["/generate"] = edited(cut("input_token_logprobs"))
    with pytest.raises(RolloutError, match="scored 2 tokens"):
        asyncio.run(sampler.score(PROMPT))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (lambda _: http(500, {"error": {"message": "out of memory"}}), RolloutError, "answered 500: .*out of memory"),
        (lambda _: http(400, {"error": {"message": "too long"}}), RolloutError, "answered 400: .*too long"),
        (lambda _: b"", SamplerLost, "hung up"),
        (lambda _: http(200, b'{"text": "', length=400), SamplerLost, "hung up in the middle"),
        (lambda _: b"SSH-2.0-OpenSSH_9.2\r\n", SamplerLost, "hung up"),
        (lambda _: http(200, b"<html>"), RolloutError, "is no JSON: <html>"),
        (lambda _: http(200, b"[1]"), RolloutError, "no object"),
        (lambda _: http(200, b"{}"), RolloutError, "no meta_info"),
    ],
)
def test_failures_of_the_wire_say_what_was_said(
    server: StandIn, sampler: SglangSampler, fault: Any, kind: type[RolloutError], message: str
) -> None:
    server.faults["/generate"] = fault
    with pytest.raises(RolloutError, match=message) as caught:
        sample(sampler)
    assert isinstance(caught.value, SamplerLost) == (kind is SamplerLost)
    assert len(sample(sampler).tokens) == 12


def test_a_server_that_is_gone_loses_its_requests_and_a_router_draws_them_elsewhere() -> None:
    servings = [serve(), serve()]
    pairs = [next(serving) for serving in servings]
    router = Router([sampler for _, sampler in pairs])
    pairs[0][0].close()

    async def work() -> list[Completion]:
        return list(await asyncio.gather(*(router.sample(PROMPT, PARAMS) for _ in range(4))))

    assert [len(completion.tokens) for completion in asyncio.run(work())] == [12] * 4
    assert list(router.lost) == [0]
    with pytest.raises(SamplerLost, match="no sglang server"):
        sample(pairs[0][1])
    for _, sampler in pairs:
        sampler.close()
    pairs[1][0].close()


def test_a_request_that_takes_too_long_is_given_up(server: StandIn, sampler: SglangSampler) -> None:
    slow = Link(SglangConfig(address=server.address, timeout_s=0.2))
    server.sampler.paused = True
    try:
        with pytest.raises(SamplerLost, match=r"did not answer /generate within 0.2 s"):
            asyncio.run(slow.post("/generate", generate_body("x", [5], PARAMS, 4)))
    finally:
        server.sampler.paused = False
    assert len(sample(sampler).tokens) == 12


def test_a_cancelled_request_is_aborted_at_the_server(server: StandIn, sampler: SglangSampler) -> None:
    async def give_up() -> None:
        server.sampler.paused = True
        task = asyncio.ensure_future(sampler.sample(PROMPT, PARAMS))
        while not server.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "/abort_request" not in server.paths:
            await asyncio.sleep(0.01)

    asyncio.run(give_up())
    server.sampler.paused = False
    (asked,) = [body["rid"] for path, body in server.heard if path == "/generate"]
    assert ("/abort_request", {"rid": asked}) in server.heard
    asyncio.run(sampler.sleep())  # nothing runs
    asyncio.run(sampler.wake())


# Weights


def test_an_update_is_one_transaction_with_a_folder_that_does_not_stay(
    own: tuple[StandIn, SglangSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, sampler = own
    server.heard.clear()
    asyncio.run(sampler.load_weights(other_weights().items(), 5))
    assert server.paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"]
    said = dict(server.heard)
    assert said["/pause_generation"] == {"mode": "retract"}
    folder = Path(said["/update_weights_from_disk"].pop("model_path"))
    assert said["/update_weights_from_disk"].pop("weight_version").endswith("-5")
    assert said["/update_weights_from_disk"] == {"load_format": "safetensors", "flush_cache": True}
    assert list(folder.parent.iterdir()) == [folder], "the one before is gone"
    assert sample(sampler).versions.tolist() == [5] * 12
    sampler.close()
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("path", "fault", "kind"),
    [
        ("/update_weights_from_disk", lambda _: http(400, {"success": False, "message": "no space"}), EngineError),
        ("/update_weights_from_disk", lambda _: http(200, {"success": False, "message": "no space"}), EngineError),
        ("/update_weights_from_disk", lambda _: b"", SamplerLost),
        ("/pause_generation", lambda _: http(500, b"no space"), RolloutError),
        ("/continue_generation", lambda _: http(500, b"no space"), RolloutError),
        ("/model_info", lambda _: http(200, {"weight_version": "no space"}), EngineError),
    ],
)
def test_after_a_failed_update_nothing_is_drawn_before_a_good_one(
    own: tuple[StandIn, SglangSampler], path: str, fault: Any, kind: type[StropError]
) -> None:
    server, sampler = own
    server.faults[path] = fault
    with pytest.raises(kind, match="hung up" if kind is SamplerLost else "no space"):
        asyncio.run(sampler.load_weights(other_weights().items(), 1))
    assert sampler.version == 0
    with pytest.raises(RolloutError, match="its last update failed"):
        sample(sampler)
    assert server.sampler.paused is (path == "/pause_generation"), "requests go on whatever happens"
    asyncio.run(sampler.load_weights(other_weights().items(), 2))
    assert sample(sampler).versions.tolist() == [2] * 12


def test_what_ran_while_an_update_failed_is_not_a_completion(own: tuple[StandIn, SglangSampler]) -> None:
    server, sampler = own
    server.sampler.steps_left = 2

    async def work() -> None:
        running = asyncio.ensure_future(sampler.sample(PROMPT, PARAMS))
        while server.sampler.steps_left:
            await asyncio.sleep(0.01)
        server.faults["/update_weights_from_disk"] = lambda _: http(400, {"success": False, "message": "half of it"})
        with pytest.raises(EngineError, match="half of it"):
            await sampler.load_weights(other_weights().items(), 1)
        with pytest.raises(RolloutError, match="its last update failed"):
            await running

    asyncio.run(work())


# The start


def test_a_server_that_is_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.rollout.sglang_server.POLL_S", 0.01)
    server = StandIn(tiny_model("qwen3"), decode=decode)
    server.unhealthy = 3
    start(server).close()
    assert server.paths[:5] == ["/health_generate"] * 4 + ["/server_info"]
    server.unhealthy = 10**9
    with pytest.raises(RolloutError, match=r"after 0.1 s, see sampler\.sglang\.start_timeout_s.*503"):
        start(server, start_timeout_s=0.1)
    server.close()
    with pytest.raises(RolloutError, match="no sglang server"):
        start(server, start_timeout_s=0.1)


def test_a_server_that_training_cannot_use_is_refused_with_all_that_is_wrong() -> None:
    server = StandIn(tiny_model("qwen3"), decode=decode)
    server.info |= {
        "version": "0.5.9", "enable_deterministic_inference": False, "speculative_algorithm": "EAGLE",
        "disaggregation_mode": "decode", "max_req_input_len": None,
    }  # fmt: skip
    server.model_info |= {
        "architectures": ["LlamaForCausalLM"], "is_generation": False, "preferred_sampling_params": {"top_k": 3},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        start(server)
    words = (
        "0.5.9", "--enable-deterministic-inference", "speculation", "disaggregation", "max_req_input_len",
        "Qwen3ForCausalLM", "no text", "--preferred-sampling-params",
    )  # fmt: skip
    assert [word in problem for word, problem in zip(words, caught.value.problems, strict=True)] == [True] * 8
    server.close()


def test_memory_and_stop_strings_need_a_server_that_was_started_for_them() -> None:
    server = StandIn(tiny_model("qwen3"), decode=decode)
    server.info |= {"enable_memory_saver": False, "skip_tokenizer_init": True}
    sampler = start(server)
    with pytest.raises(RolloutError, match="--enable-memory-saver"):
        asyncio.run(sampler.sleep())
    with pytest.raises(RolloutError, match="--skip-tokenizer-init"):
        sample(sampler, SamplingParams(max_tokens=4, stop_strings=("x",)))
    sampler.close()
    server.close()


def test_the_key_is_sent_and_never_shown(tmp_path: Path) -> None:
    server = StandIn(tiny_model("qwen3"), decode=decode, key="s3cret")
    (tmp_path / "key").write_text("s3cret\n")
    (tmp_path / "wrong").write_text("another")
    sampler = start(server, key_file=str(tmp_path / "key"))
    assert len(sample(sampler).tokens) == 12
    sampler.close()
    with pytest.raises(RolloutError, match=r"answered 401: .*sampler\.sglang\.key_file") as caught:
        start(server, key_file=str(tmp_path / "wrong"))
    assert "another" not in str(caught.value)
    server.close()


@pytest.mark.parametrize("text", ["", "two\nlines", "schlüssel", None])
def test_a_key_file_holds_a_key(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="key_file"):
        Link(SglangConfig(address="localhost:1", key_file=str(tmp_path / "key")))


def test_weights_go_where_the_recipe_says_and_can_be_read_by_others(tmp_path: Path) -> None:
    for server, _ in serve(weights_folder=str(tmp_path / "shared")):
        (made,) = (tmp_path / "shared").iterdir()
        assert made.stat().st_mode & 0o777 == 0o755
        assert str(made) in dict(server.heard)["/update_weights_from_disk"]["model_path"]
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"address": "localhost:30000"}, None),
        ({"address": "[::1]:30000"}, None),
        ({"address": "https://gpu:443", "weights_folder": "/shared"}, None),
        ({"address": "gpu:30000"}, "sampler.sglang.weights_folder"),
        ({"address": "gpu"}, "is not HOST:PORT"),
        ({"address": "gpu:many"}, "sampler.sglang.address"),
        ({"address": "ftp://gpu:1"}, "is not HOST:PORT"),
        ({"address": "http://gpu:1/v1"}, "is not HOST:PORT"),
    ],
)
def test_addresses_are_checked_before_anything_is_asked(config: dict[str, Any], words: str | None) -> None:
    problems = SglangConfig(**config).problems()
    assert problems == [] if words is None else [words in problem for problem in problems] == [True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampler.kind=sglang"], "set sampler.sglang.address"),
        (["sampler.kind=sglang", "sampler.sglang={}"], "set sampler.sglang.address"),
        (["sampler.kind=sglang", "sampler.sglang={address: gpu:1}"], "set sampler.sglang.weights_folder"),
        ([*GIVEN, "engine.adapter.rank=4"], ""),
        ([*GIVEN, "sampler.actors=2"], "sampler.actors would all ask"),
        ([*GIVEN, "draw.min_p=0.1"], "draw.min_p is above 0"),
        ([*GIVEN, "draw.top_p=0.9"], "set draw.top_k too"),
        ([*GIVEN, "draw.top_p=0.9", "draw.top_k=50"], ""),
        ([*GIVEN, "sampler.vllm={}"], "sampler.vllm is given, but sampler.kind is sglang"),
        (["sampler.sglang={address: x:1}"], "sampler.sglang is given, but sampler.kind is builtin"),
        (GIVEN, ""),
    ],
)
def test_a_recipe_says_what_sglang_needs_beside_it(overrides: list[str], message: str) -> None:
    text = "model: {path: m}\ntasks: {source: python, path: t.py:f, holdout: 1}\ngrpo: {}\n"
    found = read_recipe(text, "r.yaml", overrides).conflicts()
    assert any(message in problem for problem in found) if message else not found


def test_an_output_matrix_that_the_server_would_not_read_is_refused(tmp_path: Path) -> None:
    """It has one of its own where the adapter changes it and it was tied; the server takes the embedding for both."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.replace("tie_word_embeddings: false", "tie_word_embeddings: true"))
    adapter = "engine.adapter={rank: 2, targets: [unembedding]}"
    with pytest.raises(ConfigError, match="take unembedding out"):
        build_parts(load_recipe(path, ["grpo={}", *GIVEN, adapter]), tmp_path)


def test_a_recipe_builds_it(tmp_path: Path) -> None:
    server = StandIn(tiny_model("qwen3"), decode=decode)
    config = SamplerConfig(kind="sglang", sglang=SglangConfig(address=server.address), dtype="bfloat16")
    with pytest.raises(ConfigError, match="the engine's merged weights"):
        build_sampler(config, tiny_model("qwen3"), decode, AdapterConfig(rank=2))
    sampler = build_sampler(config, tiny_model("qwen3"), decode)
    assert isinstance(sampler, SglangSampler) and not sampler.serves_adapter
    asyncio.run(sampler.load_weights(((n, t.double()) for n, t in other_weights().items()), 3))  # it casts
    assert sample(sampler).versions.tolist() == [3] * 12
    sampler.close()
    server.close()


def test_nobody_listens_at_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SamplerLost, match=r"no sglang server at 127\.0\.0\.1"):
        asyncio.run(Link(SglangConfig(address=f"127.0.0.1:{port}")).get("/model_info"))
