"""One launch of one kernel that computes a step: shapes, memory layouts and arguments, and the output that it fills."""

from collections.abc import Callable, Mapping
from math import ceil, gcd
from typing import Any

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.tactics import count_stem_cells

_RESIDENT = 2
"""Blocks of a persistent kernel for each multiprocessor."""
_BY_TORCH = {"BLOCK": 1024, "warps": 4}
"""How what torch computed is quantized."""


def _launch_kernel(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: Mapping[str, int], **fixed: Any
) -> None:
    """One launch that may begin before the kernel ahead of it has ended; the kernel itself waits for that one."""
    meta = {key: value for key, value in settings.items() if key != "warps"}
    kernel[grid](
        *arguments, **meta, **fixed, num_warps=settings["warps"], num_stages=settings.get("STAGES", 1), launch_pdl=True
    )


def _describe_tiles(tensor: Any, shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """A TMA descriptor of contiguous memory seen in `shape`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(tensor, list(shape), strides, list(block))


def as_channels_last(tensor: Any, *, flat: bool = False) -> Any:
    """The memory of a tensor as (images, height, width, channels), or with `flat` as it is: copied where it lies otherwise."""
    return tensor.contiguous() if flat or tensor.dim() == 2 else tensor.permute(0, 2, 3, 1).contiguous()


def _allocate(shape: tuple[int, ...], dtype: Any, like: Any, *, flat: bool = False) -> Any:
    """A new tensor, images channels last in memory."""
    import torch

    layout = torch.channels_last if len(shape) == 4 and not flat else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=layout)


def _allocate_convolved(step: steps.Convolution, given: Any) -> Any:
    """The tensor that a convolution of `given` fills."""
    import torch

    dtype = torch.float16 if step.half else torch.int8
    if step.flat:
        return _allocate((*given.shape[:-1], len(step.scale)), dtype, given, flat=True)
    top, left, below, right = step.padding
    spans = (step.dilation * (each - 1) + 1 for each in step.kernel)
    wide = (given.shape[2] + top + below, given.shape[3] + left + right)
    size = [(each - span) // step.stride + 1 for each, span in zip(wide, spans, strict=True)]
    return _allocate((len(given), len(step.scale), *size), dtype, given)


def _get_ending(step: steps.Convolution | steps.Depthwise | steps.Stem) -> dict[str, int]:
    added = {"ADD": step.added is not None} if isinstance(step, steps.Convolution) else {}
    return {**added, "ACTIVATION": steps.ACTIVATIONS.index(step.activation), "HALF": step.half}


def _launch_product(
    step: steps.Convolution, given: Any, added: Any, kept: Mapping[str, Any], settings: Mapping[str, int]
) -> Any:
    from optpipe.backends.torch_int8.kernels import int8_wgmma_product

    output, memory = _allocate_convolved(step, given), as_channels_last(given, flat=step.flat)
    channels, outputs = memory.shape[-1], len(step.scale)
    pixels, depth = memory.numel() // channels, kept["weight"].shape[1]
    rows, columns, block = settings["BM"], settings["BN"], settings["BK"]
    across = ceil(outputs / columns)
    tiles = ceil(pixels / rows) * across
    piece = (rows, columns // settings["PARTS"])
    target = _describe_tiles(as_channels_last(output, flat=step.flat), (pixels, outputs), piece)
    other = (
        target if added is None else _describe_tiles(as_channels_last(added, flat=step.flat), (pixels, outputs), piece)
    )
    grid = min(tiles, _RESIDENT * _count_multiprocessors(given.device)) if settings["PERSISTENT"] else tiles
    arguments = (
        _describe_tiles(memory, (pixels, channels), (rows, block)),
        _describe_tiles(kept["weight"], (outputs, depth), (columns, block)),
        other, target, kept["scale"], kept["bias"], step.added_scale, tiles, across, depth,
    )  # fmt: skip
    _launch_kernel(int8_wgmma_product, (grid,), arguments, settings, **_get_ending(step))
    return output


def _launch_at_once(
    step: steps.Convolution, given: Any, added: Any, kept: Mapping[str, Any], settings: Mapping[str, int]
) -> Any:
    from optpipe.backends.torch_int8.kernels_gluon import int8_wgmma_product_at_once

    output, memory = _allocate_convolved(step, given), as_channels_last(given, flat=step.flat)
    channels, outputs = memory.shape[-1], len(step.scale)
    pixels, depth = memory.numel() // channels, kept["weight"].shape[1]
    rows, columns, block = settings["BM"], settings["BN"], settings["BK"]
    across = ceil(outputs / columns)
    target = _describe_swizzled_tiles(as_channels_last(output, flat=step.flat), (pixels, outputs), (rows, columns))
    other = _describe_swizzled_tiles(
        as_channels_last(output if added is None else added, flat=step.flat), (pixels, outputs), (rows, columns)
    )
    arguments = (
        _describe_swizzled_tiles(memory, (pixels, channels), (rows, block)),
        _describe_swizzled_tiles(kept["weight"], (outputs, depth), (columns, block)),
        other, target, kept["scale"], kept["bias"], step.added_scale, across,
    )  # fmt: skip
    grid = (ceil(pixels / rows) * across,)
    _launch_kernel(int8_wgmma_product_at_once, grid, arguments, settings, BLOCKS=depth // block, **_get_ending(step))
    return output


def _describe_swizzled_tiles(tensor: Any, shape: tuple[int, int], block: tuple[int, int]) -> Any:
    """A TMA descriptor with the layout in shared memory that the Tensor Cores read."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = block[1] * tensor.element_size()
    swizzle = next(each for each in (128, 64, 32, 0) if each == 0 or width % each == 0)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.element_size(), rank=2)
    return TensorDescriptor(tensor, list(shape), [shape[1], 1], list(block), layout)


def _count_multiprocessors(device: Any) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_gathered(
    step: steps.Convolution, given: Any, added: Any, kept: Mapping[str, Any], settings: Mapping[str, int]
) -> Any:
    from optpipe.backends.torch_int8.kernels import int8_wgmma_convolution_gathered

    output, memory = _allocate_convolved(step, given), as_channels_last(given)
    images, height, width, channels = memory.shape
    outputs, out_height, out_width = output.shape[1:]
    pixels, depth = images * out_height * out_width, channels // step.groups
    rows, columns = settings["BM"], settings["BN"]
    across = ceil(outputs / columns)
    piece = (rows, columns // settings["PARTS"])
    target = _describe_tiles(as_channels_last(output), (pixels, outputs), piece)
    other = target if added is None else _describe_tiles(as_channels_last(added), (pixels, outputs), piece)
    arguments = (
        memory, _describe_tiles(kept["weight"], tuple(kept["weight"].shape), (columns, settings["BK"])), other, target,
        kept["scale"], kept["bias"], step.added_scale, pixels, height, width, out_height, out_width, across, channels,
        outputs // step.groups, depth,
    )  # fmt: skip
    top, left, *_ = step.padding
    fixed = {"R": step.kernel[0], "S": step.kernel[1], "STRIDE": step.stride, "DILATION": step.dilation}
    fixed |= {"TOP": top, "LEFT": left, "GROUPED": step.groups > 1, "PADDED": depth % settings["BK"] != 0}
    fixed |= _get_ending(step)
    _launch_kernel(int8_wgmma_convolution_gathered, (ceil(pixels / rows) * across,), arguments, settings, **fixed)
    return output


def _launch_boxes(
    step: steps.Convolution, given: Any, added: Any, kept: Mapping[str, Any], settings: Mapping[str, int]
) -> Any:
    from optpipe.backends.torch_int8.kernels import int8_wgmma_convolution_boxes

    output, memory = _allocate_convolved(step, given), as_channels_last(given)
    images, height, width, channels = memory.shape
    outputs, out_height, out_width = output.shape[1:]
    box = tuple(settings[key] for key in ("BI", "BH", "BW"))
    columns, block, stride = settings["BN"], settings["BK"], step.stride
    groups, down, along = (ceil(size / each) for size, each in zip((images, out_height, out_width), box, strict=True))
    across = ceil(outputs / columns)
    shape = (images, out_height, out_width, outputs)
    target = _describe_tiles(as_channels_last(output), shape, (*box, columns))
    other = target if added is None else _describe_tiles(as_channels_last(added), shape, (*box, columns))
    seen = (images, height // stride, stride, width // stride, stride * channels)
    depth = kept["weight"].shape[1] // step.kernel[0] ** 2
    arguments = (
        _describe_tiles(memory, seen, (box[0], box[1], 1, box[2], block)),
        _describe_tiles(kept["weight"], tuple(kept["weight"].shape), (columns, block)), other, target,
        kept["scale"], kept["bias"], step.added_scale, down, along, across, depth // block, channels,
    )  # fmt: skip
    fixed = {"R": step.kernel[0], "STRIDE": stride, "PAD": step.padding[0], **_get_ending(step)}
    _launch_kernel(int8_wgmma_convolution_boxes, (groups * down * along * across,), arguments, settings, **fixed)
    return output


def _launch_stem(step: steps.Stem, given: Any, _: Any, kept: Mapping[str, Any], settings: Mapping[str, int]) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import fp16_reorder_cells, fp16_wgmma_stem

    images, channels, height, width = given.shape
    outputs, kernel = step.weight.shape[0], step.weight.shape[2]
    spanned, lead = count_stem_cells(kernel, step.padding)
    size = [(each + 2 * step.padding - kernel) // 2 + 1 for each in (height, width)]
    rows, columns = (each + spanned - 1 for each in size)
    cells = torch.empty((images, rows, columns, 16), dtype=torch.float16, device=given.device)
    count = images * rows * columns
    ahead = (given.contiguous(), cells, count, height, width, rows, columns, step.padding + lead)
    _launch_kernel(fp16_reorder_cells, (ceil(count / 128),), ahead, {"BP": 128, "warps": 4}, CHANNELS=channels)
    output = _allocate((images, outputs, *size), torch.float16 if step.half else torch.int8, given)
    pixels, block = images * size[0] * size[1], settings["BM"]
    arguments = (
        cells, _describe_tiles(kept["weight"], tuple(kept["weight"].shape), (outputs, spanned * 16)),
        _describe_tiles(as_channels_last(output), (pixels, outputs), (block, outputs)),
        kept["bias"], step.inverse_scale, pixels, *size, rows, columns,
    )  # fmt: skip
    fixed = {"R": spanned, "N": outputs, **_get_ending(step)}
    _launch_kernel(fp16_wgmma_stem, (ceil(pixels / block),), arguments, settings, **fixed)
    return output


def _launch_depthwise(
    step: steps.Depthwise, given: Any, _: Any, kept: Mapping[str, Any], settings: Mapping[str, int]
) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import fp16_depthwise

    memory = as_channels_last(given)
    images, height, width, channels = memory.shape
    top, left, below, right = step.padding
    wide = (height + top + below, width + left + right)
    size = [(each - span) // step.stride + 1 for each, span in zip(wide, step.kernel, strict=True)]
    outputs = channels + step.spare
    output = _allocate((images, outputs, *size), torch.float16 if step.half else torch.int8, given)
    strips = images * size[0] * ceil(size[1] / settings["ALONG"])
    arguments = (
        memory, kept["weight"], as_channels_last(output), kept["bias"], step.inverse_scale, strips, height, width, *size,
        channels, outputs,
    )  # fmt: skip
    fixed = {"R": step.kernel[0], "S": step.kernel[1], "STRIDE": step.stride, "TOP": top, "LEFT": left}
    fixed |= {"ALIGN": _align(channels, outputs), **_get_ending(step)}
    grid = (ceil(strips / settings["BP"]), ceil(outputs / settings["BC"]))
    _launch_kernel(fp16_depthwise, grid, arguments, settings, **fixed)
    return output


def _launch_depthwise_by_torch(
    step: steps.Depthwise, given: Any, _: Any, kept: Mapping[str, Any], __: Mapping[str, int]
) -> Any:
    """cuDNN's convolution, or torch's own, then the activation and the quantization."""
    import torch

    weight, bias, groups = kept["by_torch"], kept["bias_by_torch"], len(step.weight)
    value = torch.nn.functional.conv2d(given, weight, bias, step.stride, step.padding[:2], groups=groups)
    if step.activation:
        value = getattr(torch.nn.functional, step.activation)(value)
    return value if step.half else _launch_quantize(step, value, None, None, _BY_TORCH)


def _launch_max_pool(step: steps.MaxPool, given: Any, _: Any, __: Any, settings: Mapping[str, int]) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import int8_max_pool

    images, channels, height, width = given.shape
    size = [(each + 2 * step.padding - step.kernel) // step.stride + 1 for each in (height, width)]
    output = _allocate((images, channels, *size), torch.int8, given)
    words = channels // 4
    pixels, block = images * size[0] * size[1], min(16, 1 << (words - 1).bit_length())
    memory, target = (as_channels_last(each).view(torch.int32) for each in (given, output))
    grid = (ceil(pixels / settings["BP"]), ceil(words / block))
    fixed = {"BC": block, "R": step.kernel, "STRIDE": step.stride, "PAD": step.padding}
    _launch_kernel(int8_max_pool, grid, (memory, target, pixels, height, width, *size, words), settings, **fixed)
    return output


def _launch_mean_pool(step: steps.MeanPool, given: Any, _: Any, __: Any, settings: Mapping[str, int]) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import int8_mean_pool

    images, channels, height, width = given.shape
    outputs = channels + step.spare
    output = _allocate((images, outputs), torch.int8, given)
    pixels = height * width
    arguments = (as_channels_last(given), output, step.inverse_scale / pixels, channels, outputs)
    fixed = {"PIXELS": pixels, "ALIGN": _align(channels)}
    _launch_kernel(int8_mean_pool, (images, ceil(outputs / settings["BC"])), arguments, settings, **fixed)
    return output[:, :, None, None] if step.keepdims else output


def _launch_mean_by_torch(step: steps.MeanPool, given: Any, _: Any, __: Any, ___: Mapping[str, int]) -> Any:
    """torch's mean, which spreads few images and channels over more of the GPU."""
    value = given.mean(dim=(2, 3), keepdim=step.keepdims)
    quantize = steps.Quantize(step.name, step.given, step.output, step.inverse_scale)
    return _launch_quantize(quantize, value, None, None, _BY_TORCH)


def _align(*channels: int) -> int:
    """The largest power of two up to 16 that divides all of them: loads may be as wide."""
    return gcd(16, *channels)


def _launch_linear(step: steps.Linear, given: Any, _: Any, kept: Mapping[str, Any], settings: Mapping[str, int]) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import int8_wgmma_linear

    depth, features = given.shape[-1], len(step.scale)
    rows = given.numel() // depth
    output = _allocate((*given.shape[:-1], features), torch.float32, given, flat=True)
    arguments = (
        _describe_tiles(given.contiguous(), (rows, depth), (settings["BM"], settings["BK"])),
        _describe_tiles(kept["weight"], tuple(kept["weight"].shape), (settings["BN"], settings["BK"])),
        output, kept["scale"], kept["bias"], rows, features, depth,
    )  # fmt: skip
    _launch_kernel(
        int8_wgmma_linear, (ceil(features / settings["BN"]), ceil(rows / settings["BM"])), arguments, settings
    )
    return output


def _launch_quantize(
    step: steps.Quantize | steps.Depthwise, given: Any, _: Any, __: Any, settings: Mapping[str, int]
) -> Any:
    """In the order of the given memory, gaps taken out."""
    import torch

    from optpipe.backends.torch_int8.kernels import int8_quantize

    output = torch.empty_like(given, dtype=torch.int8)
    source, count = given if output.stride() == given.stride() else given.clone(), given.numel()
    arguments = (source, output, step.inverse_scale, count)
    _launch_kernel(int8_quantize, (ceil(count / settings["BLOCK"]),), arguments, settings)
    return output


def _launch_quantize_gated(step: steps.Quantize, given: Any, gate: Any, _: Any, settings: Mapping[str, int]) -> Any:
    import torch

    from optpipe.backends.torch_int8.kernels import int8_quantize_gated

    images, channels, height, width = given.shape
    outputs, pixels = channels + step.spare, images * height * width
    output = _allocate((images, outputs, height, width), torch.int8, given)
    arguments = (
        as_channels_last(given), as_channels_last(gate), as_channels_last(output), step.inverse_scale, pixels,
        height * width, channels, outputs,
    )  # fmt: skip
    grid = (ceil(pixels / settings["BP"]), ceil(outputs / settings["BC"]))
    fixed = {"GATE": steps.GATES.index(step.gate_activation), "ALIGN": _align(channels, outputs)}
    _launch_kernel(int8_quantize_gated, grid, arguments, settings, **fixed)
    return output


LAUNCHERS: dict[str, Callable[[Any, Any, Any, Any, Mapping[str, int]], Any]] = {
    "depthwise_by_torch": _launch_depthwise_by_torch,
    "fp16_depthwise": _launch_depthwise,
    "fp16_wgmma_stem": _launch_stem,
    "int8_wgmma_convolution_boxes": _launch_boxes,
    "int8_wgmma_convolution_gathered": _launch_gathered,
    "int8_wgmma_linear": _launch_linear,
    "int8_max_pool": _launch_max_pool,
    "int8_mean_pool": _launch_mean_pool,
    "int8_wgmma_product": _launch_product,
    "int8_wgmma_product_at_once": _launch_at_once,
    "int8_quantize": _launch_quantize,
    "int8_quantize_gated": _launch_quantize_gated,
    "mean_by_torch": _launch_mean_by_torch,
}
"""By the kernel's name: called with the step, what it reads first and second, its constants, and the tactic's settings."""
