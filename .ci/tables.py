"""Makes the tables of limits, scores, and units from the metrics: in the dossier format and in its independent verifier.

`uv run python .ci/tables.py` writes them, `--check` only compares. The verifier's arithmetic is written a second time, on
purpose; what a limit is called, and in which unit it is, is not arithmetic.
"""

import subprocess
import sys
from pathlib import Path
from pprint import pformat

from optpipe.core.metrics.measured import OTHERS, SHOWN, Percentile
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.metrics.sections import JUDGED, Section
from optpipe.core.quantity import Dimension

ROOT = Path(__file__).parents[1]
FORMAT = ROOT / "docs" / "dossier-format.md"
VERIFIER = ROOT / "verifier" / "verify_dossier.py"
WORDS = {Dimension.SHARE: "a fraction"}


def main() -> None:
    """Exits with 1 if `--check` is given and a file is not as the metrics are."""
    only_check = "--check" in sys.argv[1:]
    old = {path: path.read_text(encoding="utf-8") for path in (FORMAT, VERIFIER)}
    new = {
        FORMAT: replace_between(
            old[FORMAT], "<!-- made by .ci/tables.py -->\n", "<!-- end -->", make_format_table()
        ),
        VERIFIER: replace_between(
            old[VERIFIER], "# made by .ci/tables.py\n", "# end\n", make_verifier_tables()
        ),
    }
    changed = [path.relative_to(ROOT) for path in new if new[path] != old[path]]
    if only_check and changed:
        names = " and ".join(map(str, changed))
        sys.exit(f"the tables in {names} are old; run `uv run python .ci/tables.py`")
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")


def replace_between(text: str, begin: str, end: str, content: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert rest, begin
    assert after, end
    return f"{before}{begin}{content}{end}{after}"


def make_format_table() -> str:
    """The rows of section 4: keys with one sense and one unit stand together."""
    rows = [
        "| section | keys | sense, base unit |",
        "|---|---|---|",
        "| `environment` | `gpu`, `driver`, `cpu`, `python`, `packages.NAME` | equals |",
        *map(describe_section, JUDGED),
        "| `metrics.NAME` | `maximum` · `minimum` | at most · at least, the base unit that has the limit's unit (1 without a unit) |",
    ]
    return "\n".join(rows) + "\n"


def describe_section(section: Section) -> str:
    groups: dict[str, list[str]] = {}
    for key, (sense, dimension) in section.limits.items():
        unit = WORDS.get(dimension, str(dimension))
        groups.setdefault(f"{sense}, {unit}", []).append(f"`{key}`")
    keys = " · ".join(", ".join(each) for each in groups.values())
    return f"| `{section}` | {keys} | {' · '.join(groups)} |"


def make_verifier_tables() -> str:
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
    tables = {
        "TAILS": pooled,
        "ASKED": percentiles,
        "SCORES": SCORE_NAMES,
        "UNITS": units | {str(Dimension.POINTS): plain | dict.fromkeys(SCORE_NAMES, 1.0)},
        "SECTIONS": sections,
        "FIGURES": figures,
    }
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


if __name__ == "__main__":
    main()
