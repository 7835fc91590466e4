"""A session that does nothing, to see what the harness costs."""

from optpipe.core.card import TensorSpec


class Nothing:
    device = "cpu"
    inputs = (TensorSpec("x", "float32", ("batch", 4)),)
    outputs = (TensorSpec("x", "float32", ("batch", 4)),)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, inputs):
        return dict(inputs)

    def bind(self, inputs):
        return Binding(dict(inputs))


class Binding:
    def __init__(self, inputs):
        self.inputs = self.outputs = inputs

    def launch(self):
        pass


def nothing():
    return Nothing()
