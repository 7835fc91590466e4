"""A backend for optpipe: ONNX's own reference evaluator, whose outputs an option can falsify."""

import shutil

from optpipe.backends.base import Backend, BuildResult, Capability, Option
from optpipe.core.card import TensorSpec
from optpipe.core.precision import Precision

FILE = "copied.onnx"


class ToySession:
    """One loaded artifact."""

    device = "cpu"

    def __init__(self, path, scale):
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load(path)
        self._evaluator = ReferenceEvaluator(model)
        self._scale = scale
        self.inputs = tuple(map(describe_tensor, model.graph.input))
        self.outputs = tuple(map(describe_tensor, model.graph.output))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._evaluator = None

    def run(self, inputs):
        """Takes and returns arrays on the host, by name."""
        import numpy as np

        names = [spec.name for spec in self.outputs]
        outputs = dict(zip(names, self._evaluator.run(names, dict(inputs)), strict=True))
        return {name: value * np.float32(self._scale) for name, value in outputs.items()}

    def bind(self, inputs):
        """Fixes shapes and buffers; `bench` measures `launch`."""
        return ToyBinding(self, inputs)


class ToyBinding:
    """Buffers that keep their place: whoever binds writes into `inputs` and reads `outputs`."""

    def __init__(self, session, inputs):
        self.inputs = {name: value.copy() for name, value in inputs.items()}
        self.outputs = session.run(self.inputs)
        self._session = session

    def launch(self):
        for name, value in self._session.run(self.inputs).items():
            self.outputs[name][...] = value


def describe_tensor(value):
    import onnx

    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, dtype, shape)


class Toy(Backend):
    name = "toy"
    purpose = "a proof that backends are open"
    packages = ("onnx",)

    def describe_options(self, device):
        return (Option("scale", 1, "what the outputs are multiplied by"),)

    def devices(self):
        return ("cpu",)

    def precisions(self, device):
        return frozenset((Precision.FP32,))

    def probe_capability(self, device):
        import onnx

        return Capability(True, True, onnx.__version__)

    def recipe(self, device, options):
        import onnx

        return {"version": onnx.__version__, "options": self.merge_options(options, device)}

    def build(self, request):
        import onnx

        from optpipe.backends.onnx_layers import layers_from_onnx

        shutil.copyfile(request.graph, request.directory / FILE)
        layers = layers_from_onnx(onnx.load(request.graph), request.card.inputs)
        options = self.recipe(request.device, request.options)["options"]
        return BuildResult(layers, FILE, options)

    def load(self, directory, info, options):
        return ToySession(directory / FILE, {**info.options, **options}["scale"])
