"""A GGUF file in, a Hugging Face folder out: config.json, float32 safetensors, tokenizer and generation_config.json.

    metadata -> configuration -> names and shapes that transformers expects -> tensors, dequantised shard by shard

Nothing in the file is trusted: every number of the metadata is checked, every tensor that the model needs must be there
with its shape, and a tensor that the model does not know is an error. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strop.errors import ConfigError
from strop.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

CONVERTER_VERSION = 1  # part of every cache key: raise it when the folder written for the same file changes
SHARD_BYTES = 4 * 2**30

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"  # the frequencies' divisors of Llama 3's position scaling


def convert_gguf(source: Path, target: Path) -> Path:
    """Write the model in GGUF file `source` as a new Hugging Face folder `target`, weights in float32; give it back.

    The tokenizer comes with its chat template, and generation_config.json lists every end token the file names. The
    folder is built beside `target` and renamed, so that a crash leaves nothing that looks finished.

    Raises ConfigError when the file is not GGUF, is cut off, lacks something, or holds an architecture, a number format
    or a position scaling that is not supported; or when `target` exists, or its disk is too small.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    file = GGUFFile.read(source, supported=tuple(ARCHITECTURES))
    config = _configuration(file)
    tensors = _match(file, config)
    needed = sum(4 * tensor.n_elements for tensor in tensors.values())
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ConfigError(f"{target} needs {needed / 1e9:.2g} GB as float32, and its disk has {free / 1e9:.2g} GB free")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation(file))
        _write_weights(folder, tensors, file, config)
        _write_tokenizer(folder, file)
        try:
            os.rename(folder, target)
        except OSError as error:
            raise ConfigError(f"{target} appeared while {source.name} was being converted: {error}") from error
    return target


def _configuration(file: GGUFFile) -> dict[str, Any]:
    """The model's config.json. Raises ConfigError for what would be computed differently without a word."""
    hidden, heads = file.count("{arch}.embedding_length"), file.count("{arch}.attention.head_count")
    head = file.count("{arch}.attention.key_length", default=max(1, hidden // heads))
    for key, needed in (("attention.value_length", head), ("rope.dimension_count", head)):
        if file.count(f"{{arch}}.{key}", default=needed) != needed:
            raise ConfigError(
                f"{file.path}: {file.architecture}.{key} differs from the head size {needed}: not supported"
            )
    if file.has("{arch}.expert_count") and file.value("{arch}.expert_count", int):
        raise ConfigError(f"{file.path} is a mixture of experts under the name {file.architecture}: not supported")
    names = {tensor.name for tensor in file.reader.tensors}
    vocabulary = [int(t.shape[-1]) for t in file.reader.tensors if t.name == "token_embd.weight"]
    if not vocabulary:
        raise ConfigError(f"{file.path} lacks the tensor token_embd.weight")
    if (tokens := len(file.value("tokenizer.ggml.tokens", list))) > vocabulary[0]:
        raise ConfigError(f"{file.path} has {tokens} tokens, but embeddings for {vocabulary[0]} only")
    context = file.count("{arch}.context_length")
    if file.has("{arch}.attention.sliding_window") and 0 < file.value("{arch}.attention.sliding_window", int) < context:
        raise ConfigError(
            f"{file.path} uses sliding-window attention under the name {file.architecture}: not supported"
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "hidden_size": hidden,
        "intermediate_size": file.count("{arch}.feed_forward_length"),
        "num_hidden_layers": file.count("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("{arch}.attention.head_count_kv", default=heads),
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": file.number("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "vocab_size": vocabulary[0],
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
        "bos_token_id": file.token("bos"),
        "eos_token_id": file.token("eos"),
        "pad_token_id": file.token("padding"),
        "rope_parameters": _positions(file, head),
    }
    if file.architecture != "qwen2":  # whose three biases are not optional
        config["attention_bias"] = "blk.0.attn_output.bias" in names
    if heads % config["num_key_value_heads"]:
        raise ConfigError(f"{file.path}: {heads} query heads cannot share {config['num_key_value_heads']} key heads")
    return config


def _positions(file: GGUFFile, head: int) -> dict[str, Any]:
    """Rotary position parameters, with the scaling that the file declares or that its frequency divisors spell out."""
    theta = file.number("{arch}.rope.freq_base", default=10000.0)
    scaling = file.value("{arch}.rope.scaling.type", str) if file.has("{arch}.rope.scaling.type") else "none"
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": file.number("{arch}.rope.scaling.factor")}
    if scaling != "none":
        raise ConfigError(f"{file.path} scales positions by {scaling!r}; supported are none, linear and Llama 3's")
    divisors = [t for t in file.reader.tensors if t.name == _ROPE_FACTORS]
    if not divisors:
        return {"rope_type": "default", "rope_theta": theta}
    found = _dequantise(divisors[0], file.path).reshape(-1)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if found.shape != (head // 2,) or not np.allclose(found, _llama3_divisors(parameters, head), rtol=1e-4):
        raise ConfigError(f"{file.path}: {_ROPE_FACTORS} is not the position scaling that Llama 3 uses: not supported")
    return parameters


def _llama3_divisors(parameters: Mapping[str, Any], head: int) -> NDArray[np.float64]:
    """What Llama 3.1's rule divides each rotary frequency by, [head / 2]: 1 for short waves, `factor` for long ones."""
    wavelength = 2 * np.pi * parameters["rope_theta"] ** (np.arange(0, head, 2) / head)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    blend = np.clip((parameters["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / parameters["factor"] + blend)


def _generation(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json: every end token, so that a chat model stops at its end of turn too."""
    ends = file.end_tokens()
    config = {"bos_token_id": file.token("bos"), "eos_token_id": ends if len(ends) != 1 else ends[0]}
    config["pad_token_id"] = file.token("padding")
    return {key: value for key, value in config.items() if value not in (None, [])}


def _match(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, ReaderTensor]:
    """The file's tensors under Hugging Face names: exactly those that transformers expects, each with its shape."""
    found: dict[str, ReaderTensor] = {}
    unknown: list[str] = []
    for tensor in file.reader.tensors:
        name = _hugging_face_name(tensor.name)
        if name is not None:
            found[name] = tensor
        elif tensor.name != _ROPE_FACTORS:
            unknown.append(tensor.name)
    expected = _expected_shapes(config)
    problems = [f"lacks the tensor {name}" for name in expected if name not in found]
    unknown += [found[name].name for name in found if name not in expected]
    problems += [f"has a tensor that {file.architecture} has no place for, {name}" for name in unknown]
    for name, shape in expected.items():
        if name in found and (actual := _shape(found[name])) != shape:
            problems.append(f"has {found[name].name} of shape {list(actual)} where {list(shape)} belongs")
    if problems:
        more = f" (and {len(problems) - 5} more such faults)" if len(problems) > 5 else ""
        raise ConfigError(f"{file.path} {'; '.join(problems[:5])}{more}")
    return {name: found[name] for name in expected}


def _hugging_face_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _INNER or not (layer.isascii() and layer.isdigit()) or str(int(layer)) != layer:
        return None
    return f"model.layers.{layer}.{_INNER[part]}.{kind}"


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that transformers builds from this config; a tied head is not one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoConfig.for_model(config["model_type"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(kind).from_dict(dict(config)))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest-running axis first


def _dequantise(tensor: ReaderTensor, path: Path) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConfigError(f"{path}: {tensor.name} has number format {kind}, which cannot be read") from error
    values = np.ascontiguousarray(values, np.float32).reshape(_shape(tensor))
    if not np.isfinite(values).all():
        raise ConfigError(f"{path}: {tensor.name} holds a value that is not finite")
    return values


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a Llama query or key projection, from GGUF's interleaved rotary pairs to Hugging Face's two halves."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_weights(
    folder: Path, tensors: Mapping[str, ReaderTensor], file: GGUFFile, config: Mapping[str, Any]
) -> None:
    from safetensors.numpy import save_file

    shards = _shards(tensors)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        shard = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays: dict[str, NDArray[np.float32]] = {}
        for name in names:
            weight = _dequantise(tensors[name], file.path)
            if file.architecture == "llama" and ".q_proj." in name:
                weight = _unpermute(weight, config["num_attention_heads"])
            elif file.architecture == "llama" and ".k_proj." in name:
                weight = _unpermute(weight, config["num_key_value_heads"])
            arrays[name] = np.ascontiguousarray(weight)
            where[name] = shard
        save_file(arrays, folder / shard, metadata={"format": "pt"})
    if len(shards) > 1:
        size = sum(4 * tensor.n_elements for tensor in tensors.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _shards(tensors: Mapping[str, ReaderTensor]) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = 4 * tensor.n_elements
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_tokenizer(folder: Path, file: GGUFFile) -> None:
    """Tokenizer files, by transformers' reading of the same metadata."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as alone:  # other files beside the source must not be taken for its tokenizer
        link = Path(alone) / "model.gguf"
        link.symlink_to(file.path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=link.name)
        except (ValueError, KeyError, TypeError, IndexError, NotImplementedError, ImportError) as error:
            raise ConfigError(f"{file.path}: its tokenizer cannot be read: {error}") from error
    tokenizer.save_pretrained(folder)
    size = len(file.value("tokenizer.ggml.tokens", list))
    if len(tokenizer) != size:
        raise ConfigError(f"{file.path} lists {size} tokens, but its tokenizer came out with {len(tokenizer)}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
