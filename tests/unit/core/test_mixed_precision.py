import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.errors import BadInputError
from optpipe.core.precision import (
    EXACT_DB,
    Budget,
    KeptLayer,
    MixedPrecision,
    PrecisionCost,
    budget_from_text,
    make_cost_order,
)
from optpipe.core.records import json_from_record, record_from_json


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.5points", Budget(0.5, "points")),
        ("1 point", Budget(1.0, "points")),
        ("0.5%", Budget(0.5, "points")),
        ("0.5pt", Budget(0.5, "points")),
        ("0%", Budget(0.0, "points")),
        ("30dB", Budget(30.0, "dB")),
        (" 30 dB ", Budget(30.0, "dB")),
    ],
)
def test_a_budget_is_points_or_decibels(text, budget) -> None:
    assert budget_from_text(text, "--budget") == budget


@pytest.mark.parametrize(
    "text",
    ["", "0.5", "-1points", "101%", "0dB", "201dB", "nan%", "infdB", "\u0663\u0660dB", "dB", "9" * 400 + "dB"],
)
def test_anything_else_is_refused_in_one_line(text) -> None:
    with pytest.raises(BadInputError) as refused:
        budget_from_text(text, "--budget")
    assert len(str(refused.value).splitlines()) == 1


@given(st.floats(-300, 300), st.none() | st.floats(-1, 1), st.floats(0.1, 100), st.floats(0, 100))
def test_a_wider_budget_allows_what_a_narrower_one_does(snr, drop, limit, more) -> None:
    cost = PrecisionCost(max(min(snr, EXACT_DB), -EXACT_DB), drop, drop and (drop, drop))
    assert Budget(limit + more, "points").allows(cost) or not Budget(limit, "points").allows(cost)
    assert Budget(limit, "dB").allows(cost) or not Budget(limit + more, "dB").allows(cost)


def test_nan_is_within_no_budget() -> None:
    assert not Budget(100.0, "points").allows(PrecisionCost(-EXACT_DB, 0.0, (0.0, 0.0)))
    assert not Budget(1e-9, "dB").allows(PrecisionCost(-EXACT_DB))


def test_outputs_of_other_sizes_have_no_snr_and_are_ordered_by_their_drop() -> None:
    costly, cheap, noisy = PrecisionCost(None, 0.02), PrecisionCost(None, 0.001), PrecisionCost(12.0, 0.01)
    assert not Budget(1e-9, "dB").allows(costly)
    assert Budget(3.0, "points").allows(costly)
    assert sorted([cheap, noisy, costly], key=make_cost_order([cheap, noisy, costly])) == [costly, noisy, cheap]
    clear = PrecisionCost(30.0, 0.03)
    assert min(clear, noisy, key=make_cost_order([clear, noisy])) == noisy


def test_it_survives_its_file() -> None:
    kept = KeptLayer("conv", "Conv", 30, "alone lowers the SNR to 1.6 dB")
    mixed = MixedPrecision(Budget(30.0, "dB"), "snr", 16, PrecisionCost(42.0), (kept,), 120)
    assert record_from_json(json_from_record(mixed), MixedPrecision, "here") == mixed
    assert mixed.kept_share == 0.25
