"""All forgeries of this folder as one table: how many there are, and which of them each finding of the first trial is.

In that trial 134 dossiers were forged with every hash put right, and 70 passed both verifiers. The tests that the tables belong
to try each forgery in both: it is refused, or both name it as what a record alone states. None is silent.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.signoff import (
    test_closed_documents,
    test_forgeries,
    test_impossible_data,
    test_impossible_evidence,
    test_masks,
    test_record_rules,
    test_sizes,
    test_tasks,
)

REFUSED: dict[str, Mapping[str, Any]] = {
    "answers": test_tasks.ANSWERS,
    "arrivals": test_impossible_evidence.OF_SERVER,
    "evidence": test_impossible_evidence.EVIDENCE,
    "files": test_forgeries.UNDEFINED,
    "masks": test_masks.FORGED,
    "measurements on a GPU": test_impossible_evidence.ON_GPU,
    "raw data": test_impossible_data.IMPOSSIBLE,
    "records": test_record_rules.CONTRADICTING,
    "samples": test_forgeries.FOREIGN_SAMPLES,
    "scores": test_tasks.FORGED,
    "shares": test_forgeries.OUT_OF_RANGE,
    "sizes": {each.__name__: each for each in test_sizes.LARGE},
    "statements": test_closed_documents.FORGERIES,
    "waivers": {ascii(each): each for each in test_forgeries.NO_REASONS},
}
"""By table: each is refused by both verifiers."""
STATED = {
    name
    for name, (_, says) in test_forgeries.FORGERIES.items()
    if "stated by" in says or test_forgeries.STATED_BENCH in says
} | {"process gone from every count"}
"""Forgeries of what a record alone states: both verifiers accept them, and name the record."""
NAMED = {"build's record gone", "confidence", *test_forgeries.INFORMATIVE, "another version"}
"""What the verdict names, and what optpipe alone compares, which renders the sentences."""
TABLES = REFUSED | {"dossiers": test_forgeries.FORGERIES}

FINDINGS = {
    'a waiver with the reason ""': "waivers: ''",
    "a waiver of zero-width characters": "waivers: '\\u200b'",
    "a waiver of a space": "waivers: ' '",
    "a share of MACs of 17.5": "shares: MAC share of 17.5",
    "images times 100": "raw data: images times 100",
    "scheduled after the start": "raw data: scheduled after the start",
    "a constant compute_ns on a CPU": "raw data: all queries on a device, on a CPU",
    "the slow half marked warm-up": "raw data: slow half is warm-up",
    "phase 2": "raw data: phase 2",
    "phase null": "raw data: no phase",
    "readings of another day": "raw data: readings of another day",
    "readings NaN": "raw data: readings NaN",
    "readings -inf": "raw data: readings -inf",
    "readings null": "raw data: reading without a time",
    "readings negative": "raw data: readings negative",
    "an empty file of readings": "raw data: no readings",
    "the readings of another process": "raw data: readings of another process",
    "1,000 processors": "raw data: 1,000 processors",
    "processes that overlap": "raw data: processes at one time",
    "queries that overlap": "raw data: queries overlap",
    "a clock compressed by 100": "evidence: clock compressed by 100",
    "copies that differ by 1 ns": "evidence: one process twice, 1 ns apart",
    "another data set": "samples: another data set",
    "losing images replaced by others": "samples: images replaced",
    "one image many times": "samples: one sample twice",
    "class that is not the label": "samples: class of another label",
    "class 10^9": "sizes: number_a_class",
    "millions of equal rows": "sizes: repeat_rows",
    "20,000 limits": "sizes: add_limits",
    "JSON 100,000 deep": "sizes: nest",
    "stray files in baseline/": "files: stray folder in baseline",
    "stray files in runs/": "files: file among the runs",
    "an unknown kind of run": "files: run of an unknown kind",
    "schema_version 1.0": "files: version as a fraction",
    "a trailing space in a name": "files: space after the model",
    "a lone surrogate": "files: half of a pair of surrogates",
    "times as floats": "raw data: times as floats",
    "calibrated on -400": "shares: calibrated on fewer than none",
    "start_ns of -2^63": "files: start long ago",
    "readings as int128": "raw data: readings as 128 bits",
    "another column": "raw data: another column",
    "an escape in a name": "files: escape in a name",
    "reversed letters in a name": "files: reversed letters in a name",
    "a backslash in a name": "files: backslash in a name",
    "names that differ in case": "files: names that differ in case",
    "a page inside runs/": "files: page in a run",
    "a program inside runs/": "files: program in a run",
    "created without a time zone": "files: created without a time zone",
}
"""Each finding about dossiers that could be found, and the forgery that repeats it."""
UNFINDABLE = (
    "reordered or trimmed",
    "scaled together with its dates",
    "copy of a process got other noise",
    "numbered in another way",
    "predictions were edited",
    "another engine gave them",
    "carry the names of several",
    "removed a reading of the GPU",
)
"""What no file can show, in the words of section 11 of the format."""


def list_forgeries() -> set[str]:
    return {f"{table}: {name}" for table, forgeries in TABLES.items() for name in forgeries}


def test_there_are_enough_forgeries_and_none_is_silent() -> None:
    refused = sum(map(len, REFUSED.values()))
    others = {*test_forgeries.FORGERIES} - STATED - NAMED
    assert len(list_forgeries()) == refused + len(test_forgeries.FORGERIES)
    assert refused + len(others) >= 350
    assert {*test_forgeries.FORGERIES} >= NAMED
    assert len(STATED) < 20, "what a record alone states is named, and does not grow unnoticed"


@pytest.mark.parametrize("finding", FINDINGS)
def test_each_finding_of_the_trial_is_a_forgery_of_a_table(finding: str) -> None:
    assert FINDINGS[finding] in list_forgeries()


def test_what_nobody_can_find_is_named_in_the_format() -> None:
    page = Path(__file__).parents[3] / "docs" / "dossier-format.md"
    section = page.read_text(encoding="utf-8").partition("## 11. ")[2].partition("### 11.1")[0]
    text = re.sub(r"\s+", " ", section)
    assert [words for words in UNFINDABLE if words not in text] == []
