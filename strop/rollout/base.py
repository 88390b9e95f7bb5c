"""The Sampler protocol, and the one function that plays an episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from strop.envs.base import Env
from strop.errors import RolloutError
from strop.tokens.base import Renderer
from strop.types import Completion, Ending, Float32s, Message, Prompt, SamplingParams, Segment, Stop, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


class Sampler(Protocol):
    """Draws tokens from a policy. Batching, prefix sharing and caching are its own business.

    Results depend on the weights, the prompt and the request's own parameters and seed, never on what runs beside it
    (up to floating point: see the conformance suite). A cache never outlives a weight update.
    """

    @property
    def version(self) -> int:
        """The policy version being served."""
        ...

    @property
    def serves_adapter(self) -> bool:
        """Whether `load_weights` takes an adapter's matrices, over a base that is there, and not a whole model's."""
        ...

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Draw one completion. RolloutError when the prompt and `max_tokens` do not fit the model's context."""
        ...

    async def score(self, prompt: Prompt) -> Float32s:
        """Logprob of each prompt token given those before it, [T]; 0 for the first."""
        ...

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights, under a checkpoint's names or those of transformers' module, at a token boundary. Running
        requests go on with them.

        All or nothing: names, shapes and dtypes are checked before the first is used.
        """
        ...

    async def sleep(self) -> None:
        """Give back cache memory until `wake`; refused with RolloutError while requests run."""
        ...

    async def wake(self) -> None: ...

    def close(self) -> None:
        """End what was started for it elsewhere. It is asked for nothing afterwards."""
        ...


def check_bounds(params: SamplingParams) -> None:
    """Raise RolloutError for numbers that say nothing to any sampler."""
    bounds = {
        "temperature": params.temperature >= 0,
        "top_k": params.top_k >= 0,
        "top_p": 0 < params.top_p <= 1,
        "min_p": 0 <= params.min_p <= 1,
    }
    if wrong := [name for name, holds in bounds.items() if not holds]:
        raise RolloutError(f"{', '.join(wrong)} out of bounds in {params}")


async def play(
    env: Env, sampler: Sampler, renderer: Renderer, params: SamplingParams, *, max_turns: int = 1
) -> Trajectory:
    """One episode: render, sample, append, parse, step, until the environment is done or a limit is hit.

    Turn k samples with seed `params.seed + k`. A completion cut by its limit ends the episode: it is still parsed and
    scored, so that a partial answer earns what the environment thinks it is worth.
    """
    messages = await env.start()
    trajectory = Trajectory()
    trajectory.segments[-1].observe(renderer.start(messages))
    for turn in range(max_turns):
        request = replace(params, seed=params.seed + turn) if turn else params
        completion = await sampler.sample(Prompt(trajectory.segments[-1].tokens), request)
        trajectory.segments[-1].act(completion)
        reply = renderer.parse(completion.tokens)
        step = await env.step(reply)
        trajectory.reward += step.reward
        for name, value in step.rewards.items():
            trajectory.rewards[name] = trajectory.rewards.get(name, 0.0) + value
        if completion.stop is Stop.LENGTH:
            trajectory.ending = Ending.LENGTH
            return trajectory
        if step.done:
            return trajectory
        messages = [*messages, reply]
        _observe(trajectory, renderer, messages, step.messages, completion)
        messages = [*messages, *step.messages]
    trajectory.ending = Ending.MAX_TURNS
    return trajectory


def _observe(
    trajectory: Trajectory, renderer: Renderer, history: list[Message], new: list[Message], last: Completion
) -> None:
    tokens = renderer.observe(history, new, last.tokens)
    if tokens is None:  # the template rewrites history: go on in a segment of its own
        trajectory.segments.append(Segment())
        tokens = renderer.start([*history, *new])
    trajectory.segments[-1].observe(tokens)
