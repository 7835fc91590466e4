"""Compiles kernels side by side, in processes without a GPU.

Triton compiles kernels one after the other, in the process that launches them. `triton.knobs.runtime.jit_cache_hook` sees each
kernel before it is compiled and can skip it; kernels that another process compiled are in Triton's cache on disk
(triton/runtime/jit.py). So this module is also the program of processes that compile in parallel.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optpipe.core import torch
from optpipe.core.process import end_with_parent, make_python_command, open_process_group

LEAST_KERNELS = 4
"""With fewer kernels, starting processes takes longer."""
MOST_PROCESSES = 16
"""The most processes; each takes up to 0.6 GB."""


def set_assembler() -> None:
    """Makes Triton use the ptxas of torch's compile workers in this process, unless TRITON_PTXAS_PATH is set.

    torch 2.11 ships ptxas 13.0 and Triton 12.8. Only the workers set this variable, and the assembler's version is part of the
    key of Triton's cache: the process that times kernels would compile each of them again.
    """
    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    if os.access(ptxas, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


@contextmanager
def collect_kernels() -> "Iterator[dict[str, None]]":
    """Collects kernels that are not compiled yet instead of launching them, as JSON from Triton, without duplicates."""
    from triton import knobs

    kernels: dict[str, None] = {}

    def collect(*, compile: dict[str, Any], **_: Any) -> bool:
        kernels[compile["specialization_data"]] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = collect
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_side_by_side(kernels: Sequence[str]) -> None:
    """Compiles kernels into Triton's cache for the current GPU; those that do not compile fail again when they are launched."""
    from triton.runtime import driver

    count = min(len(kernels), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if len(kernels) < LEAST_KERNELS or count < 2:
        return
    target = driver.active.get_current_target()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        jobs = Path(scratch, "jobs.json")
        jobs.write_text(
            json.dumps({"target": vars(target), "kernels": list(kernels)}), encoding="utf-8"
        )
        processes = []
        for first in range(count):
            command = make_python_command(__name__, str(jobs), str(first), str(count))
            log = Path(scratch, f"{first}.log")
            processes.append(stack.enter_context(open_process_group(command, log, os.environ)))
        for process in processes:
            process.wait()


def compile_kernel(kernel: str, target: Any) -> Any:
    """Compiles JSON from `collect_kernels` without a GPU, as in Triton's `JITFunction.preload`."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    job = json.loads(kernel)
    module, _, name = job["name"].rpartition(".")
    function = getattr(import_module(module), name)
    signature = {key: _freeze(value) for key, value in job["signature"].items()}
    constants = {
        tuple(key): value["constexpr"] if isinstance(value, dict) else value
        for key, value in zip(job["constant_keys"], job["constant_vals"], strict=True)
    }
    attributes = dict(zip(map(tuple, job["attrs_keys"]), job["attrs_vals"], strict=True))
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function, signature, constants, attributes
    )
    options = {key: _freeze(value) for key, value in job["options"].items()}
    return triton.compile(source, target=target, options=options)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def main() -> None:
    from triton.backends.compiler import GPUTarget

    end_with_parent()
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    target = GPUTarget(**jobs["target"])
    for kernel in jobs["kernels"][int(sys.argv[2]) :: int(sys.argv[3])]:
        try:
            compile_kernel(kernel, target)
        except Exception as error:  # noqa: BLE001 - Triton raises many types; timing reports the failure
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
