"""Counts sentences that break the style of CONTRIBUTING.md and compares them with [tool.style] in pyproject.toml.

`uv run python .ci/style.py` prints the counts and exits with 1 if one is over its limit. A limit only goes down.
`--list RULE` prints each match of a rule with its file and line instead.

It reads the prose of Markdown files (code is left out) and, in the package, docstrings, comments, and every string
literal of two or more words. A value inside an f-string counts as a digit.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from house import PACKAGE, ROOT, check_limits

# In a pattern, ^ is the start of a sentence, and a space is any white space.
START = r"(?:\A\s*|\n\s*\n\s*|[.:;(|] |\n\s*[-*] )"
RULES = {
    "percent": r"\d %",
    "told": r"\b(?:is|are|was|were|be|been|being) (?:said|told)\b",
    "else": r"[,;] else\b",
    "fragment": r"^(?:Of|As of) (?:an?|the|what|those|its|each)\b",
    "what": r"(?:^|, )[Ww]hat (?:was|is|has|no|it|came|runs|takes|an?|the|only|makes|decides)\b",
    "where": r"(?:None|empty|negative|Raises \w+|Error) where\b",
    "keeps-limit": r"\bkeeps? (?:the|its|an?|every|all) (?:limits?|budgets?|policy|policies)\b",
    "own": r"\bof (?:its|their|our|his) own\b",
    "beside": r"\b(?:beside|[Bb]ehind (?:it|an?|the|its|others))\b",
    "old-words": r"\b(?:anew|likewise|Likewise|but for|in turns|so many)\b|\bgoes? on\b(?! (?:to|an?|the))|, for (?:it|they)\b",
    "is-no": r"(?<!here\s)\b(?:is|are) no (?!longer|more|less|slower|faster)\w+",
    "person": r"\b(?:says|asks|wants|knows|thinks|believes|remembers)\b",
    "spelling": (
        r"(?i:\b(?:licences?|licenced|\w*(?:colour|behaviour|favour|honour|neighbour)\w*|artefacts?|(?:cent|met|lit)res?"
        r"|centred|grey(?:scale|ish)?|(?:label|cancel|model|travel|signal|channel)l(?:ed|ing)|catalogued?|whilst|amongst"
        r"|analys(?:ed?|ing)|\w+(?:al|an|el|en|er|gn|il|im|it|mar|nt|on|or)is(?:e[drs]?|ing|ations?)"
        r"|speed-ups?|slow-downs?|defence|judgement)\b)"
    ),
}


LONGEST_ENTRY = 160
"""Maximum characters of a line of the changelog; longer ones belong in the commit."""


def read_chunks() -> Iterator[tuple[Path, int, str]]:
    """File, first line, and text of each piece of prose."""
    readmes = [each for top in ROOT.glob("[!.]*/") for each in top.rglob("README.md")]
    for path in sorted([*ROOT.glob("*.md"), *readmes, *(ROOT / "docs").rglob("*.md")]):
        prose = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]*`|\]\([^)\n]*\)", blank, path.read_text(encoding="utf-8"))
        yield path, 1, prose
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for line, chunk in [*read_strings(ast.parse(text)), *read_comments(text)]:
            yield path, line, chunk


def blank(match: re.Match[str]) -> str:
    """Code becomes a name without a space; its line breaks stay."""
    return "x" + "\n" * match[0].count("\n")


def read_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """First line and text of docstrings and of string literals with two or more words."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        values = [str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values]
        yield node.lineno, "".join(values)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in parts and " " in text.strip():
                yield node.lineno, text


def read_comments(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of comments; those on consecutive lines are one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    for _, group in groupby(enumerate(comments), lambda each: each[1][0] - each[0]):
        block = [comment for _, comment in group]
        yield block[0][0], "\n".join(words for _, words in block)


def main() -> None:
    """Prints the counts or one rule's matches; exits with 1 if a count is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", choices=RULES, metavar="RULE", help=f"print the matches of one of: {', '.join(RULES)}"
    )
    listed = parser.parse_args().list
    counts = dict.fromkeys(RULES, 0)
    patterns = {name: re.compile(rule.replace(" ", r"\s+").replace("^", START)) for name, rule in RULES.items()}
    for path, first, chunk in read_chunks():
        for name, pattern in patterns.items():
            for match in pattern.finditer(chunk):
                counts[name] += 1
                if name == listed:
                    line = first + chunk.count("\n", 0, match.end())
                    around = " ".join(chunk[max(0, match.start() - 40) : match.end() + 40].split())
                    print(f"{path.relative_to(ROOT)}:{line}: {around}")
    entries = re.findall(r"(?m)^- .*", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if long := [each for each in entries if len(each) > LONGEST_ENTRY]:
        sys.exit("\n".join(("CHANGELOG.md: write each entry in at most 160 characters", *long)))
    if not listed:
        sys.exit(check_limits("style", counts))


if __name__ == "__main__":
    main()
