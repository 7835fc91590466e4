"""Draws the packages of optpipe into pipeline/README.md: `uv run python .ci/package_graph.py` (`--check` only compares).

An arrow is an import that no longer way implies.
"""

import sys
from pathlib import Path

import grimp

README = Path(__file__).parents[1] / "pipeline" / "README.md"
BEGIN, END = "<!-- drawn by .ci/package_graph.py -->\n", "<!-- end -->\n"


def find_arrows() -> dict[str, set[str]]:
    """Which packages each package imports, leaving out what follows from other arrows."""
    graph = grimp.build_graph("optpipe", exclude_type_checking_imports=False)
    rooms = sorted(graph.find_children("optpipe"))
    direct = {
        one: {
            other
            for other in rooms
            if other != one
            and graph.direct_import_exists(importer=one, imported=other, as_packages=True)
        }
        for one in rooms
    }
    reach: dict[str, set[str]] = {}

    def walk(room: str) -> set[str]:
        if room not in reach:
            reach[room] = direct[room].union(*(walk(each) for each in direct[room]))
        return reach[room]

    return {
        one: {
            each
            for each in direct[one]
            if not any(each in walk(via) for via in direct[one] - {each})
        }
        for one in rooms
    }


def draw_packages() -> str:
    """The graph as a Mermaid flowchart in a fenced block."""
    arrows = find_arrows()
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  {room.removeprefix('optpipe.')}" for room in arrows]
    lines += [
        f"  {one.removeprefix('optpipe.')} --> {other.removeprefix('optpipe.')}"
        for one, others in arrows.items()
        for other in sorted(others)
    ]
    return "\n".join([*lines, "```"]) + "\n"


def main() -> None:
    """Writes the drawing, or with --check exits with 1 if the README has other boxes or arrows."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"{before}{BEGIN}{draw_packages()}{END}{after}"
    if "--check" in sys.argv[1:]:
        sys.exit(
            0
            if drawn == text
            else "pipeline/README.md: the drawing is old; run: uv run python .ci/package_graph.py"
        )
    README.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
