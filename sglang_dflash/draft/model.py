# SPDX-License-Identifier: Apache-2.0
"""The draft on SGLang's layers: Qwen3-like blocks, no embedding and no head of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import nn

from sglang_dflash.draft.checkpoint import read_draft_config
from sglang_dflash.draft.config import DraftConfig, canonical_weight_name, check_weights
from sglang_dflash.draft.context import context_kv
from sglang_dflash.draft.grouped_conv import GroupedConv, convolved
from sglang_dflash.draft.rope import sglang_scaling
from sglang_dflash.draft.selector import CandidateSelector
from sglang_dflash.draft.weights import BORROWED

__all__ = ["DFlashDraftModel", "served_draft_config"]

# checkpoint projection -> (our fused parameter, its shard)
_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def served_draft_config() -> DraftConfig:
    """Return the configuration of the draft that this server was started with."""
    spec = get_spec()
    return read_draft_config(
        spec.speculative_draft_model_path, spec.speculative_draft_model_revision
    )


class DraftAttention(nn.Module):
    """Attention of the block over [context K/V | block K/V], which lie in one KV pool."""

    def __init__(self, config: DraftConfig, layer_id: int) -> None:
        super().__init__()
        tp_size = get_parallel().tp_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // tp_size
        self.num_kv_heads = max(1, config.num_kv_heads // tp_size)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            config.head_dim,
            rotary_dim=config.rotary_dim,
            max_position=config.max_position_embeddings,
            base=config.rope_theta,
            rope_scaling=sglang_scaling(config.rope_scaling),
            is_neox_style=config.rope_is_neox_style,
        )
        window = config.sliding_windows[layer_id]
        self.attn = RadixAttention(
            self.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            self.num_kv_heads,
            layer_id,
            # A window of w tokens includes the row itself; SGLang counts those to its left.
            sliding_window_size=-1 if window is None else window - 1,
            attn_type=AttentionType.DECODER
            if config.causal[layer_id]
            else AttentionType.ENCODER_ONLY,
        )

    @property
    def kv_rows(self) -> slice:
        """Rows of the fused projection that make K and V, K first."""
        q_size = self.num_heads * self.head_dim
        return slice(q_size, q_size + 2 * self.num_kv_heads * self.head_dim)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Return the attention output [T, H] of T block rows; `positions` is [T] int64."""
        qkv, _ = self.qkv_proj(hidden)
        kv_size = self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([self.num_heads * self.head_dim, kv_size, kv_size], dim=-1)
        q, k = apply_qk_norm(q, k, self.q_norm, self.k_norm, self.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, sizes, bias=False)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, H] for [T, H]."""
        gate_up, _ = self.gate_up_proj(hidden)
        output, _ = self.down_proj(self.act(gate_up))
        return output


class DraftLayer(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: DraftConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)
        self.attention_conv = GroupedConv.of(config)
        self.mlp_conv = GroupedConv.of(config)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (hidden, residual), each [T, H], to be added by the next norm."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        width = len(hidden) // forward_batch.batch_size
        hidden = convolved(
            hidden,
            lambda rows: self.self_attn(positions, rows, forward_batch),
            self.attention_conv,
            width,
        )
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return convolved(hidden, self.mlp, self.mlp_conv, width), residual


class DFlashDraftModel(nn.Module):
    """The DFlash draft: L layers over injected context, borrowing the target's embedding and head.

    Source: DFlash (arXiv 2602.06036) and DFlash2 (inco.ai/blog/dflash2); the checkpoint format is
    z-lab's.

    Attributes:
        candidate_selector: DFlash2's, or None.
    """

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.draft_config = served_draft_config()
        draft = self.draft_config
        self.layers = nn.ModuleList(DraftLayer(draft, i) for i in range(draft.num_layers))
        self.norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        num_features = len(draft.target_layer_ids) * draft.hidden_size
        self.fc = nn.Linear(num_features, draft.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.candidate_selector = CandidateSelector.of(draft)

    def borrow_embedding(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take `embed`, [T] int64 -> [T, H], the target's embedding times its noise scale."""
        self._embed = embed

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the widest window in SGLang's count, or None when every layer sees everything."""
        windows = [w - 1 for w in self.draft_config.sliding_windows if w is not None]
        return max(windows, default=None)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: None = None,
    ) -> LogitsProcessorOutput:
        """Return the block's hidden states [T, H], T = n * B.

        Args:
            input_ids: [T] int64, anchor and masks.
            positions: [T] int64.
            forward_batch: SGLang's description of the batch.
            input_embeds: unused; SGLang's runner would round them to bfloat16.
        """
        hidden, residual = self._embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, forward_batch)
        hidden, _ = self.norm(hidden, residual)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    @torch.no_grad()
    def inject(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        locs: torch.Tensor,
        pool: MHATokenToKVPool,
    ) -> None:
        """Write the K/V of M context rows into the draft's pool, in every layer.

        Args:
            features: [M, K*H], hidden states of K target layers, concatenated.
            positions: [M] int64.
            locs: [M] int64, the slots at which the target keeps the same tokens.
            pool: the draft's KV pool.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotary = self.layers[0].self_attn.rotary_emb  # the same in all
        k, v = context_kv(
            context,
            positions,
            weight=self._context_weight,
            bias=self._context_bias,
            k_norm_weight=self._context_k_norm,
            eps=self.draft_config.rms_norm_eps,
            cos_sin=rotary.cos_sin_cache,
            is_neox_style=rotary.is_neox_style,
        )
        write = KVWriteLoc(locs, physical=True)
        for layer, layer_k, layer_v in zip(self.layers, k, v, strict=True):
            attn = layer.self_attn.attn
            pool.set_kv_buffer(attn, write, layer_k, layer_v, attn.k_scale, attn.v_scale)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint, all of it or nothing.

        Raises:
            UnsupportedCheckpoint: names every weight that is missing, unknown or of a wrong shape.
        """
        found: dict[str, torch.Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, weight in weights:
            shapes[name] = tuple(weight.shape)
            if canonical_weight_name(name) not in BORROWED:  # the target's are used
                found[name] = weight
        check_weights(shapes, self.draft_config, self.draft_config.source)
        parameters = dict(self.named_parameters())
        for stored_name, weight in found.items():
            name = canonical_weight_name(stored_name)
            if name is None:
                continue
            module, _, kind = name.rpartition(".")
            parent, _, leaf = module.rpartition(".")
            if leaf in _FUSED:
                fused, shard = _FUSED[leaf]
                parameter = parameters[f"{parent}.{fused}.{kind}"]
                parameter.weight_loader(parameter, weight, shard)
            else:
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, weight)
        self._stack_context_weights()

    def post_load_weights(self) -> None:
        """Finish a load that went past `load_weights`: dummy weights, sharded state."""
        self._stack_context_weights()

    def _stack_context_weights(self) -> None:
        """Keep the K and V rows of all layers together, for one projection per injection."""
        attentions = [layer.self_attn for layer in self.layers]
        self._context_weight = torch.cat([a.qkv_proj.weight.data[a.kv_rows] for a in attentions])
        self._context_k_norm = torch.stack([a.k_norm.weight.data for a in attentions])
        self._context_bias = (
            torch.cat([a.qkv_proj.bias.data[a.kv_rows] for a in attentions])
            if self.draft_config.attention_bias
            else None
        )


EntryClass = DFlashDraftModel
