"""How one engine is spread over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.section import Positive, Section

AboveZero = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]


class RuntimeConfig(Section):
    """What starts ranks, where there is more than one, and watches over them."""

    kind: Literal["processes", "ray"] = "processes"
    """`processes` are children on this machine; `ray` are actors of a Ray cluster, or of one that is started here."""
    address: str | None = None
    """The Ray cluster to join, like auto or ray://host:10001; null starts one on this machine."""
    cpus_per_rank: AboveZero = 1.0
    """Cores that Ray reserves for a rank."""
    gpus_per_rank: AtLeastZero = 0.0
    """GPUs that Ray reserves for a rank."""
    timeout_s: AboveZero = 1800.0
    """Stop when a rank has not answered a call for so long. A sampler's actor that is silent for so long is killed, and
    its requests are drawn elsewhere."""


class ParallelConfig(Section):
    """Ranks, processes with a device each, that hold one model together: data, replicas, sequence and tensor
    multiplied."""

    data: Positive = 1
    """Shards of the weights; each shard's ranks work on batches of their own (FSDP2)."""
    replicas: Positive = 1
    """Copies of all shards, each working on batches of its own (hybrid sharding)."""
    sequence: Positive = 1
    """Ranks that share the tokens of one batch, and exchange tokens for heads in attention (Ulysses, arXiv
    2309.14509)."""

    tensor: Positive = 1
    """Ranks that share the heads of attention and the inner channels of dense feed-forward parts."""
    experts: Positive = 1
    """Ranks that share the experts of a mixture's layers, among those of data and sequence: as many neighbours, each
    with its part. Tokens travel to their experts and back."""
    compute: Literal["model", "bfloat16"] = "model"
    """Arithmetic of layers over ranks: the model's own dtype, or bfloat16 over weights, gradient sums and moments that
    keep the model's (mixed precision)."""

    @property
    def ranks(self) -> int:
        return self.lanes * self.lane

    @property
    def shards(self) -> int:
        """Ranks among which the weights are cut, each with tokens of its own."""
        return self.data * self.sequence

    @property
    def lanes(self) -> int:
        """Ranks that work on different batches."""
        return self.data * self.replicas

    @property
    def lane(self) -> int:
        """Ranks that work on one batch together."""
        return self.sequence * self.tensor
