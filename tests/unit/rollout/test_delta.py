"""Changed elements, by their bytes: found, and written in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.errors import EngineError
from strop.rollout.delta import Delta, apply_deltas, deltas

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8, torch.int64)
NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


def floats(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_real_nan_is_sent_and_one_that_was_there_is_not() -> None:
    before, after = floats(0, NAN, NAN, 5, 0), floats(NAN, NAN, OTHER_NAN, 5, -(2**31))
    (delta,) = deltas({"w": before}, [("w", after)])
    assert delta.indices_N.tolist() == [0, 2, 4]  # a new NaN, another NaN, -0.0 for 0.0
    apply_deltas({"w": before}, [delta])
    assert torch.equal(bits(before), bits(after))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), share=st.floats(0, 1), strided=st.booleans())
def test_applied_deltas_give_the_new_weights_to_the_bit(
    seed: int, dtype: torch.dtype, share: float, strided: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (2, 5 * 7 * size), dtype=torch.uint8, generator=random)
    before, other = (half.view(dtype).view(5, 7).clone() for half in raw)
    after = torch.where(torch.rand(5, 7, generator=random) < share, other, before)
    if strided:  # E03: bytes are those of the values in order, however they lie in memory
        before, after = before.t(), after.t()
    was = before.clone()
    found = list(deltas({"w": before}, [("w", after)]))
    assert torch.equal(bits(before), bits(was)), "the receiver's weights are read, not written"
    changed = (bits(was).view(-1, size) != bits(after).view(-1, size)).any(1).nonzero()[:, 0].tolist()
    assert [i for delta in found for i in delta.indices_N.tolist()] == changed
    apply_deltas({"w": before}, found)
    assert torch.equal(bits(before), bits(after))


def test_values_are_not_views_of_what_training_writes_to() -> None:
    """E02's class: what waits to be sent does not move with the trainer."""
    after = torch.ones(3)
    (delta,) = deltas({"w": torch.zeros(3)}, [("w", after)])
    after.fill_(9.0)
    assert delta.values_N.tolist() == [1.0, 1.0, 1.0] and delta.num_bytes == 3 * (8 + 4)


def test_nothing_changed_is_nothing_sent() -> None:
    assert list(deltas({"a": torch.ones(2), "b": torch.empty(0)}, [("b", torch.empty(0)), ("a", torch.ones(2))])) == []


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": torch.ones(2)}, "b: the receiver has these weights, and nothing was said"),
        ({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)}, "c: the receiver has no such weight"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, r"b was \(2,\) torch.float32 and is \(3,\)"),
        ({"a": torch.ones(2), "b": torch.ones(2).double()}, "is .* torch.float64: send it whole"),
    ],
)  # fmt: skip
def test_other_weights_are_refused(weights: dict[str, Tensor], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        list(deltas({"a": torch.ones(2), "b": torch.ones(2)}, weights.items()))


def test_a_receiver_takes_all_or_nothing() -> None:
    def delta(name: str = "a", index: int = 0, shape: tuple[int, ...] = (2,)) -> Delta:
        return Delta(
            name=name, shape=shape, dtype=torch.float32, indices_N=torch.tensor([index]), values_N=torch.tensor([5.0])
        )

    for bad, says in (
        (delta(name="x"), "a delta of x, which is not here"),
        (delta(index=2), "indices that are not places of its 2 elements"),
        (delta(index=-1), "indices that are not places"),
        (delta(shape=(1, 2)), r"as \(1, 2\) torch.float32; here it is \(2,\)"),
    ):
        weights = {"a": torch.zeros(2)}
        with pytest.raises(EngineError, match=says):
            apply_deltas(weights, [delta(), bad])
        assert weights["a"].tolist() == [0.0, 0.0]
