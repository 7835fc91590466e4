"""Notes on INT8 and FP8 builds: no gain, lost accuracy, and the causes."""

from dataclasses import replace

import pytest

from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Measurement, Subject, Validity
from optpipe.core.quantity import Estimate
from optpipe.core.records import json_from_record
from optpipe.evaluate.recompute import observe_accuracy, read_evaluation
from optpipe.evaluate.result import EvaluatedModel
from optpipe.measure.int8_notes import check_int8_accuracy, check_int8_speed, find_int8_causes
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.files import write_bytes

POLICY = "schema = 1\nname = 'p'\n[build]\nprecision = 'int8'\n[size]\nmaximum = '1 GiB'\n"


@pytest.fixture
def built(workspace):
    """INT8 whose bench shows it slower than FP16 in the same run, and FP16."""
    slow, fast = workspace.artifact("int8", macs=0.4, proven=False), workspace.artifact("fp16")
    return workspace, slow, fast


def test_causes_are_read_from_the_built_network(built) -> None:
    _, slow, fast = built
    assert find_int8_causes(slow.info) == "only 40% of its MACs run in int8"
    assert find_int8_causes(fast.info) == ""


@pytest.mark.parametrize(("lost", "budget", "said"), [
    (0, None, None),
    (10, 0.03, None),
    (10, None, "may exceed the 1-point budget"),
    (40, None, "exceeds the 1-point budget"),
    (40, 0.02, "exceeds the 2-point budget"),
])  # fmt: skip
def test_a_drop_is_held_against_its_budget(built, lost, budget, said) -> None:
    workspace, slow, fast = built
    run = workspace.evaluate(slow, lost, budget)
    note = check_int8_accuracy([run], judged_build_from_entry(slow))
    assert (note is None) if said is None else (said in note.message)
    assert check_int8_accuracy([run], judged_build_from_entry(fast)) is None


@pytest.mark.slow
def test_signoff_notes_what_verify_computes_again(built, tmp_path) -> None:
    workspace, slow, fast = built
    workspace.evaluate(slow, 40)
    workspace.bench(slow, fast, mean_ms=10.0)  # drawn so that INT8 is the faster one
    document, folder = workspace.sign_off(POLICY, tmp_path / "dossier")
    codes = [note.code for note in document.notes if note.code.startswith("int8")]
    assert codes == ["int8-accuracy", "int8-causes"]
    assert check_dossier(folder).problems == ()


@pytest.mark.slow
def test_the_drop_of_a_sign_off_is_held_against_the_policys_limit_at_its_interval(
    built, tmp_path
) -> None:
    workspace, slow, fast = built
    workspace.evaluate(slow, 40)
    workspace.bench(slow, fast, mean_ms=10.0)
    for limit, noted in ("0.5", True), ("2.5", True), ("20", False):
        policy = f"{POLICY}[accuracy]\nmaximum_drop = '{limit} points'\n"
        document, _ = workspace.sign_off(policy, tmp_path / limit)
        notes = [note.message for note in document.notes if note.code == "int8-accuracy"]
        assert bool(notes) == noted
        (judged,) = (one for one in document.criteria if one.name == "accuracy.maximum_drop")
        for message in notes:
            assert f"the {limit}-point budget" in message
            assert "[{:+.2f}, {:+.2f}]".format(*judged.ci) in message


def test_samples_that_calibrated_a_build_widen_what_is_judged(built) -> None:
    workspace, slow, _ = built
    run = workspace.evaluate(slow, 5)
    plain = observe_accuracy([run], judged_build_from_entry(slow), 0.95)
    row = EvaluatedModel(
        "onnxruntime", "int8", "cpu", samples=1000, artifact=slow.id, calibrated_on=30
    )
    write_bytes(
        run.path / "evaluate.json", json_from_record(replace(read_evaluation(run), results=(row,)))
    )
    found = observe_accuracy([run], judged_build_from_entry(slow), 0.95)
    assert found["drop"].value == plain["drop"].value
    assert found["drop"].high == pytest.approx(plain["drop"].high + 0.03)
    assert found["top1"].low == pytest.approx(plain["top1"].low - 0.03)
    assert "30 of which were used for calibration" in found["drop"].about


def at(precision, rate, ci=None, batch=8):
    low, high = ci or (0.99 * rate, 1.01 * rate)
    subject = Subject("a", "onnxruntime", precision, "cuda:0", model="m")
    return Measurement(
        "m",
        subject,
        LoadSpec(batch),
        Validity.VALID,
        (),
        throughput_images_per_s=Estimate(rate, low, high),
    )


def notes(*measurements):
    found = (check_int8_speed(each, measurements) for each in measurements)
    return [f"{note.code}: {note.message} -> {note.remedy}" if note else "" for note in found]


@pytest.mark.parametrize(
    ("others", "int8", "said"),
    [
        ([at("fp16", 100.0)], at("int8", 60.0), "deploy fp16"),
        ([at("fp16", 100.0, (95.0, 106.0))], at("int8", 105.0), "int8-not-faster"),
        ([at("fp16", 100.0)], at("int8", 160.0), None),
        ([at("fp16", 100.0, batch=1)], at("int8", 60.0), None),
        ([at("fp32", 50.0), at("fp16", 100.0)], at("int8", 60.0), "100 in fp16"),
        ([at("fp32", 70.0)], at("int8", 60.0), "70 in fp32"),
        (
            [at("fp16", 100.0, (60.0, 140.0))],
            at("int8", 130.0, (90.0, 170.0)),
            "but the intervals overlap -> compare them interleaved: "
            "optpipe bench a --against a --metric throughput --batch 8",
        ),
    ],
)
def test_int8_that_is_not_clearly_faster_than_a_wider_type_at_the_same_load_is_marked(
    others, int8, said
):
    *wider, note = notes(*others, int8)
    assert not any(wider)
    assert (note == "") if said is None else (said in note)


def test_int8_is_held_against_the_same_options_else_against_the_fastest():
    def with_threads(one, threads):
        return replace(one, subject=replace(one.subject, options={"threads": threads}))

    wider = [
        with_threads(at("fp32", rate), threads)
        for threads, rate in ((4, 120.0), (1, 50.0), (2, 90.0))
    ]
    assert notes(*wider, with_threads(at("int8", 60.0), 1))[3] == ""
    slower = notes(*wider, with_threads(at("int8", 100.0), 8))[3]
    assert "100 images/s in int8 (threads=8), 120 in fp32 (threads=4) on the same runtime" in slower


def test_no_profile_is_suggested_for_a_module_in_memory():
    found = check_int8_speed(at("int8", 60.0), [at("fp16", 100.0)], can_profile=False)
    assert found is not None
    assert found.remedy == "deploy fp16"
