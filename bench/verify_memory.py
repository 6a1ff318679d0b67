# SPDX-License-Identifier: Apache-2.0
"""Peak memory of deciding a sampled step, beside the logits themselves: ours and SGLang's.

    python bench/verify_memory.py --requests 8 --block-size 16 --vocab-size 151936

Ours is what the worker runs. SGLang's is `build_speculative_verify_target_probs` and the dense
draft law that its CUDA kernel is given; the kernel itself is not run, so its figure is a lower
bound. Tensors are counted as torch makes and frees them, so a CPU tells what a GPU would need.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dflash.draft.proposer import Proposal
from sglang_dflash.verify.accept import DraftProbs
from sglang_dflash.verify.decide import Decider
from sglang_dflash.verify.rows import Rows

SUPPORT = 32


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note the storages it made."""
        before = {id(_storage(leaf)) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in filter(_is_tensor, tree_leaves(result)):
            storage = _storage(leaf)
            key = storage._cdata
            if id(storage) in before or key in self._known or storage.nbytes() == 0:
                continue
            self._known.add(key)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


class OneRank:
    """Nobody to agree with."""

    def sync(self, site: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values


def options(n: int, vocab_size: int, *, cut: bool) -> SamplingBatchInfo:
    """Return n sampled requests' options."""
    return SamplingBatchInfo(
        temperatures=torch.full((n, 1), 0.7),
        top_ps=torch.full((n,), 0.9 if cut else 1.0),
        top_ks=torch.full((n,), 50 if cut else TOP_K_ALL, dtype=torch.int32),
        min_ps=torch.zeros(n),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=cut,
        need_top_k_sampling=cut,
        need_min_p_sampling=False,
        max_top_k=50 if cut else None,
        vocab_size=vocab_size,
        device="cpu",
    )


def peak_of(step: Callable[[torch.Tensor], Any], logits: torch.Tensor) -> float:
    """Return a step's peak beside its logits, in units of their size."""
    with Peak() as peak:
        step(logits)
    return peak.peak / (logits.numel() * logits.element_size())


def main() -> None:
    """Print the two peaks, with and without top-k and top-p."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    args = parser.parse_args()
    n, block_size, vocab_size = args.requests, args.block_size, args.vocab_size
    rows = Rows.of([block_size] * n, block_size, "cpu")
    ids = torch.randint(vocab_size, (n, block_size - 1, SUPPORT))
    proposal = Proposal(ids[..., 0], DraftProbs(ids, torch.full(ids.shape, 1 / SUPPORT)))
    decider = Decider(None, OneRank())  # type: ignore[arg-type]
    size = n * block_size * vocab_size * 4 / 2**20
    print(f"{n} requests, block {block_size}, vocabulary {vocab_size}: logits {size:.0f} MiB")
    for cut in (False, True):
        info = options(n, vocab_size, cut=cut)

        def ours(logits: torch.Tensor, info: SamplingBatchInfo = info) -> None:
            decider._verify(info, rows, proposal, logits)

        def theirs(logits: torch.Tensor, info: SamplingBatchInfo = info) -> Any:
            probs = build_speculative_verify_target_probs(
                next_token_logits=logits,
                sampling_info=info,
                draft_token_num=block_size,
                bs=n,
                max_top_k=info.max_top_k,
            )
            return probs, torch.zeros_like(probs)

        logits = torch.randn(n * block_size, vocab_size)
        figures = peak_of(theirs, logits), peak_of(ours, logits)
        name = "top-k 50, top-p 0.9" if cut else "temperature alone"
        print(f"{name}: SGLang {figures[0]:.2f} times the logits, ours {figures[1]:.2f}")


if __name__ == "__main__":
    main()
