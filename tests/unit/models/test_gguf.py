"""A GGUF file becomes a Hugging Face folder that computes the same numbers, or one clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strop.errors import ConfigError
from strop.models import gguf as converter
from strop.models.gguf import convert_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), "he", "hel", "Ġh"]
MERGES = ["h e", "he l", "Ġ h"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
VOCABULARY, HIDDEN, HEADS, KEYS = 288, 64, 4, 2  # more embeddings than tokens, as padded checkpoints have

INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def original(architecture: str, *, tied: bool = True, **settings: Any) -> Any:
    """A tiny random model of transformers; every parameter is away from its initial value, norms and biases too."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        architecture,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        tie_word_embeddings=tied,
        **({} if architecture == "qwen2" else {"head_dim": HIDDEN // HEADS}),
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's two rotary halves of each head to GGUF's neighbouring pairs, the format's rule for Llama."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for h in range(heads):
        for i in range(size // 2):
            out[h * size + 2 * i] = rows[h * size + i]
            out[h * size + 2 * i + 1] = rows[h * size + size // 2 + i]
    return out


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        value = parameter.detach().numpy()
        if stem in OUTER:
            tensors[f"{OUTER[stem]}.{kind}"] = value
            continue
        _, _, layer, part = stem.split(".", 3)
        if architecture == "llama" and part == "self_attn.q_proj":
            value = interleave(value, HEADS)
        if architecture == "llama" and part == "self_attn.k_proj":
            value = interleave(value, KEYS)
        tensors[f"blk.{layer}.{INNER[part]}.{kind}"] = value
    return tensors


def metadata(architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KEYS,
        f"{architecture}.attention.key_length": HIDDEN // HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50_000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    changes: dict[str, Any] | None = None,
    quantised: bool = False,
) -> Path:
    """A GGUF file. `changes` replaces metadata; None takes a key away. Matrices are Q8_0 when `quantised`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(architecture), **(changes or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, value in tensors.items():
        if quantised and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> dict[str, np.ndarray]:
    return gguf_tensors(original("llama"), "llama")


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
)
def test_the_folder_computes_what_the_original_does(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = original(architecture, tied=tied)
    source = write(tmp_path / "m.gguf", architecture, gguf_tensors(model, architecture))
    folder = convert_gguf(source, tmp_path / "out")
    loading: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    loaded, report = loading
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(model))
    stored = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert stored.keys() == dict(model.named_parameters()).keys()


def test_attention_biases_of_a_llama_are_kept_and_permuted(tmp_path: Path) -> None:
    model = original("llama", attention_bias=True)
    folder = convert_gguf(write(tmp_path / "m.gguf", "llama", gguf_tensors(model, "llama")), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_quantised_matrices_are_dequantised(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    folder = convert_gguf(write(tmp_path / "m.gguf", "llama", llama, quantised=True), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    for name, exact in original("llama").named_parameters():
        error = (stored[name] - exact).abs().max()
        # Q8_0 rounds to 1/127 of the largest value of each 32, and stores that scale as float16
        assert error <= (0 if exact.ndim == 1 else exact.abs().max() / 127), name
    assert any((stored[name] != exact).any() for name, exact in original("llama").named_parameters())


def test_rotary_pairs_of_the_file_turn_like_the_halves_of_the_folder(
    tmp_path: Path, llama: dict[str, np.ndarray]
) -> None:
    """GGUF's Llama turns neighbouring rows by one angle, transformers turns rows half a head apart: same scores."""
    folder = convert_gguf(write(tmp_path / "m.gguf", "llama", llama), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    size = HIDDEN // HEADS
    x = np.random.default_rng(0).standard_normal((5, HIDDEN))
    angle = np.arange(5)[:, None] * 50_000.0 ** (-np.arange(0, size, 2) / size)

    def pairs(weight: np.ndarray) -> np.ndarray:
        first, second = (x @ weight[:size].T)[:, 0::2], (x @ weight[:size].T)[:, 1::2]
        turned = first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)
        return np.concatenate(turned, axis=1)

    def halves(weight: np.ndarray) -> np.ndarray:
        first, second = np.split(x @ weight[:size].T, 2, axis=1)
        turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate(turned, axis=1)

    layer = "model.layers.1.self_attn"
    theirs = pairs(llama["blk.1.attn_q.weight"]) @ pairs(llama["blk.1.attn_k.weight"]).T
    ours = halves(stored[f"{layer}.q_proj.weight"].numpy()) @ halves(stored[f"{layer}.k_proj.weight"].numpy()).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert not np.allclose(halves(llama["blk.1.attn_q.weight"]), halves(stored[f"{layer}.q_proj.weight"].numpy()))


def test_tokenizer_template_and_end_tokens_come_along(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    folder = convert_gguf(write(tmp_path / "m.gguf", "llama", llama), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("hello hi") == [TOKENS.index(t) for t in ("hel", "l", "o", "Ġh", "i")]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False)
    assert text == "<|im_start|>user\né<|im_end|>\n"
    assert tokenizer.encode(text)[0] == 1 and tokenizer.decode(tokenizer.encode(text)) == text
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # the float32 in the file prints as 9.999999747378752e-06


def test_large_models_are_written_in_shards(
    tmp_path: Path, llama: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "m.gguf", "llama", llama)
    whole = load_file(convert_gguf(source, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(converter, "SHARD_BYTES", 60_000)
    folder = convert_gguf(source, tmp_path / "shards")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    parts = [load_file(shard) for shard in shards]
    assert sum(len(part) for part in parts) == len(whole)
    assert all(torch.equal(tensor, whole[name]) for part in parts for name, tensor in part.items())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(original("llama")))


def llama3_divisors(factor: float, original_context: int = 8192) -> np.ndarray:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=16 * original_context,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50_000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original_context,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 50_000.0 ** (-np.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama_3_position_scaling_is_recognised_from_its_divisors(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    source = write(tmp_path / "m.gguf", "llama", {**llama, "rope_freqs.weight": llama3_divisors(8.0)})
    config = json.loads((convert_gguf(source, tmp_path / "out") / "config.json").read_text())
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": pytest.approx(8.0, rel=1e-5),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    source = write(tmp_path / "m.gguf", "llama", {**llama, "rope_freqs.weight": llama3_divisors(8.0, 2048)})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not the position scaling"):
        convert_gguf(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.context_length": None}, "lacks llama.context_length"),
        ({"llama.attention.head_count": 0}, "head_count is 0, which is no size"),
        ({"llama.block_count": "two"}, "block_count should be int, and is str 'two'"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3 key heads"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs from the head size 16"),
        ({"llama.expert_count": 4}, "mixture of experts"),
        ({"llama.attention.sliding_window": 32}, "sliding-window"),
        ({"llama.rope.scaling.type": "yarn"}, "scales positions by 'yarn'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"llama.block_count": 3}, "lacks the tensor model.layers.2"),
        ({"llama.block_count": 1}, "has no place for, blk.1"),
        ({"llama.feed_forward_length": 64}, r"shape \[96, 64\] where \[64, 64\] belongs"),
    ],
)
def test_metadata_is_checked(
    tmp_path: Path, llama: dict[str, np.ndarray], changes: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "m.gguf", "llama", llama, changes=changes)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_every_number_format_that_cannot_be_used_is_named(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    bad = {**llama, "blk.0.ffn_up.weight": np.full((96, HIDDEN), np.inf, np.float32)}
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up\.weight holds a value that is not finite"):
        convert_gguf(write(tmp_path / "m.gguf", "llama", bad), tmp_path / "out")
    whole = {**llama, "blk.0.ffn_up.weight": np.ones((96, HIDDEN), np.int32)}
    with pytest.raises(ConfigError, match=r"ffn_up\.weight has number format I32"):
        convert_gguf(write(tmp_path / "i.gguf", "llama", whole), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_and_unknown_tensors_are_named(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    fewer = {name: value for name, value in llama.items() if name != "blk.1.ffn_norm.weight"}
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.1\.post_attention_layernorm\.weight"):
        convert_gguf(write(tmp_path / "fewer.gguf", "llama", fewer), tmp_path / "out")
    more = {**llama, "blk.0.attn_q.scale": np.ones(4, np.float32)}
    with pytest.raises(ConfigError, match=r"no place for, blk\.0\.attn_q\.scale"):
        convert_gguf(write(tmp_path / "more.gguf", "llama", more), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"lacks the tensor token_embd\.weight"):
        convert_gguf(write(tmp_path / "none.gguf", "llama", {}), tmp_path / "out")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "mamba", {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ConfigError, match="architecture 'mamba'; supported are llama, qwen2, qwen3"):
        convert_gguf(source, tmp_path / "out")


def test_files_that_are_not_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a GGUF file: it begins with b''"):
        convert_gguf(tmp_path / "empty.gguf", tmp_path / "out")
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" * 9)
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        convert_gguf(tmp_path / "zip.gguf", tmp_path / "out")


def test_a_file_cut_anywhere_is_an_error_and_leaves_nothing(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    whole = write(tmp_path / "m.gguf", "llama", llama).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [4, 6, 8, 20, 24, 40, 300, 2000, len(whole) // 2, len(whole) - 4]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="cut off or damaged"):
            convert_gguf(cut, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "m.gguf"]


def test_lengths_that_the_file_states_are_not_believed(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    """A list of 2^62 one-byte elements would be read one by one, for ever."""
    whole = write(tmp_path / "m.gguf", "llama", llama).read_bytes()
    key = b"tokenizer.ggml.token_type"
    start = whole.index(key) + len(key)  # then: kind of value, kind of element, count
    for element in (0, 8):
        damaged = whole[: start + 4] + struct.pack("<IQ", element, 2**62) + whole[start + 16 :]
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with pytest.raises(ConfigError, match="its header goes on past its end"):
            convert_gguf(tmp_path / "damaged.gguf", tmp_path / "out")
    (tmp_path / "damaged.gguf").write_bytes(whole[:start] + struct.pack("<I", 77) + whole[start + 4 :])
    with pytest.raises(ConfigError, match="a value of unknown type 77"):
        convert_gguf(tmp_path / "damaged.gguf", tmp_path / "out")
    (tmp_path / "damaged.gguf").write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(ConfigError, match="versions 2 and 3, little-endian"):
        convert_gguf(tmp_path / "damaged.gguf", tmp_path / "out")


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, llama: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"needs 0\.00032 GB as float32"):
        convert_gguf(write(tmp_path / "m.gguf", "llama", llama), tmp_path / "out")


def test_an_existing_folder_is_left_alone(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(write(tmp_path / "m.gguf", "llama", llama), tmp_path / "out")


def test_a_neighbouring_tokenizer_is_not_mistaken_for_the_files_own(
    tmp_path: Path, llama: dict[str, np.ndarray]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "stranger"}')
    folder = convert_gguf(write(tmp_path / "m.gguf", "llama", llama), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
