"""A stand-in for an sglang server: it listens on the loopback, speaks the JSON of sglang 0.5.23, and draws with strop's
own sampler.

It behaves as that version's sources say, also where that is awkward: weights are read from a folder, with labels for
versions; the token at a position is drawn from the seed and the position; end tokens of the model end a request unless
`ignore_eos`, which silences stop tokens too; longer replies than it has room for are cut without an error.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from strop.errors import RolloutError, StropError
from strop.models.attention import NAME
from strop.models.loading import LanguageModel, prepare
from strop.rollout.builtin.draw import uniforms
from strop.rollout.builtin.rows import Request, Rows
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Completion, Prompt, SamplingParams, Stop

disable_progress_bar()  # of transformers, at each folder
Json = dict[str, Any]
Fault = Callable[[Json], bytes]
"""Given what would have been answered, what is sent instead, head and all; b"" hangs up."""
MASK_CAP = 4096


def http(status: int, body: bytes | Json, length: int | None = None) -> bytes:
    """A whole answer; `length` may be a lie."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


class BadRequest(Exception):
    """Answered with 400."""


class PositionalRows(Rows):
    """A token is drawn from (seed, position), so a text that is sent again goes on as it would have."""

    def enter(self, request: Request, pages: list[int], computed: int) -> int:
        row = super().enter(request, pages, computed)
        limit = request.num_prompt + request.params.max_tokens
        self._uniforms_RW[row, :limit] = uniforms(request.params.seed, limit)
        return row


class PausableSampler(BuiltinSampler):
    """Draws nothing while it is paused, or has taken the steps that it may take before new weights come."""

    paused = False
    steps_left: int | None = None

    async def _run(self) -> None:
        while self._scheduler.busy:
            if self.paused or self.steps_left == 0:
                await asyncio.sleep(0.001)
                continue
            if self.steps_left is not None:
                self.steps_left -= 1
            self._step()
            await asyncio.sleep(0)


class StandIn:
    """A server in a thread of its own, from the start on until `close`."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_running: int = 6,
        cache_tokens: int = 256,
        decode: Callable[[list[int]], str] | None = None,
        key: str = "",
        end_tokens: tuple[int, ...] = (2,),
        steps: int | None = None,
    ) -> None:
        self.model, self.key, self.end_tokens = model, key, end_tokens
        self.decode = decode
        self.sampler = PausableSampler(
            model, max_running=max_running, cache_tokens=cache_tokens, decode=decode, prefill_tokens=48
        )
        self.sampler.steps_left = steps
        self.sampler._scheduler.rows = PositionalRows(max_running, self.sampler._max_tokens)
        self.labels = ["default"]  # of the weights that came, by the sampler's own count
        self.info: Json = {
            "version": "0.5.23",
            "enable_deterministic_inference": True,
            "enable_memory_saver": True,
            "skip_tokenizer_init": False,
            "speculative_algorithm": None,
            "disaggregation_mode": "null",
            "max_req_input_len": model.max_length + 1,
        }
        self.model_info: Json = {
            "architectures": [type(model.module).__name__],
            "is_generation": True,
            "preferred_sampling_params": None,
        }
        self.heard: list[tuple[str, Json]] = []
        self.faults: dict[str, Fault] = {}  # by path, each for one answer
        self.running: dict[str, asyncio.Task[Completion]] = {}
        self.unhealthy = 0  # health checks that it still fails
        self._loop = asyncio.new_event_loop()
        self._going = asyncio.Event()
        self._going.set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.heard]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=1024))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, value in (line.split(": ") for line in head[1:] if line)}
            body = json.loads(await reader.readexactly(int(headers["content-length"])) or b"{}")
            self.heard.append((path, body))
            answer = self._answer(method, path, body, headers.get("authorization", ""))
            writer.write(await self._while_heard(answer, reader))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _while_heard(self, answer: Coroutine[Any, Any, bytes], reader: asyncio.StreamReader) -> bytes:
        """The answer, given up when the client hangs up first."""
        asked, gone = asyncio.ensure_future(answer), asyncio.ensure_future(reader.read(1))
        await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            return b""
        gone.cancel()
        return asked.result()

    async def _answer(self, method: str, path: str, body: Json, authorization: str) -> bytes:
        if self.key and not path.startswith("/health") and authorization != f"Bearer {self.key}":
            return http(401, {"error": "Unauthorized"})
        routes: dict[tuple[str, str], Callable[[Json], Coroutine[Any, Any, Json | None]]] = {
            ("GET", "/health_generate"): self._health,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/release_memory_occupation"): self._release,
            ("POST", "/resume_memory_occupation"): self._resume,
        }
        if (method, path) not in routes:
            return http(404, {"detail": "Not Found"})
        try:
            found = await routes[method, path](body)
        except BadRequest as error:
            return http(400, {"error": {"message": str(error)}})
        except (StropError, AssertionError) as error:
            return http(500, {"error": {"message": repr(error)}})
        if (fault := self.faults.pop(path, None)) is not None:
            return fault(found or {})
        if path == "/health_generate" and found is None:
            return http(503, b"")
        if path == "/update_weights_from_disk" and found is not None and not found["success"]:
            return http(400, found)
        return http(200, b"null" if found is None else found)

    async def _health(self, _: Json) -> Json | None:
        self.unhealthy -= 1
        return None if self.unhealthy >= 0 else {}

    async def _server_info(self, _: Json) -> Json:
        return self.info

    async def _model_info(self, _: Json) -> Json:
        return {**self.model_info, "weight_version": self.labels[-1]}

    async def _pause(self, body: Json) -> Json:
        assert body["mode"] == "retract"
        self._going.clear()
        self.sampler.paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, _: Json) -> Json:
        self.sampler.paused = False
        self._going.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _update(self, body: Json) -> Json:
        busy = bool(self.running) and not self.sampler.paused
        assert body["load_format"] == "safetensors" and body["flush_cache"] is True
        try:
            weights = self._read(Path(body["model_path"]))
            await self.sampler.load_weights(weights.items(), len(self.labels))
        except (OSError, ValueError, StropError) as error:
            return {"success": False, "message": f"Failed to update weights: {error}.", "num_paused_requests": 0}
        self.labels.append(body["weight_version"])
        self.sampler.steps_left = None
        said = "the cache was not flushed because requests are still running" if busy else "Succeeded to update"
        return {"success": not busy, "message": said, "num_paused_requests": 0}

    def _read(self, folder: Path) -> Json:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.model.dtype, attn_implementation=NAME, output_loading_info=True, local_files_only=True
        )
        module, told = loaded
        if strange := [*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"]]:
            raise ValueError(f"not the model's weights: {strange}")
        return dict(prepare(module, self.model.impl).state())

    async def _release(self, body: Json) -> None:
        assert body["tags"] == ["kv_cache"] and not self.running
        await self.sampler.sleep()

    async def _resume(self, body: Json) -> None:
        assert body["tags"] == ["kv_cache"]
        await self.sampler.wake()

    async def _abort(self, body: Json) -> Json:
        if body["rid"] in self.running:
            self.running[body["rid"]].cancel()
        return {}

    async def _generate(self, body: Json) -> Json:
        await self._going.wait()
        name, prompt, asked = body["rid"], np.array(body["input_ids"], np.int32), body["sampling_params"]
        if len(prompt) >= self.info["max_req_input_len"]:
            raise BadRequest(f"The input ({len(prompt)} tokens) is longer than the model's context length")
        if asked["max_new_tokens"] == 0:
            return await self._score(name, prompt)
        params = self._params(asked, len(prompt))
        self._check_mask(body, asked)
        task = asyncio.ensure_future(self.sampler.sample(Prompt(prompt), params))
        self.running[name] = task
        try:
            drawn = await task
        except asyncio.CancelledError:
            if not task.cancelled():  # it is this one that was
                task.cancel()
                raise
            return self._meta(name, prompt, {"type": "abort", "message": "Abort in waiting queue"}, [])
        finally:
            del self.running[name]
        rows = [[float(p), int(t), None] for p, t in zip(drawn.logprobs, drawn.tokens, strict=True)]
        answer = self._meta(name, prompt, self._reason(drawn, params), rows)
        answer["output_ids"] = drawn.tokens.tolist()
        answer["text"] = "" if self.decode is None else self.decode(drawn.tokens.tolist())
        answer["meta_info"]["weight_versions"] = self._spans(drawn)
        answer["meta_info"]["weight_version"] = answer["meta_info"]["weight_versions"][-1]["version"]
        if body.get("return_sampling_mask"):
            answer["meta_info"]["output_token_sampling_logprobs"] = drawn.sampling_logprobs.tolist()
        return answer

    def _params(self, asked: Json, num_prompt: int) -> SamplingParams:
        assert not (asked["min_p"] and asked["temperature"]), "multinomial_with_seed will provide wrong results"
        ends = () if asked["ignore_eos"] else (*asked.get("stop_token_ids", ()), *self.end_tokens)
        room = self.info["max_req_input_len"] + 5 - num_prompt - 1
        return SamplingParams(
            max_tokens=min(asked["max_new_tokens"], room),
            temperature=asked["temperature"],
            top_k=max(asked["top_k"], 0),
            top_p=asked["top_p"],
            stop_tokens=ends,
            stop_strings=tuple(asked.get("stop", ())),
            seed=asked["sampling_seed"],
        )

    def _check_mask(self, body: Json, asked: Json) -> None:
        if body.get("return_sampling_mask") and not 1 <= asked["top_k"] <= MASK_CAP:
            raise BadRequest(f"return_sampling_mask requires finite 1 < top_k <= {MASK_CAP}")

    def _reason(self, drawn: Completion, params: SamplingParams) -> Json:
        if drawn.stop is Stop.LENGTH:
            return {"type": "length", "length": params.max_tokens}
        last = int(drawn.tokens[-1])
        if last in params.stop_tokens or self.decode is None:
            return {"type": "stop", "matched": last}
        text = self.decode(drawn.tokens.tolist())
        return {"type": "stop", "matched": next(string for string in params.stop_strings if string in text)}

    def _spans(self, drawn: Completion) -> list[Json]:
        cuts = np.flatnonzero(np.diff(drawn.versions)) + 1
        edges = [0, *cuts.tolist(), len(drawn.versions)]
        return [
            {"version": self.labels[int(drawn.versions[start])], "start": start, "end": end}
            for start, end in pairwise(edges)
        ]

    async def _score(self, name: str, prompt: np.ndarray) -> Json:
        try:
            scores = await self.sampler.score(Prompt(prompt))
        except RolloutError as error:
            raise BadRequest(str(error)) from error
        answer = self._meta(name, prompt, {"type": "length", "length": 0}, [])
        rows = [[float(p), int(t), None] for p, t in zip(scores, prompt, strict=True)]
        answer["meta_info"]["input_token_logprobs"] = [[None, *rows[0][1:]], *rows[1:]]
        return answer

    def _meta(self, name: str, prompt: np.ndarray, reason: Json, rows: list[list[Any]]) -> Json:
        meta = {
            "id": name,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.labels[-1],
            "num_retractions": 0,
            "completion_tokens": len(rows),
            "input_token_logprobs": [],
            "output_token_logprobs": rows,
            "output_token_logprobs_length": len(rows),
        }
        return {"text": "", "output_ids": [], "meta_info": meta}


def edited(change: Callable[[Json], object]) -> Fault:
    """An answer with its `meta_info` changed in place."""

    def fault(answer: Json) -> bytes:
        change(answer["meta_info"])
        return http(200, answer)

    return fault
