"""The kind of work of a kernel, and its use of Tensor Cores, from its name.

Sources of the patterns: names in real traces (H200, torch 2.11, cuDNN 9, cuBLAS 13), the naming of CUTLASS and cuDNN
(`tensorop`, `simt`, `s16816`: the shape of one matrix instruction), and PTX's instruction names (`hmma`, `imma`, `wgmma`,
`tcgen05`).
"""

import re
from enum import StrEnum
from functools import lru_cache

import polars as pl

_PLAIN = re.compile(
    r"simt|ffma|sgemm(?!.*(tensor|s\d{3,5}))|dgemm(?!.*dmma)|scudnn|winograd|gemv|gemmk1|splitk?reduce|gemmSN|dot_kernel|"
    r"implicit_convolve|explicit_convolve|conv2d_grouped_direct|convolve_common_engine|depthwise|conv_depthwise",
    re.IGNORECASE,
)
"""Matrix work on the FMA units, and helpers of matrix kernels that only move or add."""
_TENSOR = re.compile(
    r"tensor_?op|(?<![a-z])_?tensor\d+x\d+x\d+|[hidqsbg]+mma(?![a-z]*_?sync_none)|wgmma|tcgen05|utc\w*mma|nvjet|xmma|"
    r"[a-z]?(884|1688|16816|16832|8816|16864)(gemm|fprop|dgrad|wgrad|cudnn|_|\b)|"
    r"SM(80|90|100|120)_\d+x\d+x\d+|fmha|flash_?(fwd|attn|attention)|wmma",
    re.IGNORECASE,
)
_TRITON_TEMPLATE = re.compile(r"triton_(tem|mm|bmm|conv)|triton_.*convolution", re.IGNORECASE)


class KernelKind(StrEnum):
    MATRIX = "matrix"
    ATTENTION = "attention"
    NORMALIZATION = "normalization"
    POOLING = "pooling"
    REDUCTION = "reduction"
    SOFTMAX = "softmax"
    LAYOUT = "layout"
    CAST = "cast"
    ELEMENTWISE = "elementwise"
    IMAGE = "image"
    OTHER = "other"


_MATRIX_WORK = {KernelKind.MATRIX, KernelKind.ATTENTION}
# The first match wins, so specific words stand first.
_KINDS: tuple[tuple[KernelKind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (KernelKind.ATTENTION, r"fmha|flash_?(fwd|attn|attention)|attention|sdpa"),
        (
            KernelKind.LAYOUT,
            r"nchwtonhwc|nhwctonchw|AddPadding|transpose|permute|reorder|reformat|nhwc2nchw|nchw2nhwc|im2col|concat|"
            r"split_?k?_?copy|CatArray",
        ),
        (KernelKind.NORMALIZATION, r"batch_?norm|layer_?norm|group_?norm|rms_?norm|bn_fw|bn_inf"),
        (KernelKind.POOLING, r"pool"),
        (KernelKind.SOFTMAX, r"softmax"),
        (
            KernelKind.IMAGE,
            r"jpeg|huffman|idct|dct|resample|resize|crop|mirror|slice_?flip|SliceKernel|colou?r|dali|warp_?affine|ycbcr|nvimgcodec",
        ),
        (
            KernelKind.MATRIX,
            r"gemm|gemv|nvjet|xmma|cutlass|convolve|conv\dd|_conv|convolution|fprop|dgrad|wgrad|winograd|[hisd]cudnn|([hisd]|[hiqb]g)mma|"
            r"wgmma|matmul|dot_kernel|triton_(tem|mm|bmm)|splitkreduce|tensorop|s\d{3,5}(gemm|cudnn)",
        ),
        (KernelKind.CAST, r"direct_copy_kernel|copy_kernel|LoadWithCast|_Cast|cast_kernel|UnaryElementWise.*Cast|convert|quantize"),
        (KernelKind.ELEMENTWISE, r"op_(generic_)?tensor_kernel"),  # cuDNN's cudnnOpTensor and cudnnAddTensor; one argument is "reduced"
        (KernelKind.REDUCTION, r"reduce|argmax|argmin|triton_(red|per)"),
        (
            KernelKind.ELEMENTWISE,
            r"elementwise|triton_poi|_UnaryElementWise|_BinaryElementWise|clamp|relu|add_|bias|activation|fill|pointwise",
        ),
    )
)  # fmt: skip


@lru_cache(maxsize=8192)
def classify_kernel(name: str) -> KernelKind:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), KernelKind.OTHER)


def uses_tensor_cores(name: str) -> bool | None:
    """None for matrix work whose name does not tell."""
    if classify_kernel(name) not in _MATRIX_WORK:
        return False
    if _TRITON_TEMPLATE.search(name):
        return None
    return not _PLAIN.search(name) and bool(_TENSOR.search(name))


_PRECISIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (precision, re.compile(pattern))
    for precision, pattern in (
        ("fp8", r"e4m3|e5m2|fp8|_qmma|nvjet_\w*?_q{2,}"),
        ("int8", r"s8s8|i8816|i16832|imma|int8|_i8i8|nvjet_\w*?_i{2,}|s8_s8|signed char"),
        ("bf16", r"bf16|__nv_bfloat16|BFloat16|nvjet_sm\d+_[a-z]*t[a-z]*_"),
        ("tf32", r"tf32|s1688(gemm|fprop|dgrad|wgrad|cudnn)(?!_f16)"),
        (
            "fp16",
            r"f16|fp16|__half|c10::Half|_h(ss|sh|hh)|hmma|hgemm|h884|h1688|h16816|nvjet_sm\d+_h|half",
        ),
        ("fp64", r"dgemm|dmma|double"),
        ("fp32", r"f32f32|sgemm|scudnn|ffma|float"),
    )
)


@lru_cache(maxsize=8192)
def find_precision(name: str) -> str | None:
    """The element type that a kernel's name tells; None if it does not."""
    return next((kind for kind, pattern in _PRECISIONS if pattern.search(name)), None)


def classify_kernels(names: pl.Series) -> pl.DataFrame:
    """One row per distinct name: `name`, `kind`, `tensor_core`, and `matrix`, false for the helpers of products and attention."""
    rows = []
    for name in names.cast(pl.String).unique().drop_nulls().sort():
        kind, helps = (
            classify_kernel(name),
            re.search(r"splitk?reduce|gemv|dot_kernel", name, re.IGNORECASE),
        )
        rows.append((name, kind.value, uses_tensor_cores(name), kind in _MATRIX_WORK and not helps))
    schema = {"name": pl.String, "kind": pl.String, "tensor_core": pl.Boolean, "matrix": pl.Boolean}
    return pl.DataFrame(rows, schema, orient="row")


def find_function_name(name: str) -> str:
    """The function's name alone, without return type, namespaces, templates, and arguments, as ncu compares it.

    >>> find_function_name("void at::native::vectorized_elementwise_kernel<4, float>(int, float)")
    'vectorized_elementwise_kernel'
    """
    flat = re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", name)
    return _strip_templates(flat).strip().removeprefix("void ").rsplit("::", 1)[-1].strip()


@lru_cache(maxsize=8192)
def make_comparable_name(name: str) -> str:
    """The name without namespaces and casts of template arguments, which nsys prints and ncu does not.

    >>> make_comparable_name("void at::native::kernel<(int)4, c10::Half>(at::TensorIterator &)")
    'voidkernel<4,Half>(TensorIterator&)'
    """
    plain = re.sub(r"\((?:unsigned )?(?:int|long|bool|char|short)\)(?=-?\d)", "", name)
    plain = re.sub(r"<?unnamed>::|\(anonymous namespace\)::", "", plain)
    return re.sub(r"\s+", "", re.sub(r"\b[A-Za-z_]\w*::", "", plain))


def shorten_name(name: str, width: int = 60) -> str:
    """The function's name without return type, namespaces, and template and call arguments, cut to `width`."""
    functor = re.search(
        r"(CUDAFunctor_\w+|\w+_kernel_cuda|batch_norm\w+|launch_\w+|FillFunctor|MeanOps|cutlass_(?!_)\w+_[a-z]\w+)",
        name,
    )
    base = re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", name)
    base = re.sub(r"^void ", "", _strip_templates(base)).rsplit("::", 1)[-1].strip() or name
    if functor and base in {"Kernel", "Kernel2", "device_kernel"}:
        base = functor.group(1)
    text = f"{base} [{functor.group(1)}]" if functor and functor.group(1) not in base else base
    return text if len(text) <= width else text[: width - 1] + "…"


def _strip_templates(name: str) -> str:
    depth, kept = 0, []
    for character in name.replace("(anonymous namespace)", "anonymous").replace(
        "<unnamed>", "unnamed"
    ):
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif depth == 0:
            kept.append(character)
    return "".join(kept)
