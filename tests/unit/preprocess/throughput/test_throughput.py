from types import SimpleNamespace

import pytest
from PIL import Image
from tests.fakes.preprocess import tuned_preprocessing

from optpipe.core.errors import StageError
from optpipe.core.events import SilentListener
from optpipe.core.records import json_from_record, record_from_json
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Pack,
    Rescale,
    Resize,
    Transform,
)
from optpipe.models.inputs.synthetic import make_synthetic_image
from optpipe.preprocess import throughput
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.throughput import (
    BatchTimes,
    LoaderPlan,
    Throughput,
    ThroughputJob,
    ThroughputTuning,
    TuningSearch,
    make_dali_job,
    make_loader_job,
    measure_throughputs,
    merge_repeats,
    tune_preprocessing,
    warn_about_other_load,
)

TRANSFORM = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


def dali(batch_size=32):
    return ThroughputJob("dali", (), {}, 1.0, plan=DaliPlan(batch_size=batch_size))


def test_the_rate_is_all_images_over_all_time_with_an_interval_around_it():
    batch_ns = tuple(10_000_000 + (index % 7) * 1_000_000 for index in range(120))
    found = Throughput(dali(), (BatchTimes(batch_ns, batch_ns),))
    assert found.images_per_s == pytest.approx(32 * 120 / (sum(batch_ns) / 1e9))
    low, high = found.compute_interval()
    assert low < found.images_per_s < high
    assert found.summarize().batch_cost_ns == pytest.approx(sum(batch_ns) / 120)


def test_too_few_batches_have_no_interval_and_a_failure_has_no_rate():
    assert Throughput(dali(), (BatchTimes((1,) * 2, (1,) * 2),)).compute_interval() is None
    failed = Throughput(dali(), error="out of memory").summarize()
    assert (failed.images_per_s, failed.ci, failed.error) == (None, None, "out of memory")


def test_repetitions_are_put_together_and_widen_the_interval():
    def steady(ms):
        return Throughput(dali(10), (BatchTimes((1,) * 24, (ms * 1_000_000,) * 24, group=2),))

    both = merge_repeats([steady(10), steady(11), Throughput(dali(10), error="out of memory")])
    assert both.repeated_images_per_s == pytest.approx((1000, 1e4 / 11))
    low, high = both.compute_interval()
    assert low <= 1e4 / 11 < both.images_per_s < 1000 <= high


def test_a_record_is_read_back_as_it_was_written():
    tuned = tuned_preprocessing(DaliPlan(threads=3))
    assert record_from_json(json_from_record(tuned), ThroughputTuning, "here") == tuned


@pytest.mark.slow
def test_both_are_measured_for_real_in_a_process_of_their_own(tmp_path):
    for index in range(4):
        Image.fromarray(make_synthetic_image(60, 80, index)).save(tmp_path / f"{index}.jpg")
    paths, plan = sorted(tmp_path.glob("*.jpg")), DaliPlan(threads=1, batch_size=4)
    jobs = [
        make_dali_job(paths, TRANSFORM, plan, 0.1),
        make_dali_job(paths, TRANSFORM, plan, 0.1, decode_only=True),
        make_loader_job(paths, TRANSFORM, LoaderPlan(2, 4, "cpu"), 0.1),
    ]
    found = list(measure_throughputs(jobs))
    for each in found:
        assert each.error is None
        assert each.images_per_s > 0
        assert len(each.batch_ns) >= 4
    assert [each.job.implementation for each in found] == ["dali", "dali-decode", "dataloader"]
    assert len(found[2].batch_ns) % 2 == 0, "whole rounds of the two workers"


@pytest.mark.slow
def test_what_cannot_be_read_is_an_error_of_its_row_and_the_next_goes_on(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    job = make_dali_job([tmp_path / "1.jpg"], TRANSFORM, DaliPlan(batch_size=1), 0.1)
    for found in measure_throughputs([job, job]):
        assert found.error


def simulated(monkeypatch, rate_of_dali, rate_of_loader):
    def measured(job):
        rate = rate_of_loader(job.loader.workers) if job.loader else rate_of_dali(job.plan)
        if rate is None:
            return Throughput(job, error="out of memory")
        rate *= 2 if job.implementation == "dali-decode" else 1
        ns = (int(1e9 * job.batch_size / rate),) * 48
        return Throughput(job, (BatchTimes(ns, ns),))

    def throughputs(jobs):
        yield from map(measured, jobs)

    monkeypatch.setattr(throughput, "measure_throughputs", throughputs)


def test_the_fastest_of_each_kind_is_found_on_a_gpu(monkeypatch):
    def dali(plan):
        if plan.decode == "cpu":
            return 2_000
        rate = 10_000 * plan.hw_decoder_load + (500 if plan.threads == 4 else 0) - 4000 * plan.cpu_share
        return rate - (0 if plan.prefetch == 2 else 900)

    simulated(monkeypatch, dali, lambda workers: 100 + 50 * workers if workers <= 8 else 450)
    found, _ = tune_preprocessing(
        TuningSearch([], TRANSFORM, DaliPlan(decode="mixed", device="gpu", batch_size=256), 16, 1.0, SilentListener())
    )
    assert (found.dali.plan.hw_decoder_load, found.dali.plan.threads, found.dali.plan.prefetch) == (1.0, 4, 2)
    assert found.dali.plan.cpu_share == 0
    assert found.dataloader.loader.workers == 8
    assert found.dataloader.loader.batch_size == 64
    assert found.speedup == pytest.approx(10_500 / 500)
    assert found.share_of_decode_only == pytest.approx(0.5)
    assert found.left_out == "2 workers not tried: 4 reached 0.60 of the best"


def test_the_cpu_takes_a_share_where_that_is_faster(monkeypatch):
    simulated(monkeypatch, lambda plan: 10_000 * (1 + plan.cpu_share) + plan.threads, lambda workers: 100 * workers)
    found, _ = tune_preprocessing(
        TuningSearch([], TRANSFORM, DaliPlan(decode="mixed", device="gpu", batch_size=256), 16, 1.0, SilentListener())
    )
    assert (found.dali.plan.cpu_share, found.dali.plan.threads) == (0.25, 16)


def test_what_was_asked_for_is_not_tuned(monkeypatch):
    asked = DaliPlan(decode="mixed", device="gpu", batch_size=256, threads=3)
    simulated(monkeypatch, lambda plan: 9000 if plan.decode == "cpu" else 10 * plan.threads, lambda _: 100)
    found, _ = tune_preprocessing(
        TuningSearch([], TRANSFORM, asked, 16, 1.0, SilentListener(), frozenset({"decode", "threads"}))
    )
    tried = [row.plan for row in found.tried if row.plan]
    assert {(each.decode, each.threads) for each in tried} == {("mixed", 3)}


def test_a_configuration_that_fails_is_a_row_and_not_the_end(monkeypatch):
    simulated(monkeypatch, lambda plan: None if plan.threads == 2 else 900, lambda workers: 100 if workers else None)
    found, _ = tune_preprocessing(TuningSearch([], TRANSFORM, DaliPlan(batch_size=8), 2, 1.0, SilentListener()))
    assert found.dali.plan.threads == 1
    assert {row.error for row in found.tried} == {None, "out of memory"}


def test_nothing_that_works_is_a_failed_stage(monkeypatch):
    simulated(monkeypatch, lambda _: None, lambda _: 100)
    with pytest.raises(StageError, match="out of memory"):
        tune_preprocessing(TuningSearch([], TRANSFORM, DaliPlan(batch_size=8), 2, 1.0, SilentListener()))


@pytest.mark.parametrize(("others", "warned"), [(None, False), (0.0, False), (64.0, True)])
def test_rates_that_other_work_disturbed_are_said_to_be(others, warned):
    said: list[str] = []
    warn_about_other_load(others, "dali", SimpleNamespace(warn=said.append))
    assert bool(said) is warned
