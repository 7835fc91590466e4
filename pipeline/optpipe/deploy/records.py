"""What a deployment says of itself: `deployment.json` in its folder, and what a proof found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from optpipe.core.entries import Environment
from optpipe.core.measurement import ROUNDS, LatencySummary
from optpipe.core.plan import Param
from optpipe.core.quantity import Estimate, share_from_text, share_to_text
from optpipe.core.verdict import Verdict
from optpipe.stats.ratio import Change

DEPLOYMENT = "deployment.json"
MODELS = "models"
"""Folder of a deployment that is Triton's model repository."""
REQUESTS = "requests"
"""Folder of a deployment with what a proof sends."""
TENSORS = "tensors.npz"
"""In `requests`: inputs `input:NAME` and the source model's outputs `output:NAME`, first axis the samples."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting with what it follows from."""

    setting: str
    """`max_batch_size`, `dynamic_batching.max_queue_delay_microseconds`, …"""
    value: str
    source: str
    """The measurement, the policy's limit, or the reason why neither decides."""


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An encoded image with the class that was signed off for it; None for a model that does not classify."""

    file: str
    sha256: str
    prediction: int | None


@dataclass(frozen=True, slots=True)
class DossierReference:
    name: str
    sha256: str
    """Of its list of hashes, which identifies its content."""
    verdict: Verdict
    waived: tuple[str, ...]
    because: str | None
    """Why it is deployed without an unqualified PASS."""


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """The content of `deployment.json`."""

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
    """Name of the Triton model that holds the DALI pipeline; None for a model without image preprocessing."""
    ensemble: str | None
    options: Mapping[str, bool | int | str]
    """Runtime options that the signed-off measurements ran with."""
    labels: tuple[str, ...]
    choices: tuple[Choice, ...]
    not_carried: tuple[str, ...]
    """Runtime options that Triton's backend has no setting for."""
    tolerance: float
    """Largest relative L2 error of an output against the signed-off one."""
    images: tuple[RequestImage, ...]
    """In `requests`, out of an evaluation in the dossier."""
    environment: Environment
    """The passport: machine and versions that the evidence holds for, without packages that do not matter to it."""
    triton: str
    """Which Triton releases can serve it."""
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
    """Served outputs against the signed-off ones, over one protocol."""

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
    """Latency in-process and through the server, of the same requests at the same load, in rounds that alternate."""

    load: str
    source: str
    in_process: LatencySummary
    server: LatencySummary
    added_ns: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServerThroughput:
    """Requests/s with a number of requests always in flight, in-process and through the server, in rounds that alternate."""

    concurrency: int
    in_process: Estimate
    """The same requests joined to batches of that many, or as many as the deployment takes: what dynamic batching can reach."""
    server: Estimate
    latency: LatencySummary
    """Through the server, from sending a request to its answer."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProofRecord:
    """What `deploy --prove` found."""

    deployment: str
    server: ServerRecord
    models: Mapping[str, str]
    """How each was proven: `served by tritonserver`, or `configured, not run: …`."""
    comparisons: tuple[Comparison, ...]
    costs: tuple[ServerCost, ...]
    throughputs: tuple[ServerThroughput, ...]
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class DeployResult:
    """What `optpipe deploy` prints with `--json`."""

    folder: str
    deployment: DeploymentRecord
    differences: tuple[str, ...] = ()
    """Between the evidence's machine and this one."""
    proof: ProofRecord | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecheckPlan:
    python: Annotated[
        Path | None,
        Param("Environment to compare with this one; default: this one with the dossier.", metavar="ENV"),
    ] = None
    rounds: Annotated[int, Param("Rounds, 8 or more; up to three times as many if noise hides a 4 % difference.")] = (
        ROUNDS
    )
    min_time: Annotated[float, Param("Seconds to measure in each process.", minimum=0.05)] = 0.5
    max_slowdown: Annotated[
        float,
        Param("Slow-down that must be excluded for a PASS.", parse=share_from_text, show=share_to_text),
    ] = 0.05


@dataclass(frozen=True, slots=True)
class OutputChange:
    """One output in the new environment against the old one's."""

    name: str
    values: int
    changed: int
    """Values that are not equal to the last bit."""
    first_changed: tuple[int, ...] | None
    """Index of the first; None where all are equal, or the old values are not here."""
    relative_error: float
    """‖new − old‖ / ‖old‖; without the old environment, of the new outputs against the source model's."""
    predictions_changed: int | None
    """Samples with another class; None for a model that does not classify."""


@dataclass(frozen=True, slots=True)
class LatencyChange:
    """New over old: above 1 is slower."""

    metric: str
    load: str
    ratio: float
    ci: tuple[float, float] | None
    """None where nothing can be said of it."""
    confidence: float
    change: Change
    how: str
    """`interleaved, 10 rounds`, or which processes were compared and why they are not judged."""
    rounds_to_settle: int | None = None
    """About how many rounds of this scatter would exclude the slow-down or show one; None where processes were not interleaved."""

    def format_interval(self) -> str:
        """`0.998 to 1.004 at 99%`."""
        return f"{self.ci[0]:.3f} to {self.ci[1]:.3f} at {self.confidence:.0%}" if self.ci else "no interval"


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    """The JSON document of `optpipe signoff recheck`."""

    dossier: str
    artifact: str
    verdict: Verdict
    reasons: tuple[str, ...]
    versions: Mapping[str, tuple[str, str]]
    """Of each package that is not what it was, the old and the new version."""
    outputs: tuple[OutputChange, ...]
    outputs_how: str
    latency: LatencyChange
    precision: str
    max_slowdown: float
    warnings: tuple[str, ...] = ()
