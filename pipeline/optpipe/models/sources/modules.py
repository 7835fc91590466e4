"""Models in memory, made exportable: tensors in, a flat tuple of tensors out; weights from a file that cannot run code, or seeded."""

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from optpipe.core import torch
from optpipe.core.card import ModelCard
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, OptpipeError, read_as_user_file
from optpipe.core.files import get_memory_bytes, hash_arrays, require_regular_file
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument
from optpipe.models.sources.nesting import Arrange, FlatOutputs, flatten_outputs

DEFAULT_BATCH_PROFILE = (1, 8, 64)
"""Profile of an open first dimension without `--batch`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: a `torch.nn.Module` whose forward takes the card's inputs in order, or an ONNX file."""

    card: ModelCard
    weights: WeightsRecord
    module: Any = None
    """In float32; a copy where the user's is in another type."""
    own_module: Any = None
    """The user's module in its own type, with inputs and outputs in float32; None if `module` is that."""
    onnx: Path | None = None
    unread: tuple[str, ...] = ()
    """Inputs of the ONNX file that no output depends on; they are not in the card."""
    tokenizer: str | None = None
    quantization: Precision | None = None
    """INT8 or FP8 of a module with Q/DQ operators; an ONNX file is asked itself."""
    code_identity: Mapping[str, Any] = field(default_factory=dict)
    """Identity besides the source's, known only after loading; for models with `runs_code`."""

    @property
    def given(self) -> Any:
        """The module as the user gave it, which is the reference; None for an ONNX file."""
        return self.module if self.own_module is None else self.own_module


class Source(Protocol):
    @property
    def name(self) -> str:
        """Canonical text, such as `torchvision:resnet50`."""

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module; an ONNX file does not."""

    @property
    def runs_code(self) -> bool:
        """Whether a user's code makes it; `LoadedModel.code_identity` then has the rest of its identity."""

    def collect_identity(self) -> Mapping[str, Any]:
        """Versions and file hashes that determine the model besides its weights. Imports no framework."""

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Raises BadInputError for a name or file that is not a model, NoWeightsError without a network."""


class NoWeightsError(OptpipeError):
    """The published weights are not available; `host` would serve them."""

    def __init__(self, reason: str, host: str) -> None:
        super().__init__(reason)
        self.host = host


def flatten_tensors(value: Any) -> tuple[Any, ...]:
    """The tensors of a nested output in order. Raises TypeError for an output without any."""
    return tuple(flatten_outputs(value).tensors)


def flatten_module(module: Any, arrange: Arrange | None = None) -> Any:
    """`module` with a flat tuple as output; `arrange` makes its arguments from the tensors of the inputs.

    Its `output_names` are the keys and fields of the outputs, and `left_out` the outputs that are no tensors; both are known after
    a run or a trace.
    """
    last = FlatOutputs()  # not an attribute, which torch.export would restore

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *inputs: Any) -> Any:
            positional, named = arrange(inputs) if arrange else (inputs, {})
            nonlocal last
            last = flatten_outputs(self.model(*positional, **named))
            tensors, last.tensors = tuple(last.tensors), []
            return tensors

        @property
        def output_names(self) -> tuple[str, ...]:
            return last.names

        @property
        def left_out(self) -> tuple[str, ...]:
            return tuple(last.left_out)

    return Flat().eval()


def pool_tokens(module: Any, pooling: str) -> Any:
    """An encoder with one embedding per text: the mean of the last hidden states (n, tokens, values), or the first token's."""

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(
                input_ids=input_ids, attention_mask=attention_mask
            ).last_hidden_state
            if pooling == "cls":
                return hidden[:, 0]
            mask = attention_mask.to(hidden.dtype)[:, :, None]
            return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)

    return Pooled().eval()


def wrap_detector(module: Any, size: tuple[int, int]) -> Any:
    """A torchvision detector for one image: (1, 3, H, W) in; boxes, scores, labels (and masks) out.

    torchvision selects one of two ways of suppression per class by the number of boxes, which an exported graph cannot
    do; here boxes of different classes are always moved apart by more than the image's width and suppressed together.
    Both agree, since boxes are clipped to the image before.
    """
    from torchvision.ops import boxes as operators

    apart = 2.0 * max(size)

    def moved_apart(boxes: Any, scores: Any, classes: Any, overlap: float) -> Any:
        return torch.ops.torchvision.nms(
            boxes + (classes.to(boxes) * apart)[:, None], scores, overlap
        )

    class OneImage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, images: Any) -> Any:
            own, operators.batched_nms = operators.batched_nms, moved_apart
            try:
                return self.model([images[0]])
            finally:
                operators.batched_nms = own

    return flatten_module(OneImage())


def take_last_flow(module: Any) -> Any:
    """An optical-flow network that returns only the flow of its last iteration, (n, 2, H, W) in pixels."""

    class LastFlow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, image1: Any, image2: Any) -> Any:
            return {"flow": self.model(image1, image2)[-1]}

    return flatten_module(LastFlow())


ZERO_LAYER_STD = 0.02
"""Standard deviation for layers that begin at zero, as transformers draw their other layers."""


def hash_module_weights(module: Any) -> str:
    state = module.state_dict()
    return hash_arrays(
        {
            name: _array_from_tensor(tensor)
            for name, tensor in state.items()
            if torch.is_tensor(tensor)
        }
    )


def hash_tensors(module: Any) -> dict[str, str]:
    """Hash of each parameter and buffer by name, including those outside the state dict."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: hash_arrays({"": _array_from_tensor(tensor)}) for name, tensor in tensors.items()}


def _array_from_tensor(tensor: Any) -> Any:
    """A tensor as an array, as raw bits if NumPy does not know its type."""
    flat = tensor.detach().cpu().contiguous()
    if flat.dtype.is_floating_point and flat.dtype not in (
        torch.float16,
        torch.float32,
        torch.float64,
    ):
        flat = flat.view(torch.int16 if flat.itemsize == 2 else torch.uint8)
    return flat.numpy()


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python while the block runs, then restores them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def draw_neutral_layers(module: Any) -> Any:
    """Draws values for fresh layers without effect from torch's generator; changes `module` in place.

    Fresh batch normalization is the identity (or zero, in a residual branch that begins closed): it folds away without
    a bias, which gives a graph that no trained model has. A layer with zero weights, as ViT's head has, gives the same
    outputs for every input. Layers that are not fresh have learned something and stay.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and _is_fresh(layer):
                for scale in (layer.weight, layer.running_var):
                    if scale is not None:
                        scale.uniform_(0.8, 1.2)
                for shift in (layer.bias, layer.running_mean):
                    if shift is not None:
                        shift.normal_(0.0, 0.1)
            elif (
                isinstance(layer, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
                and not layer.weight.any()
            ):
                layer.weight.normal_(0.0, ZERO_LAYER_STD)
    return module


def _is_fresh(norm: Any) -> bool:
    """Whether a batch normalization is in its initial state: mean and shift 0, variance 1, scale 1 (or 0) throughout."""

    def throughout(tensor: Any, *values: float) -> bool:
        return tensor is None or any(bool((tensor == value).all()) for value in values)

    return (
        throughout(norm.running_mean, 0.0)
        and throughout(norm.running_var, 1.0)
        and throughout(norm.weight, 1.0, 0.0)
        and throughout(norm.bias, 0.0)
    )


def make_with_weights(
    make: Callable[[], Any], request: WeightsRequest
) -> tuple[Any, WeightsRecord]:
    with use_seed(request.seed):
        if request.path is None:
            module = draw_neutral_layers(make()).eval()
            return module, WeightsRecord("random", hash_module_weights(module), request.seed)
        module = make().eval()
    load_state(module, request.path)
    return module, WeightsRecord("file", hash_module_weights(module))


def make_with_factory_weights(
    make: Callable[[], Any], request: WeightsRequest, name: str
) -> tuple[Any, WeightsRecord]:
    """The module of the factory `name`, in evaluation mode, and whether its weights are random.

    The factory is called under two seeds, with the first result freed before the second call: equal weights are those
    that it sets itself. Raises BadInputError if random weights are requested and none depends on the seed, or if some
    depend on more than the seed.
    """
    if request.path is not None:
        return make_with_weights(make, request)
    with use_seed(request.seed + 1):
        other = hash_tensors(make())
    with use_seed(request.seed):
        module = make()
        own = hash_tensors(module)
        drawn = sorted(name for name, sha256 in own.items() if other.get(name) != sha256)
        if not drawn and request.kind != "random":
            return module.eval(), WeightsRecord(f"default:{name}", hash_module_weights(module))
        draw_neutral_layers(module)
    if not drawn:
        problem = f"no weight of {name} depends on the seed, so it has no random weights"
        raise BadInputError(
            problem,
            remedy="use its own ("
            + Argument("weights", "default")
            + "), or a factory that loads none",
        )
    which = f"{len(drawn)} of {len(own)} tensors, first {drawn[0]}"
    record = WeightsRecord("random", hash_module_weights(module), request.seed, which)
    del module
    return remake_module(make, request, record, name), record


def remake_module(
    make: Callable[[], Any], request: WeightsRequest, record: WeightsRecord, name: str
) -> Any:
    """The module of `record` again. Raises BadInputError if the factory `name` gives different ones each time."""
    if request.path is not None:
        return make_with_weights(make, request)[0]
    with use_seed(request.seed):
        module = make().eval()
        if record.source == "random":
            draw_neutral_layers(module)
    if hash_module_weights(module) != record.sha256:
        problem = f"{name} creates different weights on every call, regardless of the seed"
        way = "draw them from torch's, NumPy's, or Python's generator, or load them from a file"
        raise BadInputError(f"{problem}\n{way}")
    return module


def load_state(module: Any, path: Path) -> None:
    """Loads a state dict strictly. Raises BadInputError that names the first tensors that do not fit."""
    state = state_dict_from_file(path)
    own = module.state_dict()
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    misshapen = {name for name in own.keys() & state.keys() if own[name].shape != state[name].shape}
    for names, what in (
        (missing, "lacks"),
        (unexpected, "has unexpected"),
        (misshapen, "has the wrong shape for"),
    ):
        if names:
            raise BadInputError(
                f"{path} does not fit this model: it {what} {len(names)} tensors, first {', '.join(sorted(names)[:3])}\n"
                "give weights of the same architecture (for a head of another size, use file.py:factory)"
            )
    module.load_state_dict(state)


def state_dict_from_file(path: Path) -> Mapping[str, Any]:
    """Reads safetensors, or a `torch.save`d state dict with torch's weights-only reader, without free unpickling."""
    from safetensors.torch import load_file

    with read_as_user_file(path, "weights", "it may be truncated or of another format"):
        require_regular_file(path, get_memory_bytes())
        try:
            if path.suffix == ".safetensors":
                state: Any = dict(load_file(path))
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            problem = f"{path} is not a state dict, or a pickle that would run code"
            raise BadInputError(
                f"{problem}; save the state dict as .safetensors instead"
            ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        problem = f"{path} contains no state dict (names to tensors)"
        raise BadInputError(f"{problem}; save one with safetensors.torch.save_file")
    return state
