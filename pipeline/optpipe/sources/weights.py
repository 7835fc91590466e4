"""Weights into modules: from a file that cannot run code, or seeded."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optpipe.core.hashing import tensors_sha256
from optpipe.core.weights import WeightsRecord, WeightsRequest
from optpipe.errors import BadInputError


def module_weights_sha256(module: Any) -> str:
    """The hash over a module's state dict, whatever its types."""
    import torch

    return tensors_sha256({name: _raw(each) for name, each in module.state_dict().items() if torch.is_tensor(each)})


def tensor_hashes(module: Any) -> dict[str, str]:
    """The hash of each parameter and buffer by name, also of those that its state dict leaves out."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensors_sha256({"": _raw(tensor)}) for name, tensor in tensors.items()}


def _raw(tensor: Any) -> Any:
    """A tensor as an array, in bits where NumPy does not know its type."""
    import torch

    flat = tensor.detach().cpu().contiguous()
    if flat.dtype.is_floating_point and flat.dtype not in (torch.float16, torch.float32, torch.float64):
        flat = flat.view(torch.int16 if flat.itemsize == 2 else torch.uint8)
    return flat.numpy()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python while the block runs, and leaves them as they were."""
    import numpy as np
    import torch

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


def with_drawn_normalization(module: Any) -> Any:
    """Draws what batch normalization would have learned, from torch's generator; changes `module` in place.

    Freshly made, it is the identity (or zero, where a residual branch is to begin closed): it folds away without a bias, and
    the graph is one that no trained model has. One that is not fresh has learned something, and is left as it is.
    """
    import torch

    with torch.no_grad():
        for norm in module.modules():
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and _fresh(norm):
                for scale in (norm.weight, norm.running_var):
                    if scale is not None:
                        scale.uniform_(0.8, 1.2)
                for shift in (norm.bias, norm.running_mean):
                    if shift is not None:
                        shift.normal_(0.0, 0.1)
    return module


def _fresh(norm: Any) -> bool:
    """Whether a batch normalization is as it is made: mean and shift 0, variance 1, scale 1 (or 0) throughout."""

    def throughout(tensor: Any, *values: float) -> bool:
        return tensor is None or any(bool((tensor == value).all()) for value in values)

    return (
        throughout(norm.running_mean, 0.0)
        and throughout(norm.running_var, 1.0)
        and throughout(norm.weight, 1.0, 0.0)
        and throughout(norm.bias, 0.0)
    )


def with_weights(make: Callable[[], Any], request: WeightsRequest) -> tuple[Any, WeightsRecord]:
    """A library's architecture, made by `make`, with random or file weights as requested, in evaluation mode."""
    with seeded(request.seed):
        if request.path is None:
            module = with_drawn_normalization(make()).eval()
            return module, WeightsRecord("random", module_weights_sha256(module), request.seed)
        module = make().eval()
    load_state(module, request.path)
    return module, WeightsRecord("file", module_weights_sha256(module))


def with_factory_weights(make: Callable[[], Any], request: WeightsRequest, name: str) -> tuple[Any, WeightsRecord]:
    """What the factory `name` makes, in evaluation mode; whether its weights are random is found out, not assumed.

    It is called under two seeds, the first result freed before the second: weights that are the same both times are those
    that it sets itself. Raises `BadInputError` where random ones are asked for and none depends on the seed, or where some
    depend on more than the seed.
    """
    if request.path is not None:
        return with_weights(make, request)
    with seeded(request.seed + 1):
        other = tensor_hashes(make())
    with seeded(request.seed):
        module = make()
        own = tensor_hashes(module)
        drawn = sorted(each for each, sha256 in own.items() if other.get(each) != sha256)
        if not drawn and request.kind != "random":
            return module.eval(), WeightsRecord(f"default:{name}", module_weights_sha256(module))
        with_drawn_normalization(module)
    if not drawn:
        raise BadInputError(
            f"no weight that {name} makes depends on the seed, so it has no random weights to give\n"
            "ask for its own (--weights default), or name a factory that loads none"
        )
    which = f"{len(drawn)} of {len(own)} tensors, first {drawn[0]}"
    record = WeightsRecord("random", module_weights_sha256(module), request.seed, which)
    del module
    return remade(make, request, record, name), record


def remade(make: Callable[[], Any], request: WeightsRequest, record: WeightsRecord, name: str) -> Any:
    """The module of `record` once more; raises `BadInputError` where the factory `name` gives another one each time."""
    if request.path is not None:
        return with_weights(make, request)[0]
    with seeded(request.seed):
        module = make().eval()
        if record.source == "random":
            with_drawn_normalization(module)
    if module_weights_sha256(module) != record.sha256:
        raise BadInputError(
            f"{name} makes other weights each time it is called, whatever the seed\n"
            "draw them from torch's, NumPy's or Python's own generator, or load them from a file"
        )
    return module


def load_state(module: Any, path: Path) -> None:
    """Loads a state dict strictly; raises `BadInputError` that names the first tensors that do not fit."""
    state = state_dict_from_file(path)
    own = module.state_dict()
    missing = sorted(set(own) - set(state))
    unexpected = sorted(set(state) - set(own))
    misshapen = sorted(name for name in set(own) & set(state) if own[name].shape != state[name].shape)
    for names, what in ((missing, "lacks"), (unexpected, "has unknown"), (misshapen, "has in another shape")):
        if names:
            raise BadInputError(
                f"{path} does not fit this model: it {what} {len(names)} tensors, first {', '.join(names[:3])}\n"
                "give weights of the same architecture (for a head of another size, use file.py:factory)"
            )
    module.load_state_dict(state)


def state_dict_from_file(path: Path) -> Mapping[str, Any]:
    """Reads safetensors, or a `torch.save`d state dict with torch's weights-only reader. Nothing is unpickled freely."""
    import pickle
    import zipfile

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInputError(
            f"{path} is a pickle that would run code when loaded; save the state dict as .safetensors instead"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile, OSError) as error:
        raise BadInputError(
            f"{path} cannot be read as weights ({type(error).__name__}): it may be truncated or of another format"
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise BadInputError(f"{path} holds no state dict (names to tensors); save one with safetensors.torch.save_file")
    return state
