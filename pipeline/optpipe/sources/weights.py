"""Weights into modules: from a file that cannot run code, or seeded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optpipe.core.hashing import tensors_sha256
from optpipe.core.weights import WeightsRecord, WeightsRequest
from optpipe.errors import BadInputError


def module_weights_sha256(module: Any) -> str:
    """The hash over a module's state dict, whatever its types."""
    import torch

    def raw(tensor: Any) -> Any:
        flat = tensor.detach().cpu().contiguous()
        return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()

    return tensors_sha256({name: raw(tensor) for name, tensor in module.state_dict().items()})


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Calls `make` with torch's generator seeded, and leaves the generator as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def with_drawn_normalization(module: Any) -> Any:
    """Draws what batch normalization would have learned, from torch's generator; changes `module` in place.

    Freshly made, it is the identity: it folds away without a bias, and the graph is one that no trained model has.
    """
    import torch

    with torch.no_grad():
        for norm in module.modules():
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
                for scale in (norm.weight, norm.running_var):
                    if scale is not None:
                        scale.uniform_(0.8, 1.2)
                for shift in (norm.bias, norm.running_mean):
                    if shift is not None:
                        shift.normal_(0.0, 0.1)
    return module


def with_weights(make: Callable[[], Any], request: WeightsRequest) -> tuple[Any, WeightsRecord]:
    """A module made by `make`, with random or file weights as requested, in evaluation mode."""
    if request.path is None:
        module = seeded(lambda: with_drawn_normalization(make()), request.seed).eval()
        return module, WeightsRecord("random", module_weights_sha256(module), request.seed)
    module = seeded(make, request.seed).eval()
    load_state(module, request.path)
    return module, WeightsRecord("file", module_weights_sha256(module))


def load_state(module: Any, path: Path) -> None:
    """Loads a state dict strictly; raises `BadInputError` that names the first tensors that do not fit."""
    state = state_dict_from_file(path)
    own = module.state_dict()
    missing = sorted(set(own) - set(state))
    unexpected = sorted(set(state) - set(own))
    misshapen = sorted(name for name in set(own) & set(state) if own[name].shape != state[name].shape)
    for names, what in ((missing, "lacks"), (unexpected, "has unknown"), (misshapen, "has in another shape")):
        if names:
            message = (
                f"{path} does not fit this model: it {what} {len(names)} tensors, first {', '.join(names[:3])}\n"
                "give weights of the same architecture (for a head of another size, use file.py:factory)"
            )
            raise BadInputError(message)
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
        message = f"{path} is a pickle that would run code when loaded; save the state dict as .safetensors instead"
        raise BadInputError(message) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile, OSError) as error:
        message = f"{path} cannot be read as weights ({type(error).__name__}): it may be truncated or of another format"
        raise BadInputError(message) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        message = f"{path} holds no state dict (names to tensors); save one with safetensors.torch.save_file"
        raise BadInputError(message)
    return state
