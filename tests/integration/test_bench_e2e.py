"""`optpipe bench --from-images` as users run it: files in, predictions out, preprocessing and inference at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from optpipe.core.records import read_record, record_from_json
from optpipe.preprocess.end_to_end import EndToEndRecord
from optpipe.workspace.entry import load_run
from optpipe.workspace.places import find_shipped_folder
from tests.integration.conftest import optpipe


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, exported):
    return exported(tmp_path_factory.mktemp("end-to-end") / "workspace")


FILES = str(find_shipped_folder("calibration") / "digits" / "validation")


def test_the_predictions_of_the_timed_run_are_the_references(workspace):
    done = optpipe("bench", "digits", "--from-images", FILES, "--min-time", "0.3", "--json", workspace=workspace)
    assert done.status == 0, done.stderr
    record = record_from_json(done.stdout, EndToEndRecord, "stdout")
    (result,) = record.results
    figures = result.figures
    assert (figures.check.predictions, figures.check.equal) == (32, 32)
    assert figures.check.classes > 3
    assert figures.bottleneck == "CPU"
    assert result.options["spinning"] is False
    assert "optpipe preprocess digits" in " ".join(record.warnings)
    run = load_run(Path(record.run_dir))
    assert (run.kind, run.find_problems()) == ("end-to-end", [])
    stored = read_record(run.path / "end-to-end.json", EndToEndRecord)
    assert replace(record, warnings=()) == stored
    assert (run.path / f"{result.artifact}.parquet").is_file()
