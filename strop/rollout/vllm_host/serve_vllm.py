"""vLLM for one strop process: run by a Python that has vLLM, which need not be the one that has strop.

    python serve_vllm.py --socket PATH < key            started by strop itself
    python serve_vllm.py --listen HOST:PORT --key-file KEY    started by hand, reached by `sampler.vllm.address`

The first message says which model to build; its weights arrive like every later version. Requests are answered as
they end, or token by token where strop looks for stop strings. When strop is gone, so is this. A failure that vLLM
does not declare as the request's own ends the process, and so is seen.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from arriving import Arriving, WeightsRefused
from frames import HEAD, Message, pack, proof, proves, unpack, unpack_head
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError
from worker_parts import COLUMNS
from worker_routes import ASKED

REFUSED = (ValueError, VLLMClientError, EngineGenerateError)  # a request's own fault: the others go on


class Host:
    """One engine, one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, folder: Path) -> None:
        self._reader, self._writer, self._folder = reader, writer, folder
        self._engine: AsyncLLM | None = None
        self._arriving: Arriving | None = None
        self._held: Arriving | None = None  # what changes are relative to, where changes are sent
        self._running: dict[int, asyncio.Task[None]] = {}
        self._recorded: set[int] = set()  # requests whose experts the worker keeps
        self._in_order: dict[str, Callable[[Message, bytes], Awaitable[Message]]] = {
            "start": self._start, "begin": self._begin, "put": self._put, "drop": self._drop, "end": self._end,
            "sleep": self._sleep, "wake": self._wake,
        }  # fmt: skip

    @property
    def engine(self) -> AsyncLLM:
        if self._engine is None:
            raise ValueError("no engine was started")
        return self._engine

    async def run(self) -> None:
        """Until strop closes the connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        message, body = await receive(self._reader)
                    except (asyncio.IncompleteReadError, ConnectionError):
                        break
                    await self._take(message, body, tasks)
                for task in self._running.values():
                    task.cancel()
        finally:
            if self._engine is not None:
                self._engine.shutdown()

    async def _take(self, message: Message, body: bytes, tasks: asyncio.TaskGroup) -> None:
        number, op = int(message["id"]), message["op"]
        if op == "abort":
            of = int(message["of"])
            if (task := self._running.get(of)) is not None:
                task.cancel()
            if of in self._recorded:
                tasks.create_task(self._recorded_of(of, 0))
        elif op in ("sample", "score", "routes"):
            work = {"sample": self._sample, "score": self._score, "routes": self._routes}[op]
            task = tasks.create_task(self._answer(number, work(number, message)))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        else:
            await self._answer(number, self._in_order[op](message, body))

    async def _answer(self, number: int, work: Awaitable[Message]) -> None:
        try:
            answer = await work
        except REFUSED as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._send({"id": number, "last": True, **answer})
        await self._writer.drain()

    def _send(self, message: Message) -> None:
        self._writer.write(pack(message))

    async def _start(self, message: Message, _: bytes) -> Message:
        model = self._folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(message["config"]), "utf-8")
        options = AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",
            worker_extension_cls="worker_parts.StropWorker",
            disable_log_stats=True,
            enable_log_requests=False,
            max_logprobs=COLUMNS,
            kv_cache_memory_bytes=1 << 20,  # the number of blocks below says how large the cache is, and this nothing
            **message["options"],
        )
        self._engine = AsyncLLM.from_engine_args(options)
        problems = {found for found in await self._engine.collective_rpc("strop_install") if found}
        if problems:
            raise ValueError("; ".join(problems))
        layers, top_k, problem = (await self._engine.collective_rpc("strop_record_routes"))[0]
        return {"routes": {"layers": layers, "top_k": top_k, "problem": problem}}

    async def _sample(self, number: int, message: Message) -> Message:
        streams = bool(message["stream"])
        params = SamplingParams(
            logprobs=COLUMNS,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
            extra_args={ASKED: number} if message["routes"] else None,
            **message["params"],
        )
        if message["routes"]:
            self._recorded.add(number)
        last: Message = {}
        async for output in self.engine.generate({"prompt_token_ids": message["prompt"]}, params, str(number)):
            (drawn,) = output.outputs
            tokens = list(drawn.token_ids)
            last = {"tokens": tokens, **columns(drawn.logprobs, len(tokens)), "reason": drawn.finish_reason}
            if streams and not output.finished:
                self._send({"id": number, "last": False, **last})
        return last

    async def _score(self, number: int, message: Message) -> Message:
        params = SamplingParams(
            prompt_logprobs=0, flat_logprobs=True, max_tokens=1, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        scored: list[float] = []
        async for output in self.engine.generate({"prompt_token_ids": message["prompt"]}, params, str(number)):
            scored = [0.0, *output.prompt_logprobs.logprobs]
        return {"logprobs": scored}

    async def _routes(self, _: int, message: Message) -> Message:
        """The experts of a request's first tokens; where it still runs it ends."""
        of = int(message["of"])
        if (task := self._running.get(of)) is not None:
            task.cancel()
        return {"experts": base64.b64encode(await self._recorded_of(of, int(message["count"]))).decode()}

    async def _recorded_of(self, number: int, count: int) -> bytes:
        """What the worker recorded, which then forgets it: nothing is computed for the request any more."""
        self._recorded.discard(number)
        if (task := self._running.get(number)) is not None:
            await asyncio.wait([task])
        return (await self.engine.collective_rpc("strop_routes", args=(number, count)))[0]

    async def _begin(self, message: Message, _: bytes) -> Message:
        """Announce a version: all of it, or what changed since `base`. Nothing is announced when that is not here."""
        self._forget()
        base, held = message["base"], self._held
        if base is not None and (held is None or held.serial != base):
            return {"has": False}
        relative = None if base is None else held
        version, serial = int(message["version"]), int(message["serial"])
        self._arriving = Arriving(version, self._folder, serial=serial, held=relative)
        return {"has": True}

    async def _put(self, message: Message, body: bytes) -> Message:
        if self._arriving is None:
            raise WeightsRefused("weights arrived that nobody announced")
        self._arriving.put(message["entries"], body)
        return {}

    async def _drop(self, _: Message, __: bytes) -> Message:
        self._forget()
        return {}

    async def _end(self, message: Message, _: bytes) -> Message:
        """Between two steps; running requests are computed anew under the new weights, and go on."""
        arrived = self._arriving
        if arrived is None:
            raise WeightsRefused("weights ended that nobody announced")
        arrived.check(int(message["count"]))
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        files = [str(file) for file in arrived.files]
        await self.engine.collective_rpc("strop_load", args=(files, arrived.version))
        await self.engine.reset_prefix_cache(reset_running_requests=True)
        await self.engine.resume_generation()
        if message["keep"]:
            arrived.done()
            if self._held is not None:
                self._held.drop()
            self._held, self._arriving = arrived, None
        self._forget()
        return {"version": arrived.version}

    def _forget(self) -> None:
        if self._arriving is not None:
            self._arriving.drop()
        self._arriving = None

    async def _sleep(self, _: Message, __: bytes) -> Message:
        await self.engine.reset_prefix_cache()
        await self.engine.sleep(level=1)
        return {}

    async def _wake(self, _: Message, __: bytes) -> Message:
        await self.engine.wake_up()
        return {}


def columns(flat: Any, count: int) -> Message:
    """Of each drawn token: the logprob it was drawn with, the model's own at the temperature, the weights' version."""
    width = COLUMNS + 1
    if len(flat.logprobs) != width * count:
        raise RuntimeError(f"vLLM gave {len(flat.logprobs)} numbers for {count} tokens; strop's sampler gives {width}")
    versions = [int(version) for version in flat.logprobs[2::width]]
    return {"sampling_logprobs": flat.logprobs[::width], "logprobs": flat.logprobs[1::width], "versions": versions}


async def receive(reader: asyncio.StreamReader) -> tuple[Message, bytes]:
    length, body_length = unpack_head(await reader.readexactly(HEAD.size))
    message = unpack(await reader.readexactly(length))
    return message, await reader.readexactly(body_length) if body_length else b""


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> bool:
    """Whether the other end knows the key; it learns whether this one does."""
    nonce = secrets.token_hex(16)
    writer.write(pack({"nonce": nonce}))
    message, _ = await receive(reader)
    if not proves(message.get("proof"), key, "strop", nonce):
        writer.write(pack({"error": "wrong key"}))
        writer.close()
        return False
    writer.write(pack({"proof": proof(key, "host", str(message["nonce"]))}))
    return True


async def serve(socket: str, listen: str, key: bytes) -> None:
    """Wait for the one strop process that knows the key, and work for it."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    busy = asyncio.Lock()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if busy.locked() or not await admit(reader, writer, key):
            return writer.close()
        async with busy:
            with tempfile.TemporaryDirectory(prefix="strop-vllm-") as folder:
                work = asyncio.ensure_future(Host(reader, writer, Path(folder)).run())
                await asyncio.wait([work])
                done.set_exception(error) if (error := work.exception()) else done.set_result(None)

    if socket:
        server = await asyncio.start_unix_server(connected, socket)
    else:
        host, _, port = listen.rpartition(":")
        server = await asyncio.start_server(connected, host, int(port))
    async with server:
        await done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", default="", help="a path to listen at; the key is read from the standard input")
    parser.add_argument("--listen", default="", help="HOST:PORT to listen at")
    parser.add_argument("--key-file", type=Path, help="a file whose text both ends know")
    given = parser.parse_args()
    if bool(given.socket) == bool(given.listen) or bool(given.listen) != bool(given.key_file):
        parser.error("give --socket, or --listen with --key-file")
    text = given.key_file.read_text("utf-8") if given.key_file else sys.stdin.readline()
    if not text.strip():
        parser.error("the key is empty")
    asyncio.run(serve(given.socket, given.listen, text.strip().encode()))


if __name__ == "__main__":
    main()
