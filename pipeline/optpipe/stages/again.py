"""What a run says of itself, computed again from its raw files by the functions that computed it first.

Bench: every figure and VALID or INVALID, from samples and the machine's rows. Profile: every figure, from the tables of the
trace and the layers' costs. Preprocess: the outputs' error, agreement and verdict, from the rows of every image. Evaluate:
accuracy, drop and agreement, from every prediction. A run whose raw files were too large for a dossier has no figures there.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.criteria import Observation
from optpipe.core.measurement import MEASUREMENTS_FILE, Measurement
from optpipe.core.measurement_json import as_json, measurements_of
from optpipe.core.runs import Run, json_of_run
from optpipe.errors import BadInputError, first_line
from optpipe.measuring.validity import LIMITS, RULES
from optpipe.stages.preprocess.proof import ROWS, Proof, proof_from_rows, rows_from_file
from optpipe.stages.recompute import judged_again
from optpipe.stats.paired import Interval, difference_interval, share_interval

if TYPE_CHECKING:
    import polars as pl

PREDICTIONS, EVALUATION = "predictions.parquet", "evaluate.json"
PREPROCESSING, PROFILE = "preprocess.json", "profile.json"
PROSE = ("reason", "remedy", "limit", "about", "message", "note", "detail", "why", "advice", "why_not", "withheld")
"""Sentences about the figures beside them: another version of optpipe may word them differently."""
RELATIVE_TOLERANCE = 1e-9
"""Between two computations of one figure, on two machines, by the same formula."""


def unreadable() -> tuple[type[Exception], ...]:
    """What reading a file can raise whose values are of the wrong kind, however intact its form."""
    import polars as pl

    wrong_kind = (AttributeError, ArithmeticError, IndexError, KeyError, TypeError, ValueError)
    return (BadInputError, pl.exceptions.PolarsError, *wrong_kind)


def disagreements(stored: object, computed: object, place: str) -> list[str]:
    """Where a stored document says something else than what was computed, one line each."""
    if isinstance(computed, Mapping) and isinstance(stored, Mapping):
        names = sorted((set(stored) | set(computed)) - set(PROSE))
        return [
            problem
            for name in names
            for problem in disagreements(stored.get(name, "nothing"), computed.get(name, "nothing"), f"{place}: {name}")
        ]
    if isinstance(computed, list) and isinstance(stored, list) and len(computed) == len(stored):
        pairs = enumerate(zip(stored, computed, strict=True))
        return [
            problem
            for at, (one, other) in pairs
            for problem in disagreements(one, other, f"{place}[{_common_name(one, other) or at}]")
        ]
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (stored, computed))
    if stored == computed or (numbers and math.isclose(stored, computed, rel_tol=RELATIVE_TOLERANCE)):  # type: ignore[arg-type]
        return []
    return [f"{place} says {_short(stored)}, the raw files give {_short(computed)}"]


def _common_name(one: object, other: object) -> object:
    """What both call themselves, so that a line names a criterion and not its place in a list."""
    names = [each.get("name") if isinstance(each, Mapping) else None for each in (one, other)]
    return names[0] if names[0] == names[1] else None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def untrue_figures(run: Run) -> list[str]:
    """Where the record of `run` does not follow from the raw files that are there, one line each."""
    found = {"bench": _bench, "profile": _profile, "preprocess": _preprocess, "evaluate": _evaluate}[run.kind](run)
    return [f"runs/{run.run_id}/{problem}" for problem in found]


def _bench(run: Run) -> Iterator[str]:
    document = json_of_run(run, MEASUREMENTS_FILE)
    for one, stored in zip(measurements_of(document), document["measurements"], strict=True):
        if one.samples_file is not None and (run.path / one.samples_file).is_file():
            again = _plain(as_json(judged_again(one, run.path, *_asked(one))))
            same_rules = one.limits.get(RULES) == LIMITS[RULES]
            said, found = (_record(each, same_rules=same_rules) for each in (stored, again))
            yield from disagreements(said, found, f"{MEASUREMENTS_FILE}: {one.id}")


def _record(document: Mapping[str, Any], *, same_rules: bool) -> dict[str, Any]:
    """Without order among the reasons; without reasons where other rules of validity were in force."""
    reasons = sorted(document["reasons"], key=lambda reason: str(reason["code"]))
    return {**document, **({"reasons": reasons} if same_rules else {"reasons": [], "verdict": None})}


def _asked(one: Measurement) -> tuple[float, float]:
    """Confidence and highest percentile of the stored summary."""
    if one.latency is None:
        return 0.95, 99.0
    asked = [each.percent for each in one.latency.percentiles] + [float(name[1:]) for name in one.latency.withheld]
    return one.latency.confidence, max(asked, default=99.0)


def _plain(document: object) -> Any:
    return json.loads(json.dumps(document))


def _profile(run: Run) -> Iterator[str]:
    for stage in json_of_run(run, PROFILE).get("stages", ()):
        again = stage_again(run, stage) if "recording" in stage else None
        if again is not None:
            stored = {name: stage[name] for name in again if name in stage}  # only a later version's cannot disagree
            again = {name: again[name] for name in stored}
            yield from disagreements(
                _without_sentences(stored), _without_sentences(again), f"{PROFILE}: {stage['name']}"
            )


def _without_sentences(stage: Mapping[str, Any]) -> dict[str, Any]:
    """`stage` without what its findings say in words; their gains and rows are the figures."""
    found = [{name: value for name, value in each.items() if name != "evidence"} for each in stage.get("findings", ())]
    return {**stage, "findings": found}


def stage_again(run: Run, stage: Mapping[str, Any]) -> dict[str, Any] | None:
    """A stage of `profile.json` from the tables of its trace; None where not all of them are there."""
    from optpipe.trace.files import trace_from_folder
    from optpipe.trace.report import document_from_profile, profile_from_trace

    recording = stage["recording"]
    if not _all_there(run, recording["folder"]):
        return None
    trace = trace_from_folder(run.path / recording["folder"])
    profile = profile_from_trace(trace, recording["range"], **known_beside_trace(stage))
    document: dict[str, Any] = _plain(document_from_profile(profile))
    document["roofline"]["ncu"] = stage["roofline"].get("ncu")
    return document if "layers" in document["roofline"] else document | {"roofline": stage["roofline"]}


def known_beside_trace(stage: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage of `profile.json` was judged by beside its trace, as `profile_from_trace` takes it."""
    from optpipe.trace.roofline import graph_from_document

    how = {key: value for key, value in stage["recording"].items() if key not in ("folder", "range")}
    return {**how, **runtime_of(stage), "graph": graph_from_document(stage["roofline"])}


def runtime_of(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime of an inference and its options, which advice depends on."""
    return {key: stage.get(key) for key in ("backend", "options")}


def _all_there(run: Run, folder: str) -> bool:
    mine = [record["path"] for record in run.manifest["files"] if record["path"].startswith(f"{folder}/")]
    return bool(mine) and all((run.path / path).is_file() for path in mine)


def _preprocess(run: Run) -> Iterator[str]:
    if (run.path / ROWS).is_file():
        record = json_of_run(run, PREPROCESSING)
        again = proof_again(run, record).to_dict()
        stored = {name: record["parity"].get(name, "nothing") for name in again}
        yield from disagreements(stored, _plain(again), f"{PREPROCESSING}: parity")


def proof_again(run: Run, record: Mapping[str, Any]) -> Proof:
    """The parity proof of a preprocess run from its rows. Raises BadInputError where they are not there or too old."""
    return proof_from_rows(
        rows_from_file(run.path / ROWS),
        trained=bool(record["weights"].get("trained", False)),
        classifies=bool(record["classifies"]),
        refused=len(record["parity"].get("refused") or ()),
    )


def _evaluate(run: Run) -> Iterator[str]:
    if not (run.path / PREDICTIONS).is_file():
        return
    for row in json_of_run(run, EVALUATION).get("results", ()):
        again = answers_again(run.path / PREDICTIONS, row["artifact"], 0.95)
        for name, key in (("top1", "top1"), ("drop_vs_source", "drop"), ("agreement", "agreement")):
            if row.get(name) is not None and key in again:
                place = f"{EVALUATION}: {row['artifact']}: {name}"
                yield from disagreements(row[name], again[key].value, place)


def answers_again(path: Path, artifact: str | None, confidence: float) -> dict[str, Observation]:
    """The figures of one artifact's predictions in the file at `path`; none where it has none there."""
    import polars as pl

    answers, mine = _table(path), f"{artifact}:best"
    if mine not in answers.columns:
        return {}
    return _answer_figures(
        answers.select(
            pl.col("class"),
            pl.col(mine).list.first().alias("mine"),
            pl.col("source:best").list.first().alias("source"),
        ),
        confidence,
    )


def _answer_figures(answers: "pl.DataFrame", confidence: float) -> dict[str, Observation]:
    n, about = answers.height, f"{answers.height} images"
    figures = {}
    if answers["source"].n_unique() > 1:
        same = int((answers["mine"] == answers["source"]).sum())
        figures["agreement"] = _figure(same / n, share_interval(same, n, confidence), about)
    if answers["class"].null_count() == 0:
        right, was = answers["mine"] == answers["class"], answers["source"] == answers["class"]
        lost, won = int((was & ~right).sum()), int((right & ~was).sum())
        hits = int(right.sum())
        figures["top1"] = _figure(hits / n, share_interval(hits, n, confidence), about)
        figures["drop"] = _figure((lost - won) / n, difference_interval(lost, won, n, confidence), about)
    return figures


def _figure(value: float, interval: Interval, about: str) -> Observation:
    return Observation(value, interval.low, interval.high, about=about)


def _table(path: Path) -> "pl.DataFrame":
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        message = f"cannot read {path}: {first_line(error)}"
        raise BadInputError(message) from error
