"""The verdict of a live check as metrics of Prometheus, for its node exporter's text files."""

from time import time

from optpipe.core.errors import MissingError
from optpipe.core.verdict import Verdict
from optpipe.deploy.records import DeploymentRecord, ProofRecord

SAME = ("model", "artifact", "server")
"""The labels of every metric."""


def require_prometheus_client() -> None:
    """Raises MissingError if the library that writes the metrics is not installed."""
    from importlib.util import find_spec

    if find_spec("prometheus_client") is None:
        raise MissingError(
            "metrics require prometheus-client; install it with `pip install 'prometheus-client>=0.22'`"
        )


def render_metrics(proof: ProofRecord, record: DeploymentRecord) -> bytes:
    """The verdict, its criteria and figures in Prometheus's text format; times are in seconds."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    same = (record.model, record.artifact, proof.server)

    def add(name: str, about: str, *more: str) -> Gauge:
        return Gauge(f"optpipe_check_{name}", about, (*SAME, *more), registry=registry)

    add("time_seconds", "When the check ended, in seconds since 1970.").labels(*same).set(time())
    verdict = add("verdict", "1 for the verdict of the check, 0 for the others.", "verdict")
    for state in Verdict:
        verdict.labels(*same, str(state)).set(state is proof.verdict)

    passed = add("criterion_passed", "1 if the criterion is PASS.", "criterion")
    latency = add("latency_seconds", "Measured latency of a criterion.", "criterion")
    low = add("latency_low_seconds", "Lower end of its 95% interval.", "criterion")
    high = add("latency_high_seconds", "Upper end of its 95% interval.", "criterion")
    limit = add("limit_seconds", "The policy's limit of the latency.", "criterion")
    for criterion in proof.criteria:
        labels = (*same, criterion.name)
        passed.labels(*labels).set(criterion.verdict is Verdict.PASS)
        if not isinstance(criterion.observed, float) or not isinstance(criterion.threshold, float):
            continue
        latency.labels(*labels).set(criterion.observed / 1e9)
        limit.labels(*labels).set(criterion.threshold / 1e9)
        if criterion.ci is not None:
            low.labels(*labels).set(criterion.ci[0] / 1e9)
            high.labels(*labels).set(criterion.ci[1] / 1e9)
    text: bytes = generate_latest(registry)
    return text
