"""A profile run's figures, computed again from the tables of its trace."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optpipe.artifacts.facts import JudgedBuild
from optpipe.core.disagreements import find_disagreements, plain_json
from optpipe.core.observation import Blocker, Observation
from optpipe.workspace.file_names import (
    PROFILE,
)
from optpipe.workspace.runs import Run, newest_runs, read_run_json


def observe_tensor_cores(runs: Sequence[Run], build: JudgedBuild) -> Observation | None:
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build and its raw tables."""
    for run in newest_runs(runs, "profile"):
        for stage in read_run_json(run, PROFILE).get("stages", ()):
            if stage.get("artifact") == build.artifact and (stage.get("tensor_cores") or {}).get("eligible_ns"):
                again = recompute_stage(run, stage)
                caps = () if again else (_block_missing_tables(),)
                return _observe_share(again or stage, run.run_id, caps)
    return None


def _observe_share(stage: Mapping[str, Any], source: str, caps: tuple[Blocker, ...]) -> Observation | None:
    cores, quality = stage["tensor_cores"], stage["trace_quality"]["verdict"]
    if not cores.get("eligible_ns"):
        return None
    caps += () if quality == "PASS" else (Blocker(f"trace quality: {quality}", "profile again"),)
    share = cores["used_ns"] / cores["eligible_ns"]
    return Observation(share, share, share, caps, str(stage.get("name", "")), source)


def _block_missing_tables() -> Blocker:
    fewer = "optpipe profile … --iterations 10"
    return Blocker("the trace tables are too large for a dossier", f"profile fewer iterations: {fewer}")


def find_profile_disagreements(run: Run) -> Iterator[str]:
    """Where `profile.json` differs from what the tables of the trace give, one line each."""
    for stage in read_run_json(run, PROFILE).get("stages", ()):
        again = recompute_stage(run, stage) if "recording" in stage else None
        if again is not None:
            stored = {name: stage[name] for name in again if name in stage}  # only a later version's cannot disagree
            again = {name: again[name] for name in stored}
            yield from find_disagreements(
                _without_sentences(stored), _without_sentences(again), f"{PROFILE}: {stage['name']}"
            )


def _without_sentences(stage: Mapping[str, Any]) -> dict[str, Any]:
    """`stage` without what its findings say in words; their gains and rows are the figures."""
    found = [{name: value for name, value in each.items() if name != "evidence"} for each in stage.get("findings", ())]
    return {**stage, "findings": found}


def recompute_stage(run: Run, stage: Mapping[str, Any]) -> dict[str, Any] | None:
    """A stage of `profile.json` from the tables of its trace; None where not all of them are there."""
    from optpipe.trace.findings.report import document_from_profile, profile_from_trace
    from optpipe.trace.recording.files import trace_from_folder

    recording = stage["recording"]
    if not _all_there(run, recording["folder"]):
        return None
    trace = trace_from_folder(run.path / recording["folder"])
    profile = profile_from_trace(trace, recording["range"], **read_stage_facts(stage))
    document: dict[str, Any] = plain_json(document_from_profile(profile))
    document["roofline"]["ncu"] = stage["roofline"].get("ncu")
    return document if "layers" in document["roofline"] else document | {"roofline": stage["roofline"]}


def read_stage_facts(stage: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage of `profile.json` was judged by beside its trace, as `profile_from_trace` takes it."""
    from optpipe.trace.layers.roofline import graph_costs_from_document

    how = {key: value for key, value in stage["recording"].items() if key not in ("folder", "range")}
    return {**how, **runtime_from_stage(stage), "graph": graph_costs_from_document(stage["roofline"])}


def runtime_from_stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime of an inference and its options, which advice depends on."""
    return {key: stage.get(key) for key in ("backend", "options")}


def _all_there(run: Run, folder: str) -> bool:
    mine = [record["path"] for record in run.manifest["files"] if record["path"].startswith(f"{folder}/")]
    return bool(mine) and all((run.path / path).is_file() for path in mine)
