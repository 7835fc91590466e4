"""Shares, macro F1 and SNR of two builds on the same samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.stats.paired import (
    Share,
    compare_macro_f1,
    compute_macro_f1,
    compute_share_interval,
    compute_snr_interval,
    compute_top1_accuracy,
    compute_top1_agreement,
    count_samples_to_decide,
    figure_from_samples,
    find_largest_effect,
    mean_from_samples,
    pool_errors,
)

counts = st.integers(0, 60)


def compare(lost, won, n):
    parts = np.repeat([1.0, -1.0, 0.0], [lost, won, n - lost - won])
    return figure_from_samples((lost - won) / n, parts, n, (-1.0, 1.0))


@given(counts, counts, st.integers(20, 2000), st.floats(0.5, 0.999))
def test_the_interval_holds_the_estimate_and_mirrors(lost, won, same, confidence) -> None:
    n = lost + won + same
    low, high = compare(lost, won, n).interval(confidence)
    assert -1 <= low < (lost - won) / n < high <= 1
    assert low == pytest.approx(-compare(won, lost, n).interval(confidence)[1], abs=1e-9)
    wide = compare(lost, won, n).interval(confidence + (1 - confidence) / 2)
    assert wide[0] <= low
    assert high <= wide[1]


@given(st.integers(0, 3), st.integers(50, 400), st.floats(0.8, 0.999), st.booleans())
def test_the_number_of_samples_that_is_needed_is_the_fewest_that_decide(
    missed, n, limit, exact
) -> None:
    values = np.repeat([0.0, 1.0], [missed, n - missed]) if exact else np.linspace(0.97, 1.0, n)
    found = mean_from_samples(values)
    needed = count_samples_to_decide(found, limit)
    assert (needed is None) == (found.value <= limit) or limit > 0.99
    if needed is not None:
        assert (
            found.resize(needed).interval(0.95)[0]
            >= limit
            > found.resize(needed - 1).interval(0.95)[0]
        )


@pytest.mark.parametrize("values", [[0.7], [0.7] * 19, [0.7] * 30 + [float("nan")]])
def test_of_few_samples_or_undefined_ones_the_interval_spans_everything(values) -> None:
    found = mean_from_samples(np.array(values))
    assert found.interval(0.95) == (0, 1)
    assert found.compute_p_value_above(0.1) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 100, 300, 1000])
@pytest.mark.parametrize(
    ("p_lost", "p_won"), [(0.01, 0.01), (0.03, 0.01), (0.02, 0.0), (0.002, 0.001), (0.0, 0.004)]
)
def test_a_build_on_its_limit_rarely_passes_or_fails(n, p_lost, p_won) -> None:
    """Every outcome of `n` pairs with its probability."""
    from scipy.stats import multinomial

    outcomes = np.array([(lost, won) for lost in range(70) for won in range(50) if lost + won <= n])
    chances = multinomial.pmf(
        np.column_stack([outcomes, n - outcomes.sum(1)]), n, [p_lost, p_won, 1 - p_lost - p_won]
    )
    outcomes, chances = outcomes[chances > 1e-7], chances[chances > 1e-7]
    found = [compare(int(each[0]), int(each[1]), n) for each in outcomes]
    bounds = np.array([each.interval(0.95) for each in found])
    assert chances[bounds[:, 1] <= p_lost - p_won].sum() < 0.029
    assert (
        chances[[each.compute_p_value_above(p_lost - p_won) <= 0.025 for each in found]].sum()
        < 0.029
    )


def test_share_interval_against_published_values() -> None:
    found = compute_share_interval(81, 263)  # Newcombe 1998, table I, method 5: 0.2527 to 0.3676
    assert found == pytest.approx((0.2527, 0.3676), abs=5e-5)
    assert compute_share_interval(0, 20)[0] == 0
    assert compute_share_interval(20, 20)[1] == 1
    assert compute_share_interval(0, 40)[1] == pytest.approx(1 - 0.025 ** (1 / 40))  # by hand


@given(st.integers(1, 60), st.floats(0.001, 0.999), st.floats(0.5, 0.999))
def test_neither_end_of_a_share_errs_more_often_than_it_says(n, share, confidence) -> None:
    from scipy.stats import binom

    chances = binom.pmf(np.arange(n + 1), n, share)
    found = [compute_share_interval(hits, n, confidence) for hits in range(n + 1)]
    for missed in ([low > share for low, _ in found], [high < share for _, high in found]):
        assert chances[missed].sum() <= (1 - confidence) / 2 + 1e-9


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0.01, 0.99))
def test_a_share_is_below_a_limit_where_its_p_value_says_so(n, where, limit) -> None:
    hits = int(where * n)
    p_value = Share(hits, n).compute_p_value_below(limit)
    assert (compute_share_interval(hits, n)[1] < limit) == (
        p_value < 0.025
    ) or p_value == pytest.approx(0.025)


@given(counts, counts, st.integers(20, 2000), st.floats(-0.5, 0.5))
def test_a_difference_is_above_a_limit_where_its_p_value_says_so(lost, won, same, limit) -> None:
    found = compare(lost, won, lost + won + same)
    low, p_value = found.interval(0.95)[0], found.compute_p_value_above(limit)
    assert (low > limit) == (p_value < 0.025) or low == pytest.approx(limit, abs=1e-6)


def test_no_samples_have_no_share() -> None:
    with pytest.raises(ValueError, match="no samples"):
        compute_share_interval(0, 0)


@pytest.mark.slow
def test_macro_f1_against_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    labels, found = rng.integers(0, 4, 200), rng.integers(0, 5, 200)
    expected = f1_score(labels, found, average="macro", zero_division=0)
    assert compute_macro_f1(labels, found, 7) == pytest.approx(expected)


@given(st.integers(20, 200), st.integers(1, 8), st.integers(0, 2**32))
def test_the_interval_holds_the_difference_and_is_never_empty(n, classes, seed) -> None:
    generator = np.random.default_rng(seed)
    labels, first, second = (generator.integers(0, classes, n) for _ in range(3))
    figure = compare_macro_f1(labels, first, second, classes)
    low, high = figure.interval(0.95)
    assert -1 <= low < figure.value < high <= 1
    assert compare_macro_f1(labels, first, first, classes).value == 0


def errors(generator, count, spread=0.5):
    return {
        "difference_square": 1e-4 * np.exp(spread * generator.standard_normal(count)),
        "reference_square": np.exp(0.3 * generator.standard_normal(count)),
    }


def test_it_holds_the_pooled_ratio_itself():
    rows = errors(np.random.default_rng(1), 200)
    low, high = compute_snr_interval(rows, 0.95)
    others = ("values", "finite", "output_square", "product", "difference_sum", "difference_max")
    rows |= {name: np.ones(200) for name in others}
    snr = pool_errors("output", rows).snr_db
    assert low < snr < high


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


def test_the_effect_of_a_lost_sample_is_that_of_the_class_which_feels_it_most():
    common, uncommon = np.ones(97), np.ones(3)
    apart = np.zeros((2, 100))
    apart[0, :97], apart[1, 97:] = common, uncommon
    assert find_largest_effect(apart) == pytest.approx(100 / (2 * 3))
    assert find_largest_effect(np.ones((7, 100))) == pytest.approx(
        1
    )  # every sample has all classes
    assert find_largest_effect(np.ones((1, 100))) == pytest.approx(1)
    alone = np.zeros((1, 100))
    alone[0, 5] = 40.0
    assert find_largest_effect(alone) == pytest.approx(100)
    assert find_largest_effect(np.zeros((3, 100))) == 1.0
    assert find_largest_effect(np.zeros((0, 100))) == 1.0


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 10**6))
def test_no_order_or_unit_changes_the_effect_and_it_is_at_least_one(classes, samples, seed):
    generator = np.random.default_rng(seed)
    amounts = generator.integers(0, 4, (classes, samples)).astype(float)
    effect = find_largest_effect(amounts)
    assert 1 <= effect <= samples * 1.000001
    mixed = amounts[generator.permutation(classes)][:, generator.permutation(samples)] * 8
    assert find_largest_effect(mixed) == pytest.approx(effect)


def test_a_rare_class_that_lost_nothing_is_not_proven_by_few_of_it():
    nothing = np.zeros(300)
    high = figure_from_samples(0.0, nothing, 300, (-1.0, 1.0), 20.0).interval(0.95)[1]
    assert high > 5 * figure_from_samples(0.0, nothing, 300, (-1.0, 1.0)).interval(0.95)[1]


def test_noise_that_was_not_drawn_is_not_excluded():
    """0.5% of samples have 100 times the noise: 300 samples draw none of them in 22%, and did not notice."""
    generator, truth = np.random.default_rng(5), -10 * np.log10(1 + 0.005 * 99)
    wrong = 0
    for _ in range(300):
        noise = np.where(generator.random(300) < 0.005, 100.0, 1.0)
        rows = {"difference_square": noise, "reference_square": np.ones(300)}
        bounds = compute_snr_interval(rows, 0.975)
        wrong += bounds is not None and bounds[0] > truth
    assert wrong == 0


@pytest.mark.parametrize(("spread", "count"), [(2.0, 100), (1.5, 300), (2.0, 1000)])
def test_outputs_of_very_different_power_do_not_fail_an_snr_on_its_limit(spread, count):
    """Few samples have most of the signal, and most draws miss them: Student's t failed 6 to 15% of these."""
    generator, truth, wrong = np.random.default_rng(5), 5 * spread**2 / np.log(10), []
    for _ in range(300):
        rows = {
            "difference_square": np.exp(0.3 * generator.standard_normal(count) - 0.3**2 / 2),
            "reference_square": np.exp(spread * generator.standard_normal(count)),
        }
        high = compute_snr_interval(rows, 0.975)[1]
        assert np.isfinite(high)
        wrong.append(high < truth)
    assert np.mean(wrong) <= 0.035


def test_more_samples_decide_an_snr():
    widths = []
    for count in (100, 1000, 10_000):
        low, high = compute_snr_interval(errors(np.random.default_rng(1), count), 0.975)
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[1] < 2.5
    assert widths[2] < 0.4


@pytest.mark.parametrize(("value", "count"), [(np.nan, 100), (np.inf, 100), (1.0, 0), (1.0, 1)])
def test_noise_without_a_scatter_has_no_interval(value, count):
    rows = {"difference_square": np.full(count, value), "reference_square": np.ones(count)}
    assert compute_snr_interval(rows, 0.95) is None


def test_the_rarest_class_sets_the_width_of_a_drop_of_macro_f1():
    """A class of 1% that loses a fifth passed on the limit in 14% of sets of 1,000 where it was averaged with the others."""
    generator, drops = np.random.default_rng(3), []
    for rare in (0.2, 0.01):
        shares = np.array([*[(1 - rare) / 4] * 4, rare])
        labels = generator.choice(5, 1000, p=shares)
        found = compare_macro_f1(labels, labels, labels, 5)
        drops.append(np.ptp(found.interval(0.95)))
    assert drops[1] > 5 * drops[0]
