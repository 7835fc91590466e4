import numpy as np
import pytest

from optpipe.stats.agreement import compute_snr_interval, compute_top1_accuracy, compute_top1_agreement, pool_errors


def errors(generator, count, spread=0.5):
    return {
        "difference_square": 1e-4 * np.exp(spread * generator.standard_normal(count)),
        "reference_square": np.exp(0.3 * generator.standard_normal(count)),
    }


def test_the_interval_of_an_snr_covers_it_and_narrows_with_samples():
    generator, truth = np.random.default_rng(5), 40 + 10 * np.log10(np.exp((0.3**2 - 0.5**2) / 2))
    few, many = ([compute_snr_interval(errors(generator, count), 0.95) for _ in range(400)] for count in (150, 1500))
    assert np.mean([low <= truth <= high for low, high in few]) > 0.92
    assert np.mean([high - low for low, high in many]) < np.mean([high - low for low, high in few]) / 2.5


def test_it_holds_the_pooled_ratio_itself():
    rows = errors(np.random.default_rng(1), 200)
    low, high = compute_snr_interval(rows, 0.95)
    rows |= {
        name: np.ones(200)
        for name in ("values", "finite", "output_square", "product", "difference_sum", "difference_max")
    }
    assert (low + high) / 2 == pytest.approx(pool_errors("output", rows).snr_db)


def test_an_error_that_few_samples_carry_has_no_interval():
    rows = errors(np.random.default_rng(1), 500)
    assert compute_snr_interval({name: each[:50] for name, each in rows.items()}, 0.95) is None
    rows["difference_square"][0] = 1e3
    assert compute_snr_interval(rows, 0.95) is None
    assert compute_snr_interval(rows | {"difference_square": np.zeros(500)}, 0.95) is None


def test_the_best_class_is_the_same_with_axes_of_size_1():
    scores, labels = np.eye(4)[[2, 0, 3]], np.array([2, 0, 1])
    for shape in ((3, 4), (3, 4, 1, 1), (3, 1, 4)):
        assert compute_top1_agreement(scores.reshape(shape), scores.reshape(shape)) == 1
        assert compute_top1_accuracy(labels, scores.reshape(shape)) == pytest.approx(2 / 3)
