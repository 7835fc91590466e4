"""A task for optpipe: whether a handwritten digit is even. The images of a class lie in a folder of its name."""


class Evenness:
    name = "evenness"

    def read_truths(self, paths):
        return [int(path.parent.name) % 2 == 0 for path in paths]

    def decode(self, outputs, path):
        scores = outputs["logits"]
        return bool(scores[0::2].max() > scores[1::2].max())

    def score(self, prediction, truth):
        return float(prediction == truth)


TASK = Evenness()
