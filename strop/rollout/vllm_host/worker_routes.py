"""Inside vLLM's worker: which experts each token took.

    a layer chooses experts -> a row beside the token's keys and values -> after the pass, into the requests' records

vLLM's own `enable_return_routed_experts` needs its second model runner, which has no place for strop's sampler. So the
hook that vLLM has in its routers is used here without it. Whoever shares cached blocks shares their rows, and what a
request has recorded stays when newer weights compute the text again.

    S slots of the cache    L layers with experts, the model's other layers left out    K experts a token
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.v1.kv_cache_interface import FullAttentionSpec

ASKED = "strop_routes"  # in a request's extra_args: the number that its record is asked for by


class RouteRecorder:
    """Raises ValueError, which says why, where this vLLM does not let a model's choices be seen."""

    def __init__(self, runner: Any, model: torch.nn.Module) -> None:
        self._runner = runner
        routed = {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}
        self.layers = sorted(routed)
        self._column = {layer: place for place, layer in enumerate(self.layers)}
        self._records: dict[int, list[np.ndarray]] = {}
        config = runner.kv_cache_config
        kept = [n for n, one in enumerate(config.kv_cache_groups) if isinstance(one.kv_cache_spec, FullAttentionSpec)]
        if not kept:  # other kinds of cache forget tokens that their requests still have
            raise ValueError("no layer attends to the whole text, whose cache could hold the experts beside it")
        self._group, group = kept[0], config.kv_cache_groups[kept[0]]
        self._layer_name = group.layer_names[0]
        slots = config.num_blocks * group.kv_cache_spec.block_size
        top_k = {module.moe_config.experts_per_token for module in routed.values()}
        if len(top_k) != 1:
            raise ValueError(f"its layers take {sorted(top_k)} experts a token, not all as many")
        self.top_k = top_k.pop()
        shape = (slots + 1, len(self.layers), self.top_k)  # one more, which slot -1 of padded tokens means
        self._experts_SLK = torch.full(shape, -1, dtype=torch.int16, device=runner.device)
        self._bytes = 2 * shape[1] * shape[2]  # of one token
        bind_routed_experts_capturer(model, self)  # of which it calls `capture` alone

    def capture(self, layer: int, ids_TK: torch.Tensor) -> None:
        """Called by a layer's router inside a pass. Tensors alone, so that a recorded graph does it again."""
        slot_T = get_forward_context().slot_mapping[self._layer_name]
        if len(slot_T) != len(ids_TK):
            raise RuntimeError(f"layer {layer} chose experts of {len(ids_TK)} tokens in a pass over {len(slot_T)}")
        self._experts_SLK[slot_T, self._column[layer]] = ids_TK.to(torch.int16)

    def record(self) -> None:
        """After a pass: rows of the tokens that are new in the requests that ask for them."""
        batch, requests = self._runner.input_batch, self._runner.requests
        table = batch.block_table[self._group]
        ends = self._runner.query_start_loc.np
        slots: list[np.ndarray] = []
        records: list[list[np.ndarray]] = []
        for row, name in enumerate(batch.req_ids):
            asked = requests[name].sampling_params.extra_args
            if not asked or ASKED not in asked:
                continue
            record = self._records.setdefault(asked[ASKED], [])
            known = sum(map(len, record))
            computed = int(batch.num_computed_tokens_cpu[row]) + int(ends[row + 1] - ends[row])
            position = np.arange(known, computed)
            block = table.get_numpy_array()[row, position // table.block_size]
            slots.append(block * table.block_size + position % table.block_size)
            records.append(record)
        if not slots:
            return
        at = torch.from_numpy(np.concatenate(slots)).long()
        rows = self._experts_SLK[at.to(self._experts_SLK.device)].cpu().numpy()
        for record, new in zip(records, np.split(rows, np.cumsum([len(slot) for slot in slots])[:-1]), strict=True):
            record.append(new)

    def take(self, number: int, count: int) -> bytes:
        """Experts of the first `count` tokens, or of as many as were computed: int16 [count, L, K]. The record is
        forgotten."""
        return b"".join(rows.tobytes() for rows in self._records.pop(number, []))[: count * self._bytes]
