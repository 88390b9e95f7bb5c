"""Inside vLLM's worker: what strop adds to it, through `worker_extension_cls`.

A sampler that reports for every token the logprob it was drawn with, the model's own at the temperature, and the
version of the weights; and that draws token n of a request from (seed, n) alone. Weights, taken from files. And the
experts that tokens took, see `worker_routes.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler
from worker_routes import RouteRecorder

COLUMNS = 2  # beside the first, of which vLLM itself says that it is the drawn token's
GREEDY_BELOW = 1e-5  # vLLM's own bound


class ReportingSampler(Sampler):
    """vLLM's sampler; the places of a request's two likeliest tokens hold what strop wants to know instead."""

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self.runner = runner
        self.version = 0
        self.routes: RouteRecorder | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        if self.routes is not None:
            self.routes.record()
        self._reseed(sampling_metadata.generators)
        model_NV = self._at_temperature(logits, sampling_metadata.temperature)  # vLLM scales `logits` in place
        out = super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        if sampling_metadata.max_num_logprobs == COLUMNS:
            columns = out.logprobs_tensors.logprobs
            columns[:, 1] = model_NV.gather(1, out.sampled_token_ids.long())[:, 0]
            columns[:, 2] = float(self.version)
        return out

    @staticmethod
    def _at_temperature(logits: torch.Tensor, temperature_N: torch.Tensor | None) -> torch.Tensor:
        if temperature_N is not None:
            scale_N = torch.where(temperature_N < GREEDY_BELOW, 1.0, temperature_N)
            logits = logits.float() / scale_N[:, None]
        return logits.log_softmax(-1, dtype=torch.float32)

    def _reseed(self, generators: dict[int, torch.Generator]) -> None:
        """Token n from (seed, n), whatever was computed twice, in parts, or beside others before it."""
        batch, requests = self.runner.input_batch, self.runner.requests
        for row, generator in generators.items():
            request = requests[batch.req_ids[row]]
            text = f"{request.sampling_params.seed}:{len(request.output_token_ids)}".encode()
            generator.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"))


class StropWorker:
    """Methods that the worker gets, called by name."""

    model_runner: Any
    vllm_config: Any

    def strop_install(self) -> str:
        """Put the sampler in; the answer is empty, or what stands against it."""
        runner = self.model_runner
        if type(runner.sampler) is not Sampler:
            return f"vLLM runs {type(runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0 where its host is started"
        runner.sampler = ReportingSampler(runner)
        return ""

    def strop_record_routes(self) -> tuple[list[int], int, str]:
        """Note which experts tokens take, from now on: (layers that have experts, how many a token takes, ""); else
        (none, 0, what stands against it)."""
        if not any(isinstance(module, MoERunner) for module in self.model_runner.get_model().modules()):
            return [], 0, "it has no experts"
        try:
            routes = RouteRecorder(self.model_runner, self.model_runner.get_model())
        except ValueError as error:
            return [], 0, str(error)
        self.model_runner.sampler.routes = routes
        return routes.layers, routes.top_k, ""

    def strop_routes(self, number: int, count: int) -> bytes:
        """Of a request's first `count` tokens; its record is forgotten."""
        return self.model_runner.sampler.routes.take(number, count)

    def strop_load(self, files: list[str], version: int) -> int:
        """Take a whole model's weights from safetensors files, in place. What vLLM leaves as it was is an error."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            forget_packed_experts(model)
            initialize_layerwise_reload(model)
            model.load_weights(read_tensors([Path(file) for file in files]))
            left = left_out(model)  # before vLLM puts back what was there
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if left:
            raise RuntimeError(f"{type(model).__name__} took no weights for {', '.join(left[:5])}: its names differ")
        self.model_runner.sampler.version = version
        return version


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Have vLLM make the kernels of experts anew. On processors it packs their weights while it makes the kernel, and
    not again: what came later would be read as packed, and is not."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def left_out(model: torch.nn.Module) -> list[str]:
    """Parameters for which nothing has arrived since the reload began. What `load_weights` returns does not tell: it
    names some that were handed to nobody."""
    left = []
    for place, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not is_deferred_attention_layer(layer):  # attention may have scales, or none
            arrived = {name for name, _ in info.loaded_weights}
            left += [f"{place}.{name}" for name in info.restore_metadata[0] if name not in arrived]
    return sorted(left)


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for name in names:
                yield name, opened.get_tensor(name)
