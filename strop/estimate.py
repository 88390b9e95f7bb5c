"""How much memory and disk a run needs, part by part, from the model's configuration and the recipe alone.

Exact: weights, gradients, optimizer, sampler weights. Upper bounds: activations and logits, for a full pack, and the
cache, whose pages take memory only once they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from transformers import PretrainedConfig

from strop.config.activations import ActivationsConfig
from strop.config.model import ModelConfig
from strop.config.parallel import ParallelConfig
from strop.config.recipe import Recipe
from strop.ops.head import COLUMNS
from strop.ops.paged import PAGE
from strop.ops.select import Impl
from strop.rollout.builtin.states import num_snapshots

MIB = 2**20
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The sizes of linear attention layers."""

    layers: int
    taps: int  # W of the convolution
    key_heads: int  # J
    heads: int  # H
    key_channels: int  # C
    value_channels: int  # C_v

    @property
    def convolved(self) -> int:
        """F: channels of queries, keys and values together."""
        return 2 * self.key_heads * self.key_channels + self.heads * self.value_channels

    @property
    def state(self) -> int:
        """Numbers that one layer keeps of one text."""
        return (self.taps - 1) * self.convolved + self.heads * self.key_channels * self.value_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder, by their axis letters, and its parameters (tied ones once)."""

    parameters: int
    matrices: int  # elements of hidden matrices, which Muon takes
    layers: int  # L
    hidden: int  # D
    heads: int  # H
    kv_heads: int  # J
    channels: int  # C
    ffn: int  # inner size of the feed-forward part; of the experts a token visits, together
    vocabulary: int  # V
    context: int  # positions
    experts: int  # K that a token visits; 0 without experts
    rms_norms: bool  # of the kind that the native kernels take over, with what is around them
    linear: Linear | None = None
    adapter: int = 0  # numbers in the matrices of an adapter; 0: the whole model is trained
    stacked: int = 0  # parameters of experts, of all layers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """MiB by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    offloaded: float
    logits: float
    sampler: float
    cache: float
    reference: float
    teachers: float = 0.0
    critic: float = 0.0
    gathered: float = 0.0
    ranks: int = 1

    @property
    def total(self) -> float:
        """Of everything: of all ranks, where there are several, and of the process that leads them."""
        return self.ranks * sum(self.of_rank().values()) + sum(self.elsewhere().values())

    def parts(self) -> dict[str, float]:
        """Each part by its name; a part that the run does not have is left out."""
        return self.of_rank() | self.elsewhere()

    def of_rank(self) -> dict[str, float]:
        """What each rank of the engine holds."""
        parts = {
            "weights": self.weights,
            "layers gathered": self.gathered,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations of a pack": self.activations,
            "activations in host memory": self.offloaded,
            "logits": self.logits,
            "reference weights": self.reference,
            "teachers": self.teachers,
            "critic": self.critic,
        }
        return {name: size for name, size in parts.items() if size}

    def elsewhere(self) -> dict[str, float]:
        """What the sampler holds: in the process that leads the ranks, or in each actor."""
        parts = {"sampler weights": self.sampler, "key-value cache": self.cache}
        return {name: size for name, size in parts.items() if size}


def machine() -> float:
    """MiB of memory that this machine has."""
    return psutil.virtual_memory().total / MIB


def shape_of(config: PretrainedConfig, parameters: int, matrices: int, adapter: int = 0, stacked: int = 0) -> Shape:
    """Sizes from a transformers configuration; families leave some of them out."""
    text = config.get_text_config()
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    ffn = int(_value(text, "intermediate_size", "n_inner") or 4 * hidden)
    experts = int(_value(text, "num_experts_per_tok") or 0)
    if experts:
        ffn = experts * int(_value(text, "moe_intermediate_size") or ffn)
    return Shape(
        parameters=parameters,
        matrices=matrices,
        layers=int(text.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(_value(text, "num_key_value_heads") or heads),
        channels=int(_value(text, "head_dim") or hidden // heads),
        ffn=ffn,
        vocabulary=int(text.vocab_size),
        context=int(text.max_position_embeddings),
        experts=experts,
        rms_norms=_value(text, "rms_norm_eps") is not None,
        linear=_linear(text),
        adapter=adapter,
        stacked=stacked,
    )


def _linear(text: PretrainedConfig) -> Linear | None:
    kinds: list[str] = _value(text, "layer_types") or []
    layers = kinds.count("linear_attention")
    if not layers:
        return None
    return Linear(
        layers=layers,
        taps=int(text.linear_conv_kernel_dim),
        key_heads=int(text.linear_num_key_heads),
        heads=int(text.linear_num_value_heads),
        key_channels=int(text.linear_key_head_dim),
        value_channels=int(text.linear_value_head_dim),
    )


def _value(config: PretrainedConfig, *names: str) -> Any:
    """The first of these settings that a configuration has and that is not None."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def teacher_memory(models: Sequence[tuple[ModelConfig, Shape]], recipe: Recipe, *, step_tokens: int) -> float:
    """MiB of all teachers' weights, and of what they say of one pack: K logprobs of 4 bytes and ids of 8 at each token,
    by each of them, and the student's logprobs at the same ids."""
    if recipe.distill is None:
        return 0.0
    tokens = min(recipe.engine.pack_tokens, step_tokens)
    top_k = recipe.distill.objective.top_k
    said = sum(0 if top_k is None else 16 * (top_k or shape.vocabulary) * tokens for _, shape in models)
    return (said + sum(shape.parameters * BYTES[model.dtype] for model, shape in models)) / MIB


def critic_bytes(shape: Shape, recipe: Recipe, dtype: str) -> tuple[int, int]:
    """A critic of numbers of `dtype`: (weights, gradients and moments, all but the gradients as a checkpoint has them).

    It learns before the policy does: what one keeps for its backward pass is gone when the other begins.
    """
    kept = (3 * shape.parameters - _muon(shape, recipe)) * BYTES[dtype]
    return kept + shape.parameters * BYTES[dtype], kept


def memory(
    shape: Shape, recipe: Recipe, *, step_tokens: int, impl: Impl, teachers: float = 0.0, critic: float = 0.0
) -> Memory:
    """What a run holds at its fullest, when a step has at most `step_tokens` tokens and the kernels are `impl`.

    b bytes a number of the dtype, N parameters, T tokens of the largest pack, min(engine.pack_tokens, step_tokens):

        weights       N b
        gradients     N b; of an adapter's matrices alone where one is trained
        optimizer     2 N b with AdamW; with Muon its matrices keep one moment instead of two; likewise
        activations   T L (8 D + 4 H C + 5 J C + 4 F) b: what each layer keeps for its backward pass, attention being
                      computed without a score matrix; T L (6 D + 3 H C + 4 J C + 3 F) b where native kernels fuse the
                      rest; with linear attention T L (7 F + 6 H C_v + H C C_v / 16) b in place of attention's part,
                      if that is more; 3 K D more with K experts a token, which take copies; a checkpointed layer keeps
                      T D b, and one of them is computed again in full; with offload two layers' at a time. Modules
                      chosen by pattern count as if they were not
        offloaded     what the layers keep, in buffers of at most an eighth more; as much again in idle ones, up to
                      engine.activations.offload_idle_mib
        logits        trainer: plain T V (4 + 4 + b), the logits and their softmax in float32 and their gradient;
                      liger 6 V numbers of float32 for each of 512 tokens, and the output matrix's gradient;
                      chunked and triton 4 tiles of float32, and that gradient in b bytes a number until it is handed
                      over; fused also V for each of engine.head_rows tokens, and the gradient in float32
                      sampler: R V 4 * 3 for R running requests
        sampler       N b: its own copy of the weights; of an adapter alone in one that draws over the trainer's model
        cache         tokens of it, in whole pages, times 2 L J C b; and for each slot of linear attention's states
                      (W - 1) F + H C C_v numbers a layer
        reference     N b when a loop keeps a frozen copy of its start; under an adapter the model itself, and for
                      later loops another copy of the adapter
        teachers      as given, in MiB
        critic        likewise

    Over ranks these are of one rank, and the sampler's of another process:

        weights, gradients, optimizer, reference    a share: 1 / (data sequence); of hidden matrices that `tensor` cuts
                      1 / tensor of that. Replicas divide nothing
        gathered      the embeddings and the output matrix, and two layers, whole while they are computed (of what
                      `experts` deals 1 / ranks), and as much again for their gradients
        activations, logits    T / sequence tokens

    The trainer's and the sampler's logits never exist at once: the larger counts. The interpreter and its libraries add
    a few hundred MiB, and a checkpoint in the making a copy of no more than one tensor.
    """
    b = BYTES[recipe.model.dtype]
    n, trained = shape.parameters, shape.adapter or shape.parameters
    parallel = recipe.engine.parallel
    tokens = -(-min(recipe.engine.pack_tokens, step_tokens) // parallel.sequence)
    share, gathered = _spread(shape, parallel)
    on_device, offloaded = _activations(shape, tokens, recipe.engine.activations, impl)
    buffers = 1.125 * offloaded * b / MIB
    reference = any(loop.needs_reference for loop in recipe.loops().values())
    return Memory(
        weights=share * (n + shape.adapter) * b / MIB,
        gradients=share * trained * b / MIB,
        optimizer=share * (2 * trained - _muon(shape, recipe)) * b / MIB,
        activations=on_device * b / MIB,
        offloaded=buffers + min(buffers, recipe.engine.activations.offload_idle_mib),
        logits=max(_trainer_logits(shape, recipe, tokens), recipe.sampler.max_running * shape.vocabulary * 12) / MIB,
        sampler=(trained if recipe.sampler.serves_adapter else n) * _sampler_bytes(recipe) / MIB,
        cache=_cache(shape, recipe) / MIB,
        reference=share * trained * b / MIB if reference else 0.0,
        teachers=teachers,
        critic=critic,
        gathered=2 * gathered * b / MIB,
        ranks=parallel.ranks,
    )


def _spread(shape: Shape, parallel: ParallelConfig) -> tuple[float, float]:
    """(the part of all weights that a rank keeps, numbers that are whole in it while it computes)."""
    if parallel.ranks == 1:
        return 1.0, 0.0
    cut = 0 if shape.experts or shape.linear else shape.matrices  # those stay whole on each tensor rank
    kept = (shape.parameters - cut + cut / parallel.tensor) / shape.parameters
    ends = min(shape.parameters, 2 * shape.vocabulary * shape.hidden)
    away = shape.stacked * (1 - 1 / parallel.experts)
    layers = kept * max(shape.parameters - ends - away, 0) / shape.layers
    return kept / (parallel.data * parallel.sequence), ends + 2 * layers


def _sampler_bytes(recipe: Recipe) -> int:
    """Of one number in the sampler's model."""
    return BYTES[recipe.model.dtype if recipe.sampler.dtype == "model" else recipe.sampler.dtype]


def _cache(shape: Shape, recipe: Recipe) -> int:
    """Bytes of keys and values, and of states; an sglang server has its own."""
    if recipe.sampler.kind == "sglang":
        return 0
    b, linear = _sampler_bytes(recipe), shape.linear
    tokens = -(-recipe.sampler.cache_tokens // PAGE) * PAGE
    pages = tokens * 2 * (shape.layers - (linear.layers if linear else 0)) * shape.kv_heads * shape.channels * b
    if linear is None:
        return pages
    slots = recipe.sampler.max_running + num_snapshots(recipe.sampler.max_running)
    return pages + slots * linear.layers * linear.state * max(b, 4)


def checkpoint_bytes(shape: Shape, recipe: Recipe) -> int:
    """One checkpoint: what is trained, and the optimizer's moments."""
    trained = shape.adapter or shape.parameters
    return (3 * trained - _muon(shape, recipe)) * BYTES[recipe.model.dtype]


def _muon(shape: Shape, recipe: Recipe) -> int:
    """Numbers with one moment instead of two."""
    return (shape.adapter or shape.matrices) if recipe.engine.optimizer == "muon" else 0


def disk_bytes(shape: Shape, recipe: Recipe, beside: int = 0) -> int:
    """Checkpoints kept (newest, best, the end of a loop that another follows), one being written, and the export.

    `beside` are the bytes of what a checkpoint holds beside the policy.
    """
    kept = recipe.run.keep + int(recipe.evaluate.keep_best) + len(recipe.loops()) - 1
    steps = sum(loop.steps for loop in recipe.loops().values())
    saves = min(steps, kept) if recipe.run.save_every else min(steps, 3)
    one = checkpoint_bytes(shape, recipe) + beside
    return (min(kept, saves) + 1) * one + shape.parameters * BYTES[recipe.model.dtype]


def _activations(shape: Shape, tokens: int, how: ActivationsConfig, impl: Impl) -> tuple[int, int]:
    """Numbers kept for the backward pass: (on the device, offloaded)."""
    queries, keys = shape.heads * shape.channels, shape.kv_heads * shape.channels
    fused = shape.rms_norms and not shape.experts and impl is Impl.NATIVE
    times_D, times_H, times_J, times_F = (6, 3, 4, 3) if fused else (8, 4, 5, 4)
    times_D += 3 * shape.experts
    mixing = times_H * queries + times_J * keys
    if linear := shape.linear:
        values = linear.heads * linear.value_channels
        mixing = max(mixing, 7 * linear.convolved + 6 * values + values * linear.key_channels // 16)
    layer = tokens * (times_D * shape.hidden + mixing + times_F * shape.ffn)
    inputs = tokens * shape.hidden
    again = -(-shape.layers // how.checkpoint_every) if how.checkpoint_every else 0
    kept = (shape.layers - again) * layer + again * inputs
    one_again = layer if again else 0
    if not how.offload:
        return kept + one_again, 0
    if how.offload_modules:
        return kept + one_again, kept
    return min(2 * (layer if shape.layers > again else inputs), kept) + one_again, kept


def _trainer_logits(shape: Shape, recipe: Recipe, tokens: int) -> int:
    if recipe.engine.head == "plain":
        return tokens * shape.vocabulary * (8 + BYTES[recipe.model.dtype])
    b, matrix = BYTES[recipe.model.dtype], shape.vocabulary * shape.hidden
    if recipe.engine.head == "liger":
        return 6 * 4 * min(tokens, 512) * shape.vocabulary + b * matrix
    rows = min(tokens, recipe.engine.head_rows)
    tiles = 4 * 4 * min(recipe.engine.head_rows * COLUMNS, rows * shape.vocabulary)
    if recipe.engine.head == "fused":
        return tiles + 4 * rows * shape.vocabulary + max(b, 4) * matrix
    return tiles + b * matrix
