"""Low-rank adapters over one frozen model: several in one process, each on only while somebody computes with it.

    delta W = alpha / rank * B A        A [R, in] random, B [out, R] zero at first        (LoRA, arXiv 2106.09685)

The layers are PEFT's, and so is the format of an adapter's folder. Between two uses every adapter is off: the model is
its base, bit for bit, so that it can serve as the reference of what is trained over it.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from strop.config.adapter import AdapterConfig
from strop.errors import CheckpointError, ConfigError, EngineError
from strop.models.fuse import fuse
from strop.models.loading import LanguageModel, base_name
from strop.models.shards import full
from strop.ops.head import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in an adapter's folder
ATTENTION = ("attn", "attention", "mixer")
MLP = ("mlp", "feed_forward", "ffn", "experts", "shared_expert", "block_sparse_moe")
ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter of one model."""

    model: LanguageModel
    name: str
    config: LoraConfig

    @contextmanager
    def on(self) -> Generator[None]:
        """The model with this adapter, and no other, for the length of the block."""
        layers = self._layers()
        try:
            for layer in layers.values():
                layer.enable_adapters(True)
                layer.set_adapter(self.name)
            yield
        finally:
            for layer in layers.values():
                layer.enable_adapters(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The matrices that are trained, under PEFT's names without its prefix: `...q_proj.lora_A.weight`."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self._layers().items():
            for part, kept in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                found[f"{path}.{part}.weight"] = cast("nn.Parameter", kept[self.name].weight)
        return found

    def head(self) -> LowRank | None:
        """The adapter of the output matrix; None when it has none."""
        head = self.model.head
        if not isinstance(head, LoraLayer) or self.name not in head.lora_A:
            return None
        a_RD, b_VR = (cast("nn.Linear", kept[self.name]).weight for kept in (head.lora_A, head.lora_B))
        return LowRank(a_RD=a_RD, b_VR=b_VR, scale=head.scaling[self.name])

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights with the adapter in them, under Hugging Face names, one new tensor at a time.

        Nothing in the model changes. A tied output matrix that the adapter changes is there beside the embedding.
        """
        deltas = {f"{base_name(path)}.{_parameter_of(layer)}": layer for path, layer in self._layers().items()}
        seen: set[str] = set()
        for name, tensor in self.model.state():
            seen.add(name)
            whole = full(tensor)
            yield name, self._merge(whole, deltas[name]) if name in deltas else whole
        for name in deltas.keys() - seen:  # tied: the embedding stands for both, and only the output matrix changes
            yield name, self._merge(full(self.model.head.weight), deltas[name])

    def _merge(self, weight: Tensor, layer: LoraLayer) -> Tensor:
        delta: Tensor = cast("Any", layer).get_delta_weight(self.name)  # each kind of layer has its own
        return (weight.detach().to(delta.dtype) + delta).to(weight.dtype)

    @property
    def unties(self) -> bool:
        """Whether the merged model has an output matrix of its own where the base's is tied to the embedding."""
        return self.head() is not None and _tied(self.model)

    def save(self, folder: Path) -> None:
        """Write a PEFT folder: it loads with `PeftModel.from_pretrained`, in vLLM, and here."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{PREFIX}{name}": p.detach().contiguous().clone() for name, p in self.parameters().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        written = {key: sorted(v) if isinstance(v, set) else v for key, v in self.config.to_dict().items()}
        written["base_model_name_or_path"] = str(self.model.config.name_or_path)
        (folder / CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True, default=str) + "\n", "utf-8")

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy matrices in, by the names of `parameters`: all or nothing. EngineError names what does not fit."""
        own = self.parameters()
        wrong = [f"missing {name}" for name in own.keys() - weights.keys()]
        wrong += [f"unknown {name}" for name in weights.keys() - own.keys()]
        wrong += [
            f"{name} is {tuple(weights[name].shape)} but the adapter has {tuple(p.shape)}"
            for name, p in own.items()
            if name in weights and weights[name].shape != p.shape
        ]
        if wrong:
            raise EngineError(f"these matrices do not fit adapter {self.name}: {'; '.join(sorted(wrong)[:5])}")
        for name, parameter in own.items():
            parameter.copy_(weights[name])

    def load_saved(self, folder: Path) -> None:
        """Copy in what `save` wrote. CheckpointError when it is not there, EngineError when it does not fit."""
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} has no {WEIGHTS}: it is not an adapter's folder")
        self.load({key.removeprefix(PREFIX): tensor for key, tensor in load_file(folder / WEIGHTS).items()})

    def _layers(self) -> dict[str, LoraLayer]:
        return {
            path: layer
            for path, layer in self.model.module.named_modules()
            if isinstance(layer, LoraLayer) and self.name in layer.lora_A
        }


def add_adapter(model: LanguageModel, name: str, config: AdapterConfig) -> Adapter:
    """A new adapter of a model, off, its first matrices drawn by `config.seed` alone.

    Raises ConfigError when rank is 0, or a target is nothing in this model; EngineError when the name is taken.
    """
    if not config.rank:
        raise ConfigError("adapter.rank is 0: an adapter needs a rank of at least 1")
    modules, parameters = targets(model.module, config.targets)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=cast("int", config.alpha),  # PEFT writes it down as it is; other numbers than whole ones work
        lora_dropout=0.0,
        target_modules=modules or [],
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )
    adapter = _inject(model, name, lora, seed=config.seed)
    if count_matrices(model.module, config) != sum(p.numel() for p in adapter.parameters().values()):
        raise EngineError(f"adapter {name!r}: PEFT did not adapt what {', '.join(config.targets)} mean in this model")
    return adapter


def untie(model: LanguageModel, config: AdapterConfig) -> bool:
    """Give a tied output matrix memory of its own, where an adapter of `config` changes it and not the embedding: a
    model that takes the merged weights needs both. Whether it was tied."""
    if "unembedding" not in config.targets or not _tied(model):
        return False
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
    return True


def find_adapter(model: LanguageModel, name: str) -> Adapter:
    """An adapter that was added before. EngineError when there is none of that name."""
    if name not in model.adapters:
        raise EngineError(f"no adapter is called {name!r}; there are {', '.join(sorted(model.adapters)) or 'none'}")
    return Adapter(model, name, model.adapters[name])


def import_adapter(model: LanguageModel, name: str, folder: Path) -> Adapter:
    """An adapter that PEFT, or strop, wrote. CheckpointError when it is none; EngineError when it does not fit.

    Only plain LoRA is taken: dropout is ignored, since a trained policy must be the one that is sampled.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} has no {file}: it is not an adapter's folder (safetensors are needed)")
    written: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))
    strange = [key for key in ("use_dora", "lora_bias", "alora_invocation_tokens") if written.get(key)]
    if written.get("peft_type") != "LORA" or strange or written.get("bias", "none") != "none":
        raise CheckpointError(
            f"{folder} holds a {written.get('peft_type')} with {strange or 'biases'}: only plain LoRA"
        )
    config = cast("LoraConfig", LoraConfig.from_pretrained(str(folder)))
    config.lora_dropout = 0.0
    config.inference_mode = False
    adapter = _inject(model, name, config, seed=0)
    adapter.load_saved(folder)
    return adapter


def _inject(model: LanguageModel, name: str, lora: LoraConfig, *, seed: int) -> Adapter:
    if not name or "." in name:
        raise EngineError(f"adapter {name!r}: a name is not empty and has no dot")
    if name in model.adapters:
        others = ", ".join(sorted(model.adapters.keys() - {name})) or "no other"
        raise EngineError(f"adapter {name!r} is there already, beside {others}")
    # PEFT rewrites targets of mixture-of-experts models that it knows by their configuration, and then leaves shared
    # experts out. A shell without a configuration has the same names and no such opinions.
    shell = nn.Module()
    for child_name, child in model.module.named_children():
        shell.add_module(child_name, child)
    with torch.random.fork_rng(devices=[]), _as_if_whole(model.module):
        torch.manual_seed(seed)
        inject_adapter_in_model(lora, shell, adapter_name=name)
    for child_name, child in shell.named_children():
        model.module.add_module(child_name, child)
    model.adapters[name] = lora
    adapter = Adapter(model, name, lora)
    for layer in model.module.modules():
        if isinstance(layer, LoraLayer):
            layer.enable_adapters(False)
    for parameter in adapter.parameters().values():
        if parameter.dtype == torch.bfloat16:  # small steps vanish in bfloat16
            parameter.data = parameter.data.float()
    # strop's forms hold the modules that PEFT has just wrapped
    fuse(model.module, model.impl, agreed=frozenset(model.fused))
    model.module.eval()
    return adapter


@contextmanager
def _as_if_whole(module: nn.Module) -> Generator[None]:
    """Shards stand aside for tensors of the whole's shape and no memory: PEFT would size its matrices by the shards."""
    shards = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    try:
        for child, name, parameter in shards:
            shape = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            setattr(child, name, nn.Parameter(shape, requires_grad=False))
        yield
    finally:
        for child, name, parameter in shards:
            setattr(child, name, parameter)


def targets(module: PreTrainedModel, kinds: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names for PEFT of the modules and of the stacked parameters that `kinds` mean in this model.

    ConfigError for a kind that is nothing here.
    """
    head = module.get_output_embeddings()
    linear = {
        base_name(name): child
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear | Conv1D | LoraLayer)
        and base_name(name) is not None
        and "base_layer" not in name.split(".")
    }
    by_kind: dict[str, list[str]] = {"attention": [], "mlp": [], "unembedding": []}
    for name, child in linear.items():
        assert name is not None
        parts = name.split(".")
        if child is head:
            by_kind["unembedding"].append(name)
        elif parts[-1] in ROUTERS:
            continue
        elif any(part.endswith(ATTENTION) for part in parts[:-1]):
            by_kind["attention"].append(name)
        elif any(part in MLP for part in parts[:-1]):
            by_kind["mlp"].append(name)
    stacked = {
        base_name(name)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 3 and "experts" in name.split(".")
    }
    experts = sorted(name for name in stacked if name is not None)
    found = {**by_kind, "experts": experts}
    missing = [kind for kind in kinds if not found[kind]]
    if missing:
        raise ConfigError(
            f"adapter.targets: this model has no {' and no '.join(missing)}; it has "
            f"{', '.join(kind for kind, names in found.items() if names)}"
        )
    chosen = sorted(name for kind in kinds if kind != "experts" for name in found[kind])
    every = [name for name in linear if name is not None]
    return _short(chosen, every), _short(experts, experts) if "experts" in kinds else []


def count_matrices(module: PreTrainedModel, config: AdapterConfig) -> int:
    """Numbers in the matrices that an adapter would add; on a model without weights too. ConfigError as `targets`."""
    modules, parameters = targets(module, config.targets)
    chosen = [f"{name}.weight" for name in modules]
    weights = {base_name(name): p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    own = {name: shape for name, shape in weights.items() if name is not None}
    shapes = [shape for name, shape in own.items() if _ends_with(name, chosen)]
    stacked = [shape for name, shape in own.items() if _ends_with(name, parameters)]
    return config.rank * (sum(map(sum, shapes)) + sum(e * (a + b) for e, a, b in stacked))


def _tied(model: LanguageModel) -> bool:
    embedding = next(model.module.get_input_embeddings().parameters())
    return model.head.weight.data_ptr() == embedding.data_ptr()


def _ends_with(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _short(chosen: list[str], every: list[str]) -> list[str]:
    """Last parts of the names where those mean the same ones: what other programs write, and read on other models."""
    endings = sorted({name.rpartition(".")[2] for name in chosen})
    meant = [name for name in every if name.rpartition(".")[2] in endings]
    return endings if sorted(meant) == sorted(chosen) and all("." in name for name in chosen) else chosen


def _parameter_of(layer: LoraLayer) -> str:
    """The name of the parameter that a layer adapts."""
    return layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
