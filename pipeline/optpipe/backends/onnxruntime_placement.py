"""Where ONNX Runtime runs each node: the execution providers that it chose itself, read from a loaded session.

A provider without a kernel for a node leaves it to the CPU, and nothing says so.
Source: onnxruntime_session_options_config_keys.h, `session.record_ep_graph_assignment_info`.
"""

from collections.abc import Iterable
from typing import Any

from optpipe.core.precision import MAX_OTHERS, LayerType, PlacedNode, Placement

RECORD_ASSIGNMENT = ("session.record_ep_graph_assignment_info", "1")
"""The session setting without which `get_provider_graph_assignment_info` is refused."""


def placement_from_session(session: Any, provider: str, layers: Iterable[LayerType]) -> Placement:
    """What of the session's graph does not run on `provider`; the MACs are those of `layers` of the same name.

    `session` is an `onnxruntime.InferenceSession` that was made with `RECORD_ASSIGNMENT`.
    """
    macs = {layer.name: layer.macs for layer in layers}
    total = sum(macs.values())
    assigned = [
        (part.ep_name, node) for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    ]
    nodes = [
        PlacedNode(node.name, node.op_type, found, macs.get(node.name, 0) / total if total else 1 / len(assigned))
        for found, node in assigned
    ]
    elsewhere = sorted((node for node in nodes if node.provider != provider), key=lambda node: -node.share)
    share, unit = sum(node.share for node in elsewhere), "MACs" if total else "nodes"
    return Placement(provider, len(nodes), len(elsewhere), share, tuple(elsewhere[:MAX_OTHERS]), unit)
