"""Weights on their way: what left is what arrives, or an error that names the tensor, and nothing is used."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from strop.errors import EngineError
from strop.rollout.delta import Delta
from strop.rollout.transfer import Bucket, Inbox, Incoming, Outbox, Shipment, buckets, entry_of, size_of

Weights = dict[str, Tensor]
NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


def weights() -> Weights:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(0)}


def all_of(given: Weights, size: int = 1 << 20) -> list[Bucket]:
    return list(buckets(((entry_of(n, t), t) for n, t in given.items()), size))


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def deliver(inbox: Inbox, shipment: Shipment, version: int) -> tuple[int, Weights]:
    """(bytes sent, what arrived), in the order of calls that a sampler's owner makes."""
    sent = shipment.changes
    if sent is None or not inbox.begin(version, shipment.serial - 1):
        assert inbox.begin(version, None)
        sent = list(shipment.whole())
    for bucket in sent:
        inbox.put(bucket)
    found, arrived = inbox.end(len(shipment))
    assert found == version
    inbox.used(shipment.serial, arrived)
    return sum(size_of(content) for bucket in sent for _, content in bucket), arrived


@pytest.mark.parametrize("size", [1, 8, 1 << 20])
def test_everything_arrives_whatever_the_size_of_a_bucket(size: int) -> None:
    """E13: the same weights in one bucket and in many, the smallest size too, are the same model."""
    sent = all_of(weights(), size)
    assert [len(bucket) for bucket in sent] == {1: [1, 1, 1], 8: [1, 2], 1 << 20: [3]}[size]
    arriving = Incoming(7)
    for bucket in sent:
        arriving.put(bucket)
    found = arriving.end(3)
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())


def test_one_changed_bit_is_found_and_named() -> None:
    """E12: another number format is one of the things that an entry tells from what arrived."""
    (bucket,) = all_of(weights())
    entry, tensor = bucket[0]
    assert isinstance(tensor, Tensor)
    flipped = tensor.clone()
    flipped[1, 2] += 2**-20
    for wrong in (flipped, tensor.double(), tensor.view(3, 2), tensor.bfloat16()):
        with pytest.raises(EngineError, match=r"weight a of version 1 arrived as"):
            Incoming(1).put([(entry, wrong)])


def test_nothing_is_used_before_all_is_there() -> None:
    (bucket,) = all_of(weights())
    arriving = Incoming(1)
    arriving.put(bucket[:2])
    with pytest.raises(EngineError, match="2 weights arrived of the 3"):
        arriving.end(3)
    with pytest.raises(EngineError, match="weight a of version 1 came twice"):
        arriving.put(bucket[:1])
    inbox = Inbox(keeps=True)
    for call in (lambda: inbox.put(bucket), lambda: inbox.end(3)):
        with pytest.raises(EngineError, match="nobody announced"):
            call()
    inbox.begin(1, None)
    with pytest.raises(EngineError, match="arrived as"):
        inbox.put([(bucket[0][0], torch.zeros(2, 3))])
    with pytest.raises(EngineError, match="nobody announced"):  # what followed a mistake is of no version
        inbox.put(bucket[1:])


def test_changes_alone_are_sent_and_give_the_new_weights_to_the_bit() -> None:
    """Real NaNs too: one that is new is sent, one that was there is not. What changed all over is sent whole."""
    before = {"w": torch.zeros(1000), "all": torch.zeros(10), "same": torch.ones(500)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w"].view(torch.int32)[3], after["w"][7] = NAN, -0.0
    after["all"] += 1
    outbox, inbox = Outbox(deltas=True), Inbox(keeps=True)
    first, _ = deliver(inbox, outbox.ship(before.items()), 0)
    assert first == 4 * 1510
    shipment = outbox.ship(after.items())
    kinds = {entry.name: type(content) for bucket in shipment.changes or [] for entry, content in bucket}
    assert kinds == {"w": Delta, "all": Tensor, "same": Delta}
    sent, arrived = deliver(inbox, shipment, 1)
    assert sent == 2 * 12 + 40
    assert all(bits(arrived[name]) == bits(tensor) for name, tensor in after.items())


def test_whoever_missed_a_version_gets_all_of_the_next() -> None:
    outbox, here, late = Outbox(deltas=True), Inbox(keeps=True), Inbox(keeps=True)
    versions: list[Weights] = [{"w": torch.full((1000,), 0.0)}]
    for v in (1.0, 2.0, 3.0):
        versions.append({"w": versions[-1]["w"].clone()})
        versions[-1]["w"][int(v)] = v
    sent = {"here": list[int](), "late": list[int]()}
    for v, given in enumerate(versions):
        shipment = outbox.ship(given.items())
        sent["here"].append(deliver(here, shipment, v)[0])
        if v != 1:
            size, arrived = deliver(late, shipment, v)
            sent["late"].append(size)
            assert torch.equal(arrived["w"], given["w"])
    assert sent == {"here": [4000, 12, 12, 12], "late": [4000, 4000, 12]}


def test_a_failed_change_leaves_what_was_there() -> None:
    outbox, inbox = Outbox(deltas=True), Inbox(keeps=True)
    first = {"w": torch.zeros(100)}
    _, held = deliver(inbox, outbox.ship(first.items()), 0)
    changed = torch.zeros(100)
    changed[5] = 1.0
    shipment = outbox.ship([("w", changed)])
    (bucket,) = shipment.changes or []
    ((entry, delta),) = bucket
    assert isinstance(delta, Delta)
    delta.values_N[0] = 2.0
    assert inbox.begin(1, shipment.serial - 1)
    with pytest.raises(EngineError, match="weight w of version 1 arrived as"):
        inbox.put([(entry, delta)])
    assert held["w"].abs().sum() == 0
    delta.values_N[0] = 1.0
    assert deliver(inbox, shipment, 1)[1]["w"][5] == 1.0


def test_what_is_kept_is_not_the_wires_buffer() -> None:
    """E02: a buffer that is used again does not change what stays for later changes to be relative to."""
    outbox, inbox, wire = Outbox(deltas=True), Inbox(keeps=True), torch.zeros(100)
    shipment = outbox.ship([("w", wire)])
    deliver(inbox, shipment, 0)
    wire.fill_(9.0)
    after = torch.zeros(100)
    after[1] = 1.0
    assert torch.equal(deliver(inbox, outbox.ship([("w", after)]), 1)[1]["w"], after)


@pytest.mark.parametrize(
    "later", [{"w": torch.zeros(3)}, {"w": torch.zeros(4).double()}, {"v": torch.zeros(4)}, {}], ids=str
)
def test_other_names_shapes_and_formats_are_sent_whole(later: Weights) -> None:
    outbox = Outbox(deltas=True)
    outbox.ship([("w", torch.zeros(4))])
    assert outbox.ship(later.items()).changes is None
    assert Outbox().ship([("w", torch.zeros(4))]).changes is None


def test_a_coarser_format_is_made_before_it_is_sent() -> None:
    """Far fewer numbers change in bfloat16; whole numbers stay what they are."""
    outbox, inbox = Outbox(deltas=True, dtype=torch.bfloat16), Inbox(keeps=True)

    def given(value: float) -> Iterable[tuple[str, Tensor]]:
        return [("w", torch.full((100,), value)), ("n", torch.arange(3))]

    _, arrived = deliver(inbox, outbox.ship(given(1.0)), 0)
    assert arrived["w"].dtype == torch.bfloat16 and arrived["n"].dtype == torch.int64
    sent, arrived = deliver(inbox, outbox.ship(given(1.0 + 1e-4)), 1)
    assert sent == 0 and torch.equal(arrived["w"], torch.ones(100).bfloat16())
