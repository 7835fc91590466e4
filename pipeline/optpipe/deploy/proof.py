"""`deploy --prove`: sends the deployment's requests to a running server, over HTTP and gRPC, and compares the outputs.

If the server lacks a model's backend, optpipe's session serves the model in the Python backend, with the same tensors,
batching, warm-up, labels, and ensemble; the report then shows "configured, not run".
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optpipe
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import GateError, MissingError, StageError, first_line, read_as_user_file
from optpipe.core.events import Listener
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.cost import measure_server, name_inputs
from optpipe.deploy.load_client import prepare_inputs
from optpipe.deploy.records import MODELS, REQUESTS, TENSORS, Comparison, DeploymentRecord, ProofRecord
from optpipe.deploy.repository import DALI_OUTPUT, ENCODED, SHIM, add_shim_parameters
from optpipe.deploy.server import ServerProgram, list_backends, run_server
from optpipe.deploy.session_process import Answer, open_artifact, open_preprocessing
from optpipe.deploy.triton_config import CONFIG, list_positions, read_config, require_tritonclient, write_config
from optpipe.models.export.exported import Reference, reference_from_file
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.stats.paired import compute_output_error
from optpipe.workspace.entry import entry_from_folder
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    import numpy as np

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
