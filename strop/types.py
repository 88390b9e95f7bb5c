"""The nouns that flow through one step, and the letters for their axes.

Axis letters are suffixes of variable names everywhere, and the dimensions in jaxtyping annotations:

    P tasks per step      G attempts per task    S sequences     T packed tokens
    V vocabulary          D hidden size          L layers        E experts     K experts (or candidates) per token

A sampler returns a `Completion`; completions and observations grow a `Trajectory` of `Segment`s; G trajectories at one
task are a `Group`. Everything here is NumPy: the columns cross processes and are packed into tensors only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Message(TypedDict, total=False):
    """One chat message, as chat templates take it."""

    role: str
    content: str
    reasoning_content: str  # what a model thought before its reply, for templates that render it
    tool_calls: list[dict[str, Any]]
    name: str


class StreamState(TypedDict):
    """Where a task stream stands (`data/stream.py`)."""

    seed: int
    epoch: int
    position: int  # in the epoch, of the first task that is not over
    ended: list[int]  # numbers of later tasks that are over
    fingerprint: int  # of the tasks


class Stop(StrEnum):
    """Why a completion ended."""

    TOKEN = "token"  # a stop token, or the last token of a stop string, was sampled
    LENGTH = "length"  # `max_tokens` were sampled, or the model's context was full


class Ending(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment said so
    LENGTH = "length"  # a completion was cut by its limit before it stopped
    MAX_TURNS = "max_turns"
    FAILED = "failed"  # the environment or the sampler raised; there is no reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw one completion. A request's result depends on its own seed alone, never on its neighbours."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this much probability
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    routes: bool = False  # return the experts taken (mixture-of-experts models)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sampler continues: token ids [T]."""

    tokens: Int32s


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts each token took: `experts_TLK` int16 [T, L, K]; `layers` [L] holds each column's decoder-layer
    index. A token whose experts nobody knows holds -1 everywhere."""

    layers: tuple[int, ...]
    experts_TLK: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.experts_TLK)

    def resumed(self, later: Routes) -> Routes:
        """These, gone on with: what is known here stays, what is not comes from `later`, which speaks of the same text
        from its first token on. ValueError when it speaks of other layers or of another K."""
        mine, theirs = self.experts_TLK, later.experts_TLK
        if self.layers != later.layers or mine.shape[2] != theirs.shape[2]:
            raise ValueError(
                f"routes of layers {self.layers}, {mine.shape[2]} experts a token, go on in layers {later.layers}, "
                f"{theirs.shape[2]} experts a token"
            )
        both = min(len(mine), len(theirs))
        longer = theirs if len(theirs) > both else mine
        known = mine[:both].max(-1, keepdims=True) >= 0
        return Routes(self.layers, np.concatenate([np.where(known, mine[:both], theirs[:both]), longer[both:]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a sampler drew for one prompt. Every array is [T], one entry for each sampled token, the stop token
    included."""

    tokens: Int32s
    logprobs: Float32s  # of the model at the temperature, before any truncation: what training uses
    sampling_logprobs: Float32s  # of the distribution that the token was really drawn from
    versions: Int32s  # the policy version that drew each token
    stop: Stop
    routes: Routes | None = None  # of the prompt's tokens, and then of these; the last one was never routed


class Segment:
    """An append-only stretch of one episode, as columns [T]. What was sampled is what is trained: nothing is
    re-encoded."""

    __slots__ = ("routes", "rows")

    def __init__(self) -> None:
        self.rows: Int32s = np.empty((0, 3), np.int32)
        """[T, 3]: token, the bits of its float32 logprob, version. One array, so that a packer can join ten thousand
        segments at the speed of memory; everybody else reads the columns below."""
        self.routes: Routes | None = None
        """Of its first tokens: those that the sampler has seen. None when nobody asked for them."""

    def observe(self, tokens: Int32s) -> None:
        """Append tokens that the policy did not choose: prompts, tool results, template headers."""
        self._append(tokens, 0, -1)

    def act(self, completion: Completion) -> None:
        """Append what the policy sampled; it was given all that stands here. Routes that are known stay as they are.

        Raises ValueError for columns of unequal length, or a negative version.
        """
        tokens, logprobs, versions = completion.tokens, completion.logprobs, completion.versions
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(f"columns of unequal length: {[len(tokens), len(logprobs), len(versions)]}")
        if len(versions) and versions.min() < 0:
            raise ValueError(f"policy version {versions.min()}: versions count from 0, below it means not sampled")
        routes = completion.routes
        if routes is not None and len(routes) != len(self.rows) + len(tokens):
            raise ValueError(
                f"routes of {len(routes)} tokens for {len(self.rows)} given ones and {len(tokens)} sampled"
            )
        self._append(tokens, logprobs.astype(np.float32, copy=False).view(np.int32), versions)
        if routes is not None:
            self.routes = routes if self.routes is None else self.routes.resumed(routes)

    def _append(self, tokens: Int32s, logprobs: Int32s | int, versions: Int32s | int) -> None:
        held = len(self.rows)
        rows = np.empty((held + len(tokens), 3), np.int32)
        rows[:held] = self.rows
        rows[held:, 0], rows[held:, 1], rows[held:, 2] = tokens, logprobs, versions
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> Int32s:
        return np.ascontiguousarray(self.rows[:, 0])

    @property
    def logprobs(self) -> Float32s:
        """Of each token given those before it, as the sampler reported it; 0 where it was not sampled."""
        return np.ascontiguousarray(self.rows.view(np.float32)[:, 1])

    @property
    def sampled(self) -> Bools:
        """True where the policy chose the token."""
        return self.rows[:, 2] >= 0

    @property
    def versions(self) -> Int32s:
        """The policy version that drew each token; -1 where it was not sampled."""
        return np.ascontiguousarray(self.rows[:, 2])


@dataclass(slots=True)
class Trajectory:
    """One episode: its segments, its reward, and why it ended. A history edit opens a new segment."""

    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # the reward's named parts, for the record
    ending: Ending = Ending.DONE

    @property
    def num_sampled(self) -> int:
        return sum(int(segment.sampled.sum()) for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that drew a token of it; None when nothing was sampled."""
        versions = [int(s.versions[s.sampled].min()) for s in self.segments if s.sampled.any()]
        return min(versions) if versions else None


@dataclass(slots=True)
class Group:
    """The G attempts at one task."""

    task_id: str
    trajectories: list[Trajectory]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


@dataclass(frozen=True)
class Layout:
    """How T packed tokens fall into S sequences.

    `lengths` [S] sum to T. `parents` [S] names each sequence's prefix by index, -1 for none: a branch attends to its
    prefix's tokens and then to its own, and its positions go on where the prefix's end. A prefix has no prefix itself.

    Raises ValueError when a parent does not come before its branch, or has a parent itself.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.parents:
            object.__setattr__(self, "parents", (-1,) * len(self.lengths))
        if len(self.parents) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} lengths but {len(self.parents)} parents")
        for s, parent in enumerate(self.parents):
            if parent != -1 and not (0 <= parent < s and self.parents[parent] == -1):
                raise ValueError(
                    f"sequence {s} names {parent} as its prefix: that must be an earlier sequence without a prefix"
                )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def lengths_S(self) -> NDArray[np.int64]:
        return np.asarray(self.lengths, np.int64)

    @cached_property
    def starts_S(self) -> NDArray[np.int64]:
        """Index of each sequence's first token."""
        return np.cumsum(self.lengths_S) - self.lengths_S

    @cached_property
    def prefix_lengths_S(self) -> NDArray[np.int64]:
        """Length of each sequence's prefix; 0 without one."""
        parents_S = np.asarray(self.parents, np.int64)
        return np.where(parents_S >= 0, self.lengths_S[parents_S], 0) if len(parents_S) else parents_S

    @cached_property
    def sequence_T(self) -> NDArray[np.int64]:
        """Which sequence each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths_S)

    @cached_property
    def positions_T(self) -> NDArray[np.int64]:
        """Each token's position in its own text, its prefix counted."""
        shift_S = self.prefix_lengths_S - self.starts_S
        return np.arange(self.num_tokens) + np.repeat(shift_S, self.lengths_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a caller or a loss needs of a forward pass besides the targets' logprobs."""

    entropy: bool = False
    square_sums: bool = False  # the sum of squared probabilities at every row: how certain the policy was
    values: bool = False
    routes: bool = False
    router_logits: bool = False  # what the routers of a mixture of experts scored, and each expert's share of it
    top_k: int = 0  # logprobs and ids of the k likeliest tokens at every row
    every_row: bool = False  # also score targets that the mask leaves out
    per_row: bool = False  # said by a loss: each token's loss depends on its own row alone. Not merged: nobody asks it

    def __or__(self, other: Want) -> Want:
        return Want(
            entropy=self.entropy or other.entropy,
            square_sums=self.square_sums or other.square_sums,
            values=self.values or other.values,
            routes=self.routes or other.routes,
            router_logits=self.router_logits or other.router_logits,
            top_k=max(self.top_k, other.top_k),
            every_row=self.every_row or other.every_row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a forward pass gives for one batch, aligned to its targets: row t speaks of `targets_T[t]`.

    Rows that nobody wanted (the mask is off and `Want.every_row` is false) hold 0 and carry no gradient. A value model
    gives `values_T` at every row, the last row of a text included, and 0 for every logprob.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    square_sums_T: Tensor | None = None
    values_T: Tensor | None = None
    top_k_ids_TK: Tensor | None = None
    top_k_logprobs_TK: Tensor | None = None
    ids_logprobs_TK: Tensor | None = None  # of the tokens in the batch's `ids_TK`
    routes: Routes | None = None
    expert_counts_LE: Tensor | None = None  # int64, with routes: how often each expert was taken where the mask is on
    router_logits_TLE: Tensor | None = None  # before any softmax; layers as in `Routes`. Live in a loss, not kept after
    router_shares_TLE: Tensor | None = None  # each expert's part of its token's scores, by the family's own function

    def each_row(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        """The same with every column of rows [T, ...] changed; what is not of rows stays as it is."""

        def changed(column: Tensor | None) -> Tensor | None:
            return None if column is None else change(column)

        return replace(
            self,
            logprobs_T=change(self.logprobs_T),
            entropy_T=changed(self.entropy_T),
            square_sums_T=changed(self.square_sums_T),
            values_T=changed(self.values_T),
            top_k_ids_TK=changed(self.top_k_ids_TK),
            top_k_logprobs_TK=changed(self.top_k_logprobs_TK),
            ids_logprobs_TK=changed(self.ids_logprobs_TK),
            router_logits_TLE=changed(self.router_logits_TLE),
            router_shares_TLE=changed(self.router_shares_TLE),
        )


class Reduction(StrEnum):
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that can still be merged with others: for MEAN, `value` is a sum over `count` things; never a mean of
    means."""

    reduction: Reduction
    value: float | Tensor  # a 0-dimensional tensor waits on its device until it is reported
    count: float | Tensor = 1.0

    def merge(self, other: Metric) -> Metric:
        if self.reduction is not other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} with a {other.reduction}")
        a, b = self.value, other.value  # NaN wins either way: `max` and `min` would lose it when it comes second
        if self.reduction is Reduction.MAX:
            return Metric(self.reduction, a if bool(a != a) or bool(a >= b) else b, self.count + other.count)
        if self.reduction is Reduction.MIN:
            return Metric(self.reduction, a if bool(a != a) or bool(a <= b) else b, self.count + other.count)
        return Metric(self.reduction, self.value + other.value, self.count + other.count)

    @property
    def result(self) -> float:
        """The number to report; NaN for a mean, a maximum or a minimum of nothing."""
        value, count = float(self.value), float(self.count)
        if self.reduction is Reduction.SUM:
            return value
        if count == 0:
            return float("nan")
        return value / count if self.reduction is Reduction.MEAN else value


Metrics = dict[str, Metric]


def merge_metrics(parts: list[Metrics]) -> Metrics:
    """Merge the metrics of several batches or ranks, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The reportable numbers; a metric over nothing is left out rather than logged as NaN."""
    return {name: m.result for name, m in metrics.items() if m.count > 0 or m.reduction is Reduction.SUM}
