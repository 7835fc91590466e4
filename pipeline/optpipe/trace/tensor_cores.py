"""Tensor Cores: which layers could use them, which did, and what the others could save.

The successor of what DLProf showed, for inference: op nodes (layers), group nodes (kinds of work), model summary.
Eligible means matrix work whose element type has Tensor Cores on the device and whose channels are aligned (to 8 for
fp16 and bf16, to 16 for int8; NVIDIA, "Matrix Multiplication Background", Tensor Core requirements). Without a graph
at hand only the kernels' names tell that something is matrix work, and the alignment is not known: `basis` says which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from optpipe.trace.analysis import Analysis
from optpipe.trace.kernels import short_name
from optpipe.trace.layers import layer_kernels, layer_table
from optpipe.trace.peaks import Peaks

_UNKNOWN_GAIN = 2.0
"""Speed-up assumed for a missed layer on a device whose peaks are unknown: a small one, so as not to promise."""
ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}


@dataclass(frozen=True, slots=True)
class Missed:
    """Matrix work that ran without Tensor Cores."""

    name: str
    time_ns: int
    could_save_ns: int
    """At most: to the roofline where the graph is known, else by the ratio of the device's peaks."""
    reason: str
    kernel: str


@dataclass(frozen=True, slots=True)
class TensorCores:
    """The model summary, and what was missed, the largest saving first."""

    basis: str
    """`layers` or `kernels`: what `eligible` and `used` count."""
    eligible: int
    used: int
    unknown: int
    """Matrix work whose kernel's name does not tell."""
    eligible_ns: int
    used_ns: int
    kernel_ns: int
    missed: tuple[Missed, ...]
    groups: tuple[dict[str, Any], ...] = ()
    ineligible: Mapping[str, str] = field(default_factory=dict)
    """Matrix layers that cannot use Tensor Cores, and why."""

    @property
    def time_share(self) -> float:
        """The share of all kernel time that ran on Tensor Cores."""
        return self.used_ns / self.kernel_ns if self.kernel_ns else 0.0


def tensor_cores(
    measured: Analysis, peaks: Peaks | None = None, reasons: Mapping[str, str] | None = None
) -> TensorCores:
    """Counts by layer where NVTX names layers, else by kernel.

    `reasons` (layer to reason) names layers that a graph shows to be not eligible; see `roofline.ineligible_layers`.
    """
    by_layer = layer_kernels(measured)
    # Ranges that cover only a part of the matrix work (a stray range of a library) are no list of layers.
    if by_layer.height and by_layer["kernel_ns"].sum() >= 0.5 * max(measured.kernel_ns, 1):
        table, basis = layer_table(by_layer), "layers"
    else:
        table, basis = _kernels_as_layers(measured.kernels), "kernels"
    matrix = table.filter(pl.col("matrix_ns") > 0)
    ineligible = {name: why for name, why in (reasons or {}).items() if name in set(matrix["layer"].to_list())}
    eligible = matrix.filter(~pl.col("layer").is_in(list(ineligible)))
    used = eligible.filter(pl.col("tensor_core_ns") > 0)
    unknown = eligible.filter((pl.col("tensor_core_ns") == 0) & pl.col("unknown"))
    missed = eligible.filter((pl.col("tensor_core_ns") == 0) & ~pl.col("unknown"))
    return TensorCores(
        basis=basis,
        eligible=eligible.height,
        used=used.height,
        unknown=unknown.height,
        eligible_ns=int(eligible["matrix_ns"].sum()),
        used_ns=int(table["tensor_core_ns"].sum()),
        kernel_ns=measured.kernel_ns,
        missed=tuple(sorted((_missed(row, peaks) for row in missed.iter_rows(named=True)), key=lambda m: (-m.could_save_ns, m.name))),
        groups=tuple(measured.kernels.group_by("kind").agg(
            pl.col("total_ns").sum(), pl.col("total_ns").filter(pl.col("tensor_core")).sum().alias("tensor_core_ns")
        ).sort("total_ns", "kind", descending=[True, False]).iter_rows(named=True)),
        ineligible=ineligible,
    )  # fmt: skip


def _kernels_as_layers(kernels: pl.DataFrame) -> pl.DataFrame:
    matrix, on_tensor_cores = pl.col("matrix").fill_null(value=False), pl.col("tensor_core").fill_null(value=False)
    return kernels.select(
        pl.col("name").alias("layer"),
        pl.col("count"),
        pl.when(matrix).then("total_ns").otherwise(0).alias("matrix_ns"),
        pl.when(on_tensor_cores).then("total_ns").otherwise(0).alias("tensor_core_ns"),
        pl.col("tensor_core").is_null().alias("unknown"),
        pl.col("name").alias("main_kernel"),
    )


def _missed(row: Mapping[str, Any], peaks: Peaks | None) -> Missed:
    time_ns = int(row["matrix_ns"])
    ratio = peaks.flops("tf32") / peaks.flops("fp32") if peaks and "tf32" in peaks.flops_per_s else _UNKNOWN_GAIN
    if peaks and "fp16" in peaks.flops_per_s and "tf32" not in peaks.flops_per_s:
        ratio = peaks.flops("fp16") / peaks.flops("fp32")
    kernel = str(row["main_kernel"])
    return Missed(
        name=str(row["layer"]),
        time_ns=time_ns,
        could_save_ns=int(time_ns * (1 - 1 / max(ratio, 1.0))),
        reason=_reason(kernel),
        kernel=short_name(kernel),
    )


def _reason(kernel: str) -> str:
    lower = kernel.lower()
    if "winograd" in lower:
        return "a Winograd kernel on the FMA units was chosen"
    if "sgemm" in lower or "scudnn" in lower or "f32f32" in lower or "ffma" in lower or "simt" in lower:
        return "computes in fp32 on the FMA units: build it in fp16, or allow TF32"
    if "depthwise" in lower or "grouped" in lower:
        return "a depthwise or grouped kernel without Tensor Cores"
    return "no sign of Tensor Cores in the kernel's name"
