"""A task for optpipe: how bright an image is, from 0 to 1. The name of an image's file is ten times the truth."""


class Brightness:
    name = "brightness"

    def read_truths(self, paths):
        return [float(path.stem) / 10 for path in paths]

    def decode(self, outputs, path):
        return round(float(outputs["mean"].mean()), 3)

    def score(self, prediction, truth):
        return max(0.0, 1 - abs(prediction - truth))


TASK = Brightness()
