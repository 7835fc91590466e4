"""Why the ONNX parser of TensorRT refuses a graph, in one line for each operator."""

from collections.abc import Iterable

from optpipe.core.wording import Argument

MOST_REASONS = 5


def list_parser_reasons(errors: Iterable[tuple[str, str, str]]) -> list[str]:
    """One line for each operator and reason of the parser's errors (operator, node, reason), with its first node."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for operator, node, reason in errors:
        known = nodes.setdefault((operator, _explain(reason)), [])
        if node not in known:
            known.append(node)
    operators: dict[str, str] = {}
    for (operator, reason), named in nodes.items():
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        # the parser repeats an operator with the assertions of its callers
        operators.setdefault(operator, f"{operator} ({named[0]}{more}): " + reason)
    return [*operators.values()][:MOST_REASONS]


def _explain(reason: str) -> str:
    """The parser's reason; one of them is a flag of the C++ API."""
    other = Argument("backend", "onnxruntime")
    way = "quantize the model symmetrically, or build it with " + other
    asymmetric = "its zero point is not 0\n" + way
    return asymmetric if "shiftIsAllZeros" in reason else reason
