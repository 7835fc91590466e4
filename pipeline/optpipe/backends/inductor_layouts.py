"""torch's choice of layouts, compared with the program as it was exported.

With torch 2.11, that choice made the first convolution of DETR read its image in another layout (-3 dB; its logits had 33 instead of
55 dB), and without it SegFormer-B2 takes 9.19 instead of 6.17 ms. So the choice is made, and its result is checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optpipe.backends.inductor_packages import Compilation, load_package
from optpipe.core import torch

AS_EXPORTED: Mapping[str, Any] = {"layout_optimization": False}
"""The setting of torch's compiler that leaves each tensor in the layout that it was exported with."""
LEAST_AGREEMENT_DB = 45.0
"""SNR of compiled outputs relative to the same program, not compiled, below which the layouts are suspected: DETR had 33 dB, sound
FP16 programs have 50 dB or more."""
NEARER_DB = 6.0
"""The code without the choice of layouts replaces the other if it is nearer by this much. INT8 rounds a few values the other way in
any layout, which is no fault of the layouts."""


def takes_layouts(program: Any) -> bool:
    """Whether torch chooses layouts for an exported program: it does if the program has convolutions of images."""
    aten = torch.ops.aten
    convolutions = (
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv_transpose2d.input,
        aten.convolution.default,
    )
    return any(node.target in convolutions for node in program.graph.nodes)


def keep_right_layouts(compilation: Compilation, inputs: Sequence[Any]) -> str | None:
    """Checks a package on `inputs`, tensors on the GPU, and replaces it if torch's choice of layouts made it wrong.

    Returns a remark if the package was replaced. Raises what torch raises if it cannot compile the program again.
    """
    if dict(compilation.configs).get("layout_optimization") is False:
        return None
    with torch.inference_mode():
        expected = compilation.program.module()(*inputs)
    agreement = measure_agreement(expected, _run(compilation, inputs))
    if agreement >= LEAST_AGREEMENT_DB:
        return None
    configs = {**compilation.configs, **AS_EXPORTED}
    apart = compilation.package.with_name(f"as-exported-{compilation.package.name}")
    other = replace(compilation, package=apart, configs=configs)
    other.run()
    nearer = measure_agreement(expected, _run(other, inputs))
    if not nearer > agreement + NEARER_DB:  # neither is finite: the layouts are not the cause
        apart.unlink()
        return None
    apart.replace(compilation.package)
    return (
        f"{compilation.package.name} is built without torch's choice of layouts, which made it wrong: "
        f"{agreement:.0f} dB relative to the same program not compiled, {nearer:.0f} dB without the choice"
    )


def _run(compilation: Compilation, inputs: Sequence[Any]) -> Any:
    with torch.inference_mode():
        call = load_package(compilation.package, "cuda" if inputs[0].is_cuda else "cpu")
        return call(*inputs)


def measure_agreement(expected: Sequence[Any], outputs: Sequence[Any]) -> float:
    """The least SNR of the outputs in dB, over values that are finite in `expected`; minus infinity if another value is not."""
    least = float("inf")
    for whole, other in zip(expected, outputs, strict=True):
        known = torch.isfinite(whole.double())
        truth, value = whole.double()[known], other.double()[known]
        noise = (value - truth).square().sum()
        if not torch.isfinite(noise):
            return float("-inf")
        power = truth.square().sum()
        if noise > 0:
            least = min(least, float(10 * torch.log10(power / noise)) if power > 0 else -least)
    return least
