"""Which weights were asked for, and which a model was built with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optpipe.core.errors import BadInputError
from optpipe.core.hashing import hash_file


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """`default` (as published), `random` (seeded) or a `file`."""

    kind: Literal["default", "random", "file"] = "default"
    seed: int = 0
    path: Path | None = None

    def recipe(self) -> dict[str, str | int]:
        """What of the request decides the result: a file counts by its content, not by its name."""
        if self.path is not None:
            return {"file": hash_file(self.path)}
        return {"random": self.seed} if self.kind == "random" else {"default": True}


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """The weights a model really has."""

    source: str
    """`default:NAME` (as published, or as a factory sets them), `random`, `file` or `embedded` (part of an ONNX file)."""
    sha256: str
    """Over names, types, shapes and bytes of all tensors; for an ONNX file over its bytes."""
    seed: int | None = None
    drawn: str | None = None
    """Of a factory's random weights: how many of its tensors depend on the seed, and the first of them."""
    trained: bool = field(init=False, default=True)
    """Whether accuracy can mean anything."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained", self.source != "random")


def weights_from_text(text: str, seed: int = 0) -> WeightsRequest:
    """Reads `--weights`: `default`, `random` or `random:SEED`, or the path of a safetensors file or a state dict."""
    kind, _, number = text.partition(":")
    if text == "default" or (kind == "random" and number.isdecimal()) or text == "random":
        return WeightsRequest(kind="random" if kind == "random" else "default", seed=int(number or seed))
    path = Path(text)
    if not path.is_file():
        raise BadInputError(
            f"--weights {text}: no such file; expected default, random, random:SEED, or a .safetensors, .pt or .pth file"
        )
    return WeightsRequest(kind="file", path=path)
