"""What linear attention keeps of each request: slots of fixed size, whatever the length of the text.

    L linear layers    R running rows    S sequences of a pass    W - 1 inputs of the convolution    H value heads

Each row owns the slot of its own number: the state after the tokens that it has computed. The slots behind are
snapshots, the state at a page's end of some prompt, found by that page's digest: a request that begins alike starts
from a copy, as it shares the pages of keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.models.loading import StateShape
from strop.ops.causal_conv import causal_conv, conv_tails
from strop.ops.gated_delta import gated_delta_rule, gated_delta_step
from strop.ops.select import Impl
from strop.rollout.builtin.draw import Int64s
from strop.rollout.builtin.pages import Digest
from strop.types import Layout

SHARE_OF_SNAPSHOTS = 4  # one for each so many running requests: groups share prompts


def num_snapshots(max_running: int) -> int:
    """Slots beside those of the rows."""
    return max(1, max_running // SHARE_OF_SNAPSHOTS)


class Snapshots:
    """Which slots hold the state after which page; the least recently used is given up for a new one."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))[::-1]
        self._slot_of: OrderedDict[Digest, int] = OrderedDict()
        self._written: dict[Digest, int] = {}  # by the pass that is being planned: not to be read before it has run

    def settle(self) -> None:
        """The pass before has run: what it wrote can be found."""
        self._slot_of.update(self._written)
        self._written = {}

    def find(self, digests: list[Digest]) -> tuple[int, int | None]:
        """How many of a text's first pages the longest known snapshot covers, and its slot."""
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self._slot_of:
                self._slot_of.move_to_end(digests[count - 1])
                return count, self._slot_of[digests[count - 1]]
        return 0, None

    def take(self, digest: Digest) -> int | None:
        """A slot for the state after this page; None when there is one already, or this pass has written them all."""
        if digest in self._slot_of or digest in self._written or not (self._free or self._slot_of):
            return None
        self._written[digest] = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        return self._written[digest]

    def forget_all(self) -> None:
        """The weights that made them are gone."""
        self.settle()
        self._free.extend(self._slot_of.values())
        self._slot_of.clear()


@dataclass(slots=True)
class StatePlan:
    """What one pass does to the slots: first restores, then the tokens of rows, then twins.

    The pass computes one token of each steady row, then the spans (row, first position, end). A cut names a position
    in a row's span and the slot that keeps the state there.
    """

    steady_N: Int64s
    spans: list[tuple[int, int, int]]
    cuts: dict[int, tuple[int, int]] = field(default_factory=dict)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (slot, row)
    twins: list[tuple[int, int]] = field(default_factory=list)  # (row, its leader's row)


class StateCache:
    """The convolution's last inputs and the states of all layers and slots, in float32 (float64 for float64 models)."""

    def __init__(self, shape: StateShape, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        lead = (len(shape.layers), num_slots)
        self.index = {layer: index for index, layer in enumerate(shape.layers)}
        self.tails = torch.zeros(*lead, shape.taps - 1, shape.conv_channels, dtype=wide, device=device)
        self.states = torch.zeros(
            *lead, shape.heads, shape.key_channels, shape.value_channels, dtype=wide, device=device
        )

    @property
    def num_bytes(self) -> int:
        return self.tails.nbytes + self.states.nbytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, target)."""
        if pairs:
            sources, targets = (torch.tensor(slots, device=self.states.device) for slots in zip(*pairs, strict=True))
            self.tails[:, targets] = self.tails[:, sources]
            self.states[:, targets] = self.states[:, sources]

    def clear(self, rows: Sequence[int]) -> None:
        if rows:
            targets = torch.tensor(rows, device=self.states.device)
            self.tails.index_fill_(1, targets, 0.0)
            self.states.index_fill_(1, targets, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class StatePass:
    """Linear attention of one forward pass over the slots."""

    cache: StateCache
    impl: Impl
    steady_N: Tensor
    layout: Layout  # of the spans; a span with a cut is a prefix and its branch
    start_S: Tensor  # the slot before each sequence
    ended_W: Tensor  # sequences whose last state is kept, and where
    slot_W: Tensor

    @classmethod
    def of(cls, plan: StatePlan, cache: StateCache, impl: Impl) -> StatePass:
        """Prepares the slots: restores, and zeros where a text begins."""
        cache.copy(plan.restores)
        cache.clear([row for row, first, _ in plan.spans if first == 0])
        lengths: list[int] = []
        parents: list[int] = []
        starts: list[int] = []
        kept: list[tuple[int, int]] = []
        for row, first, end in plan.spans:
            cut, slot = plan.cuts.get(row, (first, -1))
            parent = -1
            if slot >= 0:
                parent = len(lengths)
                lengths.append(cut - first)
                parents.append(-1)
                kept.append((parent, slot))
            kept.append((len(lengths), row))
            lengths.append(end - cut)
            parents.append(parent)
            starts += [row] * (len(lengths) - len(starts))
        device = cache.states.device
        return cls(
            cache=cache,
            impl=impl,
            steady_N=torch.from_numpy(plan.steady_N).to(device),
            layout=Layout(tuple(lengths), tuple(parents)),
            start_S=torch.tensor(starts, dtype=torch.int64, device=device),
            ended_W=torch.tensor([s for s, _ in kept], dtype=torch.int64, device=device),
            slot_W=torch.tensor([slot for _, slot in kept], dtype=torch.int64, device=device),
        )

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        tails = self.cache.tails[self.cache.index[layer]]
        steady, W = len(self.steady_N), weight_FW.shape[1]
        parts: list[Tensor] = []
        if steady:
            window_NWF = torch.cat((tails[self.steady_N], x_TF[:steady, None]), 1)
            tails[self.steady_N] = window_NWF[:, 1:]
            parts.append((window_NWF * weight_FW.t()).sum(1))
        if steady < len(x_TF):
            before_SWF = tails[self.start_S]
            parts.append(causal_conv(x_TF[steady:], weight_FW, self.layout, before_SWF))
            tails[self.slot_W] = conv_tails(x_TF[steady:], self.layout, W, before_SWF)[self.ended_W]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        states = self.cache.states[self.cache.index[layer]]
        steady = len(self.steady_N)
        inputs = (q_TJC, k_TJC, v_THC, decay_TH, beta_TH)
        parts: list[Tensor] = []
        if steady:
            state_NHCC = states[self.steady_N]
            q, k, v, decay, beta = (x[:steady] for x in inputs)
            parts.append(gated_delta_step(q, k, v, decay, beta, state_NHCC))
            states[self.steady_N] = state_NHCC
        if steady < len(v_THC):
            q, k, v, decay, beta = (x[steady:] for x in inputs)
            out_THC, ends_SHCC = gated_delta_rule(
                q, k, v, decay, beta, self.layout, start_SHCC=states[self.start_S], ends=True, impl=self.impl
            )
            parts.append(out_THC)
            if ends_SHCC is not None:
                states[self.slot_W] = ends_SHCC[self.ended_W]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
