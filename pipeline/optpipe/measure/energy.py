"""Joules per image from the driver's running energy counter. Approximate, and it says how far.

The counter moves in steps of some tens of milliseconds, and power readings of this class of GPU sample only a part of the
time (arXiv 2312.02741): a window of ten seconds or more keeps the steps under one per cent.
"""

from math import sqrt
from typing import TYPE_CHECKING

from optpipe.core.estimate import Estimate
from optpipe.stats.means import compute_mean_interval

if TYPE_CHECKING:
    import polars as pl

MIN_WINDOW_S = 10.0
ENERGY_SECONDS = MIN_WINDOW_S + 2
"""How long is measured where energy is asked for."""
SENSOR_SHARE = 0.05
"""The board's power sensor is good to about 5 % (NVML documentation of nvmlDeviceGetPowerUsage)."""


def estimate_energy_per_image(
    machine: "pl.DataFrame", images: int, seconds: float, confidence: float = 0.95
) -> Estimate | str:
    """Mean power over the measured window times the time per image; or, in words, why there is none.

    The interval joins the spread of the power over ten parts of the window with the sensor's tolerance.
    """
    import numpy as np

    too_short = f"measured for {seconds:.1f} s; the energy counter needs at least {MIN_WINDOW_S:.0f} s (--energy)"
    rows = machine.drop_nulls("gpu_energy_mj") if "gpu_energy_mj" in machine.columns else machine.clear()
    if rows.is_empty():
        return "no energy counter: it requires an NVIDIA GPU, Volta or newer"
    if len(rows) < 12 or images < 1:
        return too_short
    times = rows["time_ns"].to_numpy() / 1e9
    window = float(times[-1] - times[0])
    if window < 0.8 * MIN_WINDOW_S:
        return too_short
    joules = rows["gpu_energy_mj"].to_numpy() / 1e3
    power = float(joules[-1] - joules[0]) / window
    cuts = np.linspace(0, len(rows) - 1, 11).astype(int)
    interval = compute_mean_interval(np.diff(joules[cuts]) / np.diff(times[cuts]), confidence)
    spread = 0.0 if interval is None or power == 0 else (interval[1] - interval[0]) / 2 / power
    value = power * seconds / images
    half = value * sqrt(spread**2 + SENSOR_SHARE**2)
    note = f"NVML energy counter over {window:.1f} s, {power:.0f} W; approximate (sensor ±{SENSOR_SHARE:.0%})"
    return Estimate(value, value - half, value + half, note)
