"""The README's excerpt comes from the command above it, and cannot drift from its policy."""

import runpy
from pathlib import Path

import pytest

excerpt = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "excerpt.py"))
OUTPUT = """PASS  Ship digits (onnxruntime int8): all 10 criteria are met.

speedup.minimum.b16.over-fp32  PASS   0.94 times [0.7, 1.3]  at least 0.5 times
    measured: batch 16
size.maximum                   PASS                188 KiB  at most 256 KiB
dossier  /somewhere
"""


def test_the_excerpt_is_the_verdict_and_the_lines_of_criteria():
    made = excerpt["make_excerpt"](OUTPUT)
    assert made.splitlines() == [
        line for line in OUTPUT.splitlines() if line[:2] in ("PA", "sp", "si")
    ]


def test_the_checked_in_excerpt_agrees_with_its_policy(monkeypatch):
    monkeypatch.setattr("sys.argv", ["excerpt.py"])
    assert excerpt["main"]() == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("speedup.minimum", "latency.p50"), "latency is not in"),
        (("PASS  Ship", "INCONCLUSIVE  Do not ship"), "does not begin"),
        (("size.maximum", "    x"), "size is not shown"),
    ],
)
def test_an_excerpt_of_another_policy_is_found(change, problem):
    text = excerpt["make_excerpt"](OUTPUT).replace(*change)
    problems = excerpt["list_problems"]("reports/examples/first.toml", text)
    assert any(problem in each for each in problems)
