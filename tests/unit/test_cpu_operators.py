# SPDX-License-Identifier: Apache-2.0
"""The CPU platform's operators, packed linear layers and slot operations, against plain forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("sglang")

from sglang_dflash.cpu.linear import PackedWeight, packed_linear
from sglang_dflash.cpu.memory import assign_req_to_token_pool, extend_cache_locs
from sglang_dflash.cpu.operators import rotate, softcap_logits
from sglang_dflash.cpu.settings import thread_environment


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(576, 960), (1536, 576), (2048, 512), (576, 49152), (64, 320), (128, 64), (48, 40)]
)
def test_an_invariant_product_is_the_same_bits_in_any_place_of_any_batch(sizes, dtype):
    weight = torch.randn(sizes[1], sizes[0]).to(dtype)
    packed, x = PackedWeight(weight, batch_invariant=True), torch.randn(24, sizes[0]).to(dtype)
    alone = torch.cat([packed.product(row[None], None) for row in x])
    torch.testing.assert_close(alone, F.linear(x, weight), atol=1e-1, rtol=2e-2)
    for count in (2, 7, 8, 9, 24):
        assert torch.equal(packed.product(x[:count], None), alone[:count])
    for place in range(1, 8):
        assert torch.equal(packed.product(x.roll(place, 0), None), alone.roll(place, 0))


def test_an_invariant_product_keeps_the_shape_and_the_bias():
    weight, bias = torch.randn(6, 4), torch.randn(6)
    packed = PackedWeight(weight, batch_invariant=True)
    for shape in ((0, 4), (4,), (1, 4), (2, 5, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(packed.product(x, bias), F.linear(x, weight, bias))


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    cos, sin = x[:, None, :64], x[:, None, 64:128]
    return rotate(x, cos, sin, 64)


# What else a row passes on its way to a token: torch does these row by row, which nothing promises.
BY_ROW: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "norm": (lambda x: F.rms_norm(x, x.shape[1:], None, 1e-5), 576),
    "odd norm": (lambda x: F.rms_norm(x, x.shape[1:], None, 1e-5), 83),
    "activation": (_silu_and_mul, 3072),
    "odd activation": (_silu_and_mul, 2 * 83),
    "rotation": (_rotate, 12 * 64),
    "softmax": (lambda x: torch.softmax(x.float(), -1), 49152),
    "log of softmax": (lambda x: torch.log_softmax(x.float(), -1), 49152),
    "running sum": (lambda x: x.float().softmax(-1).sort(-1)[0].cumsum(-1), 49152),
    "ranks": (lambda x: x.float().softmax(-1).sort(-1, descending=True)[1], 49152),
    "log": (lambda x: x.double().exp().log(), 49152),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BY_ROW)
def test_the_other_operators_go_row_by_row(name, dtype):
    function, width = BY_ROW[name]
    x = 3 * torch.randn(43, width).to(dtype)
    alone = torch.cat([function(row[None]) for row in x])
    for count in (1, 2, 7, 43):
        assert torch.equal(function(x[:count]), alone[:count])


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
