"""Records of a deployment (`deployment.json`), its proof, and a re-check; and their documents."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from optpipe.core.entries import Environment
from optpipe.core.measurement import ROUNDS, LatencySummary
from optpipe.core.plan import Param
from optpipe.core.quantity import Dimension, Estimate, format_quantity, share_from_text, share_to_text
from optpipe.core.verdict import CriterionResult, Verdict
from optpipe.report.document import TONES, Document, Sentence, Table, Tone, figure_columns, make_document, make_table
from optpipe.stats.ratio import Change

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
class RequestImage:
    """An encoded image with its signed-off class; None for a model that does not classify."""

    file: str
    sha256: str
    prediction: int | None


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
    images: tuple[RequestImage, ...]
    """Images in `requests`, from an evaluation in the dossier."""
    environment: Environment
    """The machine and versions of the evidence, without packages that do not affect it."""
    triton: str
    """Triton releases that can serve it."""
    optpipe: str
    created_utc: str


@dataclass(frozen=True, slots=True)
class ServerRecord:
    program: str
    version: str
    python: str | None
    numpy: str | None
    backends: tuple[str, ...]


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
class ServerCost:
    """Latency of the same requests in-process and through the server, in alternating rounds."""

    load: str
    source: str
    in_process: LatencySummary
    server: LatencySummary
    added_ns: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServerThroughput:
    """Requests/s with `concurrency` requests in flight, in-process and through the server, in alternating rounds."""

    concurrency: int
    in_process: Estimate
    """Requests joined to batches of `concurrency` or of the deployment's largest: the bound of dynamic batching."""
    server: Estimate
    latency: LatencySummary
    """Through the server, from sending a request to its answer."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProofRecord:
    deployment: str
    server: ServerRecord
    models: Mapping[str, str]
    """How each was proven: `served by tritonserver`, or `configured, not run: …`."""
    comparisons: tuple[Comparison, ...]
    costs: tuple[ServerCost, ...]
    throughputs: tuple[ServerThroughput, ...]
    notes: tuple[str, ...] = field(default=())
    verdict: Verdict | None = None
    """Only a live check has one; a proof that does not hold is an error instead."""
    criteria: tuple[CriterionResult, ...] = ()


@dataclass(frozen=True, slots=True)
class DeployResult:
    folder: str
    deployment: DeploymentRecord
    differences: tuple[str, ...] = ()
    """Differences of this machine from that of the evidence."""
    proof: ProofRecord | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecheckPlan:
    python: Annotated[
        Path | None,
        Param("Environment to compare with this one; default: this one with the dossier.", metavar="ENV"),
    ] = None
    rounds: Annotated[int, Param("Rounds, 8 or more; up to three times as many if noise hides a 4% difference.")] = (
        ROUNDS
    )
    min_time: Annotated[float, Param("Seconds to measure in each process.", minimum=0.05)] = 0.5
    max_slowdown: Annotated[
        float,
        Param("Slow-down that must be excluded for a PASS.", parse=share_from_text, show=share_to_text),
    ] = 0.05


@dataclass(frozen=True, slots=True)
class OutputChange:
    name: str
    values: int
    changed: int
    """Values that differ in any bit."""
    first_changed: tuple[int, ...] | None
    """Index of the first; None if all are equal, or the old values are not known."""
    relative_error: float
    """‖new − old‖ / ‖old‖; without the old environment, against the source model's outputs."""
    predictions_changed: int | None
    """Samples with another class; None for a model that does not classify."""


@dataclass(frozen=True, slots=True)
class LatencyChange:
    """`ratio` is new over old: above 1 is slower."""

    metric: str
    load: str
    ratio: float
    ci: tuple[float, float] | None
    """None if the ratio has no interval."""
    confidence: float
    change: Change
    how: str
    """`interleaved, 10 rounds`, or the compared processes and the reason why they are not judged."""
    rounds_to_settle: int | None = None
    """About how many such rounds would decide the slowdown; None if processes did not alternate."""

    def format_interval(self) -> str:
        """`0.998 to 1.004 at 99%`."""
        return f"[{self.ci[0]:.3f}, {self.ci[1]:.3f}] at {self.confidence:.0%}" if self.ci else "no interval"


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    dossier: str
    artifact: str
    verdict: Verdict
    reasons: tuple[str, ...]
    versions: Mapping[str, tuple[str, str]]
    """The old and the new version of each changed package."""
    outputs: tuple[OutputChange, ...]
    outputs_how: str
    latency: LatencyChange
    precision: str
    max_slowdown: float
    warnings: tuple[str, ...] = ()


def document_from_deployment(found: DeployResult) -> Document:
    record, dossier = found.deployment, found.deployment.dossier
    to_server = record.target != "folder"
    built = f"{record.model}: {record.backend} {record.precision} ({record.device})"
    prove = shlex.join(["optpipe", "deploy", "--check", found.folder, "--prove"])
    because = f"deployed on {dossier.verdict} because: {dossier.because}"
    without = f"not set, Triton's backend has no such setting: {', '.join(record.not_carried)}"
    return make_document(
        [
            Sentence(f"{built} for {record.target}, by dossier {dossier.name}"),
            Sentence(because, Tone.DOUBTFUL) if dossier.because else None,
            make_table(
                ("setting", "value", "from"), [(each.setting, each.value, each.source) for each in record.choices]
            ),
            Sentence(without, Tone.DOUBTFUL) if record.not_carried else None,
            Sentence(f"passport: {record.triton}", Tone.FAINT) if to_server else None,
            *(Sentence(each, Tone.DOUBTFUL, "differs from the evidence") for each in found.differences),
            *(_describe_proof(found.proof) if found.proof else ()),
            Sentence(found.folder, Tone.STRONG, "deployment"),
            Sentence(prove, Tone.FAINT, "prove it on a server") if found.proof is None and to_server else None,
        ]
    )


def _describe_proof(proof: ProofRecord) -> Iterator[Sentence | Table]:
    server = proof.server
    python = f", Python {server.python}, NumPy {server.numpy}" if server.python else ""
    tone, label = (Tone.DOUBTFUL, "PROVEN IN PART") if proof.notes else (Tone.GOOD, "PROVEN")
    yield Sentence(f"on {server.program} {server.version}{python}", tone, label)
    yield make_table(
        ["model", "protocol", *figure_columns("requests", "equal to the bit", "largest error"), "predictions"],
        [
            (
                each.model,
                each.protocol,
                str(each.requests),
                str(each.equal_bits),
                "0" if each.relative_error == 0 else f"{each.relative_error:.1e}",
                each.predictions,
            )
            for each in proof.comparisons
        ],
    )
    yield from (Sentence(f"{model}: {proven}", Tone.FAINT) for model, proven in proof.models.items())
    if proof.costs:
        yield make_table(
            ["load", "through", *figure_columns("requests", "mean", "p50", "p99"), "limited by"],
            [
                (
                    str(cost.load),
                    name,
                    str(found.samples),
                    format_quantity(found.mean, Dimension.TIME),
                    *(_format_percentile(found, percent) for percent in ("p50", "p99")),
                    cost.source,
                )
                for cost in proof.costs
                for name, found in (("in-process", cost.in_process), ("server, gRPC", cost.server))
            ],
        )
        yield make_table(
            figure_columns("in flight", "in-process, joined", "server, gRPC", "server p50", "server p99"),
            [
                (
                    str(each.concurrency),
                    *(
                        f"{one.value:,.0f} requests/s ({one.bounds[0]:,.0f} to {one.bounds[1]:,.0f})"
                        for one in (each.in_process, each.server)
                    ),
                    *(_format_percentile(each.latency, percent) for percent in ("p50", "p99")),
                )
                for each in proof.throughputs
            ],
        )
    yield from (Sentence(each, Tone.DOUBTFUL) for each in proof.notes)


def _format_percentile(found: LatencySummary, name: str) -> str:
    if (each := found.percentiles.get(name)) is None:
        return ""
    low, high = (format_quantity(bound, Dimension.TIME) for bound in each.bounds)
    return f"{format_quantity(each.value, Dimension.TIME)} ({low} to {high})"


def document_from_recheck(found: RecheckRecord) -> Document:
    latency = found.latency
    versions = [(name, *each) for name, each in found.versions.items()]
    outputs = [
        f"output {one.name}: {f'{one.changed:,} of {one.values:,} values changed' if one.changed else 'equal'}, "
        f"relative error {one.relative_error:.2g} ({found.outputs_how})"
        for one in found.outputs
    ]
    return make_document(
        [
            Sentence(str(found.dossier), TONES[found.verdict], found.verdict, found.reasons),
            make_table(("changed", "old", "new"), versions) if versions else Sentence("versions: nothing changed"),
            *map(Sentence, outputs),
            Sentence(
                f"latency {latency.metric}, {latency.load}: {latency.ratio:.3f} times the old "
                f"({latency.format_interval()}), {latency.change}; {latency.how}"
            ),
            Sentence(f"precision: {found.precision}", Tone.FAINT),
        ]
    )
