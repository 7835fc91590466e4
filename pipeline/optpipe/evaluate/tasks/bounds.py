"""How much work and memory the answers of an evaluation ask for, by what they declare: section 1.1 of docs/dossier-format.md.

A file of a few bytes can hold a mask of 67 million pixels, 30,000 boxes that are all compared with each other, a text that
expands to millions of numbers, or one class whose number makes a table of gigabytes. These are counted, and refused unread.
"""

from itertools import product
from typing import NamedTuple

from optpipe.core import pl
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.masks import measure_mask

MAX_PIXELS = 2**30
"""Of all masks."""
MAX_BOX_PAIRS = 2**27
MAX_JSON_BYTES = 2**24
"""Of the predictions of tasks in Python, each number of which takes a hundred bytes."""
MAX_TEXT_BYTES = 2**25
"""Of right answers, tags, and answers, whose words are compared."""
MAX_NUMBERS = 2**22
"""Samples times the values of a regression."""
MAX_CELLS = 2**25
"""Samples times the kinds that a task counts for each of them."""
SHOWN_SCORE = 0.25
"""Boxes of the source with at least this score are compared with those of a build."""
MATCHED_BOXES = 100
"""Boxes of an image and class that are matched with true ones."""
TRUTH, BEST, PART, PREDICTION = "truth", ":best", ":part.", ":prediction"
SOURCES = "source:prediction", "reference_prediction"


class Asked(NamedTuple):
    """What the answers of one file, or of all together, ask for."""

    pixels: int = 0
    box_pairs: int = 0
    """Pairs of boxes of one class in one sample that are compared."""
    json_bytes: int = 0
    text_bytes: int = 0
    numbers: int = 0
    """Of the truths of a regression."""
    cells: int = 0
    """Of the largest table of one column."""

    def join(self, other: "Asked") -> "Asked":
        return Asked(
            self.pixels + other.pixels,
            self.box_pairs + other.box_pairs,
            self.json_bytes + other.json_bytes,
            self.text_bytes + other.text_bytes,
            self.numbers + other.numbers,
            max(self.cells, other.cells),
        )


def require_bounded(asked: Asked, place: object) -> None:
    """Raises BadInputError for more than a dossier may ask for."""
    for number, most, what in (
        (asked.pixels, MAX_PIXELS, "its masks have {} pixels together"),
        (asked.box_pairs, MAX_BOX_PAIRS, "{} pairs of boxes would be compared"),
        (asked.json_bytes, MAX_JSON_BYTES, "its predictions in JSON have {} bytes together"),
        (asked.text_bytes, MAX_TEXT_BYTES, "its answers and tags have {} bytes together"),
        (asked.numbers, MAX_NUMBERS, "its truths have {} numbers, samples times values"),
        (asked.cells, MAX_CELLS, "{} numbers would be counted, samples times kinds"),
    ):
        if number > most:
            problem = f"{what.format(f'{number:,}')}; at most {most:,} are judged"
            raise BadInputError(problem, place=place, remedy="evaluate fewer or smaller samples")


def measure_answers(table: "pl.DataFrame") -> Asked:
    """Of a table with a row for each sample. Raises BadInputError for bytes that are no mask."""
    types = {
        "masks": pl.Binary,
        "boxes": pl.List(pl.List(pl.Float64)),
        "numbers": pl.List(pl.Int64),
        "tags": pl.List(pl.String),
    }
    of_kind = {
        kind: [column for column in table.iter_columns() if column.dtype == dtype]
        for kind, dtype in types.items()
    }
    masks = (mask for column in of_kind["masks"] for mask in column if mask is not None)
    pixels = sum(width * height for width, height in map(measure_mask, masks))
    kinds = [0, *map(_count_groups, table.iter_columns())]
    numbers = [column for column in of_kind["numbers"] if not column.name.endswith(BEST)]
    kinds += [1 + _find_largest(column.explode()) for column in numbers]
    kinds += [column.explode().n_unique() for column in of_kind["tags"] if column.name != TRUTH]
    boxes = {column.name: _list_boxes(column) for column in of_kind["boxes"]}
    if TRUTH in boxes:
        kinds.append(1 + _find_largest(boxes[TRUTH]["class"]))
    longest = None
    if TRUTH in table.columns and table[TRUTH].dtype == pl.List(pl.Float64):
        longest = table[TRUTH].list.len().max()
    return Asked(
        pixels,
        _count_box_pairs(boxes),
        _count_json_bytes(table),
        _count_text_bytes(table),
        table.height * int(longest or 0),  # type: ignore[arg-type]
        table.height * max(kinds),
    )


def _count_text_bytes(table: "pl.DataFrame") -> int:
    texts = [column for column in table.iter_columns() if column.name.endswith(PREDICTION)]
    texts = [column for column in texts if column.dtype == pl.String]
    if TRUTH in table.columns and table[TRUTH].dtype == pl.List(pl.String):
        texts.append(table[TRUTH].explode())
    return sum(int(column.str.len_bytes().cast(pl.Int64).sum()) for column in texts)


def _find_largest(numbers: "pl.Series") -> int:
    largest = numbers.max()
    return -1 if largest is None else int(largest)  # type: ignore[arg-type]


def _count_groups(column: "pl.Series") -> int:
    """Of the parts of a plug-in's score."""
    if PART not in column.name or column.dtype != pl.List(pl.Float64):
        return 0
    return column.list.get(2, null_on_oob=True).n_unique()


def _list_boxes(column: "pl.Series") -> "pl.DataFrame":
    """The sample, the class, and the score of each box; a true one has no score."""
    at, scored = (4, None) if column.name == TRUTH else (5, 4)
    rows = pl.DataFrame({"box": column}).with_row_index("sample").explode("box").drop_nulls("box")
    box = pl.col("box").list
    score = pl.lit(1.0) if scored is None else box.get(scored, null_on_oob=True)
    return rows.select("sample", box.get(at, null_on_oob=True).alias("class"), score.alias("score"))


def _count_box_pairs(boxes: "dict[str, pl.DataFrame]") -> int:
    source = next((boxes[name] for name in SOURCES if name in boxes), None)
    truths = boxes.get(TRUTH)
    shown = None if source is None else source.filter(pl.col("score") >= SHOWN_SCORE)
    tables = [table for name, table in boxes.items() if name != TRUTH]
    pairs = 0
    for (reference, most), predicted in product(((truths, MATCHED_BOXES), (shown, None)), tables):
        if reference is not None:
            mine, theirs = (
                table.group_by("sample", "class").len() for table in (reference, predicted)
            )
            both = mine.join(theirs, on=("sample", "class"), nulls_equal=True)
            judged = pl.col("len_right") if most is None else pl.min_horizontal("len_right", most)
            pairs += int(both.select((pl.col("len").cast(pl.Int64) * judged).sum()).item())
    return pairs


def _count_json_bytes(table: "pl.DataFrame") -> int:
    structs = [
        column.struct.field("prediction")
        for column in table.iter_columns()
        if isinstance(column.dtype, pl.Struct) and "prediction" in column.struct.fields
    ]
    texts = (column for column in structs if column.dtype == pl.String)
    return sum(int(column.str.len_bytes().cast(pl.Int64).sum()) for column in texts)
