# SPDX-License-Identifier: Apache-2.0
"""Each kernel does what its reference does: in Triton's interpreter, or natively on a GPU."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash import kernels
from sglang_dflash.kernels import confirm, context_keys, fill_block

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZES = [2, 3, 8, 10, 16]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in the interpreter for which tests/conftest.py has made them."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for module in (confirm, context_keys, fill_block):
            monkeypatch.setattr(module, "has_kernels", lambda _: True)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(kernels.__path__)])
def test_kernel_and_reference_have_one_signature(name: str) -> None:
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    kernel, reference = getattr(module, name), getattr(module, f"{name}_reference")
    assert inspect.signature(kernel) == inspect.signature(reference)
    assert kernel.__module__ == module.__name__


def test_kernels_compile_for_hopper_and_blackwell(tmp_path: Path) -> None:
    """Down to machine code; no GPU is needed for that."""
    compiled = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiling.py")), "90", "100"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    count = len(list(pkgutil.iter_modules(kernels.__path__)))
    assert len({line.split()[1] for line in compiled.stdout.splitlines()}) == count


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("n", [1, 5, 33])
def test_a_block_is_filled(n: int, block_size: int) -> None:
    generator = drawn(n + block_size)
    table = torch.randperm(64 * 90, generator=generator).to(torch.int32).view(64, 90)
    given = [
        torch.randint(1 << 40, (n,), generator=generator),
        torch.randint(90 - block_size, (n,), generator=generator),
        torch.randperm(64, generator=generator)[:n],
        table,
    ]
    given = [values.to(DEVICE) for values in given]
    expected, got = (
        [torch.full((n, block_size), -7, dtype=torch.int64, device=DEVICE) for _ in range(3)]
        for _ in range(2)
    )
    fill_block.fill_block_reference(*given, *expected)
    fill_block.fill_block(*given, *got)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert (got[0][:, 1:] == -7).all()  # the masks are the caller's


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("whole", [True, False])
def test_the_confirmed_prefix(block_size: int, whole: bool) -> None:
    generator = drawn(block_size)
    n = 37
    widths = torch.randint(1, block_size + 1, (n,), generator=generator)
    if whole:
        widths.fill_(block_size)
    starts = widths.cumsum(0) - widths
    choices = torch.randint(3, (int(widths.sum()),), generator=generator) << 33
    proposals = torch.randint(2, (n, block_size - 1), generator=generator) << 33
    for i in range(0, n, 3):  # a third agrees to the end
        own = choices[starts[i] : starts[i] + widths[i] - 1]
        proposals[i, : len(own)] = own
    wide = torch.stack([proposals] * 2, dim=2)[..., 0]  # not contiguous
    given = [values.to(DEVICE) for values in (wide, choices, starts, widths)]
    expected = confirm.confirm_reference(*given)
    assert (expected.num_committed[::3].cpu() == widths[::3]).all()
    assert (expected.num_committed.cpu() < widths).any()
    for one, other in zip(confirm.confirm(*given), expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary_dim"),
    [(1, 64, 64), (3, 64, 64), (8, 128, 128), (2, 80, 80), (4, 128, 64), (5, 96, 24)],
)
def test_keys_are_normed_and_turned(
    num_heads: int, head_dim: int, rotary_dim: int, is_neox_style: bool, dtype: torch.dtype
) -> None:
    num_rows, num_layers = 7, 3
    generator = drawn(head_dim + num_heads)
    kv = torch.randn(num_rows, num_layers, 2, num_heads, head_dim, generator=generator)
    weight = 1 + 0.3 * torch.randn(num_layers, head_dim, generator=generator)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    positions = torch.randperm(50, generator=generator)[:num_rows].to(DEVICE)
    kv, weight = kv.to(DEVICE, dtype), weight.to(DEVICE, dtype)
    given = (kv[:, :, 0], positions, weight, table)
    how = {"eps": 1e-5, "is_neox_style": is_neox_style}
    expected = context_keys.context_keys_reference(*given, **how)
    got = context_keys.context_keys(*given, **how)
    assert got.shape == expected.shape == (num_layers, num_rows, num_heads, head_dim)
    assert got.dtype == expected.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if dtype != torch.float32 and (dtype != torch.bfloat16 or DEVICE == "cuda"):
        # Another order of a sum turns few roundings; the interpreter cuts bfloat16 off.
        assert (got != expected).float().mean() < 0.1


def test_no_rows_have_no_keys() -> None:
    empty = torch.empty(0, 2, 3, 8, device=DEVICE)
    positions = torch.empty(0, dtype=torch.int64, device=DEVICE)
    weight, table = torch.ones(2, 8, device=DEVICE), torch.ones(4, 8, device=DEVICE)
    got = context_keys.context_keys(empty, positions, weight, table, eps=1e-6, is_neox_style=True)
    assert got.shape == (2, 0, 3, 8)
