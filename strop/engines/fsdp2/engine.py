"""The FSDP2 engine: batches in, per-token outputs and accumulated gradients out. In this process, at world size 1.

One batch flows tokens -> hidden states -> the wanted rows of the head -> loss per token -> weighted sum -> backward,
and is gone before the next begins: peak memory does not depend on how many batches a call holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Capabilities, ForwardBackward, Loss, OptimOutcome, OptimParams
from strop.engines.fsdp2.activations import Activations
from strop.engines.fsdp2.expert_parallel import check_experts, has_experts
from strop.engines.fsdp2.host import HostBuffers
from strop.engines.fsdp2.optimizer import build_optimizers, parameter_groups
from strop.engines.fsdp2.resident import Away
from strop.engines.fsdp2.routing import Routers
from strop.engines.fsdp2.scoring import Scorer
from strop.engines.fsdp2.spread import Alone, Place, Spread, is_first_rank, on_first_rank
from strop.errors import CheckpointError, EngineError
from strop.models.experts import Form
from strop.models.heads import values
from strop.models.loading import LanguageModel
from strop.models.saved import export_weights
from strop.models.shards import gathered
from strop.ops.logprobs import Entropy
from strop.types import Metrics, Outputs, Want, merge_metrics

if TYPE_CHECKING:
    from strop.models.lora import Adapter

InputsT = TypeVar("InputsT")
WEIGHTS, MOMENTS, STANDING = "model.safetensors", "optimizer.safetensors", "hyper_parameters"
ADAPTER = "adapter_model.safetensors"


class Fsdp2Engine:
    """Trains a `LanguageModel`. The contract is `strop.engines.base.Engine`.

    A frozen engine (`trainable=False`: a reference model, a teacher) has no optimizer and only runs `forward`. An
    engine with an `adapter` trains that over the frozen weights of `base`, which stay what they are.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        trainable: bool = True,
        adapter: Adapter | None = None,
        base: Fsdp2Engine | None = None,
    ) -> None:
        self.model = model
        if base is None:
            check_experts(model.module, config.parallel)
        spread = config.parallel.ranks > 1 and model.device.type != "meta"  # a plan looks at a model without weights
        if spread and base is None:
            model.module.requires_grad_(trainable)
        self._routers = base._routers if base is not None else Routers(model)  # before their weights are spread
        self._place = base._place if base is not None else _place(model, config.parallel, spread)
        self.trainable = trainable
        self._config = config
        self._adapter = adapter
        self._base = base
        self.capabilities = Capabilities(
            lora=config.parallel.tensor == 1,
            shared_prefix=True,
            value_head=model.value_head is not None,
            router_replay=self._routers.known,
            expert_parallel=has_experts(model.module),
        )
        self.data_parallel = 1
        self._scorer = Scorer(model, config, adapter, every_weight=spread)
        self._away: Away | None = None
        if adapter is None:
            model.module.requires_grad_(trainable)
        self._activations = Activations(model.module, config.activations, model.device)
        learned = None if adapter is None else adapter.parameters()
        self._optimizers = build_optimizers(parameter_groups(model, config, learned)) if trainable else None

    @property
    def activation_buffers(self) -> HostBuffers | None:
        """Where offloaded activations wait, for whoever measures; None without offload."""
        return self._activations.buffers

    async def forward(self, batches: list[Batch[Any]], want: Want = Want()) -> list[Outputs]:  # noqa: B008
        self._here("forward")
        with torch.no_grad(), self._adapted():
            scored = [self._score(batch, want) for batch in batches]
        self._place.put_away()
        return scored

    async def forward_backward(
        self,
        batches: list[Batch[InputsT]],
        loss: Loss[InputsT],
        want: Want = Want(),  # noqa: B008
    ) -> ForwardBackward:
        if self._optimizers is None:
            raise EngineError("this engine is frozen: it scores batches (forward) and cannot take gradients")
        self._here("forward_backward")
        with self._optimizers.all_or_nothing(), self._activations.applied(), self._adapted():
            learned = self._learn(batches, loss, want)
            self._place.add_up([] if self._adapter is None else self._adapter.parameters().values())
            self._place.put_away()
            return learned

    def _learn(self, batches: list[Batch[InputsT]], loss: Loss[InputsT], want: Want) -> ForwardBackward:
        outputs: list[Outputs] = []
        metrics: list[Metrics] = []
        for number, batch in enumerate(batches, start=1):
            self._place.syncs(number == len(batches))
            output, measured = self._learn_one(batch, loss, want | loss.want)
            outputs.append(output)
            metrics.append(measured)
        return ForwardBackward(outputs=outputs, metrics=merge_metrics(metrics))

    def _learn_one(self, batch: Batch[InputsT], loss: Loss[InputsT], want: Want) -> tuple[Outputs, Metrics]:
        with self._routers.around(batch, want, self._place) as routed:  # the backward pass may run layers again
            summed: Tensor | None = None
            if self.model.value_head is None and self._scorer.fuses(loss) and self._place.ranks == 1:
                live, summed = self._scorer.learn(self._hidden(batch, want), batch, want, loss)
            else:
                live = self._outputs(batch, want, Entropy.GRADIENT if loss.want.entropy else Entropy.VALUE)
            live = routed.into(live)
            loss_T, measured = loss(live, batch.inputs, batch.layout, batch.mask_T)
            if loss_T.shape != batch.targets_T.shape:
                raise EngineError(f"the loss returned {tuple(loss_T.shape)} for targets {tuple(batch.targets_T.shape)}")
            if summed is None:
                summed = (torch.where(batch.mask_T, loss_T, 0.0) * batch.weights_T.to(loss_T.dtype)).sum()
            if summed.requires_grad:  # an all-masked batch has no rows and no graph, and adds nothing
                summed.backward()
            return _detached(live), measured | routed.metrics()

    def _score(self, batch: Batch[Any], want: Want) -> Outputs:
        with self._routers.around(batch, want, self._place) as routed:
            return routed.into(self._outputs(batch, want, Entropy.VALUE))

    def _outputs(self, batch: Batch[Any], want: Want, entropy: Entropy) -> Outputs:
        """Run one batch. `entropy` is computed without a gradient unless the loss needs one."""
        share = self._place.share(batch)

        def compute() -> Outputs:
            hidden_TD = self._hidden(share, want)
            if self.model.value_head is not None:
                values_T = values(self.model.value_head, hidden_TD)
                return Outputs(logprobs_T=torch.zeros_like(values_T), values_T=values_T)
            return self._scorer.score(hidden_TD, share, want, entropy)

        return self._place.whole(self._place.run(compute), len(batch))

    def _hidden(self, batch: Batch[Any], want: Want) -> Tensor:
        """The body's hidden states [T, D]. EngineError for what this model cannot give."""
        _check_want(want, self.model)
        place, layout = self._place, batch.layout
        tokens_T = batch.tokens_T.to(self.model.device)
        return self.model.hidden(tokens_T, place.positions(layout), place.attention(layout))

    async def zero_grad(self) -> None:
        self._here("zero_grad")
        if self._optimizers is not None:
            self._optimizers.zero_grad()

    async def optim_step(self, params: OptimParams) -> OptimOutcome:
        if self._optimizers is None:
            raise EngineError("this engine is frozen: it has no optimizer")
        self._here("optim_step")
        return self._optimizers.step(params)

    def weights(self, form: Form = Form.SAVED) -> Iterator[tuple[str, Tensor]]:
        self._here("weights")
        own = self._adapter.merged() if self._adapter is not None else gathered(self.model.state())
        for name, tensor in export_weights(self.model.module, own, form):
            yield name, tensor.detach().clone()  # one expert of a stack would carry all of it along

    def lend_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapter is not None or self._place.ranks > 1:
            yield from self.weights(Form.PACKED)
            return
        self._here("lend_weights")
        yield from self.model.state()

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._here("adapter_weights")
        if self._adapter is None:
            raise EngineError("this engine trains the whole model: it has weights() and no adapter")
        for name, parameter in self._adapter.parameters().items():
            yield name, parameter.detach().clone()

    async def save(self, folder: Path) -> None:
        self._here("save")
        if self._adapter is not None:
            if is_first_rank():
                self._adapter.save(folder)
        else:
            self._write(dict(self.model.state()), folder / WEIGHTS)
        if self._optimizers is not None:
            standing = {STANDING: self._optimizers.standing.state()}
            self._write(dict(self._optimizers.state()), folder / MOMENTS, standing)

    def _write(self, tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
        """One file, whole tensors in it, written by the first rank: another number of ranks can read it."""
        whole = {name: on_first_rank(tensor) for name, tensor in tensors.items()}
        if is_first_rank():
            try:
                save_file({name: t for name, t in whole.items() if t is not None}, file, metadata=metadata)
            except SafetensorError as error:
                raise CheckpointError(f"{file} cannot be written: {error}") from error
        self._place.wait()

    async def load(self, folder: Path) -> None:
        self._here("load")
        weights = WEIGHTS if self._adapter is None else ADAPTER
        for name in (weights, MOMENTS) if self._optimizers is not None else (weights,):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} has no {name}: it is not a checkpoint of this engine")
        moments, standing = _moments(folder / MOMENTS) if self._optimizers is not None else ({}, "")
        if self._adapter is not None:
            self._adapter.load_saved(folder)
        else:
            self.model.load_state(load_file(folder / WEIGHTS).items())
        if self._optimizers is not None:
            self._optimizers.load_state(moments, standing)
            self._optimizers.zero_grad()

    async def resident(self, on_device: bool) -> None:
        if on_device and self._away is not None:
            self._away.back()
            self._away = None
        elif not on_device and self._away is None:
            self._away = Away.move(self._tensors(), self.model.device)

    def _tensors(self) -> Iterator[Tensor]:
        """Everything that this engine keeps between two calls."""
        if self._adapter is not None:
            yield from self._learned(self._adapter.parameters().values())
            return
        yield from self.model.module.buffers()
        yield from self._learned(self.model.module.parameters())

    def _learned(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        if self._optimizers is not None:
            yield from (tensor for _, tensor in self._optimizers.state())

    def _adapted(self) -> AbstractContextManager[None]:
        """The model as this engine means it: with its adapter, or bare."""
        return nullcontext() if self._adapter is None else self._adapter.on()

    def _here(self, asked: str) -> None:
        if self._base is not None:
            self._base._here(asked)
        if self._away is not None:
            raise EngineError(
                f"{asked}: this engine's tensors are in host memory; call resident(on_device=True) before"
            )

    def adapter(self, name: str, config: AdapterConfig, *, trainable: bool = True) -> Fsdp2Engine:
        from strop.models.lora import add_adapter

        if self.trainable or self._adapter is not None:
            raise EngineError(f"adapter {name!r} needs a frozen base: build that engine with trainable=False")
        if self.model.value_head is not None:
            raise EngineError(f"adapter {name!r}: a value model's head would not be trained; train the whole model")
        if self._place.ranks > 1 and (self._config.parallel.tensor > 1 or "experts" in config.targets):
            raise EngineError(
                f"adapter {name!r}: over ranks an adapter is of attention, mlp and unembedding, and its base is not "
                "cut by tensor: set engine.parallel.tensor to 1 and take experts out of engine.adapter.targets"
            )
        added = add_adapter(self.model, name, config)
        return Fsdp2Engine(self.model, self._config, trainable=trainable, adapter=added, base=self)


def read_weights(model: LanguageModel, folder: Path) -> None:
    """Copy in, tensor by tensor, what an engine of such a body wrote to `folder`; a head of the model's own stays."""
    with safe_open(folder / WEIGHTS, framework="pt") as saved, torch.no_grad():
        names = set(saved.keys())
        for name, tensor in model.state():
            if name in names:
                tensor.copy_(saved.get_tensor(name))


def _place(model: LanguageModel, config: ParallelConfig, spread: bool) -> Place:
    return Spread(model, config) if spread else Alone(model)


def _moments(file: Path) -> tuple[dict[str, Tensor], str]:
    """Moments, and the hyper-parameters that stood. CheckpointError when the file has none."""
    with safe_open(file, framework="pt") as opened:
        standing: dict[str, str] = opened.metadata() or {}
    if STANDING not in standing:
        raise CheckpointError(f"{file} has no {STANDING}: it is not of this version of the engine")
    return load_file(file), standing[STANDING]


def _check_want(want: Want, model: LanguageModel) -> None:
    """EngineError for what the model cannot give: a language model no values, a value model nothing else."""
    if want.values and model.value_head is None:
        raise EngineError("this engine's model has no value head, so it gives no values: load it as a value model")
    tokens = not want.values or want.entropy or want.top_k or want.every_row
    if model.value_head is not None and tokens:
        raise EngineError("a value model has no output matrix: it gives values (Want(values=True)) and nothing else")


def _detached(live: Outputs) -> Outputs:
    """What is kept of a batch when its graph goes."""
    return replace(live, router_logits_TLE=None, router_shares_TLE=None).each_row(Tensor.detach)
