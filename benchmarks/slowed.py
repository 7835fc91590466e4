"""A session whose calls are held back to a multiple of their own length: the planted slow-down of ab_error_rates.py."""

from time import perf_counter_ns

from optpipe.measure.worker.messages import session_from_loader


class Slowed:
    def __init__(self, session, factor):
        self.session, self.factor = session, factor
        self.device, self.inputs, self.outputs = session.device, session.inputs, session.outputs

    def __enter__(self):
        self.session.__enter__()
        return self

    def __exit__(self, *error):
        return self.session.__exit__(*error)

    def run(self, inputs):
        return self.session.run(inputs)

    def bind(self, inputs):
        return SlowedBinding(self.session.bind(inputs), self.factor)


class SlowedBinding:
    def __init__(self, binding, factor):
        self.binding, self.factor = binding, factor
        self.inputs, self.outputs = binding.inputs, binding.outputs

    def launch(self):
        start = perf_counter_ns()
        self.binding.launch()
        end = start + (perf_counter_ns() - start) * self.factor
        while perf_counter_ns() < end:
            pass


def slowed(factor, of, arguments):
    return Slowed(session_from_loader(of, arguments), factor)
