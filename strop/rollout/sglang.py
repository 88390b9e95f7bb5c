"""A running sglang server as a Sampler, over its HTTP API.

    Prompt, SamplingParams -> POST /generate -> tokens, logprobs, the weights of each -> Completion
    (name, tensor) ... -> a folder of safetensors -> pause, update from disk, continue -> the next version

It follows the HTTP API of sglang 0.5.23, as that version's sources have it. No sglang server was ever spoken to from
here: the tests run against a stand-in that speaks the same JSON. sglang is never imported, and it is started by hand:

    python -m sglang.launch_server --model-path FOLDER --enable-deterministic-inference --enable-memory-saver

Weights go by way of a folder that both ends see, because `/update_weights_from_tensor` takes pickled tensors, and
strop neither writes pickle nor asks anybody to read it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from strop.config.sglang import SglangConfig
from strop.errors import EngineError, RolloutError, StropError
from strop.rollout.folder import Policy
from strop.rollout.sglang_link import Json, Link, Refused
from strop.rollout.sglang_server import Server, reach
from strop.rollout.sglang_wire import Drawn, check_params, generate_body, read_drawn, read_scores, score_body
from strop.tokens.stops import StopStrings
from strop.types import Completion, Float32s, Prompt, SamplingParams, Stop

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.loading import LanguageModel

ABORT_S = 10.0

T = TypeVar("T")


class SglangSampler:
    """A `Sampler` over one server. What its weights were before the first `load_weights` does not matter.

    `folder` is seen by both ends under the same path; at most `max_running` requests are at the server at once.
    """

    def __init__(
        self,
        link: Link,
        policy: Policy,
        server: Server,
        *,
        folder: Path,
        max_running: int,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._link, self._policy, self._server = link, policy, server
        self._folder, self._max_running = folder, max_running
        self._decode = decode
        self._run = secrets.token_hex(4)  # so that weights of another run are told from ours
        self._serial = 0
        self._served: Path | None = None
        self._version = 0
        self._running = 0
        self._asleep = False
        self._unusable = "it was given no weights yet"
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @classmethod
    def start(
        cls,
        model: LanguageModel,
        config: SglangConfig,
        *,
        max_running: int,
        decode: Callable[[list[int]], str] | None = None,
        casts: bool = False,
    ) -> SglangSampler:
        """Wait until the server is healthy, check what it can do, and give it the model's weights as version 0.

        The model is not kept. RolloutError when there is no server; ConfigError when it was started without what
        sampling for training needs, or with another architecture.
        """
        link, policy = Link(config), Policy.of(model, casts)
        server = _wait_for(reach(link, policy.architecture, config.start_timeout_s))
        folder = Path(config.weights_folder).expanduser().absolute() if config.weights_folder else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="strop-sglang-", dir=folder))
        if folder is not None:
            made.chmod(0o755)  # the server may run as somebody else
        sampler = cls(link, policy, server, folder=made, max_running=max_running, decode=decode)
        try:
            _wait_for(sampler.load_weights(model.state(), 0))
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
        check_params(params)
        self._check_stop_strings(params)
        self._check_tokens(prompt, params.max_tokens)
        self._running += 1
        try:
            async with self._a_place():
                return self._completion(await self._draw(prompt.tokens.tolist(), params))
        finally:
            self._running -= 1

    async def score(self, prompt: Prompt) -> Float32s:
        self._check_tokens(prompt, 0)
        self._running += 1
        try:
            async with self._a_place():
                answer = await self._link.post("/generate", score_body(uuid.uuid4().hex, prompt.tokens.tolist()))
            return read_scores(answer, prompt.tokens)
        finally:
            self._running -= 1

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As the protocol says; all is checked and on disk before the server hears of it. One transaction: running
        requests are taken back into its queue, weights and cache are replaced, requests go on.

        EngineError when the weights are not the model's, or the server could not load them. After the latter it is not
        known what the server holds, so nothing is drawn before weights arrive whole.
        """
        self._serial += 1
        folder, old, arrived = self._folder / f"{self._serial:06}-v{version}", self._served, False
        await self._policy.write(weights, folder)
        try:
            await self._update(folder, f"{self._run}-{version}")
            arrived = True
        finally:
            self._unusable = "" if arrived else "its last update failed, so it is not known what it holds"
            if (useless := old if arrived else folder) is not None:
                shutil.rmtree(useless, ignore_errors=True)
        self._served, self._version = folder, version

    async def sleep(self) -> None:
        if self._running:
            raise RolloutError("the sampler was told to sleep while requests run; await or cancel them first")
        if not self._server.frees_memory:
            raise RolloutError("this sglang server cannot give memory back: start it with --enable-memory-saver")
        if not self._asleep:
            await self._link.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            await self._link.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
            self._asleep = False

    def close(self) -> None:
        """Remove the weights that were written. The server goes on, with what it has."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _draw(self, prompt: list[int], params: SamplingParams) -> list[Drawn]:
        """A completion in parts: more than one where the server ended at an end token that nobody asked for. It draws
        the token at a position from the seed and the position alone, so the parts are as one."""
        parts: list[Drawn] = []
        tokens = list(prompt)
        matcher = None
        if params.stop_strings and self._decode is not None:
            matcher = StopStrings(params.stop_strings, self._decode).start()
        while not parts or parts[-1].stop is None:
            left = params.max_tokens + len(prompt) - len(tokens)
            part = read_drawn(await self._generate(tokens, params, left), params, left)
            if matcher is not None:  # what a stop string is, strop says: the server may see it late
                ends = next((n for n, token in enumerate(part.tokens.tolist(), 1) if matcher.push(token)), None)
                if ends is not None:
                    part = part.first(ends, Stop.TOKEN)
                elif part.stop is Stop.TOKEN and int(part.tokens[-1]) not in params.stop_tokens:
                    raise RolloutError(
                        f"sglang found one of {params.stop_strings} where the tokens do not spell it: is its tokenizer "
                        "the model's?"
                    )
            parts.append(part)
            tokens += part.tokens.tolist()
        return parts

    async def _generate(self, tokens: list[int], params: SamplingParams, max_tokens: int) -> Json:
        name = uuid.uuid4().hex
        try:
            return await self._link.post("/generate", generate_body(name, tokens, params, max_tokens))
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._abort(name))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, name: str) -> None:
        with suppress(RolloutError):  # the server sees by itself, later, that nobody waits
            await self._link.post("/abort_request", {"rid": name}, ABORT_S)

    def _completion(self, parts: list[Drawn]) -> Completion:
        self._check_usable()  # an update may have failed meanwhile
        stop = parts[-1].stop
        assert stop is not None
        versions = [self._version_of(label) for part in parts for label in part.labels]
        return Completion(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            sampling_logprobs=np.concatenate([part.sampling_logprobs for part in parts]),
            versions=np.array(versions, np.int32),
            stop=stop,
        )

    def _version_of(self, label: str) -> int:
        run, _, version = label.rpartition("-")
        if run != self._run or not version.isdecimal():
            raise RolloutError(
                f"the sglang server at {self._link} drew with weights {label!r}, which this run did not give it: it "
                "serves one run at a time"
            )
        return int(version)

    async def _update(self, folder: Path, label: str) -> None:
        body: Json = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": label,
            "flush_cache": True,
        }
        await self._link.post("/pause_generation", {"mode": "retract"})
        try:
            answer = await self._link.post("/update_weights_from_disk", body)
        except Refused as error:
            raise EngineError(f"the sglang server did not load {folder}: {error}") from error
        finally:
            await self._link.post("/continue_generation", {})
        info = await self._link.get("/model_info")
        if answer.get("success") is not True or info.get("weight_version") != label:
            raise EngineError(
                f"the sglang server should serve {label} and says {info.get('weight_version')!r}; it said: {answer}"
            )

    def _a_place(self) -> asyncio.Semaphore:
        """One for the event loop that runs: requests beyond `max_running` wait here."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self._max_running))
        return self._gate[1]

    def _check_usable(self) -> None:
        if self._unusable:
            raise RolloutError(f"the sglang server at {self._link} is not to be asked: {self._unusable}")

    def _check_stop_strings(self, params: SamplingParams) -> None:
        if params.stop_strings and self._decode is None:
            raise RolloutError(f"stop strings {params.stop_strings} need a sampler that was given `decode`")
        if params.stop_strings and not self._server.decodes:
            raise RolloutError("stop strings need a server that was started without --skip-tokenizer-init")

    def _check_tokens(self, prompt: Prompt, max_tokens: int) -> None:
        if self._asleep:
            raise RolloutError("the sampler sleeps; call wake() before sample()")
        self._check_usable()
        count = len(prompt.tokens)
        if count == 0:
            raise RolloutError("an empty prompt has nothing to continue; give at least one token")
        for limit, who in ((self._policy.max_length, "the model"), (self._server.max_length, "the server")):
            if count + max_tokens > limit:
                raise RolloutError(
                    f"a prompt of {count} tokens and max_tokens={max_tokens} need {count + max_tokens} positions; "
                    f"{who} has {limit}"
                )
        low, high, last = int(prompt.tokens.min()), int(prompt.tokens.max()), self._policy.vocab_size - 1
        if low < 0 or high > last:
            raise RolloutError(f"a prompt with token ids from {low} to {high}; the model has ids 0 to {last}")


def _wait_for(asked: Coroutine[Any, Any, T]) -> T:
    """The result, for code that may be inside an event loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, asked).result()
