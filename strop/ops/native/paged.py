from torch import Tensor


def write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    raise NotImplementedError


def attend(
    keys: Tensor, values: Tensor, q: Tensor, tables: Tensor, row: Tensor, context: Tensor, scale: float
) -> Tensor:
    raise NotImplementedError
