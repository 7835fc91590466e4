"""Units live in field names (`_ns`, `_bytes`); these functions turn them into text, and only reporters call them."""

_SI_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_snr(snr_db: float) -> str:
    """`63 dB`; of outputs that are not finite or of another size, which records hold as -1e30 since JSON has no infinity, why."""
    return f"{snr_db:.0f} dB" if snr_db > -1e29 else "-inf dB (NaN or Inf in the outputs, or other sizes)"


def format_duration(ns: float) -> str:
    """A duration with three significant digits and its unit: `format_duration(1_234_567) == "1.23 ms"`."""
    for scale, unit in _SI_TIME:
        if abs(_round_to_significant(ns)) >= scale:
            return f"{_format_significant(ns / scale)} {unit}"
    return "0 ns" if ns == 0 else f"{_format_significant(ns)} ns"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units: `format_bytes(51_603_628) == "49.2 MiB"`."""
    for scale, unit in _BINARY:
        if abs(size_bytes) >= scale:
            return f"{_format_significant(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count with an SI prefix: `format_count(4_089_184_256) == "4.09 G"`."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(_round_to_significant(count)) >= scale:
            return f"{_format_significant(count / scale)} {prefix}"
    return f"{count:g}"


def _format_significant(value: float) -> str:
    digits = max(0, 2 - len(str(int(abs(_round_to_significant(value))))) + 1)
    return f"{value:.{digits}f}"


def _round_to_significant(value: float) -> float:
    """To three significant digits, so that 999.6 ns are shown as 1.00 µs, and 9.996 as 10.0."""
    return float(f"{value:.3g}")
