"""How one engine is spread over ranks."""

from __future__ import annotations

from strop.config.section import Positive, Section


class ParallelConfig(Section):
    """Ranks, processes with a device each, that hold one model together: as many as all of these multiplied."""

    data: Positive = 1
    """Shards of the weights; each shard's ranks work on batches of their own (FSDP2)."""
    replicas: Positive = 1
    """Copies of all shards, each working on batches of its own (hybrid sharding)."""
    sequence: Positive = 1
    """Ranks that share the tokens of one batch, and exchange tokens for heads in attention (Ulysses, arXiv
    2309.14509)."""

    tensor: Positive = 1
    """Ranks that share the heads of attention and the inner channels of dense feed-forward parts."""

    @property
    def ranks(self) -> int:
        return self.lanes * self.lane

    @property
    def lanes(self) -> int:
        """Ranks that work on different batches."""
        return self.data * self.replicas

    @property
    def lane(self) -> int:
        """Ranks that work on one batch together."""
        return self.sequence * self.tensor
