"""A comparison as CSV and Parquet: one row per measurement, one column per figure, bounds beside their value."""

from typing import TYPE_CHECKING

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.estimate import Estimate
from optpipe.core.measurement import format_settings
from optpipe.report.records import scale_to_ms

if TYPE_CHECKING:
    import polars as pl

PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")


def frame_from_comparison(comparison: Comparison) -> "pl.DataFrame":
    """The rows as a frame; units are in the column names."""
    import polars as pl

    return pl.DataFrame([_record(row) for row in comparison.rows], infer_schema_length=None)


def _record(row: ComparisonRow) -> dict[str, object]:
    record: dict[str, object] = {
        name: getattr(row, name)
        for name in ("id", "run", "artifact", "model", "backend", "precision", "device", "setting")
    }
    for name in ("batch_size", "scenario", "mode", "streams", "rate_per_s"):
        record[name] = getattr(row.load, name)
    if row.load.length is not None:
        record["length"] = row.load.length
    record |= {"settings": format_settings(row.settings, row.settings)}
    record |= {"verdict": "VALID" if row.valid else "INVALID", "processes": row.processes, "samples": row.samples}
    for name in PERCENTILES:
        record |= _figure(f"latency_{name.replace('.', '_')}_ms", scale_to_ms(row.latency_ns.get(name)))
    record |= _figure("throughput_images_per_s", row.throughput_images_per_s)
    if row.throughput_tokens_per_s is not None:
        record |= _figure("throughput_tokens_per_s", row.throughput_tokens_per_s)
    record |= _figure("energy_j_per_image", row.energy_j_per_image)
    record |= _figure("top1", row.top1)
    record |= _figure("speedup", row.speedup)
    return record | {
        "change": row.change,
        "held_against": row.held_against,
        "memory_bytes": row.memory_bytes,
        "size_bytes": row.size_bytes,
        "build_s": row.build_s,
        "on_frontier": row.on_frontier,
        "dominated_by": row.dominated_by,
        "reasons": "; ".join(row.reasons),
        "caveats": "; ".join(row.caveats),
    }


def _figure(name: str, figure: Estimate | None) -> dict[str, float | None]:
    return {
        name: figure.value if figure else None,
        f"{name}_low": figure.low if figure else None,
        f"{name}_high": figure.high if figure else None,
    }
