from torch import Tensor

from strop.types import Layout


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    raise NotImplementedError
