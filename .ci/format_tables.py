"""Writes the columns of a dossier's tables into the format document and into the verifier, which shares no code with optpipe.

`uv run python .ci/format_tables.py` writes them; `--check` only compares. The document says it first: change the table, then this.
"""

import sys
from pathlib import Path

from optpipe.core.tables import ANY, COLUMNS, WHOLE

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "dossier-format.md"
VERIFIER = ROOT / "verifier" / "verify_dossier.py"
MARKS = {
    DOCUMENT: ("<!-- columns -->\n", "<!-- end of columns -->\n"),
    VERIFIER: ("# columns, by .ci/format_tables.py\n", "# end of columns\n"),
}


def write_document() -> str:
    lines = ["", "| table | columns |", "|---|---|"]
    for kind, types in COLUMNS.items():
        by_type: dict[str, list[str]] = {}
        for name, type_ in types.items():
            by_type.setdefault(type_, []).append(f"`{name}`")
        said = " · ".join(
            f"{', '.join(names)} ({'as the task says' if type_ == ANY else type_})"
            for type_, names in by_type.items()
        )
        lines.append(f"| {kind}{', all of' if kind in WHOLE else ''} | {said} |")
    return "\n".join([*lines, "", ""])


def write_verifier() -> str:
    lines = ["COLUMNS = {"]
    for kind, types in COLUMNS.items():
        lines += [f'    "{kind}": {{']
        lines += [f'        "{name}": "{type_}",' for name, type_ in types.items()]
        lines += ["    },"]
    names = ", ".join(f'"{each}"' for each in sorted(WHOLE))
    return "\n".join([*lines, "}", f"WHOLE = {{{names}}}", ""])


def main() -> int:
    changed = []
    for path, text in ((DOCUMENT, write_document()), (VERIFIER, write_verifier())):
        content = path.read_text(encoding="utf-8")
        (first, last), (before, _, rest) = MARKS[path], content.partition(MARKS[path][0])
        now = before + first + text + last + rest.partition(last)[2]
        if now != content:
            changed.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(now, encoding="utf-8")
    print(f"differs: {', '.join(changed)}" if changed else "the tables are those of optpipe")
    return int(bool(changed) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
