# SPDX-License-Identifier: Apache-2.0
"""Drafts that several tests share; all trained on one thread: sums then come in one order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pairs import Pair

sys.path.append(str(Path(__file__).parents[1] / "engine"))  # for `engines`

from drafts import train

_SETTINGS = """
draft:
  num_layers: 2
  block_size: 8
  target_layer_ids: [0, 1, 2]
  selector_rank: 8
  selector_top_k: 8
  conv_kernel_size: 2
data:
  prompts: ["auto:160"]
  auto_starts: ["a", "B", "7", "+", "x", "Q", "#", "e"]
  max_new_tokens: 48
  batch_size: 80
  texts_per_shard: 80
  held_out_share: 0.1
  greedy_share: 1.0
train:
  steps: 160
  texts_per_batch: 16
  anchors_per_text: 6
  learning_rate: 4.0e-3
  dtype: float32
  eval_every: 80
  checkpoint_every: 80
  eval_texts: 8
"""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made(llama_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that `train` made from nothing for the tiny target; settings.yaml lies beside it."""
    folder = tmp_path_factory.mktemp("made")
    config = folder / "settings.yaml"
    config.write_text(_SETTINGS)
    assert train(llama_pair.target, folder / "draft", "--config", config) == 0
    return folder / "draft"
