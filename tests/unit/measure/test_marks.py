from dataclasses import replace

from optpipe.core.estimate import Estimate
from optpipe.core.measurement import (
    LoadSpec,
    Measurement,
    Subject,
    Validity,
)
from optpipe.measure.int8_notes import add_int8_speed_notes


def at(precision, rate, ci=None, batch=8):
    subject = Subject("a", "onnxruntime", precision, "cuda:0", model="m")
    return Measurement(
        "m",
        subject,
        LoadSpec(batch),
        Validity.VALID,
        (),
        throughput_images_per_s=Estimate(rate, *(ci or ())),
    )


def codes(*measurements):
    return [[reason.code for reason in each.reasons] for each in add_int8_speed_notes(measurements)]


def test_int8_that_is_slower_or_not_clearly_faster_is_marked():
    assert codes(at("fp16", 100.0), at("int8", 60.0)) == [[], ["int8-not-faster"]]
    assert codes(at("fp16", 100.0, (95.0, 106.0)), at("int8", 105.0)) == [[], ["int8-not-faster"]]
    assert codes(at("fp16", 100.0), at("int8", 160.0)) == [[], []]


def test_a_faster_int8_whose_interval_overlaps_is_not_called_slower():
    noisy = add_int8_speed_notes((at("fp16", 100.0, (60.0, 140.0)), at("int8", 130.0, (90.0, 170.0))))[1].reasons[0]
    assert "the confidence intervals overlap: no significant speedup" in noisy.message
    assert noisy.remedy == "compare them interleaved: optpipe bench a --against a --metric throughput --batch 8"
    assert "deploy fp16" in add_int8_speed_notes((at("fp16", 100.0), at("int8", 60.0)))[1].reasons[0].remedy


def test_only_the_same_load_is_compared_and_fp16_before_fp32():
    assert codes(at("fp16", 100.0, batch=1), at("int8", 60.0)) == [[], []]
    assert codes(at("fp32", 50.0), at("fp16", 100.0), at("int8", 60.0))[2] == ["int8-not-faster"]
    assert codes(at("fp32", 70.0), at("int8", 60.0))[1] == ["int8-not-faster"]


def test_the_verdict_stays():
    found = add_int8_speed_notes((at("fp16", 100.0), replace(at("int8", 60.0), verdict=Validity.VALID)))
    assert found[1].verdict is Validity.VALID


def test_int8_is_held_against_the_same_options_else_against_the_fastest():
    def with_threads(one, threads):
        return replace(one, subject=replace(one.subject, options={"threads": threads}))

    wider = [with_threads(at("fp32", rate), threads) for threads, rate in ((4, 120.0), (1, 50.0), (2, 90.0))]
    assert codes(*wider, with_threads(at("int8", 60.0), 1))[3] == []
    slower = add_int8_speed_notes((*wider, with_threads(at("int8", 100.0), 8)))[3].reasons[0]
    assert "100 images/s in int8 (threads=8), 120 in fp32 (threads=4) on the same runtime" in slower.message
