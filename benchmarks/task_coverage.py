"""How often the 95 % intervals of task scores and of their drops hold the truth: F1 of entities, Spearman, mIoU, AP.

usage: PYTHONPATH=pipeline python3 benchmarks/task_coverage.py [--trials 400] [--samples 200] [--only F1,AP]

For each task a population of made-up samples with predictions of a source model and of a slightly worse one; its scores are the truth.
A trial draws samples out of it and asks the tool's own `score_predictions`. Two cores need about six minutes for all.
"""

import argparse
from math import sqrt

import numpy as np

from optpipe.evaluate.tasks.contract import BootstrapTask, Values, measure_scores
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.embedding import Embedding
from optpipe.evaluate.tasks.segmentation import Segmentation, encode_mask
from optpipe.evaluate.tasks.token_classification import TokenClassification

Population = tuple[Values, Values, Values]
TAGS = np.array(["O", "O", "O", "B-PER", "I-PER", "B-ORG", "I-ORG"])


def make_tagged(count: int, draw: np.random.Generator) -> Population:
    """Texts of 5 to 20 words; some texts are harder than others."""
    truths, source, found = [], [], []
    for _ in range(count):
        words, hard = int(draw.integers(5, 21)), draw.beta(1, 9)
        true = draw.choice(TAGS, words)
        one = np.where(draw.random(words) < hard, draw.choice(TAGS, words), true)
        truths.append(true.tolist())
        source.append(one.tolist())
        found.append(np.where(draw.random(words) < 0.03, draw.choice(TAGS, words), one).tolist())
    return truths, source, found


def make_pairs(count: int, draw: np.random.Generator) -> Population:
    """Two texts for each sample: embeddings whose cosine follows the stated similarity with noise."""
    truths, source, found = [], [], []
    for pair in range(count):
        stated = draw.random()
        angle = np.arccos(np.clip(stated + draw.normal(0, 0.15), -1, 1))
        other = angle + draw.normal(0, 0.05)
        truths += [[float(pair), float(stated)]] * 2
        source += [[1.0, 0.0], [float(np.cos(angle)), float(np.sin(angle))]]
        found += [[1.0, 0.0], [float(np.cos(other)), float(np.sin(other))]]
    return truths, source, found


def make_masks(count: int, draw: np.random.Generator) -> Population:
    """Masks of 16 by 16 pixels with a rectangle of one of four classes; predictions have it moved."""
    truths, source, found = [], [], []
    for _ in range(count):
        label, (top, left), (high, wide) = draw.integers(1, 5), draw.integers(1, 7, 2), draw.integers(4, 9, 2)

        def paint(moved: int, label=label, top=top, left=left, high=high, wide=wide) -> "np.ndarray":
            mask = np.zeros((16, 16), np.uint8)
            mask[top : top + high, left + moved : left + moved + wide] = label
            return mask

        moved = int(draw.random() < 0.5)
        truths.append(encode_mask(paint(0)))
        source.append(encode_mask(paint(moved)))
        found.append(encode_mask(paint(moved + int(draw.random() < 0.2))))
    return truths, source, found


def make_boxes(count: int, draw: np.random.Generator) -> Population:
    """Images of 100 by 100 pixels with up to four boxes of three classes; found boxes are moved, some are missed, some made up."""
    truths, source, found = [], [], []
    for _ in range(count):
        true, one, other = [], [], []
        for _ in range(int(draw.integers(0, 5))):
            left, top, wide, high = draw.uniform(0, 60), draw.uniform(0, 60), draw.uniform(10, 40), draw.uniform(10, 40)
            label = float(draw.integers(3))
            true.append([left, top, wide, high, label, wide * high, 0.0])
            if draw.random() < 0.9:
                shift = draw.normal(0, 0.08 * wide)
                row = [left + shift, top, wide, high, float(draw.beta(5, 2)), label]
                one.append(row)
                other.append([row[0] + draw.normal(0, 0.03 * wide), *row[1:]])
        for _ in range(int(draw.random() < 0.3)):
            row = [*draw.uniform(0, 60, 2), *draw.uniform(10, 40, 2), float(draw.beta(2, 5)), float(draw.integers(3))]
            one.append([float(each) for each in row])
            other.append(one[-1])
        truths.append(true)
        source.append(one)
        found.append(other)
    return truths, source, found


TASKS = {
    "F1": (TokenClassification(), make_tagged, 1),
    "Spearman": (Embedding(), make_pairs, 2),
    "mIoU": (Segmentation(), make_masks, 1),
    "AP": (Detection(), make_boxes, 1),
}


def draw_samples(population: Population, chosen: "np.ndarray", each: int) -> Population:
    """The chosen units of `each` rows; a pair that is drawn twice is two pairs."""
    rows: list[int] = (chosen[:, None] * each + np.arange(each)).ravel().tolist()
    truths, source, found = ([values[row] for row in rows] for values in population)
    if each == 2:
        truths = [[float(place // 2), value[1]] for place, value in enumerate(truths)]
    return truths, source, found


def measure_coverage(
    task: BootstrapTask, population: Population, each: int, trials: int, samples: int, seed: int
) -> tuple[int, int]:
    """How many intervals of the first score and of its drop hold the population's."""
    units = len(population[0]) // each
    whole = task.score_predictions(*population, (), 0).scores[0]
    draw, inside, drops = np.random.default_rng(seed), 0, 0
    for _ in range(trials):
        score = task.score_predictions(*draw_samples(population, draw.integers(0, units, samples), each), (), 0).scores[
            0
        ]
        measure_scores.cache_clear()
        inside += score.ci[0] <= whole.value <= score.ci[1]
        drops += score.drop_ci[0] <= whole.drop <= score.drop_ci[1]
    return inside, drops


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--population", type=int, default=3000)
    parser.add_argument("--only", default=",".join(TASKS))
    given = parser.parse_args()
    print("| score | samples | interval of the score | interval of the drop |\n|---|---:|---:|---:|")
    for name in given.only.split(","):
        task, make, each = TASKS[name]
        population = make(given.population, np.random.default_rng(1))
        counts = measure_coverage(task, population, each, given.trials, given.samples, seed=2)
        shares = [count / given.trials for count in counts]
        cells = (f"{share:.1%} ± {2 * sqrt(share * (1 - share) / given.trials):.1%}" for share in shares)
        print(f"| {name} | {given.samples} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
