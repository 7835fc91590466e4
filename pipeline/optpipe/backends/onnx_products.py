"""How many multiply-accumulates (MACs) the matrix products of an ONNX node have, and in which type it computes them.

A node's count is a number, which is 0 for an operator without products. It is None if it is unknown: for an operator that no
table here has, or if shape inference does not find a size. An unknown count never becomes 0.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from optpipe.core import onnx
from optpipe.core.precision import UNATTRIBUTED

Shape = tuple[int, ...]
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's contributed operators (ContribOperators.md of ONNX Runtime 1.31)."""
_CONTRIBUTED = (MICROSOFT, "com.microsoft.nchwc", "com.ms.internal.nhwc")
_STANDARD = ("", "ai.onnx")
_CLASSICAL = "ai.onnx.ml"


class GraphTypes(NamedTuple):
    """Element types and shapes by tensor name, for inputs of `opt` shapes."""

    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]


def read_attributes(node: Any) -> dict[str, Any]:
    """The attributes of a node by name; texts are bytes."""
    return {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }


def _find_shape(node: Any, at: int, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of input `at`; None if it is unknown or left out."""
    return shapes.get(node.input[at]) if at < len(node.input) and node.input[at] else None


def _find_output(node: Any, shapes: Mapping[str, Shape]) -> Shape | None:
    return shapes.get(node.output[0])


# One counter for each kind of product.

_WEIGHT_POSITION = {"QLinearConv": 3, "QLinearConvTranspose": 3, "QLinearMatMul": 3, "QGemm": 3}


def _count_convolution(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Each output value is a sum over the input channels of its group and the window."""
    output = _find_output(node, shapes)
    weight = _find_shape(node, _WEIGHT_POSITION.get(node.op_type, 1), shapes)
    return math.prod(output) * math.prod(weight[1:]) if output and weight else None


def _count_transposed(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Each input value is multiplied by the output channels of its group and the window."""
    data = _find_shape(node, 0, shapes)
    weight = _find_shape(node, _WEIGHT_POSITION.get(node.op_type, 1), shapes)
    return math.prod(data) * math.prod(weight[1:]) if data and weight else None


def _count_matmul(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Output values times the length of a row of the first factor, which FusedMatMul and Gemm may transpose."""
    output, left = _find_output(node, shapes), _find_shape(node, 0, shapes)
    if output is None or not left:
        return None
    attributes = read_attributes(node)
    if not attributes.get("transA"):
        return math.prod(output) * left[-1]
    return math.prod(output) * left[0 if attributes.get("transBatchA") else -2]


def _count_recurrent(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Each step multiplies each sample by the weights of the input and of the state."""
    data = _find_shape(node, 0, shapes)
    weights = [_find_shape(node, at, shapes) for at in (1, 2)]
    if not data or not all(weights):
        return None
    return math.prod(data[:2]) * sum(math.prod(shape) for shape in weights if shape)


def _count_einsum(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """The factors of an Einsum are multiplied from left to right, as ONNX Runtime does (einsum_compute_preprocessor.cc).

    A step that sums over no index is an elementwise product and has no MACs.
    """
    equation = read_attributes(node)["equation"].decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    labels = terms.split(",")
    if "..." in equation:
        return None
    if "->" not in equation:
        joined = "".join(labels)
        result = "".join(sorted(label for label in {*joined} if joined.count(label) == 1))
    sizes: dict[str, int] = {}
    for at, term in enumerate(labels):
        shape = _find_shape(node, at, shapes)
        if shape is None or len(shape) != len(term):
            return None
        for label, size in zip(term, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    macs, left = 0, {*labels[0]}
    for at, term in enumerate(labels[1:], 2):
        needed = {*result}.union(*labels[at:])
        joint = left | {*term}
        if (left & {*term}) - needed:
            macs += math.prod(sizes[label] for label in joint)
        left = joint & needed
    return macs


def _count_attention(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Attention of ONNX (opset 23): queries by keys, and their weights by values, for each query head."""
    query, key, output = (
        _find_shape(node, 0, shapes),
        _find_shape(node, 1, shapes),
        _find_output(node, shapes),
    )
    past = _find_shape(node, 4, shapes)
    if not query or not key or not output:
        return None
    if len(node.input) > 4 and node.input[4] and past is None:
        return None
    heads_apart = len(query) == 4
    steps = query[2] if heads_apart else query[1]
    length = (key[2] if len(key) == 4 else key[1]) + (past[2] if past else 0)
    width = (query[1] * query[3] if heads_apart else query[2]) + (
        output[1] * output[3] if heads_apart else output[2]
    )
    return query[0] * steps * length * width


def _count_projected_attention(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """Attention and QAttention of ONNX Runtime: the projection of the input to queries, keys, and values is part of it."""
    data, weights = _find_shape(node, 0, shapes), _find_shape(node, 1, shapes)
    position = 8 if node.op_type == "QAttention" else 4
    past = _find_shape(node, position, shapes)
    if not data or len(data) != 3 or not weights or len(weights) != 2:
        return None
    if len(node.input) > position and node.input[position] and past is None:
        return None
    batch, steps, _ = data
    sizes: list[int] = read_attributes(node).get("qkv_hidden_sizes") or [weights[1] // 3] * 3
    length = steps + (past[3] if past else 0)
    return batch * steps * math.prod(weights) + batch * steps * length * (sizes[0] + sizes[2])


def _count_multi_head(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """MultiHeadAttention of ONNX Runtime with separate queries, keys, and values; None for packed ones."""
    query, key, output = (
        _find_shape(node, 0, shapes),
        _find_shape(node, 1, shapes),
        _find_output(node, shapes),
    )
    past = _find_shape(node, 6, shapes)
    if not query or len(query) != 3 or not key or len(key) not in (3, 4) or not output:
        return None
    if len(node.input) > 6 and node.input[6] and past is None:
        return None
    length = (key[2] if len(key) == 4 else key[1]) + (past[2] if past and len(past) == 4 else 0)
    return query[0] * query[1] * length * (query[2] + output[-1])


def _count_grouped(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """GroupQueryAttention of ONNX Runtime, over the whole length of the present keys."""
    query, output = _find_shape(node, 0, shapes), _find_output(node, shapes)
    present = shapes.get(node.output[1]) if len(node.output) > 1 else None
    if not query or len(query) != 3 or not output or not present or len(present) != 4:
        return None
    return query[0] * query[1] * present[2] * 2 * output[-1]


def _count_experts(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """MoE of ONNX Runtime: each token passes the two or three layers of `k` experts."""
    data = _find_shape(node, 0, shapes)
    first, second = _find_shape(node, 2, shapes), _find_shape(node, 4, shapes)
    third = _find_shape(node, 6, shapes)
    if not data or not first or not second or (third is None and len(node.input) > 6):
        return None
    layers = math.prod(first[1:]) + math.prod(second[1:]) + (math.prod(third[1:]) if third else 0)
    experts = int(read_attributes(node).get("k", 1))
    return math.prod(data[:-1]) * experts * layers


def _count_linear(node: Any, shapes: Mapping[str, Shape]) -> int | None:
    """LinearClassifier and LinearRegressor: each row by all coefficients."""
    data = _find_shape(node, 0, shapes)
    count = len(read_attributes(node)["coefficients"])
    return count * math.prod(data[:-1]) if data else None


Counter = Callable[[Any, Mapping[str, Shape]], int | None]
_COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(
        ("Conv", "ConvInteger", "DeformConv", "FusedConv", "NhwcConv", "NhwcFusedConv", "QLinearConv"),
        _count_convolution,
    ),
    **dict.fromkeys(
        ("ConvTranspose", "ConvTransposeWithDynamicPads", "QLinearConvTranspose"), _count_transposed
    ),
    **dict.fromkeys(
        (
            "CDist", "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "Gemm",
            "GemmFastGelu", "GemmFloat8", "MatMul", "MatMulBlockQuantizedFp4Weight",
            "MatMulBlockQuantizedFp8Weight", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger", "MatMulInteger16",
            "MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QLinearMatMul", "QOrderedMatMul", "TransposeMatMul",
        ),
        _count_matmul,
    ),
    **dict.fromkeys(("DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"), _count_recurrent),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor"), _count_linear),
    "Einsum": _count_einsum,
    "Attention": _count_attention,
    "QAttention": _count_projected_attention,
    "MultiHeadAttention": _count_multi_head,
    "GroupQueryAttention": _count_grouped,
    "MoE": _count_experts,
}  # fmt: skip
_WITHOUT_PRODUCTS = {
    **dict.fromkeys(_STANDARD, frozenset((
        "Abs", "Acos", "Acosh", "Add", "Affine", "AffineGrid", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh",
        "AveragePool", "BatchNormalization", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
        "BitwiseXor", "BlackmanWindow", "Cast", "CastLike", "Ceil", "Celu", "CenterCropPad", "Clip", "Col2Im", "Compress",
        "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "Cos", "Cosh", "Crop", "CumProd", "CumSum",
        "DepthToSpace", "DequantizeLinear", "Div", "Dropout", "DynamicQuantizeLinear", "DynamicSlice", "Elu", "Equal",
        "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu",
        "GivenTensorFill", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual",
        "GridSample", "GroupNormalization", "HammingWindow", "HannWindow", "HardSigmoid", "HardSwish", "Hardmax",
        "Identity", "If", "ImageDecoder", "ImageScaler", "InstanceNormalization", "IsInf", "IsNaN", "LRN",
        "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "Loop", "LpNormalization", "LpPool",
        "Max", "MaxPool", "MaxRoiPool", "MaxUnpool", "Mean", "MeanVarianceNormalization", "MelWeightMatrix",
        "MemcpyFromHost", "MemcpyToHost", "Min", "Mish", "Mod", "Mul", "Multinomial", "Neg", "NegativeLogLikelihoodLoss",
        "NonMaxSuppression", "NonZero", "Not", "OneHot", "Optional", "OptionalGetElement", "OptionalHasElement", "Or",
        "PRelu", "Pad", "ParametricSoftplus", "Pow", "QuantizeLinear", "RMSNormalization", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Reciprocal", "ReduceL1", "ReduceL2",
        "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
        "ReduceSumSquare", "RegexFullMatch", "Relu", "Reshape", "Resize", "ReverseSequence", "RoiAlign",
        "RotaryEmbedding", "Round", "Scale", "ScaledTanh", "Scan", "Scatter", "ScatterElements", "ScatterND", "Selu",
        "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
        "SequenceMap", "Shape", "Shrink", "Sigmoid", "Sign", "SimplifiedLayerNormalization", "Sin", "Sinh", "Size", "Slice",
        "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "SpaceToDepth", "Split", "SplitToSequence", "Sqrt",
        "Squeeze", "StringConcat", "StringNormalizer", "StringSplit", "Sub", "Sum", "SwiGLU", "Swish", "Tan", "Tanh",
        "TensorScatter", "TfIdfVectorizer", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique",
        "Unsqueeze", "Upsample", "Where", "Xor",
    ))),
    **dict.fromkeys(_CONTRIBUTED, frozenset((
        "AveragePool", "BatchNormalization", "BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "BiasSplitGelu",
        "BifurcationDetector", "BitmaskBiasDropout", "BitmaskDropout", "BranchwiseRMSNorm", "ComplexMul", "ComplexMulConj",
        "CropAndResize", "DepthToSpace", "DequantizeBFP", "DequantizeLinear", "DequantizeWithOrder", "DynamicTimeWarping",
        "EmbedLayerNormalization", "ExpandDims", "FastGelu", "GatedAdd", "GatedRMSNorm", "GatherBlockQuantized", "GatherND",
        "Gelu", "GemmaRotaryEmbedding", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GridSample", "GroupNorm",
        "InstanceNormalization", "IsAllFinite", "LRN", "LpPool", "MRotaryEmbedding", "MaxPool", "MaxUnpool",
        "MaxpoolWithMask", "MulInteger", "MurmurHash3", "NGramHashMapping", "NGramRepeatBlock", "NhwcMaxPool", "Pad",
        "QEmbedLayerNormalization", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
        "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
        "QOrderedGelu", "QOrderedLayerNormalization", "QuantizeBFP", "QuantizeLinear", "QuantizeWithOrder", "QuickGelu",
        "Range", "ReduceSumInteger", "RemovePadding", "ReorderInput", "ReorderOutput", "Resize", "RestorePadding",
        "RotaryEmbedding", "SampleOp", "ScaledSiLU", "SkipGroupNorm", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "SpaceToDepth", "Tokenizer", "TorchEmbedding", "Trilu", "UnfoldTensor",
        "Unique", "Upsample", "VarlenNGramHashMapping",
        # these run a graph of their attributes, whose nodes are counted themselves
        "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch",
    ))),
    _CLASSICAL: frozenset((
        "ArrayFeatureExtractor", "Binarizer", "CastMap", "CategoryMapper", "DictVectorizer", "FeatureVectorizer",
        "Imputer", "LabelEncoder", "Normalizer", "OneHotEncoder", "Scaler", "TreeEnsemble", "TreeEnsembleClassifier",
        "TreeEnsembleRegressor", "ZipMap",
    )),
}  # fmt: skip
"""Operators without matrix products, by domain. One that is neither here nor in `_COUNTERS` has an unknown cost: FFTs,
determinants, state spaces, operators of other domains, and calls of functions are among these."""
_IN_TYPE_OF_DATA = {
    "CausalConvWithState", "DFT", "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention",
    "Det", "GatedDeltaNet", "Inverse", "Irfft", "LinearAttention", "LongformerAttention", "PackedAttention",
    "PackedMultiHeadAttention", "PagedAttention", "Rfft", "STFT", "SVMClassifier", "SVMRegressor", "SparseAttention",
}  # fmt: skip
"""Operators of unknown cost that compute in the type of their first input."""
QUANTIZES_ITS_DATA = {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
"""Operators that quantize floating-point data to INT8 and compute in INT8."""
INT8_LEVEL = 4
"""`accuracy_level` of MatMulNBits from which ONNX Runtime quantizes its data to INT8, by block."""


def count_node_macs(node: Any, known: GraphTypes) -> int | None:
    """MACs of the matrix products of one node for the shapes in `known`; 0 for none, None if they are not known.

    Nodes inside a graph of an attribute are counted as if they ran once, which `layers_from_onnx` does not take for known.

        >>> node = onnx.helper.make_node("MatMul", ["a", "b"], ["c"])
        >>> count_node_macs(node, GraphTypes({}, {"a": (2, 8), "b": (8, 4), "c": (2, 4)}))
        64
    """
    if node.op_type in _WITHOUT_PRODUCTS.get(node.domain, ()):
        return 0
    if node.domain not in (*_STANDARD, *_CONTRIBUTED, _CLASSICAL) or not node.output:
        return None
    counter = _COUNTERS.get(node.op_type)
    if node.op_type == "Attention" and node.domain == MICROSOFT:
        counter = _count_projected_attention
    return None if counter is None else counter(node, known.shapes)


def find_product_type(node: Any, known: GraphTypes) -> str:
    """The type in which a node with products computes them: that of its data, unless the operator quantizes these.

    `unattributed` for an operator that may compute in any type.
    """
    if node.op_type in QUANTIZES_ITS_DATA:
        return "int8"
    if read_attributes(node).get("accuracy_level") == INT8_LEVEL:
        return "int8"
    known_domain = node.domain in (*_STANDARD, *_CONTRIBUTED, _CLASSICAL)
    if not known_domain or node.op_type not in _COUNTERS.keys() | _IN_TYPE_OF_DATA:
        return UNATTRIBUTED
    return known.types.get(node.input[0], UNATTRIBUTED) if node.input else UNATTRIBUTED


# Standard operators whose outputs have the shapes and types of contributed ones. onnx's inference knows only its domain, and
# would lose every tensor after the first of ONNX Runtime's operators.

_LIKE_FIRST_INPUT = {
    "BiasAdd", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "GroupNorm", "GroupQueryAttention", "MoE",
    "MultiHeadAttention", "QMoE", "QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization", "SkipGroupNorm",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
_PACKED = {"GroupQueryAttention", "MultiHeadAttention"}
"""Without separate keys, their first input holds queries, keys, and values, and is larger than the output."""


def standardize_for_inference(graph: Any) -> None:
    """Replaces contributed operators of a graph by standard ones with outputs of the same shapes and types, in place.

    Operators that have no such form stay. The result is for shape inference alone: it computes something else.
    """
    stored = {weight.name: weight for weight in graph.initializer}
    sizes = {name: tuple(weight.dims) for name, weight in stored.items()}
    kinds = {name: weight.data_type for name, weight in stored.items()}
    for value in graph.input:
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_value for dim in tensor.shape.dim)
        sizes.setdefault(value.name, dims if all(dims) else ())
        kinds.setdefault(value.name, tensor.elem_type)
    nodes = []
    for node in graph.node:
        if node.domain in _STANDARD and node.op_type != "SimplifiedLayerNormalization":
            nodes.append(node)
            continue
        nodes += _replace_contributed(node, graph, sizes, kinds) or [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _replace_contributed(
    node: Any, graph: Any, sizes: Mapping[str, Shape], kinds: Mapping[str, int]
) -> list[Any] | None:
    make = onnx.helper.make_node
    attributes = read_attributes(node)
    inputs, output = list(node.input), node.output[0] if node.output else ""

    def multiply(data: str, size: Shape, kind: int) -> list[Any]:
        """The product of `data` and a matrix of `size`."""
        name = f"{output}\x00factor"  # no name that a user gave
        graph.input.append(onnx.helper.make_tensor_value_info(name, kind, size))
        return [make("MatMul", [data, name], [output])]

    if node.op_type in _LIKE_FIRST_INPUT:
        if node.op_type in _PACKED and (len(inputs) < 2 or not inputs[1]):
            return None
        sums = [name for name in node.output[3:4] if name]  # of the skip and its input
        return [make("Identity", inputs[:1], [name]) for name in (output, *sums) if name]
    if node.op_type == "FusedConv":
        kept = {
            name: value for name, value in attributes.items() if not name.startswith("activation")
        }
        return [make("Conv", inputs[:3], [output], **kept)]
    if node.op_type == "FusedGemm":
        kept = {
            name: value for name, value in attributes.items() if not name.startswith("activation")
        }
        return [make("Gemm", inputs[:3], [output], **kept)]
    if node.op_type in ("FusedMatMul", "TransposeMatMul"):
        if attributes.get("transBatchA") or attributes.get("transBatchB"):
            return None
        left = "...ki" if attributes.get("transA") else "...ik"
        right = "...jk" if attributes.get("transB") else "...kj"
        return [make("Einsum", inputs[:2], [output], equation=f"{left},{right}->...ij")]
    if node.op_type in ("MatMulNBits", "MatMulBnb4") and {"K", "N"} <= attributes.keys():
        kind = kinds.get(inputs[2], onnx.TensorProto.FLOAT)
        return multiply(inputs[0], (attributes["K"], attributes["N"]), kind)
    if node.op_type == "DynamicQuantizeMatMul" and len(sizes.get(inputs[1], ())) == 2:
        return multiply(inputs[0], sizes[inputs[1]], onnx.TensorProto.FLOAT)
    if node.op_type == "MatMulIntegerToFloat" and len(sizes.get(inputs[1], ())) == 2:
        data = f"{output}\x00data"
        cast = make("Cast", inputs[:1], [data], to=onnx.TensorProto.FLOAT)
        return [cast, *multiply(data, sizes[inputs[1]], onnx.TensorProto.FLOAT)]
    if node.op_type == "Attention" and len(sizes.get(inputs[1], ())) == 2:
        width, columns = sizes[inputs[1]]
        values = (attributes.get("qkv_hidden_sizes") or [columns // 3])[-1]
        return multiply(inputs[0], (width, values), kinds[inputs[1]])
    return None


# Weights that are stored in fewer bits than the product computes in.

_DEQUANTIZES_WEIGHTS = {"MatMulNBits", "MatMulBnb4", "QMoE"}
_STORED_TYPES = {"uint8": "uint8", "float4e2m1": "fp4"}


def describe_stored_weights(
    node: Any, producers: Mapping[str, Any], stored: Mapping[str, Any]
) -> str:
    """How the weights of a floating-point product are stored: `int4 (block 32)`; empty if they are as they are computed.

    `producers` holds the node that computes each tensor, `stored` the constants by name.
    """
    attributes = read_attributes(node)
    if node.op_type in _DEQUANTIZES_WEIGHTS and node.domain == MICROSOFT:
        bits = attributes.get("bits", attributes.get("expert_weight_bits", 4))
        kind = (
            ("fp4", "nf4")[attributes.get("quant_type", 1)]
            if node.op_type == "MatMulBnb4"
            else f"int{bits}"
        )
        block = attributes.get("block_size", 0)
        return f"{kind} (block {block})" if block else kind
    data = producers.get(node.input[0]) if node.input else None
    if data is not None and data.op_type == "DequantizeLinear":
        return ""  # its data are quantized too
    for name in node.input[1:2]:
        dequantize = _trace_to_weights(name, producers)
        if dequantize is not None and dequantize.input[0] in stored:
            return _describe_dequantized(dequantize, stored)
    return ""


def _trace_to_weights(name: str, producers: Mapping[str, Any]) -> Any | None:
    """The DequantizeLinear behind a tensor, through operators that only move or convert values."""
    seen: set[str] = set()
    while name not in seen and (node := producers.get(name)) is not None and node.input:
        if node.op_type == "DequantizeLinear":
            return node
        if node.op_type not in ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"):
            return None
        seen.add(name)
        name = node.input[0]
    return None


def _describe_dequantized(node: Any, stored: Mapping[str, Any]) -> str:
    weight, scale = stored[node.input[0]], stored.get(node.input[1])
    name = onnx.TensorProto.DataType.Name(weight.data_type).lower()
    kind = "fp8" if name.startswith("float8") else _STORED_TYPES.get(name, name)
    if block := read_attributes(node).get("block_size"):
        return f"{kind} (block {block})"
    if scale is None:
        return kind
    return f"{kind} (per {'tensor' if math.prod(scale.dims) == 1 else 'channel'})"
