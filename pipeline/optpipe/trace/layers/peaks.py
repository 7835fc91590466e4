"""Peaks of a device: measured by a short probe, or from the maker's data sheet, and which of the two.

Data sheets: NVIDIA H100/H200/A100/L4/L40S/A10/T4/V100 and B200 product pages; dense rates, without sparsity.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from optpipe.workspace.environment import count_cores

_CPU_REPEATS, _GPU_REPEATS, _GPU_ROUNDS = 20, 5, 4


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device can do at most. `flops_per_s` by type counts a MAC as two operations."""

    device: str
    source: str
    """`measured` or `data sheet`."""
    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def flops(self, kind: str) -> float:
        """The peak for element type `kind`; a type without an entry is taken to run as fp32."""
        return self.flops_per_s.get(kind) or self.flops_per_s["fp32"]


# TFLOP/s dense for fp32, tf32, fp16 (and bf16), int8; then GB/s. None: the type has no matrix units there.
_SHEETS: tuple[tuple[str, tuple[float, float | None, float, float | None], float], ...] = (
    ("B200", (75, 1100, 2250, 4500), 8000),
    ("H200", (67, 494.7, 989.4, 1978.9), 4800),
    ("H100 PCIe", (51.2, 378, 756, 1513), 2000),
    ("H100", (67, 494.7, 989.4, 1978.9), 3350),
    ("A100-SXM4-80GB", (19.5, 156, 312, 624), 2039),
    ("A100 80GB", (19.5, 156, 312, 624), 1935),
    ("A100", (19.5, 156, 312, 624), 1555),
    ("L40S", (91.6, 183, 362, 733), 864),
    ("L4", (30.3, 60, 121, 242), 300),
    ("A10", (31.2, 62.5, 125, 250), 600),
    ("T4", (8.1, None, 65, 130), 320),
    ("V100", (15.7, None, 125, None), 900),
)


def peaks_from_data_sheet(device: str) -> Peaks | None:
    """The data sheet's peaks of the GPU whose name contains a known model; None for any other."""
    for model, (fp32, tf32, fp16, int8), gigabytes in _SHEETS:
        if model.lower() in device.lower():
            rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "int8": int8}
            known = {kind: rate * 1e12 for kind, rate in rates.items() if rate}
            return Peaks(device, "data sheet", known, gigabytes * 1e9)
    return None


def measure_gpu_peaks() -> Peaks:
    """Probes the current CUDA device for about a second: square matrix products per type, and a copy of 1 GiB.

    A type whose product the device, or torch, cannot compute has no peak.
    """
    import torch

    size = 8192
    rates: dict[str, float] = {}
    allowed = torch.backends.cuda.matmul.allow_tf32
    for kind, dtype in {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }.items():
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        one, other = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        rates[kind] = 2 * size**3 / _time_best_gpu_run(torch, lambda a=one, b=other: a @ b)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = allowed
    whole, other_whole = (torch.randint(-8, 8, (size, size), device="cuda", dtype=torch.int8) for _ in range(2))
    with suppress(RuntimeError):
        rates["int8"] = 2 * size**3 / _time_best_gpu_run(torch, lambda: torch._int_mm(whole, other_whole.t()))
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(buffer)
    bandwidth = 2 * buffer.numel() / _time_best_gpu_run(torch, lambda: target.copy_(buffer))
    return Peaks(torch.cuda.get_device_name(), "measured", rates, bandwidth)


def measure_cpu_peaks(threads: int | None = None) -> Peaks:
    """Probes the CPU for about a second: float32 matrix products and a copy of 256 MiB, on `threads`, by default all.

    torch's own number of threads is not a default: OMP_NUM_THREADS may have set it, which the runtime judged need not follow.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or count_cores())
    try:
        rate = max(_measure_product_flops_per_s(torch, size) for size in (512, 1024))
        buffer = torch.zeros(1 << 28, dtype=torch.uint8)
        target = torch.zeros_like(buffer)
        bandwidth = 2 * buffer.numel() / _time_best_cpu_run(lambda: target.copy_(buffer))
    finally:
        torch.set_num_threads(before)
    return Peaks("CPU", "measured", {"fp32": rate}, bandwidth)


def _measure_product_flops_per_s(torch: Any, size: int) -> float:
    one, other = torch.randn(size, size), torch.randn(size, size)
    return float(2 * size**3 / _time_best_cpu_run(lambda: one @ other))


def _time_best_cpu_run(work: Callable[[], Any]) -> float:
    work()
    best = float("inf")
    for _ in range(_CPU_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _time_best_gpu_run(torch: Any, work: Callable[[], Any]) -> float:
    work()
    best = float("inf")
    for _ in range(_GPU_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_GPU_ROUNDS):
            work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / _GPU_ROUNDS)
    return best
