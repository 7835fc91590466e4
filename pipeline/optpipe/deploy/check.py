"""Checks a deployment: its seal, its configurations against the signed-off model, and its machine."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.backends.base import Serving
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import ModelCard, TensorSpec, card_from_file
from optpipe.core.entries import ArtifactInfo, Environment
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import Files
from optpipe.core.records import record_from_files
from optpipe.core.transform import Transform
from optpipe.core.wording import Call
from optpipe.deploy.folder import ENGINE
from optpipe.deploy.records import DEPLOYMENT, MODELS, DeploymentRecord
from optpipe.deploy.requests import DALI_OUTPUT, ENCODED
from optpipe.deploy.triton_config import (
    CONFIG,
    LABELS,
    WARM_UP,
    describe_tensors,
    find_tensor_differences,
    read_config,
)
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.workspace.entry import entry_from_files
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.file_names import CARD
from optpipe.workspace.seal import find_seal_problems


@dataclass(frozen=True, slots=True)
class CheckedDeployment:
    """A deployment with correct bytes and configurations, and the differences of this machine from its evidence."""

    folder: Path
    record: DeploymentRecord
    card: ModelCard
    serving: Serving | None
    """None for a folder, which no server runs."""
    differences: tuple[str, ...]

    @property
    def files(self) -> Files:
        return Files(self.folder)


def check_deployment(folder: Path) -> CheckedDeployment:
    """Raises BadInputError with the first problem of a deployment and the number of the others."""
    files = Files(folder)
    if not files.has(DEPLOYMENT):
        problem = (
            f"is not a deployment: {DEPLOYMENT} is missing" if folder.exists() else "does not exist"
        )
        raise BadInputError(
            f"{folder} {problem}; write one with "
            + Call("deploy", "DOSSIER", to="triton", output="DIR")
        )
    if problems := find_seal_problems(files):
        _refuse(folder, problems)
    record = record_from_files(files, DEPLOYMENT, DeploymentRecord)
    with read_as_user_file(folder / CARD, "a model card"):
        card = card_from_file(folder / CARD)
    to_server = record.target != "folder"
    entry = entry_from_files(
        files.below(f"{MODELS}/{record.engine}/1" if to_server else ENGINE), ArtifactInfo
    )
    serving = (
        BACKENDS[entry.info.backend].serving(entry.info, record.options, "") if to_server else None
    )
    names = [
        model
        for model in (record.engine, record.preprocessing, record.ensemble)
        if model and to_server
    ]
    problems = [
        f"{model} has no {CONFIG}" for model in names if not files.has(f"{MODELS}/{model}/{CONFIG}")
    ]
    if entry.id != record.artifact or hash_engine(entry) != record.artifact_sha256:
        problems.append(
            f"{record.engine}: the artifact is {entry.id}, the dossier signs off {record.artifact}"
        )
    elif (damage := entry.find_damage()) is not None:
        problems.append(f"{record.engine}: {damage}")
    if serving is not None and not problems:
        problems = list(find_configuration_problems(folder, record, card, serving))
    if problems:
        _refuse(folder, problems)
    return CheckedDeployment(folder, record, card, serving, tuple(find_differences(record)))


def find_differences(record: DeploymentRecord, here: Environment | None = None) -> Iterator[str]:
    """Differences of this machine from that of the evidence that affect outputs or times, one line each."""
    then, now = record.environment, describe_environment() if here is None else here
    for name in ("gpu", "driver") if record.device == "cuda" else ("cpu",):
        if then.get_fact(name) != now.get_fact(name):
            yield f"{name}: the evidence is from {then.get_fact(name)}; here: {now.get_fact(name)}"
    for name, version in then.packages.items():
        if (installed := now.packages.get(name, "none")) != version:
            yield f"{name}: the evidence is from {version}; here: {installed}"


def _refuse(folder: Path, problems: list[str]) -> None:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise BadInputError(
        f"{problems[0]}{more}",
        place=folder,
        remedy="write it again with " + Call("deploy", "DOSSIER", output="DIR"),
    )


def find_configuration_problems(
    folder: Path, record: DeploymentRecord, card: ModelCard, serving: Serving
) -> Iterator[str]:
    """Differences between the served and the signed-off model, one line each."""
    models, labeled = folder / MODELS, (record.engine, record.ensemble) if record.labels else ()
    engine = read_config(models / record.engine / CONFIG)
    batched = engine.max_batch_size > 0
    served = {
        record.engine: describe_tensors(card, batched=batched, by_position=serving.by_position)
    }
    if (
        record.preprocessing is not None
        and record.ensemble is not None
        and card.transform is not None
    ):
        made = TensorSpec(DALI_OUTPUT, card.transform.pack.dtype, tuple(card.transform.shape))
        served[record.preprocessing] = [TensorSpec(DALI_INPUT, "uint8", (-1,))], [made]
        served[record.ensemble] = (
            [TensorSpec(ENCODED, "uint8", (-1,))],
            describe_tensors(card, batched=batched)[1],
        )
        stored = models / record.preprocessing / "1" / "transform.json"
        with read_as_user_file(stored, "the steps of a preprocessing"):
            proven = Transform.from_dict(json.loads(stored.read_bytes()))
        if proven != card.transform:
            yield f"{record.preprocessing}: transform.json is not the preprocessing of the model card"
    for name, (inputs, outputs) in served.items():
        config = read_config(models / name / CONFIG)
        yield from find_tensor_differences(config, name, inputs, outputs)
        if name in labeled:
            yield from _check_labels(models / name, config, record.labels)
        steps = [step.model_name for step in config.ensemble_scheduling.step]
        if name != record.ensemble:
            yield from _check_warm_up(models / name, config, [spec.name for spec in inputs])
        elif steps != [record.preprocessing, record.engine]:
            yield f"{name}: runs {', '.join(steps)}, not {record.preprocessing}, {record.engine}"
    if (backend := engine.backend) != serving.triton_backend:
        yield f"{record.engine}: backend '{backend}' in {CONFIG}, '{serving.triton_backend}' for an artifact of {record.backend}"
    if batched and engine.max_batch_size > card.batch_range[2]:
        yield f"{record.engine}: max_batch_size {engine.max_batch_size} exceeds the build's profile ({card.batch_range[2]})"


def _check_labels(folder: Path, config: Any, wanted: Sequence[str]) -> Iterator[str]:
    first = config.output[0]
    if first.label_filename != LABELS or not (folder / LABELS).is_file():
        yield f"{folder.name}: output '{first.name}' has no label file"
        return
    labels = (folder / LABELS).read_text(encoding="utf-8").splitlines()
    wrong = [
        at for at, (label, other) in enumerate(zip(labels, wanted, strict=False)) if label != other
    ]
    if wrong or len(labels) != len(wanted):
        at = wrong[0] if wrong else min(len(labels), len(wanted))
        yield f"{folder.name}: {LABELS} is not the model card's: it differs from class {at} on"


def _check_warm_up(folder: Path, config: Any, inputs: Sequence[str]) -> Iterator[str]:
    if not config.model_warmup:
        yield f"{folder.name}: model_warmup is missing: the first requests would pay for lazy initialization"
    for warm_up in config.model_warmup:
        for name in inputs:
            file = warm_up.inputs[name].input_data_file if name in warm_up.inputs else ""
            if not file or not (folder / WARM_UP / file).is_file():
                yield f"{folder.name}: warm-up '{warm_up.name}' has no data for input '{name}'"
