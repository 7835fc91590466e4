"""Records of a deployment (`deployment.json`), its proof, and a re-check; and their documents."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from optpipe.core.entries import Environment
from optpipe.core.verdict import CriterionResult, Verdict
from optpipe.core.wording import Call
from optpipe.report.document import (
    TONES,
    Document,
    Sentence,
    Table,
    Tone,
    figure_columns,
    make_document,
    make_table,
)
from optpipe.stats.ratio import EQUAL_ROUNDS, Ratio
from optpipe.stats.selected_rows import EMPTY, Selection

Form = Literal["triton", "kserve", "folder"]
"""What `deploy` writes: a model repository, the same with an InferenceService, or files for the user's own server."""
DEPLOYMENT = "deployment.json"
MODELS = "models"
"""Folder of a deployment with Triton's model repository."""
REQUESTS = "requests"
"""Folder of a deployment with the requests of a proof."""
TENSORS = "tensors.npz"
"""In `requests`: inputs `input:NAME` and the source model's outputs `output:NAME`, (samples, ...)."""
OUTPUTS = "outputs.npz"
"""In `requests`: the artifact's outputs `NUMBER:NAME` for each request; missing if it did not run where it was deployed from."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting of the server with its reason."""

    setting: str
    """`max_batch_size`, `dynamic_batching.max_queue_delay_microseconds`, …"""
    value: str
    source: str
    """The measurement, the policy's limit, or the reason why neither decides."""


@dataclass(frozen=True, slots=True)
class DossierReference:
    name: str
    sha256: str
    """Hash of its list of hashes, which identifies its content."""
    verdict: Verdict
    waived: tuple[str, ...]
    because: str | None
    """Reason to deploy without an unqualified PASS."""


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    target: str
    model: str
    artifact: str
    artifact_sha256: str
    backend: str
    precision: str
    device: str
    dossier: DossierReference
    engine: str
    """Name of the Triton model that holds the artifact."""
    preprocessing: str | None
    """Name of the Triton model that holds the DALI pipeline; None without image preprocessing."""
    ensemble: str | None
    options: Mapping[str, bool | int | str]
    """Runtime options of the signed-off measurements."""
    labels: tuple[str, ...]
    choices: tuple[Choice, ...]
    not_carried: tuple[str, ...]
    """Runtime options without a setting in Triton's backend."""
    tolerance: float
    """Largest relative L2 error of an output against the signed-off one."""
    images: Mapping[str, int | None]
    """Images in `requests`, from an evaluation in the dossier, with the signed-off class; None if the model does not classify."""
    environment: Environment
    """The machine and versions of the evidence, without packages that do not affect it."""
    triton: str
    """Triton releases that can serve it."""
    optpipe: str
    created_utc: str
    selection: Selection = EMPTY
    """Outputs whose rows the model selects: they are compared as sets."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Served outputs against the signed-off ones over one protocol."""

    model: str
    protocol: str
    requests: int
    equal_bits: int
    """Requests whose outputs equal the in-process outputs to the last bit."""
    relative_error: float
    """Largest ‖served − in-process‖ / ‖in-process‖ of a request."""
    predictions: str | None
    """`32 of 32 equal to the signed-off predictions`."""


@dataclass(frozen=True, slots=True)
class ProofRecord:
    server: str
    """Program and version, of a live check also the address."""
    models: Mapping[str, str]
    """How each was proven: `served by tritonserver`, or `configured, not run: …`."""
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    verdict: Verdict | None = None
    """Only a live check has one; a proof that does not hold is an error instead."""
    criteria: tuple[CriterionResult, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class DeployResult:
    folder: str
    deployment: DeploymentRecord
    differences: tuple[str, ...] = ()
    """Differences of this machine from that of the evidence."""
    proof: ProofRecord | None = None
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        record = self.deployment
        proven = "" if self.proof is None else ", proven on a server"
        build = f"{record.model}: {record.backend} {record.precision}"
        return f"DeployResult({self.folder!r}, {record.target}, {build}{proven})"


@dataclass(frozen=True, slots=True)
class OutputChange:
    name: str
    values: int
    changed: int
    """Values that differ in any bit."""
    first_changed: tuple[int, ...] | None
    """Index of the first; None if all are equal."""
    relative_error: float
    """‖new − old‖ / ‖old‖."""
    predictions_changed: int | None
    """Samples with another class; None for a model that does not classify."""


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    dossier: str
    artifact: str
    verdict: Verdict
    reasons: tuple[str, ...]
    versions: Mapping[str, tuple[str, str]]
    """The old and the new version of each changed package."""
    outputs: tuple[OutputChange, ...]
    load: str
    latency: Ratio
    """The new p50 over the old one."""
    rounds_to_settle: int
    """About how many such rounds would decide the slowdown."""
    max_slowdown: float
    warnings: tuple[str, ...] = ()


def document_from_deployment(deployed: DeployResult) -> Document:
    record, dossier = deployed.deployment, deployed.deployment.dossier
    to_server = record.target != "folder"
    built = f"{record.model}: {record.backend} {record.precision} ({record.device})"
    prove = Call("deploy", check=deployed.folder, prove=True)
    because = f"deployed on {dossier.verdict} because: {dossier.because}"
    without = (
        f"not set, because Triton's backend has no such setting: {', '.join(record.not_carried)}"
    )
    choices = [(choice.setting, choice.value, choice.source) for choice in record.choices]
    return make_document(
        [
            Sentence(f"{built} for {record.target}, from dossier {dossier.name}"),
            Sentence(because, Tone.DOUBTFUL) if dossier.because else None,
            make_table(("setting", "value", "from"), choices),
            Sentence(without, Tone.DOUBTFUL) if record.not_carried else None,
            Sentence(f"passport: {record.triton}", Tone.FAINT) if to_server else None,
            *(
                Sentence(difference, Tone.DOUBTFUL, "differs from the evidence")
                for difference in deployed.differences
            ),
            *(_describe_proof(deployed.proof) if deployed.proof else ()),
            Sentence(deployed.folder, Tone.STRONG, "deployment"),
            Sentence(prove, Tone.FAINT, "prove it on a server")
            if deployed.proof is None and to_server
            else None,
        ]
    )


def _describe_proof(proof: ProofRecord) -> Iterator[Sentence | Table]:
    tone, label = (Tone.DOUBTFUL, "PROVEN IN PART") if proof.notes else (Tone.GOOD, "PROVEN")
    yield Sentence(f"on {proof.server}", tone, label)
    rows = []
    for comparison in proof.comparisons:
        error = "0" if comparison.relative_error == 0 else f"{comparison.relative_error:.1e}"
        rows.append(
            (
                comparison.model,
                comparison.protocol,
                str(comparison.requests),
                str(comparison.equal_bits),
                error,
                comparison.predictions,
            )
        )
    figures = figure_columns("requests", "bit-identical", "largest error")
    yield make_table(["model", "protocol", *figures, "predictions"], rows)
    yield from (
        Sentence(f"{model}: {proven}", Tone.FAINT) for model, proven in proof.models.items()
    )
    yield from (Sentence(note, Tone.DOUBTFUL) for note in proof.notes)


def format_ratio(latency: Ratio) -> str:
    if not latency.is_known:
        return f"{latency.value:.3f} times the old ({EQUAL_ROUNDS})"
    low, high = latency.ci
    return (
        f"{latency.value:.3f} times the old ([{low:.3f}, {high:.3f}] at {latency.confidence:.0%})"
    )


def document_from_recheck(record: RecheckRecord) -> Document:
    latency = record.latency
    versions = [(name, *pair) for name, pair in record.versions.items()]
    outputs = [
        f"output {output.name}: {f'{output.changed:,} of {output.values:,} values changed' if output.changed else 'equal'}, "
        f"relative error {output.relative_error:.2g}"
        for output in record.outputs
    ]
    turns = f"{latency.rounds} rounds of two alternating processes"
    return make_document(
        [
            Sentence(str(record.dossier), TONES[record.verdict], record.verdict, record.reasons),
            make_table(("changed", "old", "new"), versions)
            if versions
            else Sentence("versions: nothing changed"),
            *map(Sentence, outputs),
            Sentence(
                f"latency p50, {record.load}: {format_ratio(latency)}, {latency.change}; {turns}"
            ),
        ]
    )
