# SPDX-License-Identifier: Apache-2.0
"""The CPU attention core against a loop over requests, rows and heads in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sglang_dflash.cpu import attention_core
from sglang_dflash.cpu.attention_core import AttentionPlan, PagedRows
from sglang_dflash.cpu.attention_math import HeadLayout, Workspace

Q_HEADS, KV_HEADS, HEAD_DIM, V_DIM = 6, 2, 16, 16
CONTEXT = 1024


class Case(NamedTuple):
    """The rows of one forward and the pool they read."""

    rows: PagedRows
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def make_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    v_dim: int = V_DIM,
    seed: int = 0,
) -> Case:
    """Return random rows over a pool whose pages are shuffled, so that slots never follow on."""
    generator = torch.Generator().manual_seed(seed)
    num = len(q_lens)
    pages_per_request = -(-max(kv_lens) // page_size)
    num_slots = (num * pages_per_request + 1) * page_size
    pages = torch.randperm(num * pages_per_request, generator=generator) + 1
    slots = pages[:, None] * page_size + torch.arange(page_size)
    req_to_token = torch.zeros(num + 3, CONTEXT, dtype=torch.int32)
    requests = torch.randperm(num + 3, generator=generator)[:num]
    for i, request in enumerate(requests.tolist()):
        own = slots[i * pages_per_request : (i + 1) * pages_per_request].reshape(-1)
        req_to_token[request, : kv_lens[i]] = own[: kv_lens[i]].int()
    return Case(
        PagedRows(req_to_token, requests, q_lens, kv_lens),
        torch.randn(sum(q_lens), Q_HEADS, HEAD_DIM, generator=generator).to(dtype),
        torch.randn(num_slots, KV_HEADS, HEAD_DIM, generator=generator).to(dtype),
        torch.randn(num_slots, KV_HEADS, v_dim, generator=generator).to(dtype),
    )


def by_loop(case: Case, heads: HeadLayout, *, window: int, causal: bool) -> torch.Tensor:
    """Return the same attention, one query row and head at a time, in float64."""
    out, row = [], 0
    for i, (width, kv_len) in enumerate(zip(case.rows.q_lens, case.rows.kv_lens, strict=True)):
        slots = case.rows.req_to_token[case.rows.req_pool_indices[i], :kv_len].long()
        for p in range(kv_len - width, kv_len):
            keys = torch.arange(kv_len)
            seen = keys <= p if causal else keys >= 0
            if window >= 0:
                seen &= (keys >= p - window) & (keys <= p + window)
            for head in range(Q_HEADS):
                kv_head = head * KV_HEADS // Q_HEADS
                k = case.k_cache[slots[seen], kv_head].double()
                v = case.v_cache[slots[seen], kv_head].double()
                score = k @ case.q[row, head].double() * heads.scale
                if heads.softcap:
                    score = torch.tanh(score / heads.softcap) * heads.softcap
                if heads.sinks is not None:
                    score = torch.cat([score, heads.sinks[head : head + 1].double()])
                prob = torch.softmax(score, 0)[: len(k)]
                out.append(prob @ v)
            row += 1
    return torch.stack(out).view(row, Q_HEADS, -1)


def check(
    case: Case,
    *,
    window: int = -1,
    causal: bool = True,
    heads: HeadLayout | None = None,
    by_row: bool = False,
):
    """Assert that the plan and the loop agree, to float32 rounding."""
    heads = heads or HeadLayout(HEAD_DIM**-0.5)
    plan = AttentionPlan.build(case.rows, window, by_row=by_row)
    got = plan.attend(case.q, case.k_cache, case.v_cache, heads, Workspace(), causal=causal)
    want = by_loop(case, heads, window=window, causal=causal)
    tolerance = 2e-5 if case.q.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    return plan


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [-1, 0, 5, 300])
def test_decode_equals_loop(page_size, window):
    case = make_case([1] * 5, [1, 7, 64, 33, 200], page_size=page_size)
    check(case, window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 3, 20])
@pytest.mark.parametrize("widths", [[8, 8, 8], [1, 8, 3], [4]])
def test_verify_block_equals_loop(widths, window, causal):
    kv_lens = [width + prefix for width, prefix in zip(widths, [1, 40, 90], strict=False)]
    check(make_case(widths, kv_lens, page_size=4), window=window, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 10, 150])
def test_prefill_with_prefix_equals_loop(monkeypatch, window, causal):
    monkeypatch.setattr(attention_core, "TILE_ROWS", 48)
    case = make_case([100, 65, 90], [100, 165, 91], page_size=16)
    plan = check(case, window=window, causal=causal)
    assert len(plan.tiles) == 3


def test_mixed_chunk_of_long_and_short_requests_equals_loop():
    plan = check(make_case([1, 70, 1, 5], [50, 90, 3, 5]))
    assert len(plan.tiles) == 1
    assert len(plan.blocks) == 1


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("q_lens", [[0, 1, 2], [3, 0, 3], [70, 5, 0], [2, 2, 0]])
def test_an_empty_prompt_has_no_rows(q_lens, by_row):
    check(make_case(q_lens, q_lens), by_row=by_row)


def test_very_different_lengths_are_split_and_keep_their_order():
    case = make_case([1] * 8, [900, 10, 12, 11, 880, 9, 14, 10])
    plan = check(case)
    assert sorted(block.num for block in plan.blocks) == [2, 6]


def test_block_never_gathers_more_than_the_workspace_bound(monkeypatch):
    monkeypatch.setattr(attention_core, "GROUP_MAX_TOKENS", 2048)
    plan = check(make_case([2] * 6, [500] * 6))
    assert max(block.num * block.length for block in plan.blocks) <= 2048


@pytest.mark.parametrize("q_lens", [[1, 1], [4, 2], [70, 1]])
def test_sinks_and_soft_cap_equal_loop(q_lens):
    heads = HeadLayout(HEAD_DIM**-0.5, softcap=3.0, sinks=torch.randn(Q_HEADS))
    check(make_case(q_lens, [80, 9]), heads=heads)


def test_value_heads_may_be_narrower_than_keys():
    check(make_case([1, 3], [20, 30], v_dim=8))


def test_bfloat16_stays_within_its_rounding():
    check(make_case([1, 4, 66], [100, 60, 70], dtype=torch.bfloat16))


def test_rows_beyond_the_plan_are_zero():
    case = make_case([2, 2], [9, 5])
    padded = torch.cat([case.q, torch.full((3, Q_HEADS, HEAD_DIM), float("nan"))])
    got = AttentionPlan.build(case.rows).attend(
        padded, case.k_cache, case.v_cache, HeadLayout(0.25), Workspace(), causal=True
    )
    assert torch.equal(got[4:], torch.zeros(3, Q_HEADS, V_DIM))
    assert torch.isfinite(got).all()


def test_another_requests_overflow_does_not_leak():
    case = make_case([1, 4, 2], [40, 9, 25], page_size=4)
    own = set()
    for i, kv_len in enumerate(case.rows.kv_lens):
        own.update(case.rows.req_to_token[case.rows.req_pool_indices[i], :kv_len].tolist())
    others = torch.tensor([slot for slot in range(case.v_cache.shape[0]) if slot not in own])
    case.v_cache[others] = float("nan")
    case.k_cache[others] = float("inf")
    check(case)


def test_sliding_pool_slots_are_translated():
    case = make_case([1, 3], [30, 12])
    order = torch.randperm(case.k_cache.shape[0])
    moved_k, moved_v = torch.empty_like(case.k_cache), torch.empty_like(case.v_cache)
    moved_k[order], moved_v[order] = case.k_cache, case.v_cache
    heads = HeadLayout(0.25)
    plan = AttentionPlan.build(case.rows, 6, lambda slots: order[slots])
    got = plan.attend(case.q, moved_k, moved_v, heads, Workspace(), causal=True)
    want = by_loop(case, heads, window=6, causal=True)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_verify_rows_equal_decode_steps():
    """Row j of a verified block is what decoding at its position gives."""
    case = make_case([6, 6], [50, 31])
    heads = HeadLayout(HEAD_DIM**-0.5)
    plan = AttentionPlan.build(case.rows)
    block = plan.attend(case.q, case.k_cache, case.v_cache, heads, Workspace(), causal=True)
    for j in range(6):
        rows = case.rows
        step = PagedRows(rows.req_to_token, rows.req_pool_indices, [1, 1], [45 + j, 26 + j])
        one = AttentionPlan.build(step).attend(
            case.q[[j, 6 + j]], case.k_cache, case.v_cache, heads, Workspace(), causal=True
        )
        torch.testing.assert_close(one, block[[j, 6 + j]], atol=1e-6, rtol=1e-6)


FORWARDS = {
    "decode of sixteen": ([1] * 16, [17 * i + 5 for i in range(16)]),
    "verify": ([8, 8, 8], [30, 200, 77]),
    "ragged verify": ([1, 8, 3], [30, 200, 77]),
    "prefill": ([90], [90]),
    "long prefill": ([300], [300]),
    "radix hit": ([100], [300]),
    "mixed chunk": ([1, 70, 1, 5], [50, 90, 3, 5]),
}
LAYOUTS = {
    "plain": HeadLayout(HEAD_DIM**-0.5),
    "soft cap and sinks": HeadLayout(
        HEAD_DIM**-0.5, softcap=3.0, sinks=torch.linspace(-1, 1, Q_HEADS)
    ),
}


def attend_by_row(case: Case, rows: PagedRows, q: torch.Tensor, window: int, heads: HeadLayout):
    """Return the attention of a plan made by row."""
    plan = AttentionPlan.build(rows, window, by_row=True)
    return plan.attend(q, case.k_cache, case.v_cache, heads, Workspace(), causal=True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORWARDS)
def test_a_row_by_itself_has_the_same_bits_as_in_any_forward(name, layout, window, dtype, threads):
    case, heads = make_case(*FORWARDS[name], dtype=dtype), LAYOUTS[layout]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attend_by_row(case, case.rows, case.q, window, heads)
        row = 0
        for i, (width, kv_len) in enumerate(zip(*FORWARDS[name], strict=True)):
            request = case.rows.req_pool_indices[i : i + 1]
            for seen in range(kv_len - width + 1, kv_len + 1):
                rows = PagedRows(case.rows.req_to_token, request, [1], [seen])
                alone = attend_by_row(case, rows, case.q[row : row + 1], window, heads)
                assert torch.equal(alone[0], together[row])
                row += 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [-1, 3, 150])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_by_row_equals_loop(layout, window):
    case = make_case([1, 70, 1, 5], [50, 190, 3, 5], page_size=4)
    check(case, window=window, heads=LAYOUTS[layout], by_row=True)
