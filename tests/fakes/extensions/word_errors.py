"""A word error rate: the fewest insertions, deletions, and substitutions, over the words that were spoken."""

from optpipe.core.metrics.sampled import EvaluatedSample, Part, SampleScore

WORDS = ("north", "east", "south", "west")


class WordErrors(SampleScore):
    name = "word-errors"
    title = "word error rate"
    lower_is_better = True

    def measure(self, sample: EvaluatedSample) -> Part:
        (logits,) = sample.outputs.values()  # (steps, words)
        heard = [WORDS[word] for word in logits.argmax(-1)]
        spoken = sample.truth.split()
        return Part(float(count_edits(spoken, heard)), weight=len(spoken))


def count_edits(spoken: list[str], heard: list[str]) -> int:
    """Levenshtein's distance, a row of its table at a time."""
    row = list(range(len(heard) + 1))
    for place, word in enumerate(spoken, 1):
        above, row[0] = row[0], place
        for column, other in enumerate(heard, 1):
            edits = min(row[column] + 1, row[column - 1] + 1, above + (word != other))
            above, row[column] = row[column], edits
    return row[-1]
