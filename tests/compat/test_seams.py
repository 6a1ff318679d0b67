# SPDX-License-Identifier: Apache-2.0
"""The installed SGLang has what we rely on, and we say so when it has not."""

from __future__ import annotations

import pytest

from sglang_dflash import seams
from sglang_dflash.seams import Seam, check
from sglang_dflash.state import reserved_lengths


def test_the_installed_sglang_has_every_seam() -> None:
    assert check((*seams.SEAMS, *seams.GRAPH_SEAMS)) == []


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("sglang.srt.no_such_module.name"), "not there"),
        (Seam("sglang.srt.speculative.spec_info.no_such_name"), "not there"),
        (Seam("sglang.srt.speculative.spec_info.SpecInput.__init__", ("self",)), "wants"),
        (
            Seam(
                "sglang.srt.speculative.spec_info.SpecInput.__init__",
                ("self", "spec_input_type", "gone"),
            ),
            "lacks gone",
        ),
    ],
)
def test_a_moved_seam_is_told(seam: Seam, problem: str) -> None:
    (line,) = check((seam,))
    assert seam.path in line
    assert problem in line


def test_every_import_from_sglang_is_a_seam_or_a_type() -> None:
    paths = {seam.path for seam in seams.SEAMS}
    assert len(paths) == len(seams.SEAMS), "a seam is listed twice"


@pytest.mark.parametrize(("page_size", "expected"), [(1, [26, 40]), (16, [32, 48])])
def test_a_reservation_is_two_blocks_in_whole_pages(page_size: int, expected: list[int]) -> None:
    lengths = reserved_lengths([10, 24], [12, 24], reserve=16, page_size=page_size, row_width=100)
    assert lengths == expected


def test_a_reservation_is_taken_ahead_for_all_or_not_at_all() -> None:
    asked = {"reserve": 16, "page_size": 1, "row_width": 100, "ahead": 8}
    assert reserved_lengths([10, 24], [26, 41], **asked) == [26, 41]
    assert reserved_lengths([11, 24], [26, 41], **asked) == [35, 48]
    assert reserved_lengths([80], [90], **asked) == [100], "never beyond the row"


def test_a_reservation_never_shrinks() -> None:
    assert reserved_lengths([10], [50], reserve=16, page_size=1, row_width=100) == [50]


def test_a_reservation_stays_in_its_row() -> None:
    assert reserved_lengths([81], [81], reserve=16, page_size=16, row_width=112) == [112]
    with pytest.raises(RuntimeError, match="a request of 90 tokens needs 106 positions"):
        reserved_lengths([90], [90], reserve=16, page_size=1, row_width=100)
