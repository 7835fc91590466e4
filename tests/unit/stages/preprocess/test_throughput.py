import pytest
from PIL import Image

from optpipe.core.events import Silent
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.errors import StageError
from optpipe.inputs.synthetic import synthetic_picture
from optpipe.stages.preprocess import tuning
from optpipe.stages.preprocess.dali_pipeline import DaliPlan
from optpipe.stages.preprocess.measured import _enough
from optpipe.stages.preprocess.throughput import Throughput, dali_throughput, dataloader_throughput, failure_reason
from optpipe.stages.preprocess.tuning import tuned

TRANSFORM = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


def test_the_rate_is_all_images_over_all_time_with_an_interval_around_it():
    batch_ns = tuple(10_000_000 + (index % 7) * 1_000_000 for index in range(120))
    found = Throughput("dali", {"decode": "cpu", "threads": 2}, 32, batch_ns, batch_ns)
    assert found.images_per_s == pytest.approx(32 * 120 / (sum(batch_ns) / 1e9))
    low, high = found.interval()
    assert low < found.images_per_s < high
    record = found.to_dict()
    assert (record["device"], record["threads"]) == ("cpu", 2)
    assert record["batch_cost_s"] == pytest.approx(sum(batch_ns) / 120 / 1e9)


def test_too_few_batches_have_no_interval_and_a_failure_has_no_rate():
    assert Throughput("dali", {}, 32, (1,) * 2, (1,) * 2).interval() is None
    assert Throughput("dali", {}, 32, error="out of memory").to_dict()["images_per_s"] is None


@pytest.mark.parametrize(
    ("stderr", "status", "said"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate", 1, "out of memory; a smaller batch"),
        ("CUDA runtime API error cudaErrorMemoryAllocation (2)", 1, "out of memory"),
        ("Traceback\n  x\nValueError: no such thing\n", 1, "ValueError: no such thing"),
        ("", -9, "signal 9"),
    ],
)
def test_a_failed_process_gives_its_reason_in_one_line(stderr, status, said):
    assert said in failure_reason(stderr, status)


@pytest.mark.slow
def test_both_are_measured_for_real_in_processes_of_their_own(tmp_path):
    for index in range(4):
        Image.fromarray(synthetic_picture(60, 80, index)).save(tmp_path / f"{index}.jpg")
    paths = sorted(tmp_path.glob("*.jpg"))
    for found in (
        dali_throughput(paths, TRANSFORM, DaliPlan(threads=1, batch_size=4), 0.1),
        dali_throughput(paths, TRANSFORM, DaliPlan(threads=1, batch_size=4), 0.1, decode_only=True),
        dataloader_throughput(paths, TRANSFORM, 1, 4, "cpu", 0.1),
    ):
        assert found.error is None
        assert found.images_per_s > 0
        assert len(found.batch_ns) >= 24


def test_what_cannot_be_read_is_an_error_of_its_row(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    found = dali_throughput([tmp_path / "1.jpg"], TRANSFORM, DaliPlan(batch_size=1), 0.1)
    assert found.error


def simulated(monkeypatch, rate_of_dali, rate_of_loader):
    def rate(value, implementation, settings, batch_size):
        if value is None:
            return Throughput(implementation, settings, batch_size, error="out of memory")
        ns = tuple(int(1e9 * batch_size / value) for _ in range(48))
        return Throughput(implementation, settings, batch_size, ns, ns)

    def dali(paths, transform, plan, seconds, *, decode_only=False):
        settings = {key: value for key, value in plan.to_dict().items() if key != "batch_size"}
        value = rate_of_dali(plan)
        value = 2 * value if value and decode_only else value
        return rate(value, "dali-decode" if decode_only else "dali", settings, plan.batch_size)

    def loader(paths, transform, workers, batch_size, device, seconds):
        return rate(rate_of_loader(workers), "dataloader", {"workers": workers, "device": device}, batch_size)

    monkeypatch.setattr(tuning, "dali_throughput", dali)
    monkeypatch.setattr(tuning, "dataloader_throughput", loader)


def test_the_fastest_of_each_kind_is_found_on_a_gpu(monkeypatch):
    def dali(plan):
        if plan.decode == "cpu":
            return 2_000
        return 10_000 * plan.hw_decoder_load + (500 if plan.threads == 4 else 0) + (0 if plan.prefetch == 2 else -900)

    simulated(monkeypatch, dali, lambda workers: 100 + 50 * workers if workers <= 8 else 300)
    found = tuned([], TRANSFORM, DaliPlan(decode="mixed", device="gpu", batch_size=256), 16, 1.0, Silent())
    assert (found.plan.hw_decoder_load, found.plan.threads, found.plan.prefetch) == (1.0, 4, 2)
    assert found.dataloader.settings["workers"] == 8
    assert found.speedup[0] == pytest.approx(10_500 / 500)
    assert found.to_dict()["share_of_decode_only"] == pytest.approx(0.5)


def test_a_configuration_that_fails_is_a_row_and_not_the_end(monkeypatch):
    simulated(monkeypatch, lambda plan: None if plan.threads == 2 else 900, lambda workers: 100 if workers else None)
    found = tuned([], TRANSFORM, DaliPlan(batch_size=8), 2, 1.0, Silent())
    assert found.plan.threads == 1
    assert {row.error for row in found.rows} == {None, "out of memory"}


def test_nothing_that_works_is_a_failed_stage(monkeypatch):
    simulated(monkeypatch, lambda _: None, lambda _: 100)
    with pytest.raises(StageError, match="out of memory"):
        tuned([], TRANSFORM, DaliPlan(batch_size=8), 2, 1.0, Silent())


@pytest.mark.parametrize(
    ("batches", "elapsed_s", "enough"),
    [(24, 3.0, True), (24, 2.9, False), (23, 3.0, False), (4, 9.0, True), (3, 9.0, False)],
)
def test_a_slow_configuration_ends_with_fewer_batches(batches, elapsed_s, enough):
    assert _enough(batches, elapsed_s, 3.0) is enough
