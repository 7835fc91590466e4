"""A metric is one object: no other room asks for its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.syntax import parse_file

import optpipe
from optpipe.core.metrics.registry import METRICS, find_metric
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.metrics.sections import JUDGED, SECTIONS

PACKAGE = Path(optpipe.__file__).parent
HOME = PACKAGE / "core" / "metrics"
LIMITS = {key for section in JUDGED for key in section.limits if "_" in key}
NAMES = {*METRICS, *SECTIONS, *SCORE_NAMES, *LIMITS}
WORDS = {
    "accuracy",
    "environment",
    "mean",
    "memory",
    "outputs",
    "precision",
    "preprocessing",
    "size",
    "tensor_cores",
    "tokens",
}
"""Names that are keys of other records too; a table of one of them alone says nothing."""
OF_DATA = {("models/inputs/text_lines.py", "tokens"), ("trace/read.py", "metrics")}
"""Fields of users' files, and a table of a recording, that are called like a metric."""
ASKING = ("get", "startswith", "endswith", "estimate", "list_values", "compute_mean")


def list_names(node: ast.AST) -> Iterator[str]:
    """The names of metrics among the texts of an expression that lists texts."""
    for part in ast.walk(node) if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(part, ast.Constant) and part.value in NAMES:
            yield str(part.value)


def list_asked(node: ast.AST) -> list[str]:
    """The names of metrics that an expression compares, or keeps a table of."""
    if isinstance(node, ast.Compare):
        return [name for side in (node.left, *node.comparators) for name in list_names(side)]
    if isinstance(node, ast.MatchValue):
        return list(list_names(node.value))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        return list(list_names(node.slice))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        asks = node.func.attr in ASKING
        return [
            name for each in node.args for name in list_names(each) if asks and name not in WORDS
        ]
    several: list[str] = []
    if isinstance(node, ast.Dict):
        several = [name for key in node.keys if key is not None for name in list_names(key)]
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        several = [name for each in node.elts for name in list_names(each)]
    return several if len({*several} - WORDS) > 1 else []


@pytest.mark.slow
def test_no_other_room_compares_a_metric_s_name() -> None:
    asked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if HOME in path.parents:
            continue
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(parse_file(path)):
            names = [name for name in list_asked(node) if (place, name) not in OF_DATA]
            asked += [f"{place}:{getattr(node, 'lineno', 0)}: {', '.join(names)}"] if names else []
    assert asked == []


def test_every_limit_of_a_measured_table_has_its_metric() -> None:
    for section in JUDGED:
        assert not section.is_measured or section.metrics.keys() == section.limits.keys()
        for metric in section.metrics.values():
            assert find_metric(metric.name).name == metric.name
