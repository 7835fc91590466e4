"""Makes the README's excerpt of a sign-off from the output of the command above it.

usage: excerpt.py OUTPUT   OUTPUT holds what that command printed on stdout; without it, checks that the excerpt and the policy agree
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?s)signoff digits --policy (?P<policy>\S+)\n```\n<!-- \.ci/excerpt\.py -->\n```text\n(?P<text>.*?)```\n"
)
SHOWN = ("speedup", "accuracy.maximum_drop", "precision", "size")
"""Criteria whose lines are shown, without their second lines."""


def make_excerpt(output: str) -> str:
    """The verdict, and the lines of some criteria."""
    lines = output.splitlines()
    verdict = next(line for line in lines if line.startswith(("PASS ", "FAIL ", "INCONCLUSIVE ")))
    kept = [line.rstrip() for line in lines if line.startswith(SHOWN)]
    return "\n".join([verdict, *kept]) + "\n"


def list_problems(policy: str, text: str) -> list[str]:
    """What of the excerpt cannot come from the policy; times and figures are not compared."""
    document = tomllib.loads((ROOT / policy).read_text(encoding="utf-8"))
    shown = re.findall(r"(?m)^([a-z_]+)\.", text)
    problems = [f"{name} is not in {policy}" for name in shown if name not in document]
    problems += [f"{name} is not shown" for name in ("speedup", "size") if name not in shown]
    if not text.startswith("PASS  Ship digits "):
        problems.append("the excerpt does not begin with the verdict")
    return problems


def main() -> int:
    readme = README.read_text(encoding="utf-8")
    block = BLOCK.search(readme)
    if block is None:
        print("README.md: no sign-off with an excerpt")
        return 1
    if len(sys.argv) > 1:
        made = make_excerpt(Path(sys.argv[1]).read_text(encoding="utf-8"))
        start, end = block.span("text")
        README.write_text(readme[:start] + made + readme[end:], encoding="utf-8")
        return 0
    problems = list_problems(block["policy"], block["text"])
    print("\n".join(f"README.md: {problem}" for problem in problems), end="")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
