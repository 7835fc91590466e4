"""Names from outside in a report as Markdown: no columns, no HTML, no links, no pictures."""

import pytest

from optpipe.report.markdown import render_table_lines


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[here](javascript:alert(1))", "[here]\\(javascript:alert(1))"),
        ("![x](http://example.org/x.png)", "![x]\\(http://example.org/x.png)"),
        ("[here][1]", "[here]\\[1]"),
        ("a|b", "a\\|b"),
        ("<script>", "&lt;script>"),
        ("two\nlines", "two lines"),
        ("0.1 [0.05, 0.2]", "0.1 [0.05, 0.2]"),
    ],
)
def test_a_name_stays_text(name, shown):
    *_, row = render_table_lines(["name"], [[name]])
    assert row == f"| {shown} |"
