"""One sign-off: a model, its data, and one policy to the sealed dossier."""

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optpipe as op
from optpipe.core.events import Listener

GALLERY = Path(__file__).parents[2] / "reports" / "gallery"
Tensors = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What differs between the sign-offs. `calibration` and `held_out` share no sample; labels of the former are not used."""

    name: str
    """Of the dossier and of its policy."""
    source: Any
    """The module, or the path of the file."""
    model: op.Model
    calibration: Tensors
    held_out: Tensors
    metric: op.Metric
    int8_share: str = "80%"
    """Of the multiply-adds, as the policy demands it."""
    minimum_score: str | None = None
    """So that a source which does not work at all on these data proves nothing."""
    axes: dict[str | int, int | None] | None = None
    minimum_snr: str | None = None
    """Of a build's outputs; below the usual one, the verdict says so."""


class PrintedWarnings(Listener):
    """Prints warnings where they arise, such as a measurement that was skipped."""

    def warn(self, message: str) -> None:
        print(f"warning: {message}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the dossier goes, and what builds and runs the candidate."""

    output: Path
    backend: str
    device: Any
    over: str
    """The precision that INT8 is to replace."""


def make_policy(candidate: Candidate, target: Target) -> op.Policy:
    """INT8 may lose one point against the source model, and must be faster at batch 1; on a CPU on one thread."""
    options = {"options": {"threads": 1}} if target.device == "cpu" else {}
    accuracy = {"maximum_drop": "1 point"}
    if candidate.minimum_score is not None:
        accuracy["minimum"] = candidate.minimum_score
    return op.Policy(
        name=f"{candidate.name}: INT8 in place of {target.over.upper()}",
        build={"backend": target.backend, "precision": "int8", **options},
        accuracy=accuracy,
        speedup={"over": target.over, "batch_size": 1, "minimum": 1.0},
        precision={"int8": candidate.int8_share},
    )


def read_target(description: str | None, name: str) -> Target:
    """By default the gallery, and ONNX Runtime on the CPU."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=GALLERY / name)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--over", default="fp32", help="the precision that INT8 is to replace")
    given = parser.parse_args()
    return Target(output=given.output, backend=given.backend, device=given.device, over=given.over)


def sign_off(candidate: Candidate, target: Target) -> op.Verdict:
    """Builds, evaluates, measures, and judges; replaces the dossier at the target."""
    candidate.model.workspace.listener = PrintedWarnings()
    unlabeled = {name: each for name, each in candidate.calibration.items() if name != "labels"}
    builds = candidate.model.build(
        [target.over, "int8"],
        backend=target.backend,
        device=target.device,
        calibration=op.Data(unlabeled, axes=candidate.axes),
        min_snr=candidate.minimum_snr,
    )
    for failed in builds.failed:
        raise SystemExit(f"{failed.precision}: {failed.reason}")
    held_out = op.Data(candidate.held_out, axes=candidate.axes)
    evaluation = builds.evaluate(held_out, metric=candidate.metric)
    print(evaluation, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / candidate.name
        policy = make_policy(candidate, target)
        verdict = builds["int8"].signoff(policy, evaluation=evaluation, output=folder)
        if target.output.exists():
            shutil.rmtree(target.output)
        shutil.copytree(folder, target.output)
    print(verdict)
    return verdict
