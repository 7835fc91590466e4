"""`optpipe bench-e2e`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.bench_options import TargetOptions
from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption


def bench_e2e(
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="A built model or an artifact ID.", show_default=False)
    ],
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.", show_default=False)],
    targets: TargetOptions = TargetOptions(),
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="SIZE", help="Images per batch; default: that of the tuned pipeline.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measurement time for each artifact.")] = 3.0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure from image files to predictions, with DALI.

    Reports throughput, latency, each part alone, and the bottleneck. Run `optpipe preprocess MODEL` first to tune DALI.
    """
    from dataclasses import replace

    from optpipe.cli.bench_request import find_bench_targets
    from optpipe.cli.parsing import options_from_text
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import require_existing
    from optpipe.preprocess.end_to_end import EndToEndRequest, bench_end_to_end, choose_exit_status
    from optpipe.report.terminal_end_to_end import render_end_to_end
    from optpipe.workspace.store import Store

    require_existing(images, "--images")
    store = Store(workspace)
    request = EndToEndRequest(images, batch, seconds, options_from_text(targets.option or []))
    with Terminal() as terminal:
        groups = find_bench_targets(model, targets, store, terminal)
        artifacts = [artifact for group in groups for artifact in group]
        measured = bench_end_to_end(artifacts, request, store, terminal)
    record = replace(measured, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: render_end_to_end(record), choose_exit_status(record))
