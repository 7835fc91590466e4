import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.errors import BadInputError
from optpipe.core.precision import (
    LayerType,
    Precision,
    precisions_from_text,
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


@given(layers)
def test_shares_add_up_to_one(found: list[LayerType]) -> None:
    share = summarize_precision(found)
    assert sum(share.layers.values()) == pytest.approx(1)
    if share.total_macs:
        assert sum(share.macs.values()) == pytest.approx(1)


@given(layers, st.sampled_from(list(Precision)))
def test_at_most_one_precision_can_be_proven(found: list[LayerType], wanted: Precision) -> None:
    proof = prove_precision(wanted, found)
    if proof.proven:
        assert not any(prove_precision(other, found).proven for other in Precision if other is not wanted)


@given(layers, st.sampled_from(list(Precision)))
def test_one_more_layer_in_the_wanted_type_never_unproves(found: list[LayerType], wanted: Precision) -> None:
    more = [*found, LayerType("more", "Conv", str(wanted), 10**9)]
    assert prove_precision(wanted, more).proven >= (
        prove_precision(wanted, found).proven and bool(summarize_precision(found).macs)
    )


def test_an_fp32_engine_does_not_pass_for_fp16() -> None:
    proof = prove_precision(
        Precision.FP16, [LayerType("conv1", "Conv", "fp32", 70), LayerType("conv2", "Conv", "fp16", 30)]
    )
    assert not proof.proven
    assert [each.name for each in proof.others] == ["conv1"]
    assert proof.reason == "30.0% of MACs in fp16, 80% required"


@pytest.mark.parametrize(
    ("wanted", "macs", "reason"),
    [
        (Precision.FP32, 999_999, "99.9999% of MACs in fp32, 100% required"),
        (Precision.FP16, 799_990, "79.999% of MACs in fp16, 80% required"),
        (Precision.FP16, 800_000, "80.0% of MACs in fp16, 80% required"),
        (Precision.FP32, 1_000_000, "100.0% of MACs in fp32, 100% required"),
    ],
)
def test_rounding_never_hides_why_a_precision_is_not_proven(wanted: Precision, macs: int, reason: str) -> None:
    other = LayerType("b", "Conv", "int8", 1_000_000 - macs)
    assert prove_precision(wanted, [LayerType("a", "Conv", str(wanted), macs), other]).reason == reason


def test_fp32_tolerates_nothing_else() -> None:
    assert not prove_precision(
        Precision.FP32, [LayerType("a", "Conv", "fp32", 999), LayerType("b", "Conv", "tf32", 1)]
    ).proven


def test_reading_precisions() -> None:
    assert precisions_from_text("fp16, FP32,fp16") == (Precision.FP16, Precision.FP32)
    for text in ("", "fp17", "fp16;fp32"):
        with pytest.raises(BadInputError, match="fp16"):
            precisions_from_text(text)
