"""Who teaches what: tasks and teachers in, each teacher's part in each token of a step out.

P tasks   M teachers   N attempts   T packed tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.config.imitation import TeacherConfig
from strop.data.tasks import Task
from strop.data.trained import TrainedTokens
from strop.errors import DataError

Float64s = NDArray[np.float64]


def teacher_weights(teachers: Sequence[TeacherConfig], tasks: Sequence[Task]) -> Float64s:
    """What each teacher counts for at each task, [P, M]: 0 where it does not teach, 1 over all that do.

    Raises DataError naming a task that nobody teaches.
    """
    weights_PM = np.array([[t.weight * _matches(t.teaches, task) for t in teachers] for task in tasks], np.float64)
    weights_PM = weights_PM.reshape(len(tasks), len(teachers))
    alone_P = weights_PM.sum(1) == 0
    if alone_P.any():
        asked = " or ".join(str(t.teaches) for t in teachers)
        raise DataError(
            f"task {tasks[int(np.argmax(alone_P))].id} has no teacher ({int(alone_P.sum())} of {len(tasks)} tasks): it "
            f"matches none of {asked}; widen distill.teachers' teaches, or give a teacher without it"
        )
    return weights_PM / weights_PM.sum(1, keepdims=True)


def _matches(teaches: Mapping[str, Any], task: Task) -> bool:
    return all(key in task.meta and task.meta[key] == value for key, value in teaches.items())


def spread_weights(weights_NM: Float64s, trained: TrainedTokens) -> list[Tensor]:
    """The weights of each attempt at its trained tokens, 0 elsewhere: one tensor [T, M] for each batch."""
    weights_M = weights_NM[trained.attempt_M]  # of every trained token
    columns = [trained.scatter(weights_M[:, m]) for m in range(weights_M.shape[1])]
    return [torch.stack(of_batch, -1) for of_batch in zip(*columns, strict=True)]
