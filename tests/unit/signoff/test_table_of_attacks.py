"""Each test that the table of attacks names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_the_table_of_attacks_names_tests_that_are_there():
    table = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|integration)/[\w/]+\.py)(?:::(\w+))?`", table)
    assert len(named) > 30
    for name, function in named:
        content = (TESTS / name).read_text(encoding="utf-8")
        assert f"def {function}" in content, (name, function)
