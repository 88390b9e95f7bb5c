"""Hidden states of one batch in; the batch's outputs out, with a graph or with gradients: the engine's last layer.

Only rows that the mask or `want.every_row` names go through the head. In the `fused` form a loss that looks at single
rows is differentiated while their logits are there; any other loss, and any other form, goes by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Loss
from strop.models.loading import LanguageModel
from strop.ops.logprobs import Entropy, Head, HeadImpl, Scored, learn_targets, require, score_targets
from strop.types import Outputs, Want

if TYPE_CHECKING:
    from strop.models.lora import Adapter

InputsT = TypeVar("InputsT")


@dataclass(frozen=True, slots=True)
class Scorer:
    """The head of `model`, in the form that `config` names. Raises ConfigError when that form cannot be had."""

    model: LanguageModel
    config: EngineConfig
    adapter: Adapter | None = None
    every_weight: bool = False  # a batch without rows must reach the head too: its ranks exchange gradients

    def __post_init__(self) -> None:
        if self.model.device.type != "meta":
            self.check(self.model, self.config, self.model.device)

    @staticmethod
    def check(model: LanguageModel, config: EngineConfig, device: torch.device) -> None:
        """ConfigError when the form that `config` names cannot run on `device`, or not for this model."""
        if model.value_head is None:
            head = model.head
            require(
                HeadImpl(config.head),
                device=device,
                dtype=head.weight.dtype,
                softcap=model.softcap,
                bias=head.bias is not None,  # pyright: ignore[reportUnnecessaryComparison] - most have none
            )

    def fuses(self, loss: Loss[Any]) -> bool:
        """Whether `learn` does for this loss what `score`, the loss and autograd would do."""
        return self.config.head == HeadImpl.FUSED and loss.want.per_row

    def score(self, hidden_TD: Tensor, batch: Batch[Any], want: Want, entropy: Entropy) -> Outputs:
        """Outputs with a graph behind them. `entropy` says how it is computed if it is wanted."""
        rows_N = wanted_rows(batch, want)
        nothing = not len(rows_N) and self.every_weight
        if nothing:
            rows_N = torch.zeros(1, dtype=torch.int64, device=batch.targets_T.device)
        scored = score_targets(
            hidden_TD[rows_N],
            self._head(),
            batch.targets_T[rows_N].clamp(min=0),
            temperature_N=None if batch.temperature_T is None else batch.temperature_T[rows_N],
            entropy=entropy if want.entropy else Entropy.NONE,
            top_k=want.top_k,
            ids_NK=None if batch.ids_TK is None else batch.ids_TK[rows_N],
            square_sums=want.square_sums,
            impl=HeadImpl(self.config.head),
            rows=self.config.head_rows,
            weight_grad_VD=self._weight_grad(),
        )
        outputs = outputs_of(scored, rows_N, len(batch.targets_T))
        return _emptied(outputs) if nothing else outputs

    def learn(
        self, hidden_TD: Tensor, batch: Batch[InputsT], want: Want, loss: Loss[InputsT]
    ) -> tuple[Outputs, Tensor]:
        """Outputs without a graph, and the weighted sum of the loss, whose `backward()` goes on into the body.

        The loss sees a few rows live at a time, its mask off at all others.
        """
        rows_N = wanted_rows(batch, want)
        total = len(batch)

        def of_rows(few_N: Tensor, scored: Scored) -> Tensor:
            at_N = rows_N[few_N]
            mask_T = torch.zeros_like(batch.mask_T).index_fill(0, at_N, True) & batch.mask_T
            loss_T, _ = loss(outputs_of(scored, at_N, total), batch.inputs, batch.layout, mask_T)
            return (torch.where(mask_T, loss_T, 0.0) * batch.weights_T.to(loss_T.dtype)).sum()

        entropy = Entropy.GRADIENT if loss.want.entropy else Entropy.VALUE
        scored, summed = learn_targets(
            hidden_TD[rows_N],
            self._head(),
            batch.targets_T[rows_N],
            of_rows,
            temperature_N=None if batch.temperature_T is None else batch.temperature_T[rows_N],
            entropy=entropy if want.entropy else Entropy.NONE,
            top_k=want.top_k,
            ids_NK=None if batch.ids_TK is None else batch.ids_TK[rows_N],
            square_sums=want.square_sums,
            rows=self.config.head_rows,
            weight_grad_VD=self._weight_grad(),
        )
        return outputs_of(scored, rows_N, total), summed

    def _head(self) -> Head:
        head = self.model.head
        low_rank = None if self.adapter is None else self.adapter.head()
        return Head(weight_VD=head.weight, bias_V=head.bias, softcap=self.model.softcap, low_rank=low_rank)

    def _weight_grad(self) -> Tensor | None:
        """From a call's second batch on, the place where the weight's gradient has begun: one [V, D], not two.

        A plain or liger head leaves it to autograd, and so does a weight that is not trained.
        """
        streams = self.config.head not in (HeadImpl.PLAIN, HeadImpl.LIGER)
        return self.model.head.weight.grad if streams and torch.is_grad_enabled() else None


def _emptied(outputs: Outputs) -> Outputs:
    """Zeros in every place, behind which the graph is still there: what flows back through it is zero too."""
    return outputs.each_row(lambda column: torch.where(torch.zeros_like(column, dtype=torch.bool), column, 0))


def wanted_rows(batch: Batch[Any], want: Want) -> Tensor:
    """Indices [N] of the rows to score."""
    return ((batch.targets_T >= 0) & (batch.mask_T | want.every_row)).nonzero()[:, 0]


def outputs_of(scored: Scored, rows_N: Tensor, total: int) -> Outputs:
    """Rows back to their places among `total`; the others are 0."""

    def spread(values_N: Tensor | None) -> Tensor | None:
        if values_N is None:
            return None
        return values_N.new_zeros((total, *values_N.shape[1:])).index_copy(0, rows_N, values_N)

    logprobs_T = spread(scored.logprobs_N)
    assert logprobs_T is not None
    return Outputs(
        logprobs_T=logprobs_T,
        entropy_T=spread(scored.entropy_N),
        square_sums_T=spread(scored.square_sums_N),
        ids_logprobs_TK=spread(scored.ids_logprobs_NK),
        top_k_ids_TK=spread(scored.top_k_ids_NK),
        top_k_logprobs_TK=spread(scored.top_k_logprobs_NK),
    )
