from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.verdict import Verdict
from optpipe.preprocess.proof import (
    SNR_FLOOR_DB,
    agreement_from_counts,
    compute_agreement,
    compute_images_needed,
    judge_parity,
)
from optpipe.preprocess.records import PredictionAgreement, TaskScore

GOOD: dict[str, Any] = {"finite": True, "trained": True, "classifies": True, "refused": 0}


def test_enough_equal_answers_of_a_trained_model_pass():
    assert judge_parity(agreement_from_counts(800, 800), 60.0, **GOOD).verdict is Verdict.PASS


def test_too_few_images_prove_nothing_and_the_remedy_names_the_number():
    found = judge_parity(agreement_from_counts(10, 10), 90.0, **GOOD)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert str(compute_images_needed()) in found.remedy
    assert (
        judge_parity(agreement_from_counts(compute_images_needed(), compute_images_needed()), 90.0, **GOOD).verdict
        is Verdict.PASS
    )


def test_the_number_is_that_for_the_share_that_was_found():
    found = judge_parity(agreement_from_counts(799, 800), 60.0, **GOOD)
    needed = compute_images_needed(799 / 800)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert 800 < needed < 1600
    assert str(needed) in found.remedy
    assert judge_parity(agreement_from_counts(1598, 1600), 60.0, **GOOD).verdict is Verdict.PASS
    assert "more images will not help" in judge_parity(agreement_from_counts(795, 800), 60.0, **GOOD).remedy


def test_outputs_that_do_not_depend_on_the_image_prove_nothing():
    for kind in ({"trained": False}, {"classifies": False}):
        assert judge_parity(None, None, **{**GOOD, **kind}, blind=True).verdict is Verdict.INCONCLUSIVE


def test_other_answers_fail():
    assert judge_parity(agreement_from_counts(780, 800), 60.0, **GOOD).verdict is Verdict.FAIL


def test_one_class_for_every_image_is_no_evidence():
    assert compute_agreement(np.array([3, 3, 3]), np.array([3, 3, 3])) is None
    assert judge_parity(None, 90.0, **GOOD).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("snr", "verdict"), [(None, "PASS"), (90.0, "PASS"), (SNR_FLOOR_DB - 0.1, "FAIL")])
def test_random_weights_are_judged_by_the_outputs_error(snr, verdict):
    assert judge_parity(agreement_from_counts(8, 8), snr, **{**GOOD, "trained": False}).verdict == verdict
    assert judge_parity(None, snr, **{**GOOD, "classifies": False}).verdict == verdict


def test_refused_images_and_infinite_outputs_fail_whatever_else_is_good():
    assert judge_parity(agreement_from_counts(800, 800), None, **{**GOOD, "refused": 1}).verdict is Verdict.FAIL
    assert judge_parity(agreement_from_counts(800, 800), None, **{**GOOD, "finite": False}).verdict is Verdict.FAIL


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_one_more_disagreement_never_improves_the_verdict(images, wrong):
    order = {Verdict.PASS: 2, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 0}
    equal = max(images - wrong, 0)
    better = judge_parity(agreement_from_counts(equal, images), 60.0, **GOOD).verdict
    worse = judge_parity(agreement_from_counts(max(equal - 1, 0), images), 60.0, **GOOD).verdict
    assert order[worse] <= order[better]


@pytest.mark.parametrize(
    ("drop_ci", "agreement_ci", "images", "verdict"),
    [
        ((-0.001, 0.004), (0.998, 1.0), 250, "PASS"),
        ((-0.001, 0.004), (0.994, 0.996), 250, "PASS"),
        ((-0.001, 0.004), (0.93, 0.95), 250, "FAIL"),
        ((0.006, 0.02), (0.994, 0.996), 250, "FAIL"),
        ((-0.02, -0.006), (0.998, 1.0), 250, "FAIL"),  # a higher score is no parity
        ((0.0, 0.02), (0.998, 1.0), 250, "INCONCLUSIVE"),
        ((0.0, 0.0), (1.0, 1.0), 99, "INCONCLUSIVE"),
        (None, (0.998, 1.0), 250, "PASS"),
        (None, (0.99, 1.0), 250, "INCONCLUSIVE"),
        (None, (0.98, 0.99), 250, "FAIL"),
    ],
)
def test_a_detector_is_judged_by_its_predictions(drop_ci, agreement_ci, images, verdict):
    score = None if drop_ci is None else TaskScore("AP", 0.6, 0.6 - sum(drop_ci) / 2, sum(drop_ci) / 2, drop_ci)
    predicted = PredictionAgreement(sum(agreement_ci) / 2, agreement_ci, images)
    assert judge_parity(None, 30.0, **GOOD, score=score, predicted=predicted).verdict == verdict
    untrained = judge_parity(None, 30.0, **{**GOOD, "trained": False}, score=score, predicted=predicted)
    assert untrained.verdict is Verdict.FAIL
