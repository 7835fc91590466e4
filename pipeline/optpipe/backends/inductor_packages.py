"""AOTInductor's packages of one artifact: code for every batch size of the profile, and beside it code for single sizes.

Code for one batch size has fixed shapes. Each package holds weights of its own. All but the first are compiled side by side, in
processes of their own: `python -m optpipe.backends.inductor_packages PROGRAM PACKAGE TF32 CONFIGS`.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.torch_program import set_float32_products
from optpipe.core.process_group import end_with_parent, open_process_group
from optpipe.core.tensors import TensorSpec
from optpipe.errors import BadInputError, StageError

GENERAL = "model.pt2"
"""The package for all batch sizes."""


def name_static_package(size: int) -> str:
    """The file of the package for one batch size."""
    return f"batch-{size}.pt2"


def parse_static_batches(text: str) -> tuple[int, ...]:
    """`1,64` as sizes in ascending order, each once. Raises BadInputError for anything else."""
    sizes = {each.strip() for each in text.split(",") if each.strip()}
    if wrong := sorted(each for each in sizes if not each.isdecimal() or int(each) < 1):
        raise BadInputError(f"option static_batches={text}: '{wrong[0]}' is not a batch size; example: 1,64")
    return tuple(sorted(map(int, sizes)))


@dataclass(frozen=True, slots=True)
class Compilation:
    """One exported program and the file that its package becomes."""

    program: Any
    """A `torch.export.ExportedProgram`."""
    package: Path


def compile_packages(
    first: Compilation, others: Sequence[Compilation], configs: Mapping[str, Any], *, tf32: bool
) -> None:
    """Compiles all, `first` in this process. Raises what torch raises for it, and StageError for one of the others."""
    import torch

    with TemporaryDirectory() as scratch, ExitStack() as stack:
        started = []
        for at, each in enumerate(others):
            saved, log = Path(scratch) / f"{at}.pt2", Path(scratch) / f"{at}.log"
            torch.export.save(each.program, saved)
            command = [sys.executable, "-m", __name__, saved, each.package, str(int(tf32)), json.dumps(dict(configs))]
            process = stack.enter_context(open_process_group(list(map(str, command)), log, os.environ))
            started.append((each, process, log))
        _compile(first, configs)
        for each, process, log in started:
            if process.wait() != 0 or not each.package.exists():
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it was killed"]
                raise StageError(f"AOTInductor could not compile {each.package.stem}: {said[-1]}")


def _compile(each: Compilation, configs: Mapping[str, Any]) -> None:
    import torch

    torch._inductor.aoti_compile_and_package(
        each.program, package_path=str(each.package), inductor_configs=dict(configs)
    )


class Packages:
    """What a session calls: the code for the batch size of its inputs, else that for all sizes. Each is loaded when it is first needed."""

    def __init__(
        self, directory: Path, device: Device, inputs: Sequence[TensorSpec], static_batches: Sequence[int]
    ) -> None:
        self._directory, self._device = directory, device
        self._batched = (
            next((at, each.batch) for at, each in enumerate(inputs) if each.batch is not None)
            if static_batches
            else None
        )
        self._static = frozenset(static_batches)
        self._loaded = {GENERAL: load_package(directory / GENERAL, device)}

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of torch tensors on the device."""
        file = GENERAL
        if self._batched is not None:
            at, axis = self._batched
            size = inputs[at].shape[axis]
            file = name_static_package(size) if size in self._static else GENERAL
        if file not in self._loaded:
            self._loaded[file] = load_package(self._directory / file, self._device)
        return self._loaded[file](*inputs)


def load_package(package: Path, device: Device) -> Any:
    """The package's library as a callable.

    With torch 2.11 on an H200 a fresh process ended with signal 11 while loading, unless CUDA's libraries were loaded by
    name first, which is what ONNX Runtime offers. Before that torch spent 25 s compiling probes of the processor's vector
    instructions, which code for a GPU does not use.
    """
    import torch

    if device == "cpu":
        return torch._inductor.aoti_load_package(str(package), run_single_threaded=True)
    import onnxruntime
    from torch._inductor import config

    onnxruntime.preload_dlls()
    with config.patch({"cpp.vec_isa_ok": True}):
        return torch._inductor.aoti_load_package(str(package), run_single_threaded=True)


def main() -> None:
    """Compiles one program that another process saved."""
    import torch

    end_with_parent()
    saved, package, tf32, configs = sys.argv[1:]
    set_float32_products(tf32=tf32 == "1")
    _compile(Compilation(torch.export.load(saved), Path(package)), json.loads(configs))


if __name__ == "__main__":
    main()
