# SPDX-License-Identifier: Apache-2.0
"""Acceptance by position, counted step by step and from the histograms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.acceptance import by_position

BLOCK = 5
STEPS = st.lists(
    st.integers(1, BLOCK).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows - 1))),
    min_size=1,
)


@given(STEPS)
def test_the_histograms_tell_what_counting_every_step_does(steps: list[tuple[int, int]]) -> None:
    widest = max(rows for rows, _ in steps)
    most = max(accepted for _, accepted in steps)
    found = by_position(
        [sum(rows == w for rows, _ in steps) for w in range(widest + 1)],
        [sum(accepted == k for _, accepted in steps) for k in range(most + 1)],
    )
    places = range(1, widest)
    assert found == {
        "spec_verified_per_position": [sum(rows > p for rows, _ in steps) for p in places],
        "spec_accepted_per_position": [sum(got >= p for _, got in steps) for p in places],
    }


def test_plain_steps_verify_nothing() -> None:
    assert by_position([0, 7], [7]) == {
        "spec_verified_per_position": [],
        "spec_accepted_per_position": [],
    }
