"""`deploy --prove`: sends the deployment's requests to a running server, over HTTP and gRPC, and compares the outputs.

If the server lacks a model's backend, optpipe's session serves the model in the Python backend, with the same tensors,
batching, warm-up, labels, and ensemble; the report then shows "configured, not run".

The time that the server adds to a request is that of equal requests in-process and through gRPC, in alternating rounds. Requests
follow each other, or a Poisson process in an open loop schedules them: then latency counts from the scheduled time.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain
from itertools import count as numbers_from
from pathlib import Path
from secrets import randbits
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import optpipe
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import GateError, MissingError, StageError, first_line, read_as_user_file
from optpipe.core.events import Listener
from optpipe.core.measurement import LatencySummary, LoadSpec, Mode, Scenario
from optpipe.core.quantity import Estimate
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.records import (
    MODELS,
    REQUESTS,
    TENSORS,
    Comparison,
    DeploymentRecord,
    ProofRecord,
    ServerCost,
    ServerThroughput,
)
from optpipe.deploy.repository import DALI_OUTPUT, ENCODED, SHIM, add_shim_parameters
from optpipe.deploy.server import ServerProgram, list_backends, run_server
from optpipe.deploy.session_process import (
    Answer,
    open_artifact,
    open_load_clients,
    open_preprocessing,
    prepare_inputs,
    send_in_flight,
)
from optpipe.deploy.triton_config import CONFIG, list_positions, read_config, require_tritonclient, write_config
from optpipe.measure.trials import iterate_arrivals, time_call, time_calls_for, warm_up
from optpipe.models.export.exported import Reference, reference_from_file
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.signoff.policy import Policy, policy_from_toml
from optpipe.stats.means import mean_from_values
from optpipe.stats.paired import compute_output_error
from optpipe.stats.percentiles import summary_from_ns
from optpipe.stats.ratio import alternate
from optpipe.workspace.entry import entry_from_folder
from optpipe.workspace.file_names import POLICY
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    import numpy as np

    from optpipe.backends.base import Serving

ROUNDS = 4
WARM_UP_S = 0.1
MAX_WARM_UP_S = 0.5
RATE_CONFIDENCE = 0.95
PERCENTS = (50.0, 90.0, 99.0)
MAX_IN_FLIGHT = 256
CONCURRENCY = (1, 8, 32)
"""Requests in flight during throughput trials."""
Trial = Callable[[LoadSpec, float, int], list[int]]
"""Loads a subject for a number of seconds, with a seed for the arrivals; returns latencies in ns."""


def loads_from_policy(policy: Policy, largest: int) -> tuple[tuple[LoadSpec, str], ...]:
    """The loads of the policy's latency limits; single requests if there are none."""
    found = {}
    for each in policy.criteria:
        where = each.where
        if each.section == "latency" and (
            where.scenario is None or where.scenario in (Scenario.SINGLE_STREAM, Scenario.SERVER)
        ):
            size = min(where.batch_size or 1, max(largest, 1))
            scenario = where.scenario or Scenario.SINGLE_STREAM
            rate = None if where.rate is None else float(where.rate)
            found[LoadSpec(size, scenario, Mode.END_TO_END, rate_per_s=rate, length=where.length)] = (
                f"{each.name} of the policy"
            )
    return tuple(found.items()) or (
        (LoadSpec(1, mode=Mode.END_TO_END), "the policy has no latency limit: one request at a time"),
    )


def measure_server(
    checked: CheckedDeployment,
    url: str,
    seconds: float,
    inputs: "Mapping[str, np.ndarray]",
    engine: Answer,
    largest: int,
    listener: Listener,
) -> tuple[tuple[ServerCost, ...], tuple[ServerThroughput, ...]]:
    """Measures latencies at each load that the policy limits, and requests/s of one sample at every concurrency.

    `url` is the server's gRPC address, `engine` answers in-process; `inputs` are rows to draw from, and `largest` is the
    deployment's batch, 0 without one.
    """
    record, costs, rates = checked.record, [], []
    policy = policy_from_toml(checked.files.read(POLICY), str(checked.folder / POLICY))
    for wanted, source in loads_from_policy(policy, checked.card.batch_range[2]):
        rows = dict(inputs)
        if wanted.length is not None:
            rows = fill_sequences(checked.card, rows, wanted.length, wanted.batch_size)
        load = replace(wanted, length=read_length(checked.card, rows))
        rows = _take_rows(rows, load.batch_size)
        with listener.step(f"server cost, {load}"):
            served = _make_served_trial(url, record.engine, name_inputs(checked.serving, rows))
            costs.append(_measure_cost(partial(_time_requests, partial(engine, [rows])), served, load, source, seconds))
    rows = _take_rows(inputs, 1) if largest else dict(inputs)
    with open_load_clients(url, record.engine, name_inputs(checked.serving, rows)) as run_trial:
        for count in CONCURRENCY:
            joined, seed = min(count, largest) or 1, randbits(32)
            subjects = {
                "in-process": partial(_measure_rate, partial(engine, [rows] * joined), joined, seconds / ROUNDS),
                "server": partial(run_trial, count, seconds / ROUNDS),
            }
            with listener.step(f"throughput, {count} in flight"):
                run_trial(count, MAX_WARM_UP_S)
                found = alternate(subjects, ROUNDS, seed)
            own, through = (_estimate([rate for rate, _ in each]) for each in found.values())
            latency = _summarize(chain.from_iterable(several for _, several in found["server"]))
            rates.append(ServerThroughput(count, own, through, latency, seed))
    return tuple(costs), tuple(rates)


def name_inputs(serving: "Serving | None", rows: "Mapping[str, np.ndarray]") -> "Mapping[str, np.ndarray]":
    """Renames inputs for a server that addresses them by position."""
    if serving is None or not serving.by_position:
        return rows
    return dict(zip(list_positions("INPUT", len(rows)), rows.values(), strict=True))


def _estimate(rates: Sequence[float]) -> Estimate:
    mean = mean_from_values(rates)
    assert mean is not None
    low, high = mean.interval(RATE_CONFIDENCE)
    return Estimate(mean.value, low, high, f"{RATE_CONFIDENCE:.0%}, over {ROUNDS} rounds")


def _measure_rate(call: Callable[[], object], requests: int, seconds: float) -> tuple[float, list[int]]:
    """Requests per second of calls with `requests` each, and the calls' times in ns."""
    times = _time_requests(call, LoadSpec(requests), seconds, 0)
    return requests * len(times) / sum(times) * 1e9, times


def _take_rows(inputs: "Mapping[str, np.ndarray]", size: int) -> "dict[str, np.ndarray]":
    import numpy as np

    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in inputs.items()}


def _measure_cost(own: Trial, served: Trial, load: LoadSpec, source: str, seconds: float) -> ServerCost:
    def in_turn(trial: Trial) -> Callable[[], list[int]]:
        turns = numbers_from(0)
        return lambda: trial(load, seconds / ROUNDS, next(turns))  # the same arrivals for both

    seed = randbits(32)
    found = alternate({"in-process": in_turn(own), "server": in_turn(served)}, ROUNDS, seed)
    alone, through = (_summarize(chain.from_iterable(each)) for each in found.values())
    return ServerCost(str(load), source, alone, through, through.mean - alone.mean, seed)


def _summarize(latencies: Iterable[int]) -> LatencySummary:
    import numpy as np

    found = np.fromiter(latencies, np.int64)
    if not found.size:
        raise StageError("no request was answered in the time given; increase --seconds")
    return summary_from_ns(found, PERCENTS)


def _time_requests(call: Callable[[], object], load: LoadSpec, seconds: float, seed: int) -> list[int]:
    """Latencies in ns of successive requests; in an open loop since the scheduled time."""
    warm_up(partial(time_call, call), WARM_UP_S, MAX_WARM_UP_S)
    if load.rate_per_s is None:
        return time_calls_for(call, seconds)
    return [time_call(call, due) for due in _iterate_due(load.rate_per_s, seconds, seed)]


def _iterate_due(rate_per_s: float, seconds: float, seed: int) -> Iterator[int]:
    """Times at which requests are due; the last one is the first after `seconds`."""
    end = perf_counter_ns() + seconds * 1e9
    for due in iterate_arrivals(rate_per_s, seed):
        yield due
        if due >= end:
            return


def _make_served_trial(url: str, model: str, rows: "Mapping[str, np.ndarray]") -> Trial:
    """Keeps requests of an open loop in flight together, so that the server can form batches."""
    from tritonclient import grpc

    client, inputs = grpc.InferenceServerClient(url), prepare_inputs(grpc, rows)
    ask = partial(client.infer, model, inputs)

    def run(load: LoadSpec, seconds: float, seed: int) -> list[int]:
        if load.rate_per_s is None:
            return _time_requests(ask, load, seconds, seed)
        warm_up(partial(time_call, ask), WARM_UP_S, MAX_WARM_UP_S)
        return send_in_flight(client, model, inputs, MAX_IN_FLIGHT, _iterate_due(load.rate_per_s, seconds, seed))

    return run


PROTOCOLS = ("http", "grpc")
REQUEST_LIMIT_S = 120
SERVED_TOLERANCE = 2e-2
"""Largest relative error of a served output against the in-process one: batches of other sizes use other kernels."""
ROWS_AT_ONCE = 4
"""Samples in one request of the engine, so that the order of a batch is checked too."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A request and its outputs, computed in-process from the deployment's files."""

    model: str
    inputs: "Mapping[str, np.ndarray]"
    outputs: "Mapping[str, np.ndarray]"
    source: "Mapping[str, np.ndarray]"
    """The source model's outputs; empty if they are not known."""
    prediction: int | None = None


def prove_deployment(
    checked: CheckedDeployment, program: ServerProgram, seconds: float, store: Store, listener: Listener
) -> ProofRecord:
    """Runs the server on the deployment and compares; measures the server's cost for `seconds` at each load.

    Raises GateError if an output, a label, or a shape is not the signed-off one, StageError with the server's reason if it does
    not load the repository or dies, and MissingError without tritonclient.
    """
    require_tritonclient()
    entry = entry_from_folder(checked.folder / MODELS / checked.record.engine / "1", ArtifactInfo)
    if (blocker := BACKENDS[entry.info.backend].find_run_blocker(entry.info)) is not None:
        raise MissingError(
            f"{checked.record.engine} cannot run on this machine, so nothing can be proven here: {blocker}"
        )
    with store.scratch("prove") as folder:
        scratch = folder.resolve()  # the server's processes have other working directories
        models = _arrange_models(checked, program, scratch / MODELS)
        largest = read_config(checked.folder / MODELS / checked.record.engine / CONFIG).max_batch_size
        with listener.step("in-process outputs"):
            engine = open_artifact(
                checked.folder / MODELS / checked.record.engine / "1", checked.record.options, largest
            )
            expected = list(_list_expected(checked, engine))
        with (
            listener.step("tritonserver") as step,
            run_server(program, scratch / MODELS, scratch) as (http, grpc, server),
        ):
            comparisons = []
            for protocol in PROTOCOLS:
                module = import_module(f"tritonclient.{protocol}")
                client = module, module.InferenceServerClient(http if protocol == "http" else grpc)
                comparisons += list(_compare(checked, client, protocol, expected))
                step.advance()
            costs, rates = (
                measure_server(checked, grpc, seconds, expected[0].inputs, engine, largest, listener)
                if seconds
                else ((), ())
            )
    behind = [model for model, proven in models.items() if proven.startswith("configured")]
    lacks = f"{', '.join(behind)}: the server lacks the backend (it has: {', '.join(server.backends)}); prove it again where it is deployed"
    notes = (lacks,) if behind else ()
    return ProofRecord(str(checked.folder), server, models, tuple(comparisons), costs, rates, notes)


def _arrange_models(checked: CheckedDeployment, program: ServerProgram, target: Path) -> dict[str, str]:
    """Links the repository; models without a backend on this server get the Python backend."""
    have, found = list_backends(program), {}
    for source in sorted((checked.folder / MODELS).resolve().glob("*/")):
        shutil.copytree(source, target / source.name, copy_function=lambda file, link: Path(link).symlink_to(file))
        config = read_config(source / CONFIG)
        if config.platform == "ensemble" or (config.backend in have and config.backend != "python"):
            found[source.name] = "served by tritonserver"
            continue
        own = "served by tritonserver, through optpipe's session"
        lacking = f"configured, not run: {config.backend}; run by optpipe's session"
        found[source.name] = own if config.backend == "python" else lacking
        _put_behind_shim(config, checked.record, source, target / source.name)
    return found


def _put_behind_shim(config: Any, record: DeploymentRecord, source: Path, target: Path) -> None:
    pb = require_tritonclient()
    config.backend, config.platform, config.default_model_filename = "python", "", ""
    config.ClearField("optimization")
    for each in config.instance_group:
        each.kind = pb.ModelInstanceGroup.KIND_CPU
    for each in config.input:
        each.allow_ragged_batch = False
    add_shim_parameters(config, source / "1", "artifact" if source.name == record.engine else "preprocessing")
    config.parameters["python"].string_value = sys.executable
    inherited = os.environ.get("PYTHONPATH")  # the server starts the interpreter without it
    own = str(Path(optpipe.__file__).parents[1])
    config.parameters["path"].string_value = f"{own}{os.pathsep}{inherited}" if inherited else own
    config.parameters["options"].string_value = json.dumps(dict(record.options) if source.name == record.engine else {})
    write_config(config, target)
    for name, file in SHIM.items():
        (target / "1" / name).unlink(missing_ok=True)
        (target / "1" / name).symlink_to(file)


def _list_expected(checked: CheckedDeployment, engine: Answer) -> Iterator[Expected]:
    """Requests of the engine, then of the ensemble, with the in-process outputs of the same files and options."""
    import numpy as np

    record, models = checked.record, checked.folder / MODELS
    with read_as_user_file(checked.folder / REQUESTS / TENSORS, "the requests of a proof"):
        known = reference_from_file(checked.folder / REQUESTS / TENSORS)
    yield from _expect_rows(record.engine, engine, known, checked)
    if record.ensemble is not None and record.preprocessing is not None and record.images:
        preprocess, files = open_preprocessing(models / record.preprocessing / "1"), checked.files.below(REQUESTS)
        for image in record.images:
            content = np.frombuffer(files.read(image.file), np.uint8)[np.newaxis]
            tensor = preprocess([{DALI_INPUT: content}])[0][DALI_OUTPUT]
            outputs = engine([{checked.card.inputs[0].name: tensor}])[0]
            yield Expected(record.ensemble, {ENCODED: content}, outputs, {}, image.prediction)


def _expect_rows(model: str, engine: Answer, known: Reference, checked: CheckedDeployment) -> Iterator[Expected]:
    """The known inputs, and sequences of the shortest and the longest length of the model."""
    batched = read_config(checked.folder / MODELS / model / CONFIG).max_batch_size
    if not batched:
        yield Expected(model, known.inputs, engine([known.inputs])[0], known.outputs)
        return
    count, step = len(next(iter(known.inputs.values()))), min(ROWS_AT_ONCE, batched)
    for start in range(0, count, step):
        inputs = {name: array[start : start + step] for name, array in known.inputs.items()}
        source = {name: array[start : start + step] for name, array in known.outputs.items()}
        yield Expected(model, inputs, engine([inputs])[0], source)
    for length in sorted({*(checked.card.length_range or ())} - {read_length(checked.card, known.inputs)}):
        inputs = fill_sequences(checked.card, known.inputs, length, step)
        inputs = {name: array[:step] for name, array in inputs.items()}
        yield Expected(model, inputs, engine([inputs])[0], {})


def ask(client: Any, model: str, inputs: "Mapping[str, np.ndarray]", outputs: Sequence[str], classes: int = 0) -> Any:
    """Sends one request with the protocol's (module, connection); `classes` requests that many labels instead of the tensor."""
    module, connection = client
    given = prepare_inputs(module, inputs)
    wanted = [module.InferRequestedOutput(name, class_count=classes) for name in outputs]
    from tritonclient.utils import InferenceServerException

    limit = (
        {"client_timeout": REQUEST_LIMIT_S}
        if module.__name__.endswith("grpc")
        else {"timeout": REQUEST_LIMIT_S * 10**6}
    )
    try:
        return connection.infer(model, given, outputs=wanted, **limit)
    except (InferenceServerException, OSError) as error:
        raise StageError(f"{model}: tritonserver refused a request: {first_line(error)}") from error


def _compare(
    checked: CheckedDeployment, client: Any, protocol: str, expected: Sequence[Expected]
) -> Iterator[Comparison]:
    """One comparison for each model. Raises GateError for the first output that is not the signed-off one."""
    record = checked.record
    by_position = checked.serving is not None and checked.serving.by_position
    for model in dict.fromkeys(each.model for each in expected):
        equal, worst, right, asked = 0, 0.0, 0, [each for each in expected if each.model == model]
        for number, each in enumerate(asked, 1):
            names = list(each.outputs)
            inside = model == record.engine
            served = list_positions("OUTPUT", len(names)) if inside and by_position else names
            sent = name_inputs(checked.serving, each.inputs) if inside else each.inputs
            answer = ask(client, model, sent, served)
            got = {name: answer.as_numpy(outside) for name, outside in zip(names, served, strict=True)}
            errors = [
                _judge(record, f"{model} over {protocol}, request {number}", each, name, got[name]) for name in names
            ]
            worst = max([worst, *errors])
            equal += all(got[name].tobytes() == each.outputs[name].tobytes() for name in names)
            if each.prediction is not None:
                _judge_label(
                    record, client, f"{model} over {protocol}, request {number}", each, names[0], got[names[0]]
                )
                right += 1
        text = f"{right} of {len(asked)} equal to the signed-off predictions" if right else None
        yield Comparison(model, protocol, len(asked), equal, worst, text)


def _judge(record: DeploymentRecord, where: str, each: Expected, name: str, got: "np.ndarray | None") -> float:
    """The relative error against the in-process output. Raises GateError if it is too large, or the tensor differs."""
    want = each.outputs[name]
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        have = "nothing" if got is None else f"{got.dtype} {list(got.shape)}"
        raise GateError(f"{where}: output '{name}' is {have}, the signed-off one is {want.dtype} {list(want.shape)}")
    error = compute_output_error(name, want, got)
    allowed = min(SERVED_TOLERANCE, record.tolerance)
    if not error.finite or error.relative > allowed:
        raise GateError(
            f"{where}: output '{name}' is not the signed-off one: relative error {error.relative:.2g} exceeds {allowed:g}"
        )
    if name in each.source:
        beside = compute_output_error(name, each.source[name], got)
        if beside.relative > record.tolerance:
            raise GateError(
                f"{where}: output '{name}' differs from the source model's: relative error {beside.relative:.2g} "
                f"exceeds {record.tolerance:g}"
            )
    return error.relative


def _judge_label(
    record: DeploymentRecord, client: Any, where: str, each: Expected, name: str, got: "np.ndarray"
) -> None:
    """Raises GateError if the class or its label is not the signed-off one."""
    best = int(got.reshape(len(got), -1).argmax(axis=1)[0])
    if best != each.prediction:
        raise GateError(f"{where}: predicts class {best}, the signed-off prediction is {each.prediction}")
    if not record.labels:
        return
    told = ask(client, each.model, each.inputs, [name], classes=1).as_numpy(name).reshape(-1)[0].decode()
    _, index, label = told.split(":", 2)
    if int(index) != best or label != record.labels[best]:
        raise GateError(f"{where}: class {index} is labeled '{label}', but '{record.labels[best]}' in the model card")
