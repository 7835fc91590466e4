"""Policies in Python: one text for the same limits, and errors that name arguments."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optpipe as op
from optpipe.signoff.policy import policy_from_toml

LATENCIES = st.dictionaries(
    st.sampled_from(["p50", "p90", "p99"]), st.just("10 ms"), min_size=1
).map(lambda limits: {**limits, "batch_size": 1})
OTHERS = {
    "accuracy": st.just({"maximum_drop": "1 point"}),
    "size": st.just({"maximum": "10 MiB"}),
    "build": st.just({"backend": "onnxruntime", "options": {"threads": 2, "spinning": True}}),
}


@given(st.fixed_dictionaries({"latency": LATENCIES}, optional=OTHERS), st.randoms())
def test_the_same_limits_in_any_order_are_the_same_policy(tables, random) -> None:
    def shuffle(value):
        if not isinstance(value, dict):
            return value
        items = [(key, shuffle(each)) for key, each in value.items()]
        random.shuffle(items)
        return dict(items)

    one, other = op.Policy(**tables), op.Policy(**shuffle(tables))
    assert one == other
    assert hash(one) == hash(other)
    again = policy_from_toml(one.toml.encode())
    assert again.criteria == one.criteria
    assert {key: tomllib.loads(one.toml)[key] for key in tables} == tables


def test_several_limits_of_one_table_are_an_array_in_any_order() -> None:
    first, second = {"p99": "10 ms", "batch_size": 1}, {"p99": "20 ms", "batch_size": 8}
    one, other = op.Policy(latency=[first, second]), op.Policy(latency=[second, first])
    assert one.sha256 == other.sha256
    assert [each.name for each in one.criteria] == ["latency.p99.b1", "latency.p99.b8"]
    assert op.Policy(latency=[first]).sha256 == op.Policy(latency=first).sha256


def test_a_file_is_the_same_policy(tmp_path) -> None:
    policy = op.Policy(name="ship", latency={"p99": "10 ms", "batch_size": 1})
    again = op.Policy(policy.save(tmp_path / "policy.toml"))
    assert again == policy
    with pytest.raises(op.BadInputError, match="already exists"):
        policy.save(tmp_path / "policy.toml")
    with pytest.raises(op.BadInputError, match="exclude each other"):
        op.Policy(tmp_path / "policy.toml", name="other")


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"latenc": {"p99": "10 ms"}}, "latency"),
        ({"latency": {"pp99": "10 ms"}}, "p99"),
        ({"latency": {"p99": 10}}, "no unit"),
        ({"latency": {"p99": "10 ms", "batch_size": None}}, "NoneType"),
        ({"latency": {"p99": "10 ms", 8: 1}}, "8"),
        ({"latency": "10 ms"}, "latency"),
        ({"latency": ["10 ms"]}, "latency"),
        ({}, "no criteria"),
        ({"name": "only a name"}, "no criteria"),
        ({"latency": {"p99": "10 ms"}, "confidence": "20%"}, "confidence"),
        ({"latency": {"p99": b"10 ms"}}, "bytes"),
    ],
)
def test_a_wrong_limit_is_refused_by_its_argument_without_a_line(tables, named) -> None:
    with pytest.raises(op.BadInputError, match=named) as error:
        op.Policy(**tables)
    assert "line" not in str(error.value).replace("outline", "")
    assert len(str(error.value).splitlines()) <= 2


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(op.BadInputError, match="absent"):
        op.Policy(tmp_path / "absent.toml")
