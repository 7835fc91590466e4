"""The labels of a cluster's nodes: what a node says of its GPU, and how `--node` asks for it.

Ray's own accelerator type knows the short name of device 0 alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from optpipe.core.errors import BadInputError
from optpipe.sweep.slots import describe_device, list_slots

PREFIX = "optpipe/"
LABEL = f"{PREFIX}kind"
FINGERPRINT = f"{PREFIX}fingerprint"


def describe_node() -> dict[str, str]:
    """The labels of this node for `ray start --labels`: its kind by NVML's full name, memory, power limit, driver, MIG, environment.

    Raises BadInputError where its GPUs differ: a label can say one thing.
    """
    slots = list_slots()
    first = slots[0]
    labels = {LABEL: label_from_kind(first.kind), FINGERPRINT: first.fingerprint}
    if first.gpu is None:
        return labels
    if len({slot.kind for slot in slots if slot.gpu}) > 1:
        raise BadInputError(
            "this host has GPUs of several kinds; start one Ray node for each with CUDA_VISIBLE_DEVICES"
        )
    if len({slot.fingerprint for slot in slots if slot.gpu}) > 1:
        raise BadInputError(
            "this host has GPUs of one kind with different power limits or MIG modes; set them alike, or start one Ray node for "
            "each with CUDA_VISIBLE_DEVICES"
        )
    gpu, power_w, mig = first.environment.gpus[0], *describe_device(first.gpu)
    labels |= {f"{PREFIX}driver": gpu.driver, f"{PREFIX}memory-gib": str(round(gpu.memory_bytes / 2**30))}
    labels[f"{PREFIX}mig"] = "unsupported" if mig is None else "on" if mig else "off"
    if power_w is not None:
        labels[f"{PREFIX}power-limit-w"] = f"{power_w:.0f}"
    return labels


def label_from_kind(kind: str) -> str:
    """The kind as a label of a cluster's node may be written: without spaces."""
    return kind.replace(" ", "_")


def kind_from_label(label: str) -> str:
    """The kind that a label names; NVML's names have no underscores."""
    return label.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Selector:
    """`--node driver=580.95.05`, or `!=`: what a node's label has to be, or must not be."""

    label: str
    value: str
    equal: bool = True

    def __str__(self) -> str:
        return f"{self.label.removeprefix(PREFIX)}{'=' if self.equal else '!='}{self.value}"

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is meant."""
        return (labels.get(self.label) == self.value) is self.equal

    @property
    def for_ray(self) -> str:
        """The value as Ray's label selectors write it."""
        return self.value if self.equal else f"!{self.value}"


def selector_from_text(text: str) -> Selector:
    """Reads `LABEL=VALUE` or `LABEL!=VALUE`; a label without a slash is one of ours. Raises BadInputError."""
    name, equals, value = text.partition("=")
    label, equal = name.rstrip("!").strip(), not name.endswith("!")
    value = label_from_kind(value.strip())
    if not equals or not label or not value:
        raise BadInputError(f"--node {text}: expected LABEL=VALUE or LABEL!=VALUE, such as driver=580.95.05 or mig=off")
    return Selector(label if "/" in label else f"{PREFIX}{label}", value, equal)
