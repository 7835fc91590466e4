"""Requested precisions, and the proof of the built one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Literal

from optpipe.core.errors import BadInputError
from optpipe.core.params import choices_from_text
from optpipe.core.quantity import Dimension, drop_from_text, read_quantity
from optpipe.core.wording import Argument

REQUIRED_SHARE = 0.80
"""The share of the MACs in the requested type from which a build counts as proven, if no policy states another."""
MAX_SHARE_ELSEWHERE = 0.01
"""Maximum share of the MACs on another execution provider than the requested one."""
UNATTRIBUTED = "unattributed"
"""The type of a layer that may compute in any."""
MAX_OTHERS = 10
"""Maximum layers of another type that a proof lists."""


class Precision(StrEnum):
    """Precision that a build requests. FP32 means IEEE single precision throughout: no TF32."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    """E4M3, in linear layers."""


CALIBRATED = (Precision.INT8, Precision.FP8)
"""Precisions that need activation ranges from data."""
BUDGETED = (Precision.FP16, *CALIBRATED)
"""The precisions whose builds can keep layers in floating point to meet a budget."""


QdqForm = Literal["tensorrt", "cpu", "cpu-7bit", "fp8"]
"""The Q/DQ pairs that a runtime wants in a quantized graph.

`tensorrt`: symmetric INT8 at the inputs of layers and of residual additions, so that a layer fuses with the operators after it.
`cpu`: UINT8 at the inputs and outputs of layers, as ONNX Runtime's CPU kernels take them. `cpu-7bit`: the same with weights from
-63 to 63, for processors without VNNI, whose kernels saturate sums of two products at 16 bits (oneDNN, "Nuances of int8
computations"). `fp8`: E4M3 at the inputs of linear layers.
"""


def precisions_from_text(text: str) -> tuple[Precision, ...]:
    """Reads a comma-separated list such as `fp32,fp16`."""
    return tuple(map(Precision, choices_from_text(text, list(Precision), "precision")))


@dataclass(frozen=True, slots=True)
class LayerType:
    """A layer of a built network: the type of its data input, and its MACs."""

    name: str
    op: str
    type: str
    """`fp32`, `tf32`, `fp16`, `bf16`, `int8`, `fp8`, an integer type's name, or UNATTRIBUTED."""
    macs: int | None
    """At the profile's `opt` shapes; 0 for layers without any, None for products of unknown cost."""
    stored: str = ""
    """How the weights are stored if that is not the layer's type, such as `int4 (block 32)`."""


@dataclass(frozen=True, slots=True)
class UnknownProducts:
    """Layers with products whose number of MACs is not known, of one operator and type."""

    op: str
    type: str
    """UNATTRIBUTED if the type is not known either."""
    count: int


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Layers of one type whose weights are stored in another form."""

    form: str
    """`int4 (block 32)`, `int8 (per channel)`."""
    type: str
    """The type in which they are computed."""
    count: int


@dataclass(frozen=True, slots=True)
class PrecisionShare:
    layers: Mapping[str, float]
    macs: Mapping[str, float]
    """Of the MACs that are known."""
    total_macs: int
    unknown: tuple[UnknownProducts, ...] = ()
    """What could change the shares of MACs."""
    stored: tuple[StoredWeights, ...] = ()

    @property
    def counted(self) -> Mapping[str, float]:
        """Shares of MACs, or of layers if the network has none."""
        return self.macs or self.layers

    def find_bounds(self, kind: str) -> tuple[float, float]:
        """The lowest and the highest share of `kind` that is possible.

        Products of unknown cost may be nothing or nearly all of a network. MACs of an unattributed type may be of any.
        """
        share = self.counted.get(kind, 0.0)
        high = share + self.counted.get(UNATTRIBUTED, 0.0)
        others = any(products.type != kind for products in self.unknown)
        same = any(products.type in (kind, UNATTRIBUTED) for products in self.unknown)
        if self.unknown and not self.macs:  # layers are no measure where there are products
            return float(not others), float(same)
        return 0.0 if others else share, 1.0 if same else min(high, 1.0)

    def describe_unknown(self) -> str:
        """`2 products of unknown cost: Attention, Rfft`; empty without one."""
        count = sum(products.count for products in self.unknown)
        names = sorted({products.op for products in self.unknown})
        some = ", ".join(names[:MAX_OTHERS]) + (", …" if len(names) > MAX_OTHERS else "")
        return (
            f"{count} product{'' if count == 1 else 's'} of unknown cost: {some}" if count else ""
        )


def summarize_precision(layers: Iterable[LayerType]) -> PrecisionShare:
    """Adds up `layers`, which should only include those that compute in floating point or INT8."""
    count: Counter[str] = Counter()
    macs: Counter[str] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    stored: Counter[tuple[str, str]] = Counter()
    for layer in layers:
        count[layer.type] += 1
        macs[layer.type] += layer.macs or 0
        if layer.macs is None:
            unknown[layer.op, layer.type] += 1
        if layer.stored:
            stored[layer.stored, layer.type] += 1
    total, total_macs = count.total(), macs.total()
    return PrecisionShare(
        layers={kind: n / total for kind, n in sorted(count.items())},
        macs={kind: n / total_macs for kind, n in sorted(macs.items()) if n},
        total_macs=total_macs,
        unknown=tuple(UnknownProducts(*key, n) for key, n in sorted(unknown.items())),
        stored=tuple(StoredWeights(*key, n) for key, n in sorted(stored.items())),
    )


@dataclass(frozen=True, slots=True)
class PlacedNode:
    name: str
    op: str
    provider: str
    share: float
    """Share of the graph's MACs, or of its nodes if it has none."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes of a loaded graph that run on another execution provider than the requested one."""

    provider: str
    nodes: int
    count: int
    share: float
    elsewhere: tuple[PlacedNode, ...]
    """Products of unknown cost, then in descending order of share; at most MAX_OTHERS."""
    unit: str = "MACs"
    """`nodes` in a graph without MACs."""


@dataclass(frozen=True, slots=True, repr=False)
class PrecisionProof:
    share: PrecisionShare
    proven: bool
    reason: str
    others: tuple[LayerType, ...]
    """Layers with MACs in another type, in descending order, at most MAX_OTHERS."""
    others_count: int
    placement: Placement | None = None
    """None if the runtime leaves no node to another provider silently."""

    def __repr__(self) -> str:
        """`PrecisionProof(proven: 99.8% int8, 0.2% fp32)`."""
        shares = sorted(self.share.counted.items(), key=lambda item: -item[1])
        state = "proven" if self.proven else "not proven"
        return (
            f"PrecisionProof({state}: {', '.join(f'{share:.1%} {kind}' for kind, share in shares)})"
        )

    def settle(self, wanted: Precision) -> bool | None:
        """Whether the share of `wanted` is large enough; None if products of unknown cost or type could decide it."""
        low, high = self.share.find_bounds(wanted)
        required = get_required_share(wanted) - 1e-12
        if not self.placed or high < required:
            return False
        return True if low >= required else None

    @property
    def placed(self) -> bool:
        """Whether the layers run on the provider that was asked for, so that their types are those of its kernels."""
        return self.placement is None or self.placement.share <= MAX_SHARE_ELSEWHERE

    def find_shortfall(self, wanted: Precision, required: float | None = None) -> str | None:
        """Why a build is not what was asked for; None if it is.

        A share of `wanted` that is, or may be, below `required` is one. Without `required`, a lower precision may have any share
        above zero, which the build states, but FP32 and TF32 may not contain a narrower type.
        """
        if not self.placed:
            return self.reason
        low, high = self.share.find_bounds(wanted)
        if required is not None and low < required - 1e-12:
            return _describe_share(self.share, wanted, required)
        if wanted in (Precision.FP32, Precision.TF32):
            narrower = {str(kind) for kind in Precision} - {str(wanted), str(Precision.FP32)}
            present = {*self.share.counted} | {products.type for products in self.share.unknown}
            return self.reason if narrower & present else None
        return self.reason if high == 0 else None


def get_required_share(wanted: Precision) -> float:
    """The share of the MACs from which a build counts as proven, if no policy states another."""
    return 1.0 if wanted in (Precision.FP32, Precision.TF32) else REQUIRED_SHARE


def prove_precision(
    wanted: Precision, layers: Iterable[LayerType], placement: Placement | None = None
) -> PrecisionProof:
    """Compares a built network's layers with the requested precision.

    FP32 and TF32 must hold for every MAC; the others for at least `REQUIRED_SHARE` of them. A share below that is no failure
    of a build, which states it, but a sign-off takes it only if its policy does. A network without MACs is judged by its layers.
    Products of unknown cost in another type may be any share, so that nothing is proven with them.

    More than `MAX_SHARE_ELSEWHERE` of the MACs on another execution provider is not proven either, because the types that were
    read are then not those of the kernels that run.
    """
    outside = {node.name for node in placement.elsewhere} if placement else set[str]()
    layers = tuple(
        replace(layer, type=UNATTRIBUTED) if layer.macs is None and layer.name in outside else layer
        for layer in layers
    )
    share = summarize_precision(layers)
    low, _ = share.find_bounds(wanted)
    required = get_required_share(wanted)
    others = sorted(
        (layer for layer in layers if layer.type != wanted and (layer.macs != 0 or not share.macs)),
        key=lambda layer: inf if layer.macs is None else layer.macs,
        reverse=True,
    )
    reason = _describe_share(share, wanted, required)
    placed = placement is None or placement.share <= MAX_SHARE_ELSEWHERE
    if placement is not None and not placed:
        amount = _format_share(placement.share, MAX_SHARE_ELSEWHERE)
        reason += f"; {amount} of {placement.unit} run outside {placement.provider}, {MAX_SHARE_ELSEWHERE:.0%} allowed"
    proven = placed and low >= required - 1e-12
    return PrecisionProof(share, proven, reason, tuple(others[:MAX_OTHERS]), len(others), placement)


def _describe_share(share: PrecisionShare, wanted: Precision, required: float) -> str:
    proven, unknown = share.counted.get(wanted, 0.0), share.describe_unknown()
    unit = "MACs" if share.macs else "layers"
    known = (
        f"{_format_share(proven, required)} of {'the known ' if unknown else ''}{unit} in {wanted}"
    )
    also = f" and {unknown}" if unknown else ""
    return f"{known}{also}, {required:.0%} required"


def _format_share(share: float, limit: float) -> str:
    """In percent, with as many decimals as are needed to tell `share` from `limit`."""
    texts = [(f"{share:.{digits}%}", f"{limit:.{digits}%}") for digits in range(1, 13)]
    return next((text for text, other in texts if text != other), texts[0][0])


EXACT_DB = 200.0
"""Stands for bitwise equal outputs; its negative for outputs with NaN or infinity."""


@dataclass(frozen=True, slots=True)
class PrecisionCost:
    snr_db: float | None
    """Minimum over the outputs, within ±EXACT_DB; None if an output's size differs from FP32, such as detected boxes."""
    drop: float | None = None
    """Drop of the task's score, or of agreement without labels; None if neither can be measured."""
    drop_ci: tuple[float, float] | None = None

    @property
    def finite(self) -> bool:
        return self.snr_db is None or self.snr_db > -EXACT_DB


def make_cost_order(costs: Iterable[PrecisionCost]) -> Callable[[PrecisionCost], float]:
    """Sort key for `costs`, the costliest first: by SNR, or by drop if one has no SNR."""
    if all(cost.snr_db is not None for cost in costs):
        return lambda cost: cost.snr_db or 0.0
    return lambda cost: -(cost.drop or 0.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum cost of a lower precision: a drop of the task's score in percentage points, or a minimum SNR in dB."""

    limit: float
    unit: Literal["points", "dB"]

    def __str__(self) -> str:
        unit = "point" if self.unit == "points" and self.limit == 1 else self.unit
        return f"{self.limit:g} {unit}"

    def allows(self, cost: PrecisionCost) -> bool:
        """False for outputs with NaN or infinity."""
        if self.unit == "dB":
            return cost.snr_db is not None and cost.finite and cost.snr_db >= self.limit
        return cost.finite and cost.drop is not None and 100 * cost.drop <= self.limit + 1e-9


def budget_from_text(text: str, flag: str) -> Budget:
    limit, dimension = read_quantity(
        text, flag, Dimension.POINTS, Dimension.SHARE, Dimension.DECIBEL
    )
    if dimension is Dimension.DECIBEL:
        if not 0 < limit <= EXACT_DB:
            raise BadInputError(
                f"expected an SNR above 0 dB and up to {EXACT_DB:g} dB, such as 30dB",
                argument=Argument(flag, text),
            )
        return Budget(limit, "dB")
    return Budget(drop_from_text(text, flag), "points")


@dataclass(frozen=True, slots=True)
class KeptLayer:
    layer: str
    op: str
    macs: int
    reason: str


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A build within a budget: its cost on the samples of the search, and the layers kept in floating point."""

    budget: Budget
    metric: str
    """The score that drops, `agreement` without labels, or `snr`."""
    samples: int
    cost: PrecisionCost
    kept: tuple[KeptLayer, ...]
    """Layers kept for the budget in order of their cost, then layers that cannot be converted."""
    total_macs: int
    """MACs of the network at the profile's `opt` shapes."""
