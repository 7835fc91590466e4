"""What the stored errors of samples satisfy: section 8.2 of docs/dossier-format.md.

Each row has the sums of one sample's reference r and output o over its values: of squares, of products, of the differences, of
their squares, and the largest difference. They are those of two vectors, so that no sum can be changed alone.
"""

from collections.abc import Iterator

from optpipe.core import pl

SUMS = (
    "reference_square",
    "difference_square",
    "output_square",
    "product",
    "difference_sum",
    "difference_max",
)
EXACT, ROUNDED = 1e-9, 1e-6
"""Tolerance of the law of cosines, which is computed in float64 as the sums are, and of inequalities."""


def find_broken_sums(rows: "pl.DataFrame") -> Iterator[str]:
    """What is wrong with the rows; `values`, `finite` and the six sums are columns of theirs."""
    if absent := sorted({*SUMS, "values", "finite"} - {*rows.columns}):
        yield f"has no column {', '.join(absent)}"
        return
    kinds = [rows.schema[name] == pl.Float64 for name in SUMS]
    if (
        not all(kinds)
        or not rows.schema["values"].is_integer()
        or rows.schema["finite"] != pl.Boolean
    ):
        yield "a sum is not of the type of the format"
        return
    if any(rows[name].has_nulls() for name in (*SUMS, "values", "finite")):
        yield "a sum is missing"
        return
    reference, apart, output, product, total, largest = map(pl.col, SUMS)
    count = pl.col("values").cast(pl.Float64)
    known = rows.filter(pl.col("finite"))
    rules = {
        "a sum is negative or not finite": (count >= 0)
        & pl.all_horizontal(pl.col(name).is_finite() for name in SUMS)
        & pl.all_horizontal(pl.col(name) >= 0 for name in SUMS if name != "product"),
        "the squares, the product, and the error are not those of two vectors": (
            reference + output - 2 * product - apart
        ).abs()
        <= EXACT * (reference + output),
        "the largest difference, their sum, and their squares are not those of one vector": (
            _at_most(largest, total)
            & _at_most(total, count * largest)
            & _at_most(largest**2, apart)
            & _at_most(apart, count * largest**2)
            & _at_most(total**2, count * apart)
        ),
    }
    yield from (wrong for wrong, holds in rules.items() if not known.filter(~holds).is_empty())


def _at_most(small: "pl.Expr", large: "pl.Expr") -> "pl.Expr":
    return small <= (1 + ROUNDED) * large
