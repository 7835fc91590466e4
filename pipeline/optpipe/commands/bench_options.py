"""Options that the commands of `optpipe bench` share. Defaults of a load are those of `core.measurement.LoadSpec`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import define_backend_option, define_precision_option
from optpipe.core.entries import Device
from optpipe.core.measurement import LoadSpec

LOAD = LoadSpec(batch_size=1)


PrecisionOption = Annotated[str | None, define_precision_option("Precisions to measure.")]
BackendOption = Annotated[str | None, define_backend_option("Backends to measure.")]
DeviceOption = Annotated[Device | None, typer.Option(help="Device to measure on.")]
LengthOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Sequence lengths: 128, or a list 32,128,512. Default: that of the texts the build was verified on.",
    ),
]
StreamsOption = Annotated[int, typer.Option(help="Number of concurrent streams (multi-stream, offline).")]
ProcessesOption = Annotated[
    int, typer.Option(min=1, help="Fresh processes; fewer than three give no interval over processes.")
]
PercentileOption = Annotated[float, typer.Option(help="Highest percentile to report; determines the sample count.")]
MinTimeOption = Annotated[float, typer.Option(metavar="SECONDS", help="Minimum measurement time per process.")]
MaxTimeOption = Annotated[float, typer.Option(metavar="SECONDS", help="Maximum measurement time per process.")]
WarmUpOption = Annotated[float, typer.Option(metavar="SECONDS", help="Minimum warm-up time.")]
MaxWarmUpOption = Annotated[float, typer.Option(metavar="SECONDS", help="Maximum warm-up time.")]
MaxCvOption = Annotated[
    str, typer.Option(help="Maximum coefficient of variation of a VALID measurement, such as 2.5%.")
]
ImagesOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images to use as inputs.")]
RuntimeOption = Annotated[
    list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Runtime option; recorded with the result.")
]
AffinityOption = Annotated[str | None, typer.Option(metavar="CPUS", help="Pin the worker to CPUs, such as 0,2 or 4-7.")]
SeedOption = Annotated[int, typer.Option(help="Random seed.")]
