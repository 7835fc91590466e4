"""What evaluation, preprocessing and profile runs show for a build. A run kind that is absent shows nothing.

Accuracy is computed anew from the predictions of every image, a parity proof from the rows of every image, a profile from the
tables of its trace (the recording itself holds the process environment and never leaves the scratch folder).
"""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optpipe.core.records import record_from_files
from optpipe.measure.report_data import list_raw_files
from optpipe.preprocess.parity.records import WorstImage
from optpipe.preprocess.records import PreprocessRecord
from optpipe.profile.recompute import read_profile
from optpipe.report.report import ReportImage
from optpipe.workspace.file_names import PREPROCESSING, PROFILE, ROWS
from optpipe.workspace.runs import Run, newest_runs

MAX_IMAGES = 6


def collect_report_documents(runs: Sequence[Run], root: Path) -> dict[str, Any]:
    """What the report shows of them: fields of `core.report.Report`; file paths are relative to `root`."""
    fields: dict[str, Any] = {}
    for run in newest_runs(runs, "profile"):
        stages = read_profile(run).stages
        if stages:
            shown = next((stage for stage in stages[::-1] if stage.subject.kind == "inference"), stages[-1])
            fields["profile"] = shown.profile
            tables = (path for path in run.manifest.files if path.startswith(f"{shown.folder}/tables/"))
            fields["profile_files"] = tuple(
                file for name in (PROFILE, *tables) for file in list_raw_files((run,), root, name)
            )
            break
    for run in newest_runs(runs, "preprocess"):
        record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        fields["pictures"] = tuple(_embed_images(run, record.parity.worst, root))
        break
    return fields


def _embed_images(run: Run, worst: Sequence[WorstImage], root: Path) -> Iterator[ReportImage]:
    for each in worst[:MAX_IMAGES]:
        if run.files.has(each.file):
            data = base64.b64encode(run.files.read(each.file)).decode()
            name = Path(each.image).name
            caption = f"{name}: the model's own, DALI's, and their difference (×{each.difference_times:.3g})"
            files = (*list_raw_files((run,), root, each.file), *list_raw_files((run,), root, ROWS))
            yield ReportImage(caption, f"data:image/png;base64,{data}", files)
