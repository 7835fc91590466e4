"""Figures as people read them: three significant digits, and the unit in which they are."""

import pytest

from optpipe.core.quantity import format_bytes, format_count, format_duration, format_snr


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"), (7, "7.00 ns"), (999.4, "999 ns"), (999.6, "1.00 µs"), (9_996, "10.0 µs"), (999_700, "1.00 ms"),
        (1_234_567, "1.23 ms"), (-999.6, "-1.00 µs"),
    ],
)  # fmt: skip
def test_durations(ns: float, text: str) -> None:
    assert format_duration(ns) == text


def test_sizes_and_counts() -> None:
    assert format_bytes(51_603_628) == "49.2 MiB"
    assert format_count(4_089_184_256) == "4.09 G"
    assert format_count(999_600) == "1.00 M"


def test_an_snr_of_outputs_that_are_not_finite_is_no_number() -> None:
    assert format_snr(62.6) == "63 dB"
    assert format_snr(-1e30) == "-inf dB (NaN or Inf in the outputs, or other sizes)"
