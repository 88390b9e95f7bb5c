"""strop's side of benchmarks/head_memory.py: the head's forms that run without a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.peers.head_problem import Policy, Problem, by_autograd, measure
from strop.ops.logprobs import Entropy, Head, HeadImpl, Scored, learn_targets, score_targets


def scored(problem: Problem, impl: HeadImpl) -> Policy:
    streams = impl is not HeadImpl.PLAIN
    found = score_targets(
        problem.hidden,
        Head(weight_VD=problem.weight),
        problem.targets,
        entropy=Entropy.GRADIENT,
        impl=impl,
        weight_grad_VD=problem.weight.grad if streams else None,
    )
    assert found.entropy_N is not None
    return found.logprobs_N, found.entropy_N


def fused(problem: Problem) -> Tensor:
    def loss(rows: Tensor, at: Scored) -> Tensor:
        assert at.entropy_N is not None
        return problem.loss(rows, at.logprobs_N, at.entropy_N)

    _, total = learn_targets(
        problem.hidden,
        Head(weight_VD=problem.weight),
        problem.targets,
        loss,
        entropy=Entropy.GRADIENT,
        weight_grad_VD=problem.weight.grad,
    )
    total.backward()
    return total


if __name__ == "__main__":
    assert torch.is_grad_enabled()
    forms = {impl.value: by_autograd(partial(scored, impl=impl)) for impl in (HeadImpl.PLAIN, HeadImpl.CHUNKED)}
    measure({**forms, "fused": fused})
