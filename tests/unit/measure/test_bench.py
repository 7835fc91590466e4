"""What a bench run tolerates, leaves behind, and recovers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.entries import artifact_info, proof
from tests.fakes.measurements import planted

from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE, Reason, Subject, read_measurements
from optpipe.core.precision import Precision
from optpipe.core.records import compare_recomputed, json_from_record
from optpipe.measure.bench import BenchState, recover_run
from optpipe.measure.measure import _find_coarsest_precision, offer_recovery
from optpipe.measure.recompute import recompute_bench
from optpipe.workspace.entry import MANIFEST, load_run
from optpipe.workspace.runs import begin_run


def test_a_model_that_came_quantized_has_the_tolerance_of_int8() -> None:
    plain = artifact_info(precision="fp32", precision_proof=proof("fp32", 1.0))
    quantized = artifact_info(precision="fp32", precision_proof=proof("int8", 0.2))
    assert _find_coarsest_precision(plain) is Precision.FP32
    assert _find_coarsest_precision(quantized) is Precision.INT8


def test_a_cause_on_the_host_stops_a_bench_only_where_the_last_two_processes_show_it_at_every_point() -> None:
    def cause(*processes: tuple[str, ...]) -> str | None:
        measured = [
            planted(
                Subject("a", "fake", "fp32", "cpu"),
                1,
                1.0,
                process=at,
                reasons=[Reason(code, "", "", invalidates=True)],
            )
            for at, codes in enumerate(processes)
            for code in codes
        ]
        state: Any = SimpleNamespace(measurements=measured)
        found = BenchState.find_host_cause(state)
        return None if found is None else found.code

    assert cause(("busy-gpu",), ("busy-gpu",)) == "busy-gpu"
    assert cause(("drift",), ("loaded-host",), ("loaded-host",)) == "loaded-host"
    for others in ((("loaded-host",),), (("drift",), ("drift",)), (("loaded-host",), ("hot",))):
        assert cause(*others) is None
    assert cause(("loaded-host",), ("loaded-host", "drift")) is None


@pytest.mark.parametrize("left", [True, False])
def test_a_run_that_failed_before_it_wrote_anything_leaves_no_folder(tmp_path, left):
    run, listener = begin_run(tmp_path, "bench"), SilentListener()
    if left:
        (run.path / "samples").mkdir()
        (run.path / "samples" / "m000.spool").touch()
    with pytest.raises(BadInputError), offer_recovery(run, listener):
        raise BadInputError("no reference")
    assert run.path.exists() == bool(listener.warnings) == left


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
