"""Each test that a table of what went wrong names is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLES = {"wrong-results.md": 60, "unit/signoff/README.md": 30}
"""Pages with a table, and how many tests each names at least."""


@pytest.mark.parametrize("page", TABLES)
def test_a_table_names_tests_that_are_there(page):
    text = (TESTS / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|integration)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > TABLES[page]
    for name, function in named:
        content = (TESTS / name).read_text(encoding="utf-8")
        wanted = f"def {function}(" if function else "def test_"
        assert wanted in content, (name, function)


def test_every_row_of_wrong_results_names_a_test():
    text = (TESTS / "wrong-results.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| [A-E][-\d]", line)]
    assert len(rows) > 40
    for row in rows:
        assert "`unit/" in row or "`integration/" in row, row
