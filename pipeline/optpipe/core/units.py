"""Units live in field names (`_ns`, `_bytes`); these functions turn them into text, and only reporters call them."""

_SI_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration_text(ns: float) -> str:
    """A duration with three significant digits and its unit: `duration_text(1_234_567) == "1.23 ms"`."""
    for scale, unit in _SI_TIME:
        if abs(_rounded(ns)) >= scale:
            return f"{_significant(ns / scale)} {unit}"
    return "0 ns" if ns == 0 else f"{_significant(ns)} ns"


def bytes_text(size_bytes: float) -> str:
    """A size in binary units: `bytes_text(51_603_628) == "49.2 MiB"`."""
    for scale, unit in _BINARY:
        if abs(size_bytes) >= scale:
            return f"{_significant(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def count_text(count: float) -> str:
    """A count with an SI prefix: `count_text(4_089_184_256) == "4.09 G"`."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(_rounded(count)) >= scale:
            return f"{_significant(count / scale)} {prefix}"
    return f"{count:g}"


def _significant(value: float) -> str:
    digits = max(0, 2 - len(str(int(abs(_rounded(value))))) + 1)
    return f"{value:.{digits}f}"


def _rounded(value: float) -> float:
    """To three significant digits, so that 999.6 ns are shown as 1.00 µs, and 9.996 as 10.0."""
    return float(f"{value:.3g}")
