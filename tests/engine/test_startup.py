# SPDX-License-Identifier: Apache-2.0
"""A start that cannot serve stops before anything is loaded, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair
from safetensors.torch import load_file, save_file

from sglang_dflash import seams
from sglang_dflash.errors import PluginConflict, SeamMoved, UnsupportedCheckpoint
from sglang_dflash.options import Options
from sglang_dflash.routing import check_start
from sglang_dflash.seams import Seam

Edit = Callable[..., Path]


def resolve(*flags: str) -> Any:
    """Parse and resolve a server's command line as `sglang.launch_server` does."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args([*flags, "--log-level", "error"])
    server_args.resolve_once()
    return resolved_view(server_args)


def start(pair: Pair, draft: Path | str | None, *flags: str) -> Any:
    """Resolve a DFLASH start of the pair's target with `draft`."""
    chosen = [] if draft is None else ["--speculative-draft-model-path", str(draft)]
    dflash = ["--model-path", str(pair.target), "--speculative-algorithm", "DFLASH"]
    return resolve(*dflash, *chosen, *flags)


@pytest.fixture
def edited(llama_pair: Pair, tmp_path: Path) -> Edit:
    """Make a copy of the draft with config keys or weights changed; None deletes."""

    def edit(*, config: dict | None = None, weights: dict | None = None) -> Path:
        folder = tmp_path / "draft"
        shutil.copytree(llama_pair.draft, folder)
        stated = json.loads((folder / "config.json").read_text())
        for key, value in (config or {}).items():
            place = stated["dflash_config"] if key in stated["dflash_config"] else stated
            place[key] = value
        (folder / "config.json").write_text(json.dumps(stated))
        tensors = load_file(folder / "model.safetensors") | (weights or {})
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    return edit


def test_a_good_pair_is_accepted(llama_pair: Pair) -> None:
    start(llama_pair, llama_pair.draft)


def test_a_draft_must_be_named(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match="needs --speculative-draft-model-path, and got none"):
        start(llama_pair, None)


def test_a_draft_must_be_a_checkpoint(llama_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="found nothing there"):
        start(llama_pair, tmp_path / "nowhere")
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        start(llama_pair, tmp_path)


def test_every_wrong_weight_is_named(llama_pair: Pair, edited: Edit) -> None:
    folder = edited(
        weights={
            "norm.weight": None,
            "extra.weight": torch.zeros(2),
            "fc.weight": torch.zeros(64, 65),
        }
    )
    with pytest.raises(UnsupportedCheckpoint) as refused:
        start(llama_pair, folder)
    message = str(refused.value)
    assert "missing: norm.weight [64]" in message
    assert "unexpected: extra.weight [2]" in message
    assert "fc.weight is [64, 65], expected" in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 999}, "vocab_size is 999 and the target's is 320"),
        ({"target_layer_ids": [0, 1, 40]}, "40"),
        ({"mask_token_id": 320}, "320"),
        ({"num_target_layers": 5}, "num_target_layers is 5 and the target has 4"),
    ],
)
def test_a_draft_must_fit_its_target(
    llama_pair: Pair, edited: Edit, config: dict, words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="does not fit --model-path") as refused:
        start(llama_pair, edited(config=config))
    assert words in str(refused.value)


def test_a_mask_token_without_a_number_needs_a_tokenizer(llama_pair: Pair, edited: Edit) -> None:
    draft = edited(config={"mask_token_id": None})
    start(llama_pair, draft)
    with pytest.raises(UnsupportedCheckpoint, match="mask_token_id is missing"):
        start(llama_pair, draft, "--skip-tokenizer-init")


def test_a_draft_for_a_shorter_context_is_named_before_the_target_loads(
    llama_pair: Pair, edited: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = edited(config={"max_position_embeddings": 128})
    with pytest.raises(UnsupportedCheckpoint, match=r"made for 128 positions, .* 256") as refused:
        start(llama_pair, draft, "--context-length", "256")
    assert "--context-length 128" in str(refused.value)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    start(llama_pair, draft, "--context-length", "256")


def test_a_draft_for_wider_states_is_refused(llama_pair: Pair, smollm2_pair: Pair) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="hidden_size is 576 and the target's is 64"):
        start(llama_pair, smollm2_pair.draft)


def test_heads_must_divide_among_the_ranks(llama_pair: Pair) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"tensor parallel|--tp"):
        start(llama_pair, llama_pair.draft, "--tp-size", "3")


@pytest.mark.parametrize("size", ["0", "1", "-4"])
def test_a_block_needs_an_anchor_and_a_proposal(llama_pair: Pair, size: str) -> None:
    with pytest.raises(ValueError, match=f"--speculative-num-draft-tokens {size}: "):
        start(llama_pair, llama_pair.draft, "--speculative-num-draft-tokens", size)
    with pytest.raises(ValueError, match=r"--speculative-\w+-\w+.* " + size):
        start(llama_pair, llama_pair.draft, "--speculative-dflash-block-size", size)


def test_a_block_must_fit_the_context(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"--speculative-num-draft-tokens 200: .* context"):
        start(
            llama_pair, llama_pair.draft, "--speculative-num-draft-tokens", "200",
            "--context-length", "256",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"projector_type": "domino"}, "Domino.* needs CUDA"),
        ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel.*--speculative-algorithm DSP"),
        ({"architectures": ["NobodysDraft"]}, "NobodysDraft.*made for this target"),
    ],
)
def test_another_kind_of_draft_is_refused_on_a_cpu(
    llama_pair: Pair, edited: Edit, config: dict, words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=words):
        start(llama_pair, edited(config=config))


def test_sglangs_own_worker_is_refused_on_a_cpu(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "upstream")
    with pytest.raises(UnsupportedCheckpoint, match=r"SGLANG_DFLASH_WORKER=upstream.* needs CUDA"):
        start(llama_pair, llama_pair.draft)


def test_who_insists_on_our_worker_is_told_what_it_does_not_serve(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "plugin")
    with pytest.raises(UnsupportedCheckpoint, match=r"WORKER=plugin: .*window-size.* 'auto'"):
        start(llama_pair, llama_pair.draft, "--speculative-draft-window-size", "64")
    start(llama_pair, llama_pair.draft)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--speculative-draft-window-size", "64"], "--speculative-draft-window-size"),
        (["--tp-size", "2", "--attn-dp-size", "2"], "--attn-dp-size"),
        (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "--attn-dp-size"),
        (["--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size"),
        (["--tp-size", "2", "--dcp-size", "2"], "--dcp-size"),
        (["--enable-lora", "--max-lora-rank", "8"], "--enable-lora"),
        (["--lora-paths", "some=adapter", "--max-lora-rank", "8"], "--lora-paths"),
    ],
)
def test_an_option_only_sglangs_worker_has_is_refused_by_name(
    llama_pair: Pair, flags: list[str], named: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"does not serve .*{named}.* needs CUDA"):
        start(llama_pair, llama_pair.draft, *flags)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not a readable JSON file"),
        ("{", "not a readable JSON file"),
        ("[]", "holds list, not an object"),
        (
            '{"1": {"candidate_steps": [1]}, "budget": "fixed"}',
            "does not know '1'; it knows budget",
        ),
        ('{"margin": "wide"}', "margin='wide' is not a margin"),
        ('{"max_width": 9}', "max_width .* is 9, and a block has 8 rows"),
    ],
)
def test_a_wrong_budget_file_is_refused_by_name(
    llama_pair: Pair, tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "budget.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=words) as refused:
        start(llama_pair, llama_pair.draft, "--speculative-adaptive-config", str(file))
    assert "--speculative-adaptive-config" in str(refused.value)


@pytest.mark.parametrize("bound", ["MIN", "MAX"])
def test_a_width_beyond_the_block_is_refused_before_anything_is_loaded(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setenv(f"SGLANG_DFLASH_{bound}_WIDTH", "5")
    start(llama_pair, llama_pair.draft)
    with pytest.raises(ValueError, match=rf"SGLANG_DFLASH_{bound}_WIDTH .* is 5, .* has 4 rows"):
        start(llama_pair, llama_pair.draft, "--speculative-num-draft-tokens", "4")


def test_a_trace_needs_a_folder_and_a_budget_that_moves(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_TRACE", str(tmp_path / "gone" / "trace"))
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_TRACE=.*its folder does not exist"):
        start(llama_pair, llama_pair.draft)
    monkeypatch.setenv("SGLANG_DFLASH_TRACE", str(tmp_path / "trace"))
    with pytest.raises(ValueError, match="SGLANG_DFLASH_TRACE with --dp-size 2"):
        start(llama_pair, llama_pair.draft, "--dp-size", "2")
    monkeypatch.setenv("SGLANG_DFLASH_BUDGET", "fixed")
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_TRACE .* the budget is fixed"):
        start(llama_pair, llama_pair.draft)


def test_adaptive_is_taken_for_the_budget(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import speculative_hook

    told: list[str] = []
    monkeypatch.setattr(speculative_hook.logger, "warning", lambda text, *_: told.append(text))
    start(llama_pair, llama_pair.draft, "--speculative-adaptive")
    assert not [text for text in told if "adaptive" in text]  # "disabled", it says otherwise
    monkeypatch.setenv("SGLANG_DFLASH_BUDGET", "fixed")
    with pytest.raises(ValueError, match=r"--speculative-adaptive asks for .* budget is fixed"):
        start(llama_pair, llama_pair.draft, "--speculative-adaptive")


def test_a_token_map_of_another_model_is_refused_before_anything_is_loaded(
    llama_pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "map.pt"
    torch.save([1, 2, 3], path)
    start(llama_pair, llama_pair.draft, "--speculative-token-map", str(path))
    torch.save([1, 2, 49151], path)
    with pytest.raises(ValueError, match=r"--speculative-token-map .* found 1 to 49151"):
        start(llama_pair, llama_pair.draft, "--speculative-token-map", str(path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-accept-threshold-single", "0.9"), "threshold-single 0.9: it would accept"),
        (("--speculative-accept-threshold-acc", "0.5"), "threshold-acc 0.5: it would accept"),
        (("--enable-pdmux",), "--enable-pdmux: its prefill goes past the speculative worker"),
    ],
)
def test_options_that_dflash_does_not_honour_are_refused(
    llama_pair: Pair, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(llama_pair, llama_pair.draft, *flags)


def test_requests_are_admitted_as_in_plain_decoding(llama_pair: Pair) -> None:
    """SGLang's own DFLASH lets them wait, and a full server never preempts for a priority."""
    assert start(llama_pair, llama_pair.draft).min_free_slots_delay == 1
    asked = start(
        llama_pair, llama_pair.draft, "--min-free-slots-delay", "3", "--enable-memory-saver"
    )
    assert asked.enable_draft_weights_cpu_backup, "else released weights are lost"
    assert asked.min_free_slots_delay == 3


def test_a_watermark_is_refused(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match="--enable-watermark: DFLASH verifies without"):
        start(llama_pair, llama_pair.draft, "--enable-watermark")


def test_a_simulated_acceptance_is_refused(
    llama_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN=4\.0: .* simulates nothing"):
        start(llama_pair, llama_pair.draft)


def test_a_grammar_back_end_that_takes_nothing_back_is_refused(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match="--grammar-backend outlines: DFLASH asks"):
        start(llama_pair, llama_pair.draft, "--grammar-backend", "outlines")


def test_a_sampler_of_unknown_law_is_refused(llama_pair: Pair) -> None:
    # A CPU has no other sampler to choose, so what resolves the flags is asked itself.
    settings = SimpleNamespace(
        enable_watermark=False,
        enable_pdmux=False,
        sampling_backend="ascend",
        speculative_accept_threshold_acc=1.0,
        speculative_accept_threshold_single=1.0,
        speculative_adaptive=False,
    )
    with pytest.raises(ValueError, match="--sampling-backend ascend: DFLASH knows the law"):
        check_start(settings, Options(), None)


def test_an_attention_backend_that_needs_cuda_is_refused(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match="--attention-backend flashinfer"):
        start(llama_pair, llama_pair.draft, "--attention-backend", "flashinfer")


def test_a_moved_seam_stops_the_start(llama_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Seam("sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind", ("self", "batch", "gone"))
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, moved))
    with pytest.raises(SeamMoved, match=r"KVLocPlan\.bind: lacks gone and wants reader.*Install"):
        start(llama_pair, llama_pair.draft)
    resolve("--model-path", str(llama_pair.target))  # plain serving is none of our business


def test_a_rival_plugin_stops_the_start(llama_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    target = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
    rival = (HookType.REPLACE, object, HookSource("rival", "rival-dist"))
    monkeypatch.setitem(HookRegistry._hooks, target, [rival])
    with pytest.raises(PluginConflict, match=r"rival .*SGLANG_PLUGINS"):
        start(llama_pair, llama_pair.draft)


@pytest.mark.slow
def test_a_server_whose_sglang_moved_exits_with_the_list(llama_pair: Pair, tmp_path: Path) -> None:
    """A real server process, with a plugin beside ours that takes a name away."""
    (tmp_path / "mover.py").write_text(
        "def move():\n"
        "    from sglang.srt.speculative.dflash_info import DFlashVerifyInput\n"
        "    del DFlashVerifyInput.prepare_for_verify\n"
    )
    info = tmp_path / "mover-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mover\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmover = mover:move\n")
    server = subprocess.run(
        [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(llama_pair.target),
            "--speculative-algorithm", "DFLASH",
            "--speculative-draft-model-path", str(llama_pair.draft),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert server.returncode != 0
    assert "DFlashVerifyInput.prepare_for_verify: not there" in server.stderr
