"""Makes the tables that the dossier format and its independent verifier share with optpipe, in both files.

`uv run python .ci/tables.py` writes them, `--check` only compares. The verifier's arithmetic is written a second time, on
purpose; what a limit or a column is called, and in which unit or type it is, is not arithmetic.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pprint import pformat

from shapes import Shape, list_shapes

from optpipe.core.metrics.measured import OTHERS, RECORDED, SHOWN, Percentile
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.metrics.sections import JUDGED, MORE_SCORES, Section
from optpipe.core.quantity import Dimension
from optpipe.core.tables import ANY, COLUMNS, WHOLE

ROOT = Path(__file__).parents[1]
FORMAT = ROOT / "docs" / "dossier-format.md"
VERIFIER = ROOT / "verifier" / "verify_dossier.py"
MARKS = {
    FORMAT: ("<!-- made by .ci/tables.py: {} -->\n", "<!-- end -->\n"),
    VERIFIER: ("# made by .ci/tables.py: {}\n", "# end\n"),
}
WORDS = {Dimension.SHARE: "a fraction"}


def main() -> None:
    """Exits with 1 if `--check` is given and a file is not as optpipe is."""
    changed = []
    for path, tables in TABLES.items():
        old = new = path.read_text(encoding="utf-8")
        for name, make in tables.items():
            new = replace_table(new, path, name, make())
        if new != old:
            changed.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                path.write_text(new, encoding="utf-8")
    if changed and "--check" in sys.argv[1:]:
        sys.exit(
            f"the tables in {' and '.join(changed)} are old; run `uv run python .ci/tables.py`"
        )


def replace_table(text: str, path: Path, name: str, content: str) -> str:
    begin, end = (mark.format(name) for mark in MARKS[path])
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    assert begun, f"{path} has no line {begin}"
    assert ended, f"{path}: the table {name} has no end"
    return f"{before}{begin}{content}{end}{after}"


def describe_limits() -> str:
    """Section 4 of the format: keys with one sense and one unit stand together."""
    rows = [
        "| section | keys | sense, base unit |",
        "|---|---|---|",
        "| `environment` | `gpu`, `driver`, `cpu`, `python`, `packages.NAME` | equals |",
        *map(_describe_section, JUDGED),
        "| `metrics.NAME` | `maximum` · `minimum` | at most · at least, the base unit that has the limit's unit (1 without a unit) |",
        _describe_section(MORE_SCORES, "scores.NAME"),
    ]
    return "\n".join(rows) + "\n"


def _describe_section(section: Section, name: str = "") -> str:
    groups: dict[str, list[str]] = {}
    for key, (sense, dimension) in section.limits.items():
        unit = WORDS.get(dimension, str(dimension))
        groups.setdefault(f"{sense}, {unit}", []).append(f"`{key}`")
    keys = " · ".join(", ".join(each) for each in groups.values())
    return f"| `{name or section}` | {keys} | {' · '.join(groups)} |"


def describe_columns() -> str:
    """Section 1.2 of the format: columns of one type stand together."""
    rows = ["| table | columns |", "|---|---|"]
    for kind, types in COLUMNS.items():
        by_type: dict[str, list[str]] = {}
        for name, type_ in types.items():
            by_type.setdefault(type_, []).append(f"`{name}`")
        columns = " · ".join(
            f"{', '.join(names)} ({'as the task says' if type_ == ANY else type_})"
            for type_, names in by_type.items()
        )
        rows.append(f"| {kind}{', all of' if kind in WHOLE else ''} | {columns} |")
    return "\n".join(rows) + "\n"


def describe_shapes() -> str:
    """Section 1.3 of the format: the keys of each record with their types."""
    records, words, documents = list_shapes()
    rows = ["| document | record |", "|---|---|"]
    rows += [f"| `{name}` | {record} |" for name, record in documents.items()]
    rows += ["", "| record | keys |", "|---|---|"]
    for name, keys in records.items():
        texts = (f"`{key}`: {_describe_shape(shape)}" for key, shape in keys.items())
        rows.append(f"| {name} | {' · '.join(texts)} |")
    rows += ["", "| enumeration | texts |", "|---|---|"]
    rows += [f"| {name} | {_describe_shape(shape)} |" for name, shape in words.items()]
    return "\n".join(rows) + "\n"


def _describe_shape(shape: Shape) -> str:
    if isinstance(shape, str):
        return shape
    kind, *parts = shape
    if kind == "word":
        return " or ".join(f"`{each}`" for each in parts)
    texts = [*map(_describe_shape, parts)]
    return {
        "or": " or ".join(texts),
        "list": f"[{texts[0]}, …]",
        "row": f"[{', '.join(texts)}]",
        "map": f"{{KEY: {texts[0]}, …}}",
    }[str(kind)]


def write_shapes() -> str:
    """The verifier's keys and types of JSON documents."""
    records, words, documents = list_shapes()
    return _write_python({"DOCUMENTS": documents, "WORDS": words, "SHAPES": records})


def write_limits() -> str:
    """The verifier's names, percentiles, and units of limits."""
    percentiles = {
        one.name: one.percent for one in (*SHOWN, *OTHERS) if isinstance(one, Percentile)
    }
    pooled = {one.name: one.percent for one in SHOWN if isinstance(one, Percentile)}
    sections = {
        section.name: {key: str(dimension) for key, (_, dimension) in section.limits.items()}
        for section in JUDGED
    }
    figures = {
        section.name: next(iter(section.metrics.values())).name
        for section in JUDGED
        if len(section.metrics) == 1
    }
    units = {str(each): dict(each.units) for each in Dimension}
    points = units.pop(str(Dimension.POINTS))
    plain = {name: factor for name, factor in points.items() if name not in SCORE_NAMES}
    return _write_python(
        {
            "TAILS": pooled,
            "ASKED": percentiles,
            "SCORES": SCORE_NAMES,
            "UNITS": units | {str(Dimension.POINTS): plain | dict.fromkeys(SCORE_NAMES, 1.0)},
            "SECTIONS": sections,
            "SCORE_LIMITS": {
                key: str(dimension) for key, (_, dimension) in MORE_SCORES.limits.items()
            },
            "FIGURES": figures,
            "LISTED": {one.name: str(one.dimension) for one in RECORDED},
            "WITNESSED": tuple(one.name for one in RECORDED if one.is_witnessed),
            "OPTIONAL": tuple(one.name for one in (*SHOWN, *RECORDED) if one.is_optional),
            "SENSED": tuple(one.name for one in (*SHOWN, *RECORDED) if one.sensor_share),
        }
    )


def write_columns() -> str:
    """The verifier's columns and their types by kind of table, and the kinds that have all of them."""
    return _write_python(
        {
            "COLUMNS": {kind: dict(types) for kind, types in COLUMNS.items()},
            "WHOLE": tuple(sorted(WHOLE)),
        }
    )


def _write_python(tables: dict[str, object]) -> str:
    code = "\n".join(
        f"{name} = {pformat(value, sort_dicts=False)}" for name, value in tables.items()
    )
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(VERIFIER), "-"],
        input=code,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    FORMAT: {"columns": describe_columns, "limits": describe_limits, "shapes": describe_shapes},
    VERIFIER: {"columns": write_columns, "limits": write_limits, "shapes": write_shapes},
}


if __name__ == "__main__":
    main()
