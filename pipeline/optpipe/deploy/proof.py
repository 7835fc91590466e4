"""`deploy --prove`: sends the deployment's requests to a running server, over HTTP and gRPC, and compares the outputs.

If the server lacks a model's backend, optpipe's session serves the model in the Python backend, with the same tensors,
batching, warm-up, labels, and ensemble; the report then shows "configured, not run".
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from ssl import create_default_context
from threading import Barrier, BrokenBarrierError, Semaphore, local
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

import optpipe
from optpipe.backends.base import Serving
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, GateError, MissingError, StageError, first_line
from optpipe.core.events import Listener
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.metrics.sections import LATENCY
from optpipe.core.records import group_pairs
from optpipe.core.verdict import CriterionResult, Verdict
from optpipe.deploy.bounded import bound_answers
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.records import MODELS, Comparison, DeploymentRecord, ProofRecord
from optpipe.deploy.requests import Expected, list_expected
from optpipe.deploy.server import ServerProgram, list_backends, run_server
from optpipe.deploy.session_process import open_artifact
from optpipe.deploy.triton_config import (
    CONFIG,
    TYPES,
    list_positions,
    read_config,
    require_tritonclient,
    write_config,
)
from optpipe.deploy.triton_models import SHIM, add_shim_parameters
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.signoff.policy import Criterion, Policy
from optpipe.stats.paired import compute_output_error
from optpipe.stats.selected_rows import align_rows
from optpipe.workspace.entry import entry_from_folder
from optpipe.workspace.store import Store


def loads_from_policy(policy: Policy, largest: int) -> dict[LoadSpec, list[Criterion]]:
    """The loads of the policy's latency limits, each with its limits; single requests if there are none."""
    loads: dict[LoadSpec, list[Criterion]] = {}
    for criterion in policy.criteria:
        where = criterion.where
        if criterion.is_of(LATENCY) and where.scenario in (
            None,
            Scenario.SINGLE_STREAM,
            Scenario.SERVER,
        ):
            size = min(where.batch_size or 1, max(largest, 1))
            scenario = where.scenario or Scenario.SINGLE_STREAM
            rate = None if where.rate is None else float(where.rate)
            load = LoadSpec(size, scenario, Mode.END_TO_END, rate_per_s=rate, length=where.length)
            loads.setdefault(load, []).append(criterion)
    return loads or {LoadSpec(1, mode=Mode.END_TO_END): []}


def fill_load(
    checked: CheckedDeployment, wanted: LoadSpec, inputs: Mapping[str, np.ndarray]
) -> tuple[LoadSpec, dict[str, np.ndarray]]:
    """The load with the length of its sequences, and the rows of one of its requests, drawn from `inputs`."""
    rows = dict(inputs)
    if wanted.length is not None:
        rows = fill_sequences(checked.card, rows, wanted.length, wanted.batch_size)
    taken = {
        name: np.resize(array, (wanted.batch_size, *array.shape[1:]))
        for name, array in rows.items()
    }
    return replace(wanted, length=read_length(checked.card, rows)), taken


def name_inputs(
    serving: Serving | None, rows: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """Renames inputs for a server that addresses them by position."""
    if serving is None or not serving.by_position:
        return rows
    return dict(zip(list_positions("INPUT", len(rows)), rows.values(), strict=True))


PROTOCOLS = ("http", "grpc")
Client = tuple[Any, Any]
"""A module of tritonclient, and a connection of it."""
LARGEST_ANSWER = 2**31 - 1
"""In bytes: no message of gRPC is larger."""
REQUEST_LIMIT_S = 60.0
MAX_FAILED = 5
"""Failed requests after which nothing more is sent: more would only harm others."""
CONNECTIONS = 32
"""The number for requests that arrive at a rate; one that finds all of them busy waits, which counts as latency."""
VERSION = "1"
"""The version under which a deployment is written."""
SERVED_TOLERANCE = 2e-2
"""Largest relative error of a served output against the in-process one: batches of other sizes use other kernels."""


def prove_deployment(
    checked: CheckedDeployment, program: ServerProgram, store: Store, listener: Listener
) -> ProofRecord:
    """Runs the server on the deployment and compares.

    Raises GateError if an output, a label, or a shape is not the signed-off one, StageError with the server's reason if it does
    not load the repository or dies, and MissingError without tritonclient.
    """
    require_tritonclient()
    name, source = checked.record.engine, checked.folder / MODELS / checked.record.engine
    entry = entry_from_folder(source / "1", ArtifactInfo)
    if (blocker := BACKENDS[entry.info.backend].find_run_blocker(entry.info)) is not None:
        raise MissingError(
            f"{name} cannot run on this machine, so nothing can be proven here: " + blocker
        )
    with store.scratch("prove") as folder:
        scratch = folder.resolve()  # the server's processes have other working directories
        models = arrange_models(checked, program, scratch / MODELS)
        largest = read_config(source / CONFIG).max_batch_size
        with listener.step("in-process outputs"):
            engine = open_artifact(source / "1", checked.record.options, largest)
            expected = list(list_expected(checked.folder, checked.record, checked.card, engine))
        with (
            listener.step("tritonserver") as step,
            run_server(program, scratch / MODELS, scratch) as (*places, server),
        ):
            comparisons: list[Comparison] = []
            for protocol, place in zip(PROTOCOLS, places, strict=True):
                client = open_client(protocol, place)
                for asked in group_pairs((request.model, request) for request in expected).values():
                    comparison, judged = replay(checked, client, protocol, asked)
                    for failure in (
                        criterion for criterion in judged if criterion.verdict is not Verdict.PASS
                    ):
                        raise (StageError if failure.name.startswith("answers") else GateError)(
                            failure.reason
                        )
                    comparisons.append(comparison)
                step.advance()
    behind = [model for model, proven in models.items() if proven.startswith("configured")]
    have = ", ".join(list_backends(program))
    lacks = f"{', '.join(behind)}: the server lacks the backend (it has: {have}); prove it again where it is deployed"
    return ProofRecord(server, models, tuple(comparisons), (lacks,) if behind else ())


def arrange_models(
    checked: CheckedDeployment, program: ServerProgram, target: Path
) -> dict[str, str]:
    """Links the repository; models without a backend on this server get the Python backend."""
    have, proven = list_backends(program), {}
    for source in sorted((checked.folder / MODELS).resolve().glob("*/")):
        shutil.copytree(
            source,
            target / source.name,
            copy_function=lambda file, link: Path(link).symlink_to(file),
        )
        config = read_config(source / CONFIG)
        if config.platform == "ensemble" or (config.backend in have and config.backend != "python"):
            proven[source.name] = "served by tritonserver"
            continue
        own = "served by tritonserver, through optpipe's session"
        lacking = f"configured, not run: {config.backend}; run by optpipe's session"
        proven[source.name] = own if config.backend == "python" else lacking
        _put_behind_shim(config, checked.record, source, target / source.name)
    return proven


def _put_behind_shim(config: Any, record: DeploymentRecord, source: Path, target: Path) -> None:
    pb = require_tritonclient()
    config.backend, config.platform, config.default_model_filename = "python", "", ""
    config.ClearField("optimization")
    for group in config.instance_group:
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    for tensor in config.input:
        tensor.allow_ragged_batch = False
    add_shim_parameters(
        config, source / "1", "artifact" if source.name == record.engine else "preprocessing"
    )
    config.parameters["python"].string_value = sys.executable
    inherited = os.environ.get("PYTHONPATH")  # the server starts the interpreter without it
    own = str(Path(optpipe.__file__).parents[1])
    config.parameters["path"].string_value = f"{own}{os.pathsep}{inherited}" if inherited else own
    config.parameters["options"].string_value = json.dumps(
        dict(record.options) if source.name == record.engine else {}
    )
    write_config(config, target)
    for name, file in SHIM.items():
        (target / "1" / name).unlink(missing_ok=True)
        (target / "1" / name).symlink_to(file)


def ask(
    client: Client,
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    classes: int = 0,
) -> Any:
    """Sends one request; `classes` requests that many labels instead of the tensor. Raises StageError if it fails."""
    wanted = [client[0].InferRequestedOutput(name, class_count=classes) for name in outputs]
    return infer(client, model, prepare_inputs(client[0], inputs), outputs=wanted)


def infer(client: Client, model: str, given: Sequence[Any], **how: Any) -> Any:
    limit = {"client_timeout": REQUEST_LIMIT_S} if client[0].__name__.endswith("grpc") else {}
    with translate_errors(f"{model}: the server refused a request"):
        return client[1].infer(model, given, **how, **limit)


@contextmanager
def translate_errors(problem: str) -> Iterator[None]:
    """Errors of a server and of the way to it become a StageError that begins with `problem`."""
    from geventhttpclient.response import HTTPParseError
    from tritonclient.utils import InferenceServerException

    try:
        yield
    except (
        InferenceServerException,
        HTTPParseError,
        OSError,
        ValueError,
        RecursionError,
    ) as error:
        raise StageError(f"{problem}: {first_line(error)}") from error


def prepare_inputs(module: Any, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """The inputs of a request for `tritonclient.grpc` or `tritonclient.http`."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(
            module.InferInput(
                name, list(array.shape), TYPES[str(array.dtype)].removeprefix("TYPE_")
            )
        )
        inputs[-1].set_data_from_numpy(array)
    return inputs


class Answer(NamedTuple):
    """A request that was answered; `due_ns` is when it was sent if it had no time to be sent at."""

    due_ns: int
    end_ns: int

    @property
    def latency_ns(self) -> int:
        return self.end_ns - self.due_ns


def send_requests(
    connect: Callable[[], Client],
    model: str,
    inputs: Mapping[str, np.ndarray],
    arrivals: Iterable[int | None],
    connections: int,
) -> tuple[list[Answer], list[str]]:
    """Sends a request at each of `arrivals`, for None at once; returns the answers as they came, and why other requests failed.

    A free connection takes the next arrival, so that at most `connections` requests are in flight. After MAX_FAILED nothing more is
    sent.
    """
    thread, ready, room = local(), Barrier(connections), Semaphore(connections)
    answers: list[Answer] = []
    failed: list[str] = []

    def open_sender(_: int) -> None:
        client = connect()
        thread.send = partial(infer, client, model, prepare_inputs(client[0], inputs))
        with suppress(StageError):
            thread.send()  # opens the connection
        with suppress(BrokenBarrierError):
            ready.wait(REQUEST_LIMIT_S)  # so that each thread takes one of these calls

    def send(due: int | None) -> None:
        begun = perf_counter_ns() if due is None else due
        try:
            thread.send()
        except StageError as problem:
            failed.append(str(problem))
        else:
            answers.append(Answer(begun, perf_counter_ns()))
        room.release()

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(open_sender, range(connections)))
        room.acquire()
        for due in arrivals:
            pool.submit(send, due)
            room.acquire()
            if len(failed) >= MAX_FAILED:
                break
    return answers, failed


def open_client(
    protocol: str, place: str, *, secure: bool = False, answer_bytes: int = LARGEST_ANSWER
) -> Client:
    """Connects to a server; an answer of more than `answer_bytes` is an error."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the error names a failed handshake
    module, trusted = (
        import_module(f"tritonclient.{protocol}"),
        (os.environ.get("SSL_CERT_FILE") if secure else None),
    )
    if trusted:
        try:
            create_default_context(cafile=trusted)
        except OSError as error:
            raise BadInputError(
                f"SSL_CERT_FILE={trusted}: not a PEM file of certificates: {error}"
            ) from error
    if protocol == "grpc":
        sizes = {
            "grpc.max_send_message_length": LARGEST_ANSWER,
            "grpc.max_receive_message_length": answer_bytes,
        }
        return module, module.InferenceServerClient(
            place, ssl=secure, root_certificates=trusted or None, channel_args=[*sizes.items()]
        )
    limits = {"connection_timeout": REQUEST_LIMIT_S, "network_timeout": REQUEST_LIMIT_S}
    options = {"ca_certs": trusted} if trusted else None
    client = module.InferenceServerClient(place, ssl=secure, ssl_options=options, **limits)
    bound_answers(client, answer_bytes, REQUEST_LIMIT_S)
    return module, client


def replay(
    checked: CheckedDeployment, client: Client, protocol: str, asked: Sequence[Expected]
) -> tuple[Comparison, list[CriterionResult]]:
    """Sends one model's requests, also after a wrong answer; ends after MAX_FAILED that failed, or one that took too long."""
    wrong: list[str] = []
    failed: list[str] = []
    versions: dict[str, None] = {}
    model, equal, worst, sent = asked[0].model, 0, 0.0, 0
    for request in asked:
        begun, sent = monotonic(), sent + 1
        try:
            same, error, version = _compare(
                checked, client, f"{model} over {protocol}, request {sent}", request
            )
        except GateError as problem:
            wrong.append(str(problem))
        except StageError as problem:
            failed.append(str(problem))
            if len(failed) == MAX_FAILED or monotonic() - begun >= REQUEST_LIMIT_S:
                break
        else:
            equal, worst, versions[version] = equal + same, max(worst, error), None
    right = f"{sent - len(wrong) - len(failed)} of {sent} equal to the signed-off predictions"
    predictions = None if asked[0].prediction is None else right
    verdict = Verdict.FAIL if wrong else Verdict.INCONCLUSIVE if failed else Verdict.PASS
    why = wrong[0] if wrong else predictions or f"relative error at most {worst:.2g}"
    judged = [
        judge_failed(f"answers.{model}", sent, failed),
        CriterionResult(f"outputs.{model}", verdict, why),
    ]
    if versions:
        verdict = Verdict.PASS if list(versions) == [VERSION] else Verdict.FAIL
        why = f"version {', '.join(versions)} answers; version {VERSION} was deployed"
        judged.append(CriterionResult(f"version.{model}", verdict, why))
    return Comparison(model, protocol, sent, equal, worst, predictions), judged


def judge_failed(name: str, sent: int, failed: Sequence[str]) -> CriterionResult:
    if failed:
        why = f"{len(failed)} of {sent:,} requests failed, the first: {failed[0]}"
        return CriterionResult(name, Verdict.FAIL, why)
    return CriterionResult(name, Verdict.PASS, f"{sent:,} of {sent:,} requests")


def _compare(
    checked: CheckedDeployment, client: Client, where: str, request: Expected
) -> tuple[bool, float, str]:
    """Whether the outputs equal the artifact's to the bit, their largest relative error, and the version that answered.

    Raises GateError if an output, a class or a label is not the signed-off one, StageError if the server refuses the request.
    """
    record, inside = checked.record, request.model == checked.record.engine
    names = list(request.outputs or request.source) or [spec.name for spec in checked.card.outputs]
    by_position = inside and checked.serving is not None and checked.serving.by_position
    served = list_positions("OUTPUT", len(names)) if by_position else names
    sent = name_inputs(checked.serving, request.inputs) if inside else request.inputs
    answer = ask(client, request.model, sent, served)
    got = {
        name: read_output(answer, outside, where)
        for name, outside in zip(names, served, strict=True)
    }
    worst = max(_judge(record, where, request, name, got) for name in names)
    whole = {name: output for name, output in got.items() if output is not None}
    if request.prediction is not None:
        _judge_label(record, client, where, request, names[0], whole[names[0]])
    response = answer.get_response()
    version = response["model_version"] if isinstance(response, dict) else response.model_version
    return (
        all(whole[name].tobytes() == request.outputs[name].tobytes() for name in request.outputs),
        worst,
        version,
    )


def read_output(answer: Any, name: str, where: str) -> np.ndarray | None:
    """An output of an answer of tritonclient; None without it. Raises GateError for bytes that are not of the stated type and shape."""
    from tritonclient.utils import InferenceServerException

    try:
        output: np.ndarray | None = answer.as_numpy(name)
    except (
        InferenceServerException,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        struct.error,
    ) as error:
        raise GateError(f"{where}: output '{name}' is not a tensor: {first_line(error)}") from error
    else:
        return output


def _judge(
    record: DeploymentRecord,
    where: str,
    request: Expected,
    name: str,
    answer: Mapping[str, np.ndarray | None],
) -> float:
    """The relative error against the artifact's output, or else the source's; selected rows are sets.

    Raises GateError if it is too large.
    """
    got = answer[name]
    want = request.outputs.get(name, request.source.get(name, got))
    if got is None or want is None or got.shape != want.shape or got.dtype != want.dtype:
        have = "nothing" if got is None else f"{got.dtype} {list(got.shape)}"
        shape = "" if want is None else f", the signed-off one is {want.dtype} {list(want.shape)}"
        raise GateError(f"{where}: output '{name}' is {have}{shape}")
    allowed = (
        min(SERVED_TOLERANCE, record.tolerance) if name in request.outputs else record.tolerance
    )
    whole = {key: value for key, value in answer.items() if value is not None}
    aligned = align_rows(request.outputs or request.source, whole, record.selection, allowed)
    error = compute_output_error(name, want, aligned[name])
    if not error.finite or error.relative > allowed:
        problem = f"{where}: output '{name}' is not the signed-off one"
        raise GateError(f"{problem}: relative error {error.relative:.2g} exceeds {allowed:g}")
    if name in request.source:
        aligned = align_rows(request.source, whole, record.selection, record.tolerance)
        beside = compute_output_error(name, request.source[name], aligned[name])
        if beside.relative > record.tolerance:
            problem = f"{where}: output '{name}' differs from the source model's"
            raise GateError(
                f"{problem}: relative error {beside.relative:.2g} exceeds {record.tolerance:g}"
            )
    return error.relative


def _judge_label(
    record: DeploymentRecord,
    client: Client,
    where: str,
    request: Expected,
    name: str,
    got: np.ndarray,
) -> None:
    """Raises GateError if the class or its label is not the signed-off one."""
    best = int(got.reshape(len(got), -1).argmax(axis=1)[0])
    if best != request.prediction:
        raise GateError(
            f"{where}: predicts class {best}, the signed-off prediction is {request.prediction}"
        )
    if not record.labels:
        return
    told = read_output(ask(client, request.model, request.inputs, [name], classes=1), name, where)
    first = b"" if told is None or told.size == 0 else told.reshape(-1)[0]
    text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
    index, _, label = text.partition(":")[2].partition(":")  # VALUE:INDEX:LABEL
    if index != str(best) or label != record.labels[best]:
        raise GateError(
            f"{where}: class {index} is labeled '{label}', but '{record.labels[best]}' in the model card"
        )
