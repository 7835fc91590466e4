"""The agreement of a segmenter's predictions as a policy judges it."""

import numpy as np
import polars as pl

from optpipe.evaluate.tasks.segmentation import Segmentation, encode_mask
from optpipe.preprocess.proof import compare_predictions, observe_prediction_agreement


def make_rows(images, seed=0, share=0.02):
    """Masks of which the second pipeline changes about `share` of the pixels."""
    draw = np.random.default_rng(seed)
    masks = draw.integers(0, 3, (images, 8, 8), np.uint8)
    changed = np.where(draw.random(masks.shape) < share, (masks + 1) % 3, masks).astype(np.uint8)
    columns = {"reference_prediction": masks, "dali_prediction": changed}
    return pl.DataFrame({name: [encode_mask(each) for each in values] for name, values in columns.items()})


def test_the_agreement_is_that_of_the_proof_with_an_interval_at_the_confidence_of_the_policy():
    rows, task = make_rows(200), Segmentation()
    _, proven = compare_predictions(rows, task)
    seen = {level: observe_prediction_agreement(rows, task, level, "200 images") for level in (0.95, 0.99)}
    assert proven is not None
    assert seen[0.95].value == proven.share
    assert (seen[0.95].low, seen[0.95].high) == proven.ci
    assert seen[0.99].low < seen[0.95].low < seen[0.95].value < seen[0.95].high < seen[0.99].high
    assert not seen[0.95].blockers


def test_few_images_that_all_agree_prove_nothing():
    (few,) = observe_prediction_agreement(make_rows(20, share=0.0), Segmentation(), 0.95, "20 images").blockers
    assert few.reason == "20 images are too few to prove agreement"
    assert few.remedy == "verify parity on 100 or more"
