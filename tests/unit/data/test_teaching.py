"""Who teaches what, and how that reaches the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strop.config.imitation import TeacherConfig
from strop.config.model import ModelConfig
from strop.data.tasks import Task
from strop.data.teaching import spread_weights, teacher_weights
from strop.errors import DataError
from strop.types import Group
from tests.unit.data.groups import attempt, pack


def teacher(weight: float = 1.0, **teaches: Any) -> TeacherConfig:
    return TeacherConfig(model=ModelConfig(path="t"), weight=weight, teaches=teaches)


def task(name: str, **meta: Any) -> Task:
    return Task(id=name, messages=[], answer=None, source="", meta=meta)


def test_weights_are_shared_by_those_who_teach_a_task() -> None:
    teachers = [teacher(subject="algebra"), teacher(3.0), teacher(subject="algebra", level=2)]
    tasks = [task("a", subject="algebra"), task("b", subject="logic", level=2), task("c", subject="algebra", level=2)]
    assert teacher_weights(teachers, tasks) == pytest.approx(
        np.array([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.2, 0.6, 0.2]])
    )


def test_a_task_without_a_teacher_is_named() -> None:
    """A missing field is no match, not even for null."""
    with pytest.raises(DataError, match=r"task b has no teacher \(2 of 3 tasks\).*'subject': None"):
        teacher_weights([teacher(subject=None)], [task("a", subject=None), task("b"), task("c", subject="x")])


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_each_trained_token_gets_its_attempts_weights(share_prefixes: bool) -> None:
    """An attempt that failed is in no batch; prompts get 0, and so do tokens that nobody trains."""
    groups = [
        Group("a", [attempt([7, 8], [10, 11]), attempt([7, 8], [12])]),
        Group("b", [attempt([9], [13, 14]), attempt([9], [15])]),
    ]
    packed = pack(groups, [[0.0, 0.0], [float("nan"), 0.0]], max_tokens=6, share_prefixes=share_prefixes)
    weights_NM = np.array([[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]])
    found: dict[int, list[float]] = {}
    for batch, weights_TM in zip(packed.batches, spread_weights(weights_NM, packed.trained), strict=True):
        assert weights_TM.shape == (len(batch), 2)
        for t in range(len(batch)):
            if batch.mask_T[t]:
                found[int(batch.targets_T[t])] = weights_TM[t].tolist()
            else:
                assert weights_TM[t].tolist() == [0.0, 0.0]
    assert found == {10: [0.25, 0.75], 11: [0.25, 0.75], 12: [0.5, 0.5], 15: [0.0, 1.0]}
