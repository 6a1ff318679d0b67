# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash demo`: the same prompts plainly and with DFLASH, side by side."""

from __future__ import annotations

import contextlib
import json
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dflash import __version__
from sglang_dflash.demo.compare import Divergence, PromptResult, result_table, summarise
from sglang_dflash.demo.engine import Answer, EngineProcess, Placement
from sglang_dflash.demo.model import bundled_draft, ensure_target

__all__ = ["DemoSettings", "built_in_prompts", "run_demo"]

PROMPTS = Path(__file__).parents[1] / "assets" / "demo" / "prompts.json"
WARM_UP = "Say hello."
# Enough for short chats one at a time; two engines share the machine.
SMALL = {"max_total_tokens": 8192, "max_running_requests": 4, "sleep_on_idle": True}


@dataclass(frozen=True)
class DemoSettings:
    """What the command line asks for; checked there.

    Attributes:
        prompts: (kind, prompt) in order.
        max_new_tokens: Longest answer.
        dtype: "auto", "float32" or "bfloat16".
        device: "auto", "cpu" or "cuda".
        target: Model folder or hub name; None for SmolLM2-135M-Instruct, fetched once.
        draft: DFlash draft folder or hub name; None for the bundled one.
        block_size: Tokens of a block, anchor included; None for the draft's own.
        verbose: SGLang's log goes to the terminal.
    """

    prompts: list[tuple[str, str]]
    max_new_tokens: int
    dtype: str
    device: str
    target: str | None
    draft: str | None
    block_size: int | None
    verbose: bool

    def pair(self) -> tuple[str, str]:
        """Return target and draft, the target fetched where it is the demo's own."""
        target = self.target or str(ensure_target())
        return target, self.draft or str(bundled_draft())


def built_in_prompts() -> list[tuple[str, str]]:
    """Return the packaged prompts as (kind, prompt)."""
    by_kind = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [(kind, prompt) for kind, prompts in by_kind.items() for prompt in prompts]


def run_demo(settings: DemoSettings) -> dict[str, Any]:
    """Serve the prompts both ways, print what comes, return the record (`--json` writes it).

    Raises:
        DemoError: the target cannot be had, or an engine fails.
    """
    target, draft = settings.pair()
    print(f"target  {target}\ndraft   {draft}")
    with _engines(settings, target, draft) as (plain, dflash, placement):
        for engine in (plain, dflash):
            engine.generate(WARM_UP, 16)
        results = [
            _compare(plain, dflash, settings, number) for number in range(len(settings.prompts))
        ]
    print(f"\n{placement.dtype} on {placement.device}, greedy; the rates include prefill\n")
    print(result_table(results))
    return {
        **summarise(results),
        "by_kind": {
            kind: summarise([r for r in results if r.kind == kind])
            for kind in dict.fromkeys(r.kind for r in results)
        },
        "prompts": [result.as_json() for result in results],
        "settings": _record(settings, target, draft, placement),
    }


def _record(
    settings: DemoSettings, target: str, draft: str, placement: Placement
) -> dict[str, Any]:
    return {
        "target": target,
        "draft": draft,
        **placement._asdict(),
        "block_size": settings.block_size,
        "max_new_tokens": settings.max_new_tokens,
        "sglang": version("sglang"),
        "sglang_dflash": __version__,
    }


@contextlib.contextmanager
def _engines(
    settings: DemoSettings, target: str, draft: str
) -> Iterator[tuple[EngineProcess, EngineProcess, Placement]]:
    """Start both engines, one after the other; take both down whatever happens."""
    common = {"model_path": target, "dtype": settings.dtype, **SMALL}
    if settings.verbose:
        common["log_level"] = "info"
    dflash = {
        **common,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": draft,
    }
    if settings.block_size is not None:
        dflash["speculative_num_draft_tokens"] = settings.block_size
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, options: dict[str, Any]) -> tuple[EngineProcess, Placement]:
            log_path = None if settings.verbose else logs / f"{name}.log"
            print(f"starting the {name} engine ...", end=" ", flush=True)
            begin = time.perf_counter()
            process = EngineProcess(
                name, options, on_cpu=settings.device == "cpu", log_path=log_path
            )
            engine = stack.enter_context(process)
            placement = engine.ready()
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
            return engine, placement

        plain_engine, placement = start("plain", common)
        dflash_engine, _ = start("DFLASH", dflash)
        yield plain_engine, dflash_engine, placement


def _compare(
    plain: EngineProcess, dflash: EngineProcess, settings: DemoSettings, number: int
) -> PromptResult:
    """Ask both engines, the first one in turn, so that neither has the warmer machine."""
    kind, prompt = settings.prompts[number]
    print(f"\n[{number + 1}/{len(settings.prompts)}] {kind}: {prompt}", flush=True)
    answers: dict[str, Answer] = {}
    order = [("plain", plain), ("dflash", dflash)]
    for name, engine in order if number % 2 == 0 else reversed(order):
        answers[name] = engine.generate(prompt, settings.max_new_tokens)
    divergence = _divergence(plain, prompt, answers["plain"], answers["dflash"])
    result = PromptResult(kind, prompt, answers["plain"], answers["dflash"], divergence)
    _show(result)
    return result


def _divergence(
    engine: EngineProcess, prompt: str, plain: Answer, dflash: Answer
) -> Divergence | None:
    if plain.token_ids == dflash.token_ids:
        return None
    pairs = zip(plain.token_ids, dflash.token_ids, strict=False)
    shorter = min(len(plain.token_ids), len(dflash.token_ids))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    ours, theirs = plain.token_ids[index : index + 1], dflash.token_ids[index : index + 1]
    gap = None
    if ours and theirs:
        scores = engine.log_probs(prompt, plain.token_ids[:index], ours + theirs)
        gap = scores[0] - scores[1]
    return Divergence(index, engine.token_text(ours), engine.token_text(theirs), gap)


def _show(result: PromptResult) -> None:
    print(textwrap.indent(result.dflash.text.strip(), "    "))
    figures = summarise([result])
    tau = figures["acceptance_length"]
    parts = [
        f"plain {figures['autoregressive']['tokens_per_s']:.1f} tokens/s",
        f"DFLASH {figures['dflash']['tokens_per_s']:.1f} tokens/s",
        f"{figures['speedup']:.2f}x",
        "no verify step" if tau is None else f"acceptance length {tau:.2f}",
        "identical" if result.divergence is None else _describe(result.divergence),
    ]
    print("  -> " + ", ".join(parts), flush=True)


def _describe(divergence: Divergence) -> str:
    gap = divergence.log_prob_gap
    where = f"differs from token {divergence.index}"
    what = f"plain {divergence.autoregressive!r}, DFLASH {divergence.dflash!r}"
    return f"{where} ({what}{'' if gap is None else f', log-prob gap {gap:.4f}'})"
