"""What the library returns is worded for Python; what it writes has the terminal's wording."""

import json
from dataclasses import dataclass, field

import msgspec

from optpipe.api.door import SpokenListener, speak
from optpipe.core.events import Listener
from optpipe.core.measurement import Reason
from optpipe.core.records import json_from_record, line_from_record
from optpipe.core.wording import Argument, Call
from optpipe.report.document import Section, Sentence, make_table

LONGER = "measure longer (" + Argument("min_time") + ")"
AGAIN = "measure again: " + Call("bench", "net", batch=8)


class Row(msgspec.Struct, frozen=True):
    name: str
    why: str | None = None


@dataclass(frozen=True)
class Record:
    rows: tuple[Row, ...]
    reasons: list[Reason] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    count: int = 0


def make_record() -> Record:
    reason = Reason("not-watched", "the machine was not watched", LONGER, invalidates=True)
    return Record((Row("a", AGAIN), Row("b")), [reason], {"net": LONGER}, 3)


def test_every_text_of_a_record_is_worded() -> None:
    spoken = speak(make_record())
    assert spoken.rows[0].why == 'measure again: workspace.builds("net").bench(batch=8)'
    assert spoken.reasons[0].remedy == "measure longer (min_time)"
    assert spoken.notes == {"net": "measure longer (min_time)"}
    assert spoken.count == 3
    assert "--" not in str(spoken)


def test_what_has_nothing_to_word_is_the_same_object() -> None:
    record = make_record()
    assert speak(record).rows[1] is record.rows[1]
    assert speak(plain := (Row("a"), 2.0, None, ["x"])) is plain


def test_what_is_written_has_the_words_of_the_terminal() -> None:
    written = json.loads(json_from_record(make_record()))
    assert written["rows"][0]["why"] == "measure again: optpipe bench net --batch 8"
    assert written["reasons"][0]["remedy"] == "measure longer (--min-time)"
    assert json.loads(line_from_record(Row("a", AGAIN)))["why"] == str(AGAIN)


def test_a_document_is_worded() -> None:
    table = make_table(("build", "why"), [("net", LONGER)])
    document = (Section("all", (Sentence("x", remedy=AGAIN), table)),)
    assert "--" not in str(speak(document))
    assert "bench(batch=8)" in str(speak(document))


def test_a_listener_hears_of_arguments_and_a_record_keeps_the_data() -> None:
    users = Listener()
    heard = SpokenListener(users)
    heard.warn(LONGER)
    heard.warn(LONGER)
    assert users.warnings == ["measure longer (min_time)"]
    assert heard.warnings == ["measure longer (--min-time)"]
    SpokenListener(users).warn("other")
    assert heard.warnings == ["measure longer (--min-time)"], "those of one call"
