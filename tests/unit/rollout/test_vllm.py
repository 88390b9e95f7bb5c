"""strop's end of the wire to vLLM, against a host that is no vLLM; `make vllm` runs the real one."""

from __future__ import annotations

import asyncio
import base64
import math
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strop.config.loader import read_recipe
from strop.config.vllm import VllmConfig
from strop.errors import ConfigError, EngineError, RolloutError
from strop.models.experts import Form
from strop.models.saved import export_weights
from strop.rollout.router import Router, SamplerLost
from strop.rollout.vllm import Routed, VllmSampler, _ties
from strop.rollout.vllm_host.arriving import Arriving, WeightsRefused
from strop.rollout.vllm_host.frames import HEAD, FrameError, Message, pack, proof, proves, unpack, unpack_head
from strop.rollout.vllm_link import Link, connect, receive
from strop.types import Completion, Prompt, SamplingParams, Stop
from tests.tiny_models import tiny_model

WAITS, REFUSES, HANGS_UP, BREAKS = 90, 91, 92, 93  # first tokens of prompts that the host takes as orders
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(2.0),
    "c": torch.zeros(0),
    "d": torch.ones(3).bfloat16(),
}


class FakeHost:
    """Answers as a host does, in a thread: token n of a request is its seed + n, with logprob -n."""

    def __init__(self, wire: socket.socket, folder: Path) -> None:
        self.wire, self.folder = wire, folder
        self.heard: list[Message] = []
        self.version = 0
        self.forgets = 0  # tokens whose experts it does not tell
        self.loaded: dict[str, torch.Tensor] = {}
        self.arriving: Arriving | None = None
        self.held: Arriving | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            while True:
                length, body_length = unpack_head(receive(self.wire, HEAD.size))
                message = unpack(receive(self.wire, length))
                self.heard.append(message)
                self.take(message, receive(self.wire, body_length))
        except (EOFError, OSError):
            self.wire.close()

    def reply(self, message: Message, answer: Message, last: bool = True) -> None:
        self.wire.sendall(pack({"id": message["id"], "last": last, **answer}))

    def take(self, message: Message, body: bytes) -> None:
        try:
            if message["op"] == "sample":
                self.sample(message)
            elif message["op"] == "score":
                self.reply(message, {"logprobs": [0.0, *(-float(t) for t in message["prompt"][1:])]})
            elif message["op"] == "routes":
                experts = np.arange((message["count"] - self.forgets) * 4, dtype=np.int16)
                self.reply(message, {"experts": base64.b64encode(experts.tobytes()).decode()})
            elif message["op"] != "abort":
                self.reply(message, self.weights(message, body))
        except WeightsRefused as error:
            self.reply(message, {"error": str(error)})

    def weights(self, message: Message, body: bytes) -> Message:
        if message["op"] == "begin":
            base = message["base"]
            if base is not None and (self.held is None or self.held.serial != base):
                return {"has": False}
            held = None if base is None else self.held
            self.arriving = Arriving(message["version"], self.folder, serial=message["serial"], held=held)
            return {"has": True}
        if message["op"] == "put":
            assert self.arriving is not None
            self.arriving.put(message["entries"], body)
        elif message["op"] == "end":
            assert self.arriving is not None
            self.arriving.check(message["count"])
            self.loaded = {n: t for file in self.arriving.files for n, t in load_file(file).items()}
            self.version = self.arriving.version
            self.held = self.arriving if message["keep"] else None
        return {}

    def sample(self, message: Message) -> None:
        order, params = message["prompt"][0], message["params"]
        if order == HANGS_UP:
            self.wire.shutdown(socket.SHUT_RDWR)
        elif order == REFUSES:
            self.reply(message, {"error": "ValueError: not today"})
        elif order != WAITS:
            tokens = [(params["seed"] + n) % 90 for n in range(params["max_tokens"])]
            stops = [n for n, token in enumerate(tokens) if token in params["stop_token_ids"]]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            rows = [{"tokens": [t], **self.numbers(n, order)} for n, t in enumerate(tokens)]
            if not message["stream"]:
                rows = [{key: [value for row in rows for value in row[key]] for key in rows[0]}]
            for row in rows[:-1]:
                self.reply(message, {**row, "reason": None}, last=False)
            self.reply(message, {**rows[-1], "reason": "stop" if stops else "length"})

    def numbers(self, n: int, order: int) -> dict[str, list[float]]:
        return {
            "logprobs": [math.nan if order == BREAKS else -float(n)],
            "sampling_logprobs": [-n / 2],
            "versions": [self.version],
        }


def over(link: Link, **more: Any) -> VllmSampler:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in WEIGHTS.items()}
    return VllmSampler(
        link, shapes=shapes, max_length=64, cache_tokens=48, vocab_size=96, decode=lambda ids: "".join(map(chr, ids)),
        **more,
    )  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[VllmSampler, FakeHost]]:
    ours, theirs = socket.socketpair()
    fake = FakeHost(theirs, tmp_path)
    sampler = over(Link(ours, None))
    yield sampler, fake
    sampler.close()
    fake.thread.join(5)


def prompt(*tokens: int) -> Prompt:
    return Prompt(np.array(tokens, np.int32))


def sample(sampler: VllmSampler, first: int = 5, **params: Any) -> Completion:
    asked: dict[str, Any] = {"max_tokens": 4, "seed": 65, **params}
    return asyncio.run(sampler.sample(prompt(first, 6), SamplingParams(**asked)))


def test_a_request_goes_out_and_its_columns_come_back(host: tuple[VllmSampler, FakeHost]) -> None:
    sampler, fake = host
    completion = sample(sampler, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, stop_tokens=(7,))
    assert completion.tokens.tolist() == [65, 66, 67, 68]
    assert completion.logprobs.tolist() == [0, -1, -2, -3]
    assert completion.sampling_logprobs.tolist() == [0, -0.5, -1, -1.5]
    assert completion.versions.tolist() == [0] * 4
    assert completion.stop is Stop.LENGTH
    assert fake.heard[0] == {
        "id": 0, "op": "sample", "prompt": [5, 6], "stream": False, "routes": False,
        "params": {"max_tokens": 4, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 65,
                   "stop_token_ids": [7]},
    }  # fmt: skip


def test_seeds_of_any_size_and_sign_are_ones_that_vllm_takes(host: tuple[VllmSampler, FakeHost]) -> None:
    """vLLM takes 64 bits, and -1 as no seed at all."""
    sampler, fake = host
    for seed in (-1, 2**80 + 3, 0):
        sample(sampler, seed=seed)
    assert [message["params"]["seed"] for message in fake.heard] == [2**63 - 1, 3, 0]


def test_greedy_tokens_were_drawn_for_certain(host: tuple[VllmSampler, FakeHost]) -> None:
    assert sample(host[0], temperature=0.0).sampling_logprobs.tolist() == [0.0] * 4


def test_a_stop_token_is_told_from_the_length(host: tuple[VllmSampler, FakeHost]) -> None:
    """G14."""
    assert sample(host[0], stop_tokens=(67,)).tokens.tolist() == [65, 66, 67]
    assert sample(host[0], stop_tokens=(68,)).stop is Stop.TOKEN
    assert sample(host[0], stop_tokens=(69,)).stop is Stop.LENGTH


def test_a_stop_string_ends_the_request_at_the_host_too(host: tuple[VllmSampler, FakeHost]) -> None:
    sampler, fake = host
    completion = sample(sampler, max_tokens=20, stop_strings=("zz", "BC"))  # 65 is A
    assert completion.tokens.tolist() == [65, 66, 67]
    assert completion.stop is Stop.TOKEN
    assert asyncio.run(sampler.score(prompt(3, 4))).tolist() == [0, -4]  # later replies of the first go nowhere
    assert fake.heard[0]["stream"] is True


def test_a_cancelled_request_is_aborted(host: tuple[VllmSampler, FakeHost]) -> None:
    sampler, fake = host

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await sampler.sample(prompt(WAITS), SamplingParams(max_tokens=4))
        await sampler.score(prompt(1))

    asyncio.run(give_up())
    assert [m for m in fake.heard if m["op"] == "abort"] == [{"id": 1, "op": "abort", "of": 0}]
    asyncio.run(sampler.sleep())  # nothing runs


def test_routes_are_asked_for_when_the_tokens_are_there(host: tuple[VllmSampler, FakeHost]) -> None:
    sampler, fake = host
    sampler._routed = Routed((1, 3), 2, "")
    completion = sample(sampler, routes=True, max_tokens=20, stop_strings=("BC",))
    assert completion.routes is not None and completion.routes.layers == (1, 3)
    experts = completion.routes.experts_TLK
    assert experts.shape == (5, 2, 2) and experts.dtype == np.int16  # the prompt's two tokens, and three
    assert experts[:-1].reshape(-1).tolist() == list(range(16)) and (experts[-1] == -1).all()
    assert [m for m in fake.heard if m["op"] == "routes"] == [{"id": 1, "op": "routes", "of": 0, "count": 4}]
    fake.forgets = 1
    with pytest.raises(RolloutError, match="computed 5 tokens of a request and tells the experts of 4"):
        sample(sampler, routes=True)


def test_a_record_of_a_request_that_nobody_waits_for_is_dropped_though_it_ended(
    host: tuple[VllmSampler, FakeHost],
) -> None:
    sampler, fake = host
    sampler._routed = Routed((1, 3), 2, "")
    with pytest.raises(RolloutError, match="not finite"):
        sample(sampler, BREAKS, routes=True)
    asyncio.run(sampler.score(prompt(1)))
    assert [m for m in fake.heard if m["op"] == "abort"] == [{"id": 1, "op": "abort", "of": 0}]


@pytest.mark.parametrize(
    ("first", "params", "message"),
    [
        (REFUSES, {}, "not today"),
        (BREAKS, {}, "not finite"),
        (5, {"max_tokens": 0}, "max_tokens=0"),
        (5, {"max_tokens": 63}, "65 positions"),
        (5, {"max_tokens": 47}, "cache_tokens is 48"),
        (5, {"temperature": 0.001}, "below 0.01"),
        (5, {"temperature": -1.0}, "temperature"),
        (5, {"top_p": 0.0}, "top_p"),
        (96, {}, "ids 0 to 95"),
        (5, {"routes": True}, "experts"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_the_next_request_is_not(
    host: tuple[VllmSampler, FakeHost], first: int, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        sample(host[0], first, **params)
    assert not isinstance(caught.value, SamplerLost)
    assert len(sample(host[0]).tokens) == 4


def test_a_host_that_is_gone_loses_what_it_was_drawing_and_a_router_draws_it_elsewhere(tmp_path: Path) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    hosts = [FakeHost(theirs, tmp_path) for _, theirs in pairs]
    samplers = [over(Link(ours, None)) for ours, _ in pairs]

    async def work() -> None:
        waiting = asyncio.ensure_future(samplers[0].sample(prompt(WAITS), SamplingParams(max_tokens=4)))
        await asyncio.sleep(0)
        with pytest.raises(SamplerLost, match="gone"):
            await samplers[0].sample(prompt(HANGS_UP), SamplingParams(max_tokens=4))
        with pytest.raises(SamplerLost):
            await waiting
        router = Router(samplers)
        drawn = await asyncio.gather(*(router.sample(prompt(5), SamplingParams(max_tokens=2)) for _ in range(4)))
        assert [len(completion.tokens) for completion in drawn] == [2] * 4
        assert list(router.lost) == [0]

    asyncio.run(work())
    assert len(hosts[1].heard) == 4
    for sampler in samplers:
        sampler.close()


# Weights


def test_weights_arrive_as_they_left_and_in_any_number_of_buckets(
    host: tuple[VllmSampler, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E02, E03, E04, E12, E13, E18: views, scalars, empty tensors, bytes of every format; one end for all buckets."""
    sampler, fake = host
    given = {**WEIGHTS, "a": torch.arange(6.0).view(3, 2).T, "d": torch.tensor([1.0, float("nan"), -0.0]).bfloat16()}
    for size, buckets in ((1 << 20, 1), (1, 3)):
        monkeypatch.setattr("strop.rollout.vllm.BUCKET_BYTES", size)
        fake.heard.clear()
        asyncio.run(sampler.load_weights(given.items(), 3))
        assert [message["op"] for message in fake.heard] == ["begin", *["put"] * buckets, "end"]
        assert fake.loaded.keys() == given.keys()
        for name, tensor in given.items():
            found = fake.loaded[name]
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
            assert raw(found) == raw(tensor)
    assert sampler.version == fake.version == 3
    assert sample(sampler).versions.tolist() == [3] * 4


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_a_tied_head_and_experts_go_as_checkpoints_hold_them(tmp_path: Path) -> None:
    """A tied head is sent beside its embedding; stacked experts one by one."""
    for family, some, count in (("llama", "lm_head.weight", 21), ("qwen3_moe", EXPERT, 45)):
        model = tiny_model(family)
        ours, theirs = socket.socketpair()
        fake, sampler = FakeHost(theirs, tmp_path), over(Link(ours, None))
        sampler._shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state()}
        sampler._module, sampler._ties = model.module, _ties(model.module)
        for weights in (model.state(), export_weights(model.module, model.state(), Form.SAVED)):
            fake.loaded.clear()
            asyncio.run(sampler.load_weights(weights, 1))
            assert len(fake.loaded) == count
            assert some in fake.loaded
        sampler.close()
        if family == "llama":
            assert torch.equal(fake.loaded["lm_head.weight"], fake.loaded["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "missing a"),
        ({"e": torch.zeros(1)}, "unknown e"),
        ({"a": torch.zeros(3, 2)}, "a is"),
        ({"d": torch.zeros(3)}, "d is"),
    ],
)
def test_wrong_weights_are_never_ended(
    host: tuple[VllmSampler, FakeHost], change: dict[str, torch.Tensor | None], message: str
) -> None:
    sampler, fake = host
    given = {name: tensor for name, tensor in {**WEIGHTS, **change}.items() if tensor is not None}
    with pytest.raises(EngineError, match=message):
        asyncio.run(sampler.load_weights(given.items(), 1))
    assert "end" not in [m["op"] for m in fake.heard]
    assert sampler.version == fake.version == 0


def test_a_coarser_sampler_casts(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    fake, sampler = FakeHost(theirs, tmp_path), over(Link(ours, None), casts=True)
    asyncio.run(sampler.load_weights({**WEIGHTS, "d": torch.full((3,), 1.5)}.items(), 1))
    assert fake.loaded["d"].tolist() == [1.5] * 3
    assert fake.loaded["d"].dtype == torch.bfloat16
    sampler.close()


def test_what_changed_is_sent_alone_where_the_host_has_the_rest(tmp_path: Path) -> None:
    """Real NaNs, signs of zero and bfloat16; a host that has something else is sent all."""
    ours, theirs = socket.socketpair()
    fake, sampler = FakeHost(theirs, tmp_path), over(Link(ours, None), deltas=True)
    weights = {**WEIGHTS, "a": torch.arange(60.0).view(2, 30).T.contiguous().T, "d": torch.arange(40.0).bfloat16()}
    sampler._shapes |= {name: (tuple(weights[name].shape), weights[name].dtype) for name in ("a", "d")}

    def sent(version: int) -> dict[str, tuple[int | None, int]]:
        fake.heard.clear()
        asyncio.run(sampler.load_weights(weights.items(), version))
        assert {name: raw(tensor) for name, tensor in fake.loaded.items()} == {n: raw(t) for n, t in weights.items()}
        entries = [entry for message in fake.heard if message["op"] == "put" for entry in message["entries"]]
        return {entry["name"]: (entry.get("changed"), entry["length"]) for entry in entries}

    assert sent(0) == {"a": (None, 240), "b": (None, 4), "c": (None, 0), "d": (None, 80)}
    weights["a"][1, 3], weights["a"][0, 0], weights["d"][39] = float("nan"), -0.0, float("nan")
    assert sent(1) == {"a": (2, 24), "b": (0, 0), "c": (None, 0), "d": (1, 10)}
    assert sent(2)["a"] == (0, 0)  # a NaN that was there is no change
    weights["d"] += 1  # more than half of it
    assert sent(3)["d"] == (None, 80)
    assert fake.held is not None
    fake.held.serial += 1
    assert sent(4) == {"a": (None, 240), "b": (None, 4), "c": (None, 0), "d": (None, 80)}
    assert [m.get("base") for m in fake.heard if m["op"] == "begin"] == [4, None]
    with pytest.raises(EngineError, match="unknown"):
        asyncio.run(sampler.load_weights([*weights.items(), ("e", torch.zeros(1))], 5))
    assert sent(6)["a"] == (0, 0)  # what never ended is nobody's base
    sampler.close()


@pytest.mark.parametrize(
    ("told", "body", "message"),
    [
        ({"changed": 1}, (7).to_bytes(8, "little") + b"x", "not of its 3 bytes"),
        ({"changed": 1}, (-1).to_bytes(8, "little", signed=True) + b"x", "not of its 3 bytes"),
        ({"changed": 1, "checksum": zlib.crc32(b"abd")}, (1).to_bytes(8, "little") + b"x", "checksum"),
        ({"changed": 0, "name": "y"}, b"", "not here"),
    ],
)
def test_the_host_refuses_changes_that_do_not_fit(
    tmp_path: Path, told: dict[str, Any], body: bytes, message: str
) -> None:
    held = Arriving(1, tmp_path)
    held.put([entry("x", b"abc")], b"abc")
    arriving = Arriving(2, tmp_path, held=held)
    with pytest.raises(WeightsRefused, match=message):
        arriving.put([{**entry("x", body), "shape": [3], **told}], body)
    assert held.bytes_of("x") == b"abc"


def entry(name: str, body: bytes, **other: Any) -> dict[str, Any]:
    told = {"name": name, "shape": [len(body)], "dtype": "uint8", "checksum": zlib.crc32(body), "length": len(body)}
    return {**told, **other}


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda a: a.put([entry("x", b"abc", checksum=1)], b"abc"), "checksum"),
        (lambda a: a.put([entry("x", b"abc")], b"ab"), "checksum"),
        (lambda a: [a.put([entry("x", b"abc")], b"abc") for _ in range(2)], "twice"),
        (lambda a: a.put([entry("x", b"abc", dtype="complex64")], b"abc"), "complex64"),
        (lambda a: (a.put([entry("x", b"abc")], b"abc"), a.check(2)), "1 weights arrived of the 2"),
    ],
)
def test_the_host_refuses_what_is_not_what_was_sent(
    tmp_path: Path, put: Callable[[Arriving], Any], message: str
) -> None:
    with pytest.raises(WeightsRefused, match=message):
        put(Arriving(1, tmp_path))


def test_files_of_a_transaction_are_removed(tmp_path: Path) -> None:
    arriving = Arriving(1, tmp_path)
    arriving.put([entry("x", b"abc")], b"abc")
    assert len(list(tmp_path.iterdir())) == 1
    arriving.drop()
    assert list(tmp_path.iterdir()) == []


def test_sleep_is_refused_while_requests_run_and_requests_while_asleep(host: tuple[VllmSampler, FakeHost]) -> None:
    sampler, fake = host

    async def nap() -> None:
        waiting = asyncio.ensure_future(sampler.sample(prompt(WAITS), SamplingParams(max_tokens=4)))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="while requests run"):
            await sampler.sleep()
        waiting.cancel()
        await asyncio.wait([waiting])
        await sampler.sleep()
        with pytest.raises(RolloutError, match="wake"):
            await sampler.sample(prompt(5), SamplingParams(max_tokens=1))
        await sampler.wake()
        await sampler.sample(prompt(5), SamplingParams(max_tokens=1))

    asyncio.run(nap())
    assert [m["op"] for m in fake.heard] == ["sample", "abort", "sleep", "wake", "sample"]


# Who is at the other end


def door(key: bytes, tmp_path: Path, honest: bool = True) -> int:
    """A host's door on the loopback, for one caller."""
    listener = socket.create_server(("127.0.0.1", 0))

    def admit() -> None:
        wire, _ = listener.accept()
        wire.sendall(pack({"nonce": "n"}))
        length, _ = unpack_head(receive(wire, HEAD.size))
        message = unpack(receive(wire, length))
        if proves(message["proof"], key, "strop", "n"):
            wire.sendall(pack({"proof": proof(key if honest else b"", "host", message["nonce"])}))
            FakeHost(wire, tmp_path)
        else:
            wire.sendall(pack({"error": "wrong key"}))
        listener.close()

    threading.Thread(target=admit, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(("key", "honest"), [(b"ours", True), (b"other", True), (b"ours", False)])
def test_both_ends_prove_the_key(tmp_path: Path, key: bytes, honest: bool) -> None:
    (tmp_path / "key").write_text("ours\n")
    port = door(key, tmp_path, honest)
    config = VllmConfig(address=f"127.0.0.1:{port}", key_file=str(tmp_path / "key"), start_timeout_s=5)
    if key == b"ours" and honest:
        sampler = over(connect(config))
        assert len(sample(sampler).tokens) == 4
        sampler.close()
    else:
        with pytest.raises(RolloutError, match=r"keys of sampler\.vllm\.key_file differ"):
            connect(config)


def test_nobody_at_the_address_is_told_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = VllmConfig(address=f"127.0.0.1:{port}", key_file=__file__, start_timeout_s=0.2)
    with pytest.raises(RolloutError, match="did not answer in time"):
        connect(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VllmConfig(), "needs sampler.vllm.python"),
        (VllmConfig(python="/no/such/python"), "cannot be run"),
        (VllmConfig(address="127.0.0.1:1"), "key_file"),
    ],
)
def test_a_host_that_cannot_be_reached_is_a_mistake_of_the_recipe(config: VllmConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(config)


def test_a_host_that_ends_at_once_shows_what_it_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named vllm'\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(RolloutError, match="status 3") as caught:
        connect(VllmConfig(python=str(python)))
    assert "No module named vllm" in str(caught.value)


def test_frames_of_another_protocol_are_refused() -> None:
    with pytest.raises(FrameError, match="another protocol"):
        unpack_head(b"HTTP/1.1 200")
    with pytest.raises(FrameError, match="no object"):
        unpack(b"[1]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampler.kind=vllm"], "set sampler.vllm.python"),
        (["sampler.kind=vllm", "sampler.vllm={python: p, address: a, key_file: k}"], "not both"),
        (["sampler.kind=vllm", "sampler.vllm={address: a}"], "set sampler.vllm.key_file"),
        (["sampler.kind=vllm", "sampler.vllm={python: p}", "engine.adapter.rank=4"], ""),
        (["sampler.vllm={python: p}"], "sampler.kind is builtin"),
        (["sampler.kind=vllm", "sampler.vllm={python: p}"], ""),
        (["sampler.kind=vllm", "sampler.vllm={python: p}", "sampler.publish=delta"], ""),
    ],
)
def test_a_recipe_says_what_vllm_needs_beside_it(overrides: list[str], message: str) -> None:
    text = "model: {path: m}\ntasks: {source: python, path: t.py:f, holdout: 1}\ngrpo: {}\n"
    found = read_recipe(text, "r.yaml", overrides).conflicts()
    assert any(message in problem for problem in found) if message else not found
