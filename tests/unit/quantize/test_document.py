"""Whole text of a calibration."""

from tests.fakes.console import text_of
from tests.fakes.entries import FINDING, HASH
from tests.fakes.golden import assert_golden

from optpipe.core.entries import SkippedLayer, WeightsRecord
from optpipe.core.precision import Budget, PrecisionCost
from optpipe.quantize.calibration_run import CalibrationResult, CalibrationSet, MethodResult
from optpipe.quantize.document import document_from_calibration
from optpipe.quantize.sensitivity import KeptTrial, LayerCost, SelectionInfo, SensitivityInfo


def test_a_calibration():
    cost, constant = PrecisionCost(24.31, 0.0125, (0.004, 0.021)), PrecisionCost(200.0)
    selection = SelectionInfo(
        Budget(0.5, "points"), 500, "top1", ("conv1",), 12, (KeptTrial(0, 1.0, cost), KeptTrial(1, 0.93, constant))
    )
    found = CalibrationResult(
        model="digits",
        model_id="m",
        weights=WeightsRecord("file", HASH),
        set=CalibrationSet("digits/calibration", "images", 500, 0, HASH, "/w/set.json", ()),
        target="tensorrt",
        tables=(
            MethodResult("max", "/w/max.json", "0" * 64, constant),
            MethodResult("mse", "/w/mse.json", "0" * 64, cost),
        ),
        best="mse",
        compared_on_images=128,
        skipped=tuple(SkippedLayer(f"conv{index}", "fewer than 16 channels") for index in range(14)),
        lint=(FINDING,),
        sensitivity=SensitivityInfo(128, (LayerCost("conv1", cost, 1_200_000),), 10_000_000),
        selection=selection,
        table="/w/table-mse-spared.json",
    )
    assert_golden(text_of(document_from_calibration(found)), "calibrate.txt")
