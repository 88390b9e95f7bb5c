"""Other systems' sides of benchmarks/head_memory.py, each in its environment: their own functions, their defaults."""

from __future__ import annotations

import torch

from benchmarks.peers.head_problem import Policy, Problem, by_autograd, measure


def trl(problem: Problem) -> Policy:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction  # pyright: ignore[reportMissingImports]
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk  # pyright: ignore[reportMissingImports]

    p = problem
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        p.hidden, p.weight, None, p.targets, 1.0, chunk, None, 1.0, ("entropy",)
    )
    return logprobs, entropy


def verl(problem: Problem) -> Policy:
    """What it does without fused kernels."""
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits  # pyright: ignore[reportMissingImports]

    logits = problem.hidden @ problem.weight.t()
    return logprobs_from_logits(logits, problem.targets), entropy_from_logits(logits)


def verl_fused(problem: Problem) -> Policy:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO  # pyright: ignore[reportMissingImports]

    return FusedLinearForPPO()(problem.hidden, problem.weight, problem.targets)


def liger(problem: Problem) -> Policy:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        problem.hidden, problem.weight, problem.targets, 1.0, -1, 1, True
    )
    return -nll, entropy


if __name__ == "__main__":
    assert torch.is_grad_enabled()
    measure({form.__name__: by_autograd(form) for form in (trl, verl, verl_fused, liger)})
