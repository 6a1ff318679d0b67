# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention back end for machines without an accelerator: `dflash_sdpa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_dflash.cpu.attention_core import AttentionPlan, PagedRows
from sglang_dflash.cpu.attention_math import HeadLayout, Workspace

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["BACKEND_NAME", "CpuAttentionBackend", "create_backend"]

from sglang_dflash.cpu.settings import BACKEND_NAME, is_batch_invariant


class _Forward:
    """What one forward's layers share: its rows, and a plan per window, made when first needed."""

    def __init__(self, rows: PagedRows, pool: object, write_loc: KVWriteLoc) -> None:
        self.rows = rows
        self.write_loc = write_loc
        self._pool = pool
        self._plans: dict[tuple[int, bool, bool], AttentionPlan] = {}

    def plan(self, window: int, *, sliding_pool: bool, by_row: bool) -> AttentionPlan:
        """Return the plan for a window; `sliding_pool` reads the hybrid model's second pool."""
        key = (window, sliding_pool, by_row)
        if key not in self._plans:
            translate = self._pool.translate_loc_from_full_to_swa if sliding_pool else None
            self._plans[key] = AttentionPlan.build(self.rows, window, translate, by_row=by_row)
        return self._plans[key]


class CpuAttentionBackend(AttentionBackend):
    """Attention of every forward mode that plain and DFLASH decoding use.

    A DFLASH draft and its target both run in TARGET_VERIFY; they differ by layer: ENCODER_ONLY
    layers see their whole block, all others only what lies before. K and V of the new rows are
    written to the pool first and read back with the rest.
    """

    # Lengths are read from `seq_lens`, which lies on the host and which the scheduler resolves
    # before the forward; the `seq_lens_cpu` mirror lags a step under overlap scheduling.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner, *, batch_invariant: bool = False) -> None:
        """Take the pools of `model_runner`; refuse models whose attention is not here.

        Args:
            model_runner: whose layers attend.
            batch_invariant: whether a target row's result must not depend on the rest of its
                forward.

        Raises:
            ValueError: MLA attention or an encoder-decoder model.
        """
        super().__init__()
        config = model_runner.model_config
        if model_runner.use_mla_backend or config.is_encoder_decoder:
            kind = "MLA" if model_runner.use_mla_backend else "encoder-decoder"
            raise ValueError(
                f"--attention-backend {BACKEND_NAME}: {config.hf_config.architectures} needs "
                f"{kind} attention; the CPU platform has multi-head and grouped-query decoder "
                "attention. "
                "Serve this model on an accelerator."
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: _Forward | None = None
        self._workspace = Workspace()
        self._by_row = batch_invariant
        pool = self.token_to_kv_pool
        self._sliding_layers = (
            frozenset(layer for layer, (_, sliding) in pool.layers_mapping.items() if sliding)
            if isinstance(pool, SWAKVPool)
            else frozenset()
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work out the rows of one forward."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        q_lens, kv_lens = _row_lengths(forward_batch)
        rows = PagedRows(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, q_lens, kv_lens
        )
        swa_loc = None
        if self._sliding_layers:
            swa_loc = self.token_to_kv_pool.translate_loc_from_full_to_swa(
                forward_batch.out_cache_loc
            )
        write_loc = KVWriteLoc.for_batch(forward_batch, swa_loc=swa_loc)
        self.forward_metadata = _Forward(rows, self.token_to_kv_pool, write_loc)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output of one layer.

        Args:
            q: [T, q_heads * head_dim] float.
            k: [T, kv_heads, head_dim] or [T, kv_heads * head_dim] of q's dtype, or None to read
                the pool only.
            v: [T, kv_heads, v_head_dim] or flat, of q's dtype, or None.
            layer: the layer.
            forward_batch: the batch `init_forward_metadata` saw.
            save_kv_cache: write k and v to the pool first.
            sinks: [q_heads] float attention sinks, or None.

        Returns:
            [T, q_heads * v_head_dim] of q's dtype.
        """
        forward, pool = self.forward_metadata, self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward.write_loc, k, v)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        plan = forward.plan(
            layer.sliding_window_size,
            sliding_pool=layer.layer_id in self._sliding_layers,
            by_row=self._by_row and causal,  # a draft's block may depend on the batch: no text does
        )
        heads = HeadLayout(layer.scaling, layer.logit_cap, sinks)
        out = plan.attend(
            q.view(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            heads,
            self._workspace,
            causal=causal,
        )
        return out.reshape(q.shape[0], -1)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding request."""
        return 1

    def support_triton(self) -> bool:
        """Return False: no Triton on a CPU."""
        return False


def _row_lengths(batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Return (query rows, keys) of each request.

    Raises:
        NotImplementedError: a forward mode of another speculative algorithm.
    """
    mode = batch.forward_mode
    if mode.is_decode():
        lengths = batch.seq_lens.tolist()
        return [1] * len(lengths), lengths
    if mode.is_target_verify():
        # seq_lens does not count the block in this mode.
        prefix = batch.seq_lens.tolist()
        layout = batch.spec_info.ragged_verify_layout
        if layout is None:
            widths = [int(batch.spec_info.draft_token_num)] * len(prefix)
        else:
            widths = layout.verify_lens.tolist()
        return widths, [p + w for p, w in zip(prefix, widths, strict=True)]
    if mode.is_extend():
        return batch.extend_seq_lens.tolist(), batch.seq_lens.tolist()
    raise NotImplementedError(
        f"--attention-backend {BACKEND_NAME} has no forward mode {mode.name}; it serves plain "
        "decoding and --speculative-algorithm DFLASH."
    )


def create_backend(model_runner: ModelRunner) -> CpuAttentionBackend:
    """Return the back end of one model runner (SGLang's registry calls this)."""
    return CpuAttentionBackend(model_runner, batch_invariant=is_batch_invariant())
