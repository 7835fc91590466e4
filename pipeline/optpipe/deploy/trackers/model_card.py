"""A model card of the Hugging Face Hub: `model-index` with the figures and their intervals, and a section with the verdict.

It writes `DOSSIER.model-card.md` beside the dossier; a card that the user names gets the section, and keeps everything else that is in it.
Nothing is uploaded.
Source: huggingface_hub 2.4, `huggingface_hub.EvalResult`.
"""

import re
from pathlib import Path
from typing import Any

from optpipe.core import LazyModule
from optpipe.core.verdict import CriterionResult
from optpipe.deploy.trackers.contract import Export, Tracker
from optpipe.report.document import format_observed
from optpipe.workspace.files import write_bytes

yaml = LazyModule("yaml")  # of huggingface_hub

BEGIN, END = "<!-- optpipe: begin -->", "<!-- optpipe: end -->"
_HEAD = re.compile(r"---\n(.*?)\n?---\n", re.DOTALL)
_SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


class ModelCardTracker(Tracker):
    name, needs = "model-card", "huggingface_hub"
    install = "pip install 'huggingface-hub>=1'"

    def send(self, export: Export) -> str:
        from huggingface_hub.repocard_data import eval_results_to_model_index

        path, model = _choose_path(export), export.verdict.model
        old = path.read_text(encoding="utf-8") if path.is_file() else f"# {model}\n"
        head = _HEAD.match(old)
        known = yaml.safe_load(head[1]) if head else {}
        if not isinstance(known, dict):
            raise TypeError(f"{path} does not begin with YAML metadata of a model card")
        results = [_make_result(criterion) for criterion in export.numbers]
        others = [entry for entry in known.get("model-index") or [] if entry.get("name") != model]
        known["model-index"] = [*others, *eval_results_to_model_index(model, results)]
        text, section = old[head.end() :] if head else old, _describe(export)
        body = (
            _SECTION.sub(lambda _: section, text)
            if _SECTION.search(text)
            else f"{text.rstrip()}\n\n{section}\n"
        )
        metadata = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
        write_bytes(path, f"---\n{metadata}---\n{body}".encode())
        return str(path)


def _choose_path(export: Export) -> Path:
    """The file that the user named, or one beside the dossier. Raises FileExistsError if the latter is not from an export."""
    if export.output is not None:
        return export.output
    folder = export.folder.resolve()
    path = folder.with_name(f"{folder.name}.model-card.md")
    if path.exists() and BEGIN not in path.read_text(encoding="utf-8"):
        raise FileExistsError(f"{path} is not from an export; name it, and it gets the section")
    return path


def _make_result(criterion: CriterionResult) -> Any:
    """An `EvalResult` of a criterion; `metric_args` has its interval."""
    from huggingface_hub import EvalResult

    low, high = criterion.ci or (None, None)
    waived = {"waived": criterion.waived} if criterion.waived else {}
    about = {
        "low": low,
        "high": high,
        "limit": criterion.limit,
        "verdict": str(criterion.verdict),
        **waived,
    }
    return EvalResult(
        task_type="other",
        dataset_type="optpipe",
        dataset_name=criterion.about or "the build's record",
        metric_type=criterion.name,
        metric_name=f"{criterion.name} ({criterion.unit})"
        if criterion.unit is not None
        else criterion.name,
        metric_value=criterion.observed,
        metric_args=about,
    )


def _describe_row(criterion: CriterionResult) -> str:
    verdict = f"{criterion.verdict}{' (waived)' if criterion.waived else ''}"
    observed, limit = _escape(format_observed(criterion)), _escape(criterion.limit)
    return f"| {criterion.name} | {verdict} | {observed} | {limit} |"


def _describe(export: Export) -> str:
    record = export.verdict
    rows = [_describe_row(criterion) for criterion in record.criteria]
    return "\n".join(
        [
            BEGIN,
            "## Verdict",
            "",
            f"**{record.verdict}** by the policy {_escape(record.policy.name)} on {record.created_utc[:10]}, for"
            f" {record.artifact.backend} {record.artifact.precision} (optpipe {record.optpipe}).",
            "",
            "| criterion | verdict | observed | limit |",
            "|---|---|---|---|",
            *rows,
            "",
            f"The dossier {record.dossier_name} (sha256 {export.seal}) has the raw samples; `optpipe verify` recomputes every figure.",
            END,
        ]
    )


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
