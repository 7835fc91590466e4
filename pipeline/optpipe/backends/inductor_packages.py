"""AOTInductor's packages of one artifact: code for all batch sizes of the profile, and code for single sizes.

Code for one batch size has fixed shapes, and each package holds the weights. `python -m optpipe.backends.inductor_packages TF32 FILE
[LOCK]` waits for the file, and compiles the programs that it names one after the other, so that no two of them time kernels at once.
"""

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.torch_session import set_float32_products
from optpipe.core import torch
from optpipe.core.card import TensorSpec
from optpipe.core.errors import BadInputError, first_line
from optpipe.core.events import Steps
from optpipe.core.process import POLL_S, end_with_parent, make_python_command, open_process_group
from optpipe.kernels.compilation import set_assembler
from optpipe.workspace.files import hold_lock, write_bytes

GENERAL = "model.pt2"
"""The package for all batch sizes."""
FAILURE = ".failure"


def name_static_package(size: int, variant: int = 0) -> str:
    """The file name of a package for one batch size; finally the fastest variant gets the name of the first."""
    return f"batch-{size}-variant-{variant}.pt2" if variant else f"batch-{size}.pt2"


def read_static_batch(name: str) -> int | None:
    """The batch size of a package with a name of `name_static_package`; None for the package for all sizes."""
    _, is_static, size = name.removesuffix(".pt2").partition("batch-")
    return int(size.partition("-")[0]) if is_static else None


def parse_static_batches(text: str) -> tuple[int, ...]:
    """Reads `1,64` as sorted sizes without duplicates, and `none` as no sizes. Raises BadInputError for anything else."""
    sizes = {word.strip() for word in text.split(",") if word.strip()} if text != "none" else set()
    if wrong := sorted(size for size in sizes if not size.isdecimal() or int(size) < 1):
        raise BadInputError(
            f"option static_batches={text}: '{wrong[0]}' is not a batch size; example: 1,64"
        )
    return tuple(sorted(map(int, sizes)))


@dataclass(frozen=True, slots=True)
class Compilation:
    program: Any
    """A `torch.export.ExportedProgram`."""
    package: Path
    configs: Mapping[str, Any]
    """Settings of `torch._inductor.config`."""

    def run(self) -> None:
        set_assembler()
        torch._inductor.aoti_compile_and_package(
            self.program, package_path=str(self.package), inductor_configs=dict(self.configs)
        )


def compile_packages(
    groups: Sequence[Sequence[Compilation]], *, tf32: bool, gpu_lock: Path | None = None
) -> Steps[dict[str, str]]:
    """Compiles each of `groups` in a parallel process, without `gpu_lock` the first group's only member in this process.

    Pauses twice: before it reads `groups`, so that the first process imports torch's compiler while they are made, and before it waits
    for the processes, which hold the lock of `gpu_lock` while they time kernels. Returns the reasons why programs could not be compiled,
    by the package's name. Raises what torch raises in this process.
    """
    lock = [] if gpu_lock is None else [str(gpu_lock)]
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)

        def start(number: int) -> Any:
            command = make_python_command(
                __name__, str(int(tf32)), str(folder / f"{number}.json"), *lock
            )
            return stack.enter_context(
                open_process_group(command, folder / f"{number}.log", os.environ)
            )

        started = [start(0)] if lock else []
        yield
        others = groups if lock else groups[1:]
        for number, compilations in enumerate(others):
            jobs = []
            for compilation in compilations:
                saved = folder / f"{id(compilation.program)}.pt2"
                if not saved.exists():
                    torch.export.save(compilation.program, saved)
                jobs.append([str(saved), str(compilation.package), dict(compilation.configs)])
            write_bytes(folder / f"{number}.json", json.dumps(jobs).encode())
            if number == len(started):
                started.append(start(number))
        if not lock:
            groups[0][0].run()
        yield
        failures = {}
        for compilations, process in zip(others, started, strict=True):
            process.wait()
            for package in (compilation.package for compilation in compilations):
                said = folder / package.with_suffix(FAILURE).name
                if said.exists():
                    failures[package.name] = said.read_text(encoding="utf-8")
                elif not package.exists():
                    failures[package.name] = (
                        "its process ended early; it may have run out of memory"
                    )
        return failures


class Packages:
    """Calls the code for the batch size of its inputs, or the code for all sizes. Packages are loaded on first use."""

    def __init__(
        self,
        directory: Path,
        device: Device,
        inputs: Sequence[TensorSpec],
        static_batches: Sequence[int],
    ) -> None:
        self._directory, self._device = directory, device
        self._batched = (
            next((at, spec.batch) for at, spec in enumerate(inputs) if spec.batch is not None)
            if static_batches
            else None
        )
        self._static = frozenset(static_batches)
        self._loaded = {GENERAL: load_package(directory / GENERAL, device)}

    def __call__(self, *inputs: Any) -> Any:
        file = GENERAL
        if self._batched is not None:
            at, axis = self._batched
            size = inputs[at].shape[axis]
            file = name_static_package(size) if size in self._static else GENERAL
        if file not in self._loaded:
            self._loaded[file] = load_package(self._directory / file, self._device)
        return self._loaded[file](*inputs)


def load_package(package: Path, device: Device) -> Any:
    """The package's library as a callable that takes and returns tensors by position.

    torch's own function imports its compiler first, which takes up to 8 s, and probes the CPU's vector instructions. With torch 2.11 on
    an H200, a new process ends with signal 11 while it loads a package, unless CUDA's libraries were loaded by name.
    """
    from optpipe.kernels.operators import register_operator

    register_operator()
    if device == "cuda":
        load_cuda_libraries()
    runner = torch._C._aoti.AOTIModelPackageLoader(
        str(package), "model", True, 1, -1
    )  # for a single caller, any device
    return lambda *inputs: runner.boxed_run(list(inputs))


@cache
def load_cuda_libraries() -> None:
    """Loads the libraries of CUDA and cuDNN that torch was built for, by their files or, where torch has others, by their names."""
    major = int(str(torch.version.cuda).partition(".")[0])
    folder = Path(torch.__file__).parents[1] / "nvidia"
    toolkit = ("cublasLt", "cublas", "nvrtc", "cudart")
    names = [
        *(f"lib{library}.so.{major}" for library in toolkit),
        "libcurand.so.10",
        f"libcufft.so.{major - 1}",
        *(f"libcudnn{part}.so.9" for part in CUDNN_PARTS),
    ]
    for name in names:
        file = next(folder.glob(f"*/lib/{name}"), name)
        with suppress(OSError):  # torch may be linked to a library of the system instead
            ctypes.CDLL(str(file))


CUDNN_PARTS = (
    "_engines_runtime_compiled",
    "_engines_precompiled",
    "_heuristic",
    "_ops",
    "_adv",
    "_graph",
    "",
)


def lock_timing(file: Path) -> None:
    """Makes torch's compiler hold the lock of `file` while it compiles Triton kernels and times them."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    time_kernels = PythonWrapperCodegen.generate_and_run_autotune_block

    def time_alone(wrapper: Any) -> None:
        with hold_lock(file):
            time_kernels(wrapper)

    PythonWrapperCodegen.generate_and_run_autotune_block = time_alone


def main() -> None:
    from optpipe.kernels.operators import register_operator

    end_with_parent()
    register_operator()
    set_float32_products(tf32=sys.argv[1] == "1")
    import_module("torch._inductor.compile_fx")
    while not (file := Path(sys.argv[2])).exists():
        sleep(POLL_S)
    jobs = json.loads(file.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        for lock in map(Path, sys.argv[3:]):
            if any(
                "max_autotune" in configs for *_, configs in jobs
            ):  # times kernels in other places too
                stack.enter_context(hold_lock(lock))
            else:
                lock_timing(lock)
        compile_jobs(jobs)


def compile_jobs(jobs: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Compiles saved programs; the reason why one could not be compiled goes into a file."""
    for saved, file, configs in jobs:
        package = Path(file)
        try:
            Compilation(torch.export.load(saved), package, configs).run()
        except Exception as error:  # noqa: BLE001 - torch, Triton, and compilers raise many types
            package.unlink(missing_ok=True)
            said = Path(saved).parent / package.with_suffix(FAILURE).name
            said.write_text(f"{type(error).__name__}: {first_line(error)}", encoding="utf-8")


if __name__ == "__main__":
    main()
