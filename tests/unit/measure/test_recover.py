"""A run whose process was killed, finished from the samples that it left."""

from dataclasses import replace

from optpipe.core.disagreements import compare_recomputed
from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE, read_measurements
from optpipe.core.records import json_from_record
from optpipe.measure.bench import recover_run
from optpipe.measure.recompute import recompute_bench
from optpipe.workspace.runs import MANIFEST, load_run


def test_what_is_recovered_follows_from_its_raw_files(workspace):
    """A dossier that holds it could never be verified."""
    folder = workspace.bench(workspace.artifact("fp16"), processes=1, max_cv=0.01).path
    (found,) = read_measurements(Files(folder))
    for name in (MANIFEST, MEASUREMENTS_FILE):
        (folder / name).unlink()
    begun = replace(found, samples_file=None, machine_file=None, reasons=(), energy_why_not=None)
    (folder / "samples" / f"{found.id}.json").write_bytes(json_from_record(begun))
    (row,) = recover_run(folder).measurements
    assert {"interrupted", "dispersion"} <= {reason.code for reason in row.reasons}
    assert list(compare_recomputed(recompute_bench(load_run(folder)))) == []
