# SPDX-License-Identifier: Apache-2.0
"""The CPU platform's operators, packed linear layers and slot operations, against plain forms."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.cpu.linear import PackedWeight, packed_linear
from sglang_dflash.cpu.memory import assign_req_to_token_pool, extend_cache_locs
from sglang_dflash.cpu.operators import rotate, softcap_logits
from sglang_dflash.cpu.settings import thread_environment


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_equals_linear(rows, bias):
    weight, x = torch.randn(48, 32), torch.randn(rows, 32)
    offset = torch.randn(48) if bias else None
    got = packed_linear(x, PackedWeight(weight).tensor, offset)
    want = torch.nn.functional.linear(
        x.double(), weight.double(), offset.double() if bias else None
    )
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 5, 16, 33])
def test_a_rows_product_does_not_depend_on_its_company(rows):
    packed, x = PackedWeight(torch.randn(960, 576)).tensor, torch.randn(rows, 576)
    together = packed_linear(x, packed, None)
    alone = torch.cat([packed_linear(row[None], packed, None) for row in x])
    assert torch.equal(together, alone)


def test_packed_weight_follows_an_update():
    weight = torch.randn(8, 4)
    packed = PackedWeight(weight)
    weight.mul_(2)
    packed.pack(weight)
    x = torch.randn(3, 4)
    torch.testing.assert_close(packed_linear(x, packed.tensor, None), x @ weight.t())


def test_rotate_turns_pairs_of_halves():
    angle, x = torch.rand(5, 4), torch.randn(5, 3 * 8)
    cos, sin = angle.cos(), angle.sin()
    got = rotate(
        x,
        torch.cat([cos, cos], -1)[:, None],
        torch.cat([-sin, sin], -1)[:, None],
        8,
    ).view(5, 3, 8)
    pairs = torch.complex(x.view(5, 3, 8)[..., :4], x.view(5, 3, 8)[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1))


def test_softcap_works_in_place_and_into_an_output():
    logits = torch.randn(2, 9) * 50
    want = 30 * torch.tanh(logits / 30)
    output = torch.empty(2, 9)
    assert softcap_logits(logits.clone(), 30.0, output) is output
    torch.testing.assert_close(output, want)
    assert softcap_logits(logits, 30.0) is logits
    torch.testing.assert_close(logits, want)


def test_reserved_slots_are_written_and_read_back():
    table = torch.zeros(4, 12, dtype=torch.int32)
    requests, start = torch.tensor([2, 0, 3]), torch.tensor([3, 0, 7])
    end = torch.tensor([6, 0, 12])
    slots = torch.arange(100, 108)
    assign_req_to_token_pool(requests, table, start, end, slots, 3)
    assert table[2].tolist() == [0] * 3 + [100, 101, 102] + [0] * 6
    assert table[3].tolist() == [0] * 7 + [103, 104, 105, 106, 107]
    assert not table[[0, 1]].any()
    got = extend_cache_locs(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=torch.tensor([4, 1, 8]),
        end_offset=torch.tensor([6, 3, 10]),
        batch_size=3,
        draft_token_num=2,
        device="cpu",
    )
    assert got.tolist() == [101, 102, 0, 0, 104, 105]


class _Ranks:
    tp_size, pp_size, dp_size = 2, 1, 1


def test_what_the_user_set_for_threads_stays():
    wanted = thread_environment(_Ranks, {"GOMP_SPINCOUNT": "7"})
    assert "GOMP_SPINCOUNT" not in wanted
    assert wanted["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
