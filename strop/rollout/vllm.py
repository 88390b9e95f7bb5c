"""vLLM as a Sampler: a process of another Python draws, and this is strop's end of the wire to it.

    Prompt, SamplingParams -> prompt ids and numbers -> vLLM -> tokens, logprobs, versions -> Completion
    (name, tensor) ... -> begin, put, put, ..., end -> vLLM, between two steps

With `deltas` what changed in a tensor is sent, where that is less; both ends then keep a copy of what was sent last.

vLLM is never imported here: it pins other versions of what strop stands on. `vllm_host/` is its end, which adds to
vLLM's sampler what training needs to know of each token.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from strop.config.vllm import VllmConfig
from strop.data.routes import unknown
from strop.errors import EngineError, RolloutError, StropError
from strop.models.attention import PackedAttention
from strop.models.experts import Form
from strop.models.saved import export_weights, import_weights
from strop.ops.logprobs import Head, HeadImpl, score_targets
from strop.rollout.base import check_bounds
from strop.rollout.delta import delta_of
from strop.rollout.transfer import BUCKET_BYTES
from strop.rollout.vllm_link import Link, connect
from strop.tokens.stops import StopStrings
from strop.types import Completion, Float32s, Layout, Prompt, Routes, SamplingParams, Stop

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.loading import LanguageModel
    from strop.rollout.vllm_host.frames import Message

BLOCK = 32  # tokens in one block of vLLM's cache
COLDEST = 0.01  # vLLM raises temperatures between 0 and this one, without an error
PROBE = 24  # tokens of the text that both score at the start
PROBE_GAP, COARSE_GAP = 0.01, 0.1  # mean difference at the most: rounding is far below, weights of another model above
Shape = tuple[tuple[int, ...], torch.dtype]
Steps = Generator[tuple["Message", bytes], "Message | None", None]  # what to send, the answer to it, what to send next


@dataclass(frozen=True, slots=True)
class Routed:
    """What vLLM says of a model's experts; `problem` where that is nothing."""

    layers: tuple[int, ...]
    top_k: int
    problem: str

    def read(self, answer: Message, count: int) -> Routes:
        """Of a text's first `count` tokens, and of the one after them, which was drawn and never computed."""
        experts = np.frombuffer(base64.b64decode(answer["experts"]), np.int16)
        known = Routes(self.layers, experts.reshape(-1, len(self.layers), self.top_k))
        if len(known) != count:
            raise RolloutError(f"vLLM computed {count} tokens of a request and tells the experts of {len(known)}")
        return known.resumed(unknown(count + 1, self.layers, self.top_k))


class VllmSampler:
    """A `Sampler` over one vLLM engine. `shapes` are of the weights that it takes, under Hugging Face names; `module`,
    which holds no memory, knows how checkpoints hold them."""

    def __init__(
        self,
        link: Link,
        *,
        shapes: dict[str, Shape],
        max_length: int,
        cache_tokens: int,
        vocab_size: int,
        decode: Callable[[list[int]], str] | None = None,
        casts: bool = False,
        deltas: bool = False,
        module: PreTrainedModel | None = None,
        ties: dict[str, list[str]] | None = None,
    ) -> None:
        self._link = link
        self._module = module
        self._ties = ties or {}
        self._shapes = shapes
        self._max_length = max_length
        self._cache_tokens = cache_tokens
        self._vocab_size = vocab_size
        self._decode = decode
        self._casts = casts
        self._deltas = deltas
        self._serial = 0
        self._sent: tuple[int, dict[str, Tensor]] | None = None  # the last transaction that ended, with `deltas`
        self._version = 0
        self._running = 0
        self._asleep = False
        self._routed = Routed((), 0, "")

    @classmethod
    def start(
        cls,
        model: LanguageModel,
        config: VllmConfig,
        *,
        max_running: int,
        cache_tokens: int,
        decode: Callable[[list[int]], str] | None = None,
        casts: bool = False,
        deltas: bool = False,
    ) -> VllmSampler:
        """Start or reach vLLM, and give it the model's architecture and weights, as version 0. The model is not kept.

        RolloutError when vLLM does not start, does not know the architecture, or computes something else with it.
        """
        max_length = min(config.max_model_len or model.max_length, model.max_length)
        options = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": min(max_length, cache_tokens),
            "max_num_seqs": max_running,
            "block_size": BLOCK,
            "num_gpu_blocks_override": -(-cache_tokens // BLOCK) + 1,  # vLLM keeps one for itself
            "enforce_eager": config.eager,
            "tensor_parallel_size": config.tensor_parallel,
        }
        described = json.loads(model.config.to_json_string(use_diff=False))  # versions differ in what is a default
        described |= {"architectures": [type(model.module).__name__], "tie_word_embeddings": False}
        with torch.device("meta"):
            module = type(model.module)(model.config)
        sampler = cls(
            connect(config),
            module=module,
            ties=_ties(model.module),
            shapes={name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state()},
            max_length=max_length,
            cache_tokens=cache_tokens,
            vocab_size=model.vocab_size,
            decode=decode,
            casts=casts,
            deltas=deltas,
        )
        try:
            started = sampler._link.ask({"op": "start", "options": options, "config": described})
            told = started.result(config.start_timeout_s)["routes"]
            sampler._routed = Routed(tuple(told["layers"]), told["top_k"], told["problem"])
            steps, reply = sampler._transaction(model.state(), 0), None
            while (step := _next(steps, reply)) is not None:
                reply = sampler._link.ask(*step).result(config.start_timeout_s)
            sampler._probe(model, config.start_timeout_s)
        except TimeoutError as error:
            sampler.close()
            raise RolloutError(
                f"vLLM was not ready after {config.start_timeout_s:g} s: see sampler.vllm.start_timeout_s"
            ) from error
        except StropError:
            sampler.close()
            raise
        return sampler

    @property
    def version(self) -> int:
        return self._version

    @property
    def serves_adapter(self) -> bool:
        return False

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self._check(prompt, params)
        message: Message = {
            "op": "sample",
            "prompt": prompt.tokens.tolist(),
            "stream": bool(params.stop_strings),
            "routes": params.routes,
            "params": {
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "seed": params.seed % (1 << 63),
                "stop_token_ids": list(params.stop_tokens),
            },
        }
        replies: asyncio.Queue[Message | RolloutError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def take(reply: Message | RolloutError) -> None:
            loop.call_soon_threadsafe(replies.put_nowait, reply)

        number = self._link.tell(message, take)
        self._running += 1
        recorded = params.routes
        try:
            completion = await self._collect(replies, params)
            if params.routes:
                count = len(prompt.tokens) + len(completion.tokens) - 1
                answer = self._link.ask({"op": "routes", "of": number, "count": count})
                recorded = False  # whoever takes them ends the record
                completion = replace(completion, routes=self._routed.read(await asyncio.wrap_future(answer), count))
            return completion
        finally:
            self._running -= 1
            self._link.abandon(number, recorded)  # where it was cancelled, or ended by a stop string

    async def score(self, prompt: Prompt) -> Float32s:
        self._check_tokens(prompt, 1)
        message = {"op": "score", "prompt": prompt.tokens.tolist()}
        reply = await asyncio.wrap_future(self._link.ask(message))
        return np.array(reply["logprobs"], np.float32)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        steps, reply = self._transaction(weights, version), None
        while (step := _next(steps, reply)) is not None:
            reply = await asyncio.wrap_future(self._link.ask(*step))
        self._version = version

    async def sleep(self) -> None:
        if self._running:
            raise RolloutError("the sampler was told to sleep while requests run; await or cancel them first")
        await asyncio.wrap_future(self._link.ask({"op": "sleep"}))
        self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            await asyncio.wrap_future(self._link.ask({"op": "wake"}))
            self._asleep = False

    def close(self) -> None:
        """End vLLM, where it was started here, or leave it."""
        self._link.close()

    async def _collect(self, replies: asyncio.Queue[Message | RolloutError], params: SamplingParams) -> Completion:
        matcher = None
        if params.stop_strings and self._decode is not None:
            matcher = StopStrings(params.stop_strings, self._decode).start()
        rows: list[tuple[int, float, float, int]] = []
        while True:
            reply = await replies.get()
            if isinstance(reply, RolloutError):
                raise reply
            columns = (reply["tokens"], reply["logprobs"], reply["sampling_logprobs"], reply["versions"])
            for row in zip(*columns, strict=True):
                rows.append(row)
                if matcher is not None and matcher.push(row[0]):
                    return _completion(rows, params, Stop.TOKEN)
            if reply["last"]:
                if reply["reason"] not in ("stop", "length"):
                    raise RolloutError(f"vLLM ended a request for {reply['reason']!r}, after {len(rows)} tokens")
                stopped = rows[-1][0] in params.stop_tokens
                return _completion(rows, params, Stop.TOKEN if stopped else Stop.LENGTH)

    def _transaction(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Steps:
        """Messages to send, each when the one before it was answered. EngineError before the last one, and so before
        anything is used, when the weights are not the model's."""
        self._serial += 1
        serial, (base, before) = self._serial, self._sent or (None, None)
        begin = {"op": "begin", "version": version, "serial": serial}
        answer = yield {**begin, "base": base}, b""
        if before is not None and answer is not None and not answer["has"]:
            before = None
            yield {**begin, "base": None}, b""
        missing, count, sent = set(self._shapes), 0, {}
        published = self._published(self._fitting(weights, missing))
        for entries, body in _buckets(_kept(published, sent) if self._deltas else published, before or {}):
            count += len(entries)
            yield {"op": "put", "entries": entries}, body
        if missing:
            raise EngineError(f"these weights are not the sampler's model: missing {', '.join(sorted(missing)[:5])}")
        yield {"op": "end", "count": count, "keep": self._deltas}, b""
        if self._deltas:
            self._sent = serial, sent

    def _fitting(self, weights: Iterable[tuple[str, Tensor]], missing: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, each once; they leave `missing`."""
        for name, tensor in weights if self._module is None else import_weights(self._module, weights):
            if name not in self._shapes:
                raise EngineError(f"these weights are not the sampler's model: unknown {name}")
            shape, dtype = self._shapes[name]
            if self._casts and tensor.is_floating_point() and dtype.is_floating_point:
                tensor = tensor.to(dtype)
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise EngineError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the sampler's is {shape} {dtype}")
            missing.discard(name)
            yield name, tensor

    def _published(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """As checkpoints of the architecture hold them, and vLLM reads them: experts one by one, and a tied head beside
        the embedding. vLLM would tie it too, but on processors it keeps a copy of its own, which no update reaches."""
        every = ((each, tensor) for name, tensor in weights for each in (name, *self._ties.get(name, [])))
        return every if self._module is None else export_weights(self._module, every, Form.SAVED)

    def _probe(self, model: LanguageModel, patience_s: float) -> None:
        """Both score a random text. A weight that arrived and was put nowhere, or a layer that vLLM computes in another
        way, shows here; RolloutError then, since nothing that it draws would be the model's."""
        count = min(PROBE, self._max_length - 1, self._cache_tokens - 1)
        tokens_T = np.random.default_rng(0).integers(0, self._vocab_size, count)
        reply = self._link.ask({"op": "score", "prompt": tokens_T.tolist()}).result(patience_s)
        found, expected = np.array(reply["logprobs"]), _scored(model, torch.from_numpy(tokens_T))
        gap = float(np.abs(found - expected).mean())
        if not gap <= (PROBE_GAP if model.dtype == torch.float32 else COARSE_GAP):  # NaN neither
            raise RolloutError(
                f"vLLM does not compute {type(model.module).__name__} as strop does: of a text of {count} tokens their "
                f"logprobs are {gap:.3g} apart in the mean"
            )

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RolloutError for a request that cannot be run, before it is sent."""
        if params.max_tokens < 1:
            raise RolloutError(f"max_tokens={params.max_tokens}: a completion has at least one token")
        if params.routes and not self._routed.layers:
            raise RolloutError(
                f"vLLM does not tell which experts this model's tokens take: {self._routed.problem}; leave "
                "SamplingParams.routes, and router_replay rollout, off"
            )
        if params.stop_strings and self._decode is None:
            raise RolloutError(f"stop strings {params.stop_strings} need a sampler that was given `decode`")
        if 0 < params.temperature < COLDEST:
            raise RolloutError(
                f"temperature {params.temperature}: vLLM draws below {COLDEST} as at {COLDEST}; set 0 for greedy"
            )
        check_bounds(params)
        self._check_tokens(prompt, params.max_tokens)

    def _check_tokens(self, prompt: Prompt, max_tokens: int) -> None:
        if self._asleep:
            raise RolloutError("the sampler sleeps; call wake() before sample()")
        count = len(prompt.tokens)
        if count == 0:
            raise RolloutError("an empty prompt has nothing to continue; give at least one token")
        if count + max_tokens > self._max_length:
            raise RolloutError(
                f"a prompt of {count} tokens and max_tokens={max_tokens} need {count + max_tokens} positions; "
                f"the model has {self._max_length}"
            )
        if count + max_tokens > self._cache_tokens:
            raise RolloutError(
                f"a prompt of {count} tokens and max_tokens={max_tokens} need a cache of {count + max_tokens} tokens; "
                f"cache_tokens is {self._cache_tokens}"
            )
        low, high, last = int(prompt.tokens.min()), int(prompt.tokens.max()), self._vocab_size - 1
        if low < 0 or high > last:
            raise RolloutError(f"a prompt with token ids from {low} to {high}; the model has ids 0 to {last}")


@torch.no_grad()
def _scored(model: LanguageModel, tokens_T: Tensor) -> Float32s:
    """What `score` is to give: each token's logprob after those before it; 0 for the first."""
    count, token_T = len(tokens_T), tokens_T.to(model.device)
    position_T = torch.arange(count, device=model.device)
    hidden_TD = model.hidden(token_T, position_T, PackedAttention(Layout((count,)), model.impl))
    head = Head(weight_VD=model.head.weight, bias_V=model.head.bias, softcap=model.softcap)
    scored = score_targets(hidden_TD[:-1], head, token_T[1:], impl=HeadImpl.CHUNKED)
    return np.concatenate((np.zeros(1, np.float32), scored.logprobs_N.float().cpu().numpy()))


def _ties(module: PreTrainedModel) -> dict[str, list[str]]:
    """The other names of weights that have several, by their first."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _completion(rows: list[tuple[int, float, float, int]], params: SamplingParams, stop: Stop) -> Completion:
    tokens, logprobs, sampling, versions = zip(*rows, strict=True)
    if np.isnan(logprobs).any():
        raise RolloutError("the model's logits were not finite numbers; look at its weights")
    drawn_with = np.array(sampling, np.float32)
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        sampling_logprobs=drawn_with if params.temperature > 0 else np.zeros_like(drawn_with),
        versions=np.array(versions, np.int32),
        stop=stop,
    )


def _next(steps: Steps, reply: Message | None) -> tuple[Message, bytes] | None:
    """What to send after this answer; None at the end."""
    try:
        return steps.send(reply)
    except StopIteration:
        return None


def _kept(weights: Iterable[tuple[str, Tensor]], sent: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies, which stay in `sent`."""
    for name, tensor in weights:
        sent[name] = tensor.detach().to("cpu", copy=True)
        yield name, sent[name]


def _buckets(
    weights: Iterable[tuple[str, Tensor]], before: dict[str, Tensor]
) -> Iterator[tuple[list[dict[str, Any]], bytes]]:
    """Tensors' bytes, some megabytes at a time, and what they are; of those that were sent before what changed, where
    that is less."""
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    held = 0
    for name, tensor in weights:
        whole = _bytes(tensor)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        entry: dict[str, Any] = {"name": name, "shape": shape, "dtype": dtype, "checksum": zlib.crc32(whole)}
        part = whole
        if name in before and (delta := delta_of(name, before[name], tensor)).num_bytes < len(whole):
            part = _bytes(delta.indices_N) + _bytes(delta.values_N)
            entry["changed"] = len(delta.indices_N)
        entries.append({**entry, "length": len(part)})
        parts.append(part)
        held += len(part)
        if held >= BUCKET_BYTES:
            yield entries, b"".join(parts)
            entries, parts, held = [], [], 0
    if entries:
        yield entries, b"".join(parts)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
