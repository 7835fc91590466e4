"""`deploy DEPLOYMENT --check URL`: sends the deployment's requests to a running endpoint, and judges what it answers.

The endpoint speaks the KServe v2 protocol over HTTP or gRPC, as Triton does. A server that cannot be reached decides nothing
(INCONCLUSIVE); another model, version, configuration or output, and a single failed request are a FAIL.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from secrets import randbits
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import numpy.typing as npt

from optpipe.core import LazyModule
from optpipe.core.errors import BadInputError, StageError, first_line
from optpipe.core.events import Listener
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import LatencySummary
from optpipe.core.percentile_names import format_percentile_name, percent_from_name
from optpipe.core.quantity import Dimension
from optpipe.core.records import group_pairs
from optpipe.core.verdict import CriterionResult, Verdict, combine_verdicts
from optpipe.core.wording import Argument
from optpipe.deploy.bounded import FACT_BYTES, FACT_LIMIT_S
from optpipe.deploy.check import CheckedDeployment, check_deployment
from optpipe.deploy.live_metrics import render_metrics, require_prometheus_client
from optpipe.deploy.proof import (
    CONNECTIONS,
    LARGEST_ANSWER,
    PROTOCOLS,
    Answer,
    Client,
    fill_load,
    judge_failed,
    loads_from_policy,
    name_inputs,
    open_client,
    replay,
    send_requests,
    translate_errors,
)
from optpipe.deploy.records import MODELS, DeployResult, ProofRecord
from optpipe.deploy.requests import Expected, list_expected
from optpipe.deploy.triton_config import CONFIG, read_config, require_tritonclient
from optpipe.measure.trials import iterate_arrivals
from optpipe.report.document import TONES, Document, Sentence, Tone, make_document, tabulate_results
from optpipe.signoff.policy import Criterion, policy_from_toml
from optpipe.stats.percentiles import (
    CONFIDENCE,
    compute_relaxation_queries,
    count_queries_needed,
    count_transient_queries,
    summary_from_ns,
)
from optpipe.stats.queues import bound_late_share, estimate_utilization, is_falling_behind
from optpipe.workspace.file_names import POLICY
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import require_writable_file

json_format = LazyModule("google.protobuf.json_format")
TEXT_TIMES = 8
"""A number of 4 bytes as JSON takes at most about 25."""
UNKNOWN_BYTES = 2**25
"""The limit of the outputs, without text, for an image of which only the prediction was recorded."""
FEWEST_RELAXATIONS = 50
"""Relaxation times of a queue that decide: a shorter load starts empty, and sees few of its long waits or none."""
FEW_CONFIDENCE = 0.99
"""The confidence of a percentile of fewer requests than its queue needs: their correlation is then often estimated too small."""


def check_live(
    folder: Path, url: str, load: tuple[int, float] | None, output: Path | None, listener: Listener
) -> DeployResult:
    """Checks the server at `url` against a deployment, and writes the verdict as metrics for Prometheus to `output`.

    Raises BadInputError for another kind of address or deployment, and for a `load` that no limit judges.
    """
    if output is not None:
        require_prometheus_client()
        require_writable_file(output, "output")
    checked = check_deployment(folder)
    proof = _replay_live(checked, url, load, listener)
    if output is not None:
        write_bytes(output, render_metrics(proof, checked.record))
    return DeployResult(str(folder), checked.record, (), proof)


def document_from_live_check(deployed: DeployResult) -> Document:
    proof, record = deployed.proof, deployed.deployment
    assert proof is not None
    assert proof.verdict is not None
    text = f"{record.model} ({record.backend} {record.precision}) on {proof.server}"
    return make_document(
        [
            Sentence(text, TONES[proof.verdict], proof.verdict),
            tabulate_results(proof.criteria),
            *(Sentence(note, Tone.DOUBTFUL) for note in proof.notes),
        ]
    )


def _replay_live(
    checked: CheckedDeployment, url: str, load: tuple[int, float] | None, listener: Listener
) -> ProofRecord:
    """Sends every request once; `load` also sends that many of each load of the policy, at that rate per second."""
    require_tritonclient()
    parts = split_address(url)
    protocol = parts.scheme.removesuffix("s")
    if checked.serving is None:
        raise BadInputError(
            f"{checked.folder} is a deployment to a folder; "
            + Argument("check", "URL")
            + " needs one to triton"
        )
    loads = _choose_loads(checked) if load is not None else {}
    expected = list(list_expected(checked.folder, checked.record, checked.card))
    connect = _make_connector(parts, expected, checked.card.batch_range[2])
    client = connect()
    try:
        about = _fetch(client, "server_metadata")
    except StageError as error:
        unreached = _judge_unreached(error)
        return ProofRecord(url, {}, (), (), unreached.verdict, (unreached,))

    extensions = about.get("extensions")
    tells = isinstance(extensions, list) and "model_configuration" in extensions
    criteria = [CriterionResult("server", Verdict.PASS, f"answers over {protocol}")]
    comparisons = []
    for model, asked in group_pairs((request.model, request) for request in expected).items():
        with listener.step(f"{model} over {protocol}"):
            comparison, judged = replay(checked, client, protocol, asked)
            comparisons.append(comparison)
            criteria += judged
            if tells:
                criteria.append(_judge_configuration(checked, client, model))
    if load is not None and all(
        criterion.verdict is Verdict.PASS
        for criterion in criteria
        if criterion.name.startswith("answers.")
    ):
        criteria += _judge_loads(checked, connect, loads, load, expected[0].inputs, listener)

    server = f"{about.get('name', 'server')} {about.get('version')} at {url}"
    notes = tuple(_note_unknown(expected, tells=tells))
    verdict = combine_verdicts(criterion.verdict for criterion in criteria)
    return ProofRecord(server, {}, tuple(comparisons), notes, verdict, tuple(criteria))


def _choose_loads(checked: CheckedDeployment) -> Mapping[LoadSpec, Sequence[Criterion]]:
    """The loads of the policy's latency limits. Raises BadInputError if it has none."""
    policy = policy_from_toml(checked.files.read(POLICY), str(checked.folder / POLICY))
    loads = loads_from_policy(policy, checked.card.batch_range[2])
    if not any(loads.values()):
        raise BadInputError(
            f"{checked.folder / POLICY} limits no latency, so there is nothing to judge",
            argument="load",
        )
    return loads


def _make_connector(
    parts: SplitResult, expected: Sequence[Expected], largest_batch: int
) -> Callable[[], Client]:
    """Opens a connection to the server at an address, on which answers are bounded by what is expected."""
    protocol, secure = parts.scheme.removesuffix("s"), parts.scheme.endswith("s")
    most = bound_answer(expected, largest_batch, TEXT_TIMES if protocol == "http" else 1)
    place = parts.netloc + parts.path.rstrip("/")
    return partial(open_client, protocol, place, secure=secure, answer_bytes=most)


def _judge_unreached(error: StageError) -> CriterionResult:
    """A server that cannot be reached decides nothing; one that speaks another protocol is a FAIL."""
    lost = (
        isinstance(error.__cause__, OSError)
        or "UNAVAILABLE" in str(error)
        or "DEADLINE" in str(error)
    )
    why = str(error) if lost else f"not a server of the KServe v2 protocol: {error}"
    _, untrusted, detail = why.rpartition("CERTIFICATE_VERIFY_FAILED")
    if untrusted:
        why = f"its certificate is not trusted ({detail.strip(']: ')}): SSL_CERT_FILE=FILE names the CA to trust"
    return CriterionResult("server", Verdict.INCONCLUSIVE if lost else Verdict.FAIL, why)


def _note_unknown(expected: Sequence[Expected], *, tells: bool) -> Iterator[str]:
    if not any(request.outputs for request in expected):
        unknown = "the artifact's outputs were not recorded at deployment"
        yield f"{unknown}: served ones are compared with the source model's"
    if not tells:
        yield "the server does not report its configuration"


def _judge_loads(
    checked: CheckedDeployment,
    connect: Callable[[], Client],
    loads: Mapping[LoadSpec, Sequence[Criterion]],
    load: tuple[int, float],
    inputs: Mapping[str, np.ndarray],
    listener: Listener,
) -> Iterator[CriterionResult]:
    """Sends `load`, a number of requests at a rate per second, as each of the policy's `loads`, and judges their latencies."""
    count, rate_per_s = load
    for wanted, limits in loads.items():
        spec, rows = fill_load(checked, wanted, inputs)
        with listener.step(f"{count:,} requests at {rate_per_s:g}/s, {spec}"):
            given = name_inputs(checked.serving, rows)
            due = islice(iterate_arrivals(rate_per_s, randbits(32)), count)
            # without a rate its requests follow each other: a latency counts from sending
            paced = ((None for _ in due), 1) if spec.rate_per_s is None else (due, CONNECTIONS)
            answers, failed = send_requests(connect, checked.record.engine, given, *paced)
            sent = len(answers) + len(failed)
            yield judge_failed(f"answers.{limits[0].name}", sent, failed)
            if answers and not failed:
                yield from judge_latencies(answers, limits, spec, rate_per_s)


def split_address(url: str) -> SplitResult:
    """The parts of a server's address. Raises BadInputError for one that is none, and for one that holds a secret.

    A user, a password, and a query would be in the proof, in `--json`, and in every line of the metrics.

    >>> split_address("grpc://localhost:8001").netloc
    'localhost:8001'
    """
    problem = "expected http://, https://, grpc:// or grpcs://, then HOST:PORT"
    try:
        parts = urlsplit(url)
        known = parts.hostname and parts.port != 0  # both may raise ValueError
    except ValueError:
        known = False
    if not known or not (url.isascii() and url.isprintable()) or " " in url:
        raise BadInputError(problem, argument="check")
    if parts.scheme.removesuffix("s") not in PROTOCOLS:
        raise BadInputError(problem, argument="check")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise BadInputError(
            "the address has a user, a password, or a query, which would be stored in the proof",
            argument="check",
            remedy="give HOST:PORT alone",
        )
    return parts


def bound_answer(expected: Sequence[Expected], largest_batch: int, times: int = TEXT_TIMES) -> int:
    """The bytes of an answer that are read at most: `times` those of the largest batch, and FACT_BYTES of what surrounds it."""
    known = [(request.inputs, request.outputs or request.source) for request in expected]
    sizes = [
        sum(array.nbytes for array in outputs.values()) / max(map(len, inputs.values()), default=1)
        for inputs, outputs in known
        if outputs
    ]
    most = ceil(times * max(sizes, default=0) * largest_batch)
    if len(sizes) < len(known):
        most = max(most, times * UNKNOWN_BYTES)
    return min(LARGEST_ANSWER, FACT_BYTES + most)


def _fetch(client: Client, fact: str, *words: str) -> Mapping[str, Any]:
    """`server_metadata` or `model_config` of a server, as JSON. Raises StageError."""
    limit = {"client_timeout": FACT_LIMIT_S} if client[0].__name__.endswith("grpc") else {}
    problem = f"no {fact.replace('_', ' ')}"
    with translate_errors(problem):
        told = getattr(client[1], f"get_{fact}")(*words, **limit)
    if limit:
        if (size_bytes := told.ByteSize()) > FACT_BYTES:
            raise StageError(f"{problem}: the answer has {size_bytes:,} bytes")
        answer: Mapping[str, Any] = json_format.MessageToDict(
            told, preserving_proto_field_name=True
        )
        return answer
    if not isinstance(told, dict):
        raise StageError(f"{problem}: the answer is no JSON object")
    return told


def _judge_configuration(checked: CheckedDeployment, client: Client, model: str) -> CriterionResult:
    """Compares the settings, and the artifact's hash among them, with those of the deployment."""
    name, written = f"configuration.{model}", read_config(checked.folder / MODELS / model / CONFIG)
    try:
        told = _fetch(client, "model_config", model)
    except StageError as error:
        return CriterionResult(name, Verdict.INCONCLUSIVE, error.message)
    try:
        served = json_format.ParseDict(
            told.get("config", told), type(written)(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, AttributeError, TypeError) as error:
        why = f"the server's answer is not a configuration: {first_line(error)}"
        return CriterionResult(name, Verdict.INCONCLUSIVE, why)
    shown = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
    want, have = (json_format.MessageToDict(config, **shown) for config in (written, served))
    problems: list[str] = []

    def compare(expected: Any, actual: Any, path: str) -> None:
        """Finds written settings that are served otherwise; the server may add defaults."""
        if isinstance(expected, dict) and isinstance(actual, dict):
            for name, setting in expected.items():
                compare(setting, actual.get(name), f"{path}.{name}".removeprefix("."))
        elif (
            isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual)
        ):
            for number, (setting, beside) in enumerate(zip(expected, actual, strict=True)):
                compare(setting, beside, f"{path}[{number}]")
        elif expected != actual and expected not in ("", [], {}):
            problems.append(
                f"{path} is {actual or 'not set'}, {expected or 'not set'} in the deployment"
            )

    compare({"dynamic_batching": None, **want}, {"dynamic_batching": None, **have}, "")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    why, verdict = (
        (f"{problems[0]}{more}", Verdict.FAIL) if problems else ("as deployed", Verdict.PASS)
    )
    return CriterionResult(name, verdict, why)


def judge_latencies(
    answers: Sequence[Answer], limits: Sequence[Criterion], spec: LoadSpec, rate_per_s: float
) -> Iterator[CriterionResult]:
    """Judges latencies in ns at this client. A lower rate than the policy's cannot PASS, and a higher one cannot FAIL.

    The first requests, which met a shorter queue than later ones, are left out. Where the server falls behind, latencies have no
    percentile, because they grow as long as requests come: it FAILs a limit that the last half of the requests exceed.
    """
    served = _served_from_answers(answers, spec, rate_per_s)
    percents = {percent_from_name(limit.metric) for limit in limits}
    about = f"{spec}; {len(answers):,} requests at {rate_per_s:g}/s, from this client to one running server"

    for criterion in limits:
        limit_ns, percent = float(criterion.threshold), percent_from_name(criterion.metric)
        needed = served.count_needed(percent)
        summary = served.summarize(percents, percent)
        shown = None if served.behind else summary.percentile(percent)
        verdict, why = _judge_latency(served, limit_ns, percent, summary)

        more = None
        if verdict is Verdict.INCONCLUSIVE:
            number = f"{needed:,} or more" if needed > len(answers) else "more"
            load = f"NUMBER@{served.wanted_per_s:g}"
            more = f"send {number} requests with " + Argument("load", load)
        yield CriterionResult(
            criterion.name,
            verdict,
            why,
            criterion.limit,
            more,
            None if shown is None else shown.value,
            None if shown is None else shown.interval,
            limit_ns,
            Dimension.TIME,
            about,
        )


@dataclass(frozen=True, slots=True)
class _Served:
    """What the latencies under one load show about the server's queue."""

    latency_ns: npt.NDArray[np.float64]
    """In the order in which the requests were due."""
    rate_per_s: float
    wanted_per_s: float
    """The policy's rate, or `rate_per_s` if it names none."""
    paced: bool
    behind: bool
    utilization: float
    fewest: int
    """Requests that a queue as full as this needs at least."""

    def count_transient(self, percent: float) -> int:
        return count_transient_queries(self.utilization, percent) if self.paced else 0

    def count_needed(self, percent: float) -> int:
        needed = count_queries_needed(self.utilization, percent)
        return max(self.fewest, self.count_transient(percent) + needed)

    def summarize(self, percents: Iterable[float], percent: float) -> LatencySummary:
        """The percentiles up to `percent`, without the first requests; of too few requests with a higher confidence."""
        few = self.paced and self.latency_ns.size < self.count_needed(percent)
        lower = sorted(other for other in percents if other <= percent)
        kept = self.latency_ns[min(self.count_transient(percent), self.latency_ns.size // 2) :]
        return summary_from_ns(kept, lower, FEW_CONFIDENCE if few else CONFIDENCE)


def _served_from_answers(answers: Sequence[Answer], spec: LoadSpec, rate_per_s: float) -> _Served:
    ordered = sorted(answers)
    latency_ns = np.array([answer.latency_ns for answer in ordered], dtype=np.float64)
    due_ns, end_ns = np.array(ordered, dtype=np.int64).T
    paced = spec.rate_per_s is not None
    utilization = estimate_utilization(latency_ns) if paced else 0.0
    return _Served(
        latency_ns,
        rate_per_s,
        wanted_per_s=rate_per_s if spec.rate_per_s is None else spec.rate_per_s,
        paced=paced,
        behind=paced and is_falling_behind(due_ns, end_ns, rate_per_s),
        utilization=utilization,
        fewest=ceil(FEWEST_RELAXATIONS * compute_relaxation_queries(utilization)) if paced else 0,
    )


def _judge_latency(
    served: _Served, limit_ns: float, percent: float, summary: LatencySummary
) -> tuple[Verdict, str]:
    """The verdict on one limit, and why."""
    rate_per_s, wanted_per_s, count = served.rate_per_s, served.wanted_per_s, served.latency_ns.size
    if served.behind:
        return _judge_falling_behind(served, limit_ns, percent)
    shown = summary.percentile(percent)
    if shown is None or shown.interval is None:
        withheld = summary.withheld.get(
            format_percentile_name(percent), "its interval is not known"
        )
        return Verdict.INCONCLUSIVE, f"not shown: {withheld}"
    if count < served.fewest:
        busy = f"requests wait as at a server that is busy {served.utilization:.0%} of the time"
        return Verdict.INCONCLUSIVE, f"{busy}, and {count:,} are too few for it"
    if shown.interval[0] <= limit_ns < shown.interval[1]:
        return Verdict.INCONCLUSIVE, "the interval includes the limit"
    if rate_per_s != wanted_per_s and (rate_per_s < wanted_per_s) == (shown.value <= limit_ns):
        why = f"the policy's load has {wanted_per_s:g} requests/s, not {rate_per_s:g}"
        return Verdict.INCONCLUSIVE, why
    verdict = Verdict.PASS if shown.value <= limit_ns else Verdict.FAIL
    return verdict, "as measured at this client, from one running server"


def _judge_falling_behind(served: _Served, limit_ns: float, percent: float) -> tuple[Verdict, str]:
    """FAILs a limit that the last half of the requests exceed, unless they came at a higher rate than the policy's."""
    late = served.latency_ns[served.latency_ns.size // 2 :] > limit_ns
    if bound_late_share(late.tolist()) <= 1 - percent / 100:
        why = "the server falls behind: its latencies grow, and have not exceeded the limit yet"
        return Verdict.INCONCLUSIVE, why
    if served.rate_per_s <= served.wanted_per_s:
        share = f"{late.mean():.0%} of the last {len(late):,} requests took longer"
        return Verdict.FAIL, f"the server falls behind: {share}"
    load = f"the policy's load has {served.wanted_per_s:g} requests/s, not {served.rate_per_s:g}"
    return Verdict.INCONCLUSIVE, f"the server falls behind, and {load}"
