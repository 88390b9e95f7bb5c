"""Weights on their way: what left is what arrives, or an error that names the tensor."""

from __future__ import annotations

import pytest
import torch

from strop.errors import EngineError
from strop.rollout.transfer import Incoming, buckets, checksum, entry_of


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16)), ("c", torch.zeros(0))]


def test_everything_arrives_in_buckets() -> None:
    sent = list(buckets(weights(), size=8))
    assert [[entry.name for entry, _ in bucket] for bucket in sent] == [["a"], ["b", "c"]]
    arriving = Incoming(7)
    for bucket in sent:
        arriving.put(bucket)
    found = dict(arriving.end(3))
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], tensor) for name, tensor in weights())


def test_one_changed_bit_is_found_and_named() -> None:
    (bucket,) = buckets(weights())
    entry, tensor = bucket[0]
    flipped = tensor.clone()
    flipped[1, 2] += 2**-20
    with pytest.raises(EngineError, match=r"weight a of version 1 arrived as"):
        Incoming(1).put([(entry, flipped)])
    with pytest.raises(EngineError, match="weight a"):
        Incoming(1).put([(entry, tensor.double())])
    with pytest.raises(EngineError, match="weight a"):
        Incoming(1).put([(entry, tensor.view(3, 2))])


def test_nothing_is_used_before_all_is_there() -> None:
    (bucket,) = buckets(weights())
    arriving = Incoming(1)
    arriving.put(bucket[:2])
    with pytest.raises(EngineError, match="2 weights arrived of the 3"):
        arriving.end(3)
    with pytest.raises(EngineError, match="weight a of version 1 came twice"):
        arriving.put(bucket[:1])


def test_different_nans_have_different_checksums() -> None:
    """A value that is not equal to itself is still told from another."""
    one = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(one[:1].clone()) != checksum(one[1:].clone())
    strided = torch.arange(12.0).view(3, 4).t()
    assert entry_of("x", strided).checksum == checksum(strided.contiguous())
