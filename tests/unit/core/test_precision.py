"""The precision that was built is proven by its layers; mixed precision keeps a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import proof

from optpipe.core.errors import BadInputError
from optpipe.core.precision import (
    EXACT_DB,
    Budget,
    LayerType,
    Precision,
    PrecisionCost,
    budget_from_text,
    make_cost_order,
    prove_precision,
    summarize_precision,
)

layers = st.lists(
    st.builds(
        LayerType,
        st.text(max_size=3),
        st.just("Conv"),
        st.sampled_from(list(map(str, Precision))),
        st.integers(0, 10**9),
    ),
    min_size=1,
    max_size=20,
)


@given(layers, st.sampled_from(list(Precision)))
def test_at_most_one_precision_can_be_proven(found: list[LayerType], wanted: Precision) -> None:
    proof = prove_precision(wanted, found)
    assert sum(proof.share.layers.values()) == pytest.approx(1)
    assert sum(proof.share.macs.values()) == pytest.approx(1) or not proof.share.total_macs
    if proof.proven:
        assert not any(
            prove_precision(other, found).proven for other in Precision if other is not wanted
        )


@given(layers, st.sampled_from(list(Precision)))
def test_one_more_layer_in_the_wanted_type_never_unproves(
    found: list[LayerType], wanted: Precision
) -> None:
    more = [*found, LayerType("more", "Conv", str(wanted), 10**9)]
    assert prove_precision(wanted, more).proven >= (
        prove_precision(wanted, found).proven and bool(summarize_precision(found).macs)
    )


@pytest.mark.parametrize(
    ("wanted", "macs", "reason"),
    [
        (Precision.FP32, 999_999, "99.9999% of MACs in fp32, 100% required"),
        (Precision.FP16, 799_990, "79.999% of MACs in fp16, 80% required"),
        (Precision.FP16, 800_000, "80.0% of MACs in fp16, 80% required"),
        (Precision.FP32, 1_000_000, "100.0% of MACs in fp32, 100% required"),
    ],
)
def test_rounding_never_hides_why_a_precision_is_not_proven(
    wanted: Precision, macs: int, reason: str
) -> None:
    other = LayerType("b", "Conv", "int8", 1_000_000 - macs)
    assert (
        prove_precision(wanted, [LayerType("a", "Conv", str(wanted), macs), other]).reason == reason
    )


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.5points", Budget(0.5, "points")),
        ("1 point", Budget(1.0, "points")),
        ("0.5%", Budget(0.5, "points")),
        ("0%", Budget(0.0, "points")),
        (" 30 dB ", Budget(30.0, "dB")),
    ],
)
def test_a_budget_is_points_or_decibels(text, budget) -> None:
    assert budget_from_text(text, "--budget") == budget


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.5",
        "-1points",
        "101%",
        "0dB",
        "201dB",
        "nan%",
        "infdB",
        "\u0663\u0660dB",
        "dB",
        "9" * 400 + "dB",
    ],
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
    costly, cheap, noisy = (
        PrecisionCost(None, 0.02),
        PrecisionCost(None, 0.001),
        PrecisionCost(12.0, 0.01),
    )
    assert not Budget(1e-9, "dB").allows(costly)
    assert Budget(3.0, "points").allows(costly)
    assert sorted([cheap, noisy, costly], key=make_cost_order([cheap, noisy, costly])) == [
        costly,
        noisy,
        cheap,
    ]
    clear = PrecisionCost(30.0, 0.03)
    assert min(clear, noisy, key=make_cost_order([clear, noisy])) == noisy


def test_a_proof_shows_itself_in_one_line() -> None:
    assert repr(proof("int8", 0.9)) == "PrecisionProof(proven: 90.0% int8, 10.0% fp32)"
    assert "not proven" in repr(proof("int8", 0.2, proven=False))
