"""Options that the commands of `optpipe bench` share. Defaults of a load are those of `core.measurement.LoadSpec`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.options import define_backend_option, define_precision_option
from optpipe.core.defaults import MAX_CV
from optpipe.core.entries import Device
from optpipe.core.measurement import LoadSpec, Mode, Scenario

_LOAD = LoadSpec(batch_size=1)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which artifacts of MODEL, and how they run."""

    precision: Annotated[str | None, define_precision_option("Precisions to measure.")] = None
    backend: Annotated[str | None, define_backend_option("Backends to measure.")] = None
    device: Annotated[Device | None, typer.Option(help="Default: every device that has a build.")] = None
    option: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Runtime option; recorded with the result.")
    ] = None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is put on an artifact, and for how long."""

    scenario: Annotated[Scenario, typer.Option(help="MLPerf scenario.")] = _LOAD.scenario
    mode: Annotated[Mode, typer.Option(help="compute: inputs already on the device; end-to-end: with copies.")] = (
        _LOAD.mode
    )
    streams: Annotated[int, typer.Option(help="Number of concurrent streams (multi-stream, offline).")] = _LOAD.streams
    rate: Annotated[float | None, typer.Option(help="Mean queries per second (server).")] = None
    percentile: Annotated[float, typer.Option(help="Highest percentile to report; determines the sample count.")] = (
        _LOAD.percentile
    )
    min_time: Annotated[float, typer.Option(metavar="SECONDS", help="Minimum measurement time per process.")] = (
        _LOAD.min_seconds
    )
    max_time: Annotated[float, typer.Option(metavar="SECONDS", help="Maximum measurement time per process.")] = (
        _LOAD.max_seconds
    )
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Minimum warm-up time.")] = _LOAD.warm_up_seconds
    max_warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Maximum warm-up time.")] = (
        _LOAD.max_warm_up_seconds
    )
    max_cv: Annotated[
        str, typer.Option(help="Maximum coefficient of variation of a VALID measurement, such as 2.5%.")
    ] = f"{MAX_CV:.1%}"
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images to use as inputs.")] = None
    affinity: Annotated[
        str | None, typer.Option(metavar="CPUS", help="Pin the worker to CPUs, such as 0,2 or 4-7.")
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0
