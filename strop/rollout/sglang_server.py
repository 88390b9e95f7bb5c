"""What a running sglang server says of itself, and whether training can sample from it.

/health_generate, until it is healthy -> /server_info, /model_info -> Server; or ConfigError with what to start
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from strop.errors import ConfigError, RolloutError
from strop.rollout.router import SamplerLost
from strop.rollout.sglang_link import Json, Link, Refused

OLDEST = (0, 5, 23)  # older ones may break when weights change while requests wait, or not say what drew a token
POLL_S = 0.5  # between two looks at a server that is starting
HEALTH_S = 30.0  # it answers within 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What matters of a server."""

    max_length: int  # tokens of one request, prompt included
    frees_memory: bool
    decodes: bool  # it has a tokenizer, for stop strings


async def reach(link: Link, architecture: str, patience_s: float) -> Server:
    """Wait for a healthy server that serves `architecture`.

    RolloutError when none is healthy after `patience_s` seconds; ConfigError, with everything that is wrong, when it
    was started without what sampling for training needs.
    """
    await _healthy(link, patience_s)
    server, model = await link.get("/server_info"), await link.get("/model_info")
    if problems := [*_server_problems(server), *_model_problems(model, architecture)]:
        raise ConfigError(*(f"the sglang server at {link} {problem}" for problem in problems))
    return Server(
        max_length=server["max_req_input_len"],
        frees_memory=server.get("enable_memory_saver") is True,
        decodes=server.get("skip_tokenizer_init") is not True,
    )


async def _healthy(link: Link, patience_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            await link.get("/health_generate", HEALTH_S)
            return
        except (Refused, SamplerLost) as error:
            starting = not isinstance(error, Refused) or error.status == 503
            if not starting:
                raise
            if loop.time() > deadline:
                raise RolloutError(
                    f"no healthy sglang server after {patience_s:g} s, see sampler.sglang.start_timeout_s: {error}"
                ) from error
        await asyncio.sleep(POLL_S)


def _server_problems(info: Json) -> list[str]:
    problems: list[str] = []
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version")))
    if number is None or tuple(map(int, number.groups())) < OLDEST:
        problems.append(
            f"is of version {info.get('version')}: strop follows the API of {'.'.join(map(str, OLDEST))}, take that or "
            "a newer one"
        )
    if info.get("enable_deterministic_inference") is not True:
        problems.append("ignores seeds: start it with --enable-deterministic-inference")
    if info.get("speculative_algorithm") is not None:
        problems.append("drafts tokens, and those are not drawn from a request's seed: start it without speculation")
    if info.get("disaggregation_mode") not in (None, "null"):
        problems.append("prefills elsewhere, with weights that would not be replaced: start it without disaggregation")
    if not _is_count(info.get("max_req_input_len")):
        problems.append("does not say how long requests may be (max_req_input_len)")
    return problems


def _model_problems(info: Json, architecture: str) -> list[str]:
    problems: list[str] = []
    served = info.get("architectures")
    if served is not None and architecture not in served:
        problems.append(f"serves {', '.join(served)}, and the recipe's model is a {architecture}: start it with that")
    if info.get("is_generation") is not True:
        problems.append("serves a model that gives no text")
    if info.get("preferred_sampling_params"):
        problems.append(
            f"adds sampling parameters of its own, {info['preferred_sampling_params']}: start it without "
            "--preferred-sampling-params"
        )
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
