"""One build: callable, with the proof of its precision and its verification."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from optpipe.api.arguments import check_arguments
from optpipe.api.calling import CallContract, arrays_from, pack_outputs, require_memory
from optpipe.api.door import keep_caller_state, speak_of_arguments
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo, Device, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError
from optpipe.core.precision import PrecisionProof

if TYPE_CHECKING:
    from optpipe.api.bench import Bench, BenchOptions, Times
    from optpipe.api.bound_call import BoundCall
    from optpipe.api.builds import Builds
    from optpipe.api.evaluation import Evaluation
    from optpipe.api.metric import Metric
    from optpipe.api.policy import Policy
    from optpipe.api.verdict import Verdict
    from optpipe.api.workspace import Workspace
    from optpipe.core.card import ModelCard
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.models.artifacts.lookup import StoredArtifact
    from optpipe.models.export.exported import Model as SourceModel
    from optpipe.workspace.entry import Entry


class Build:
    """One build: call it like the module, on NumPy arrays or torch tensors.

    Inputs are given by position, by name, or as one mapping; their types and shapes are checked against the profile and never
    cast. Arrays give arrays, tensors give tensors on the device where the inputs lie; one output is returned as itself, several as
    a named tuple. The session is loaded at the first call, after the hash of its file was checked; calls from several threads take
    turns. As a context manager, a build frees its session at the end; it is loaded again when it is called again.

    A call raises BadInputError for inputs that do not fit, MissingError if the build cannot run on this machine, StageError if its
    file was changed or removed.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
    >>> build = model.build("fp32", backend="onnxruntime", device="cpu")["fp32"]
    >>> build.precision.proven, build.verification.passed
    (True, True)
    >>> build(torch.zeros(1, 8).numpy()).shape
    (1, 4)
    """

    def __init__(
        self,
        workspace: "Workspace",
        stored: "StoredArtifact",
        verification: "Entry[VerificationInfo] | None",
        model: "SourceModel | None" = None,
        required_share: float | None = None,
    ) -> None:
        self.workspace = workspace
        self._required_share = required_share
        self._stored, self._verification, self._model = stored, verification, model
        self._session: Any = None
        self._stream: Any = None
        """The stream of its session on a GPU."""
        self._contract = CallContract(stored.card)
        self._index = 0
        self._file = ""
        """The path of its main file while its session is loaded."""
        self._takes_tensors = False
        self._last_device: Any = None
        """The GPU of the last call's inputs, which its session takes."""
        self._lock = threading.Lock()

    @property
    def ok(self) -> bool:
        """Whether its precision is what was asked for and its outputs, if they could be compared, are verified.

        A share below `require_share` is not; without it, any share above zero is, and `precision` states it.
        """
        verified = self.verification is None or self.verification.passed is not False
        shortfall = self.precision.find_shortfall(self.info.precision, self._required_share)
        return shortfall is None and verified

    @property
    def runs_here(self) -> bool:
        """Whether it can run on this machine."""
        from optpipe.backends.registry import BACKENDS

        return BACKENDS[self.backend].find_run_blocker(self.info) is None

    @property
    def info(self) -> ArtifactInfo:
        """The record in its manifest."""
        return self._stored.entry.info

    @property
    def id(self) -> str:
        return self._stored.entry.id

    @property
    def label(self) -> str:
        """`onnxruntime int8 (cpu)`."""
        return self._stored.label

    @property
    def backend(self) -> str:
        return self.info.backend

    @property
    def device(self) -> Device:
        return self.info.device

    @property
    def precision(self) -> PrecisionProof:
        """The proof of its precision, read from the network that was built; `str(build.info.precision)` is its name."""
        return self.info.precision_proof

    @property
    def verification(self) -> VerificationInfo | None:
        """The errors of its outputs against the source model's; None if they were not compared, as for a build that cannot run
        here."""
        return None if self._verification is None else self._verification.info

    @property
    def card(self) -> "ModelCard":
        """Inputs with their profile, and outputs."""
        return self._stored.card

    @property
    def size(self) -> int:
        """Bytes of its files."""
        from optpipe.models.artifacts.engine_files import measure_engine

        return measure_engine(self._stored.entry)

    @property
    def path(self) -> Path:
        """Its main file."""
        return self._stored.entry.file(self.info.file)

    @property
    def sha256(self) -> str:
        from optpipe.models.artifacts.engine_files import hash_engine

        return hash_engine(self._stored.entry)

    @property
    def stored(self) -> "StoredArtifact":
        """The build as optpipe's own functions take it."""
        return self._stored

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            given, device = self._contract.read(inputs, named)
            with self._lock:
                session = self._session or self._open()
                if device is None or device.type == "cpu":
                    self._require_file()
                    outputs = session.run(arrays_from(given))
                else:
                    if device is not self._last_device:
                        self._require_device(device)
                        self._last_device = device
                    outputs = session.run_on(
                        {
                            name: value.detach() if value.requires_grad else value
                            for name, value in given.items()
                        }
                    )
                    self._require_file()  # last, since the GPU works meanwhile
        except OptpipeError as error:
            error.word_for_python()
            raise
        return pack_outputs(outputs, self._stored.card.outputs, as_tensors=device is not None)

    def bind(self, *inputs: Any, **named: Any) -> "BoundCall":
        """A call of these tensors, which is checked once: for a loop in which a call of microseconds must cost no more than its session.

        Write the next inputs into the tensors in place, and read the outputs before the next call, which may overwrite them.

        Raises as a call does, and BadInputError for arrays, and for tensors that are not contiguous.

        >>> import torch, optpipe as op
        >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
        >>> build = model.build("fp32", backend="onnxruntime", device="cpu")["fp32"]
        >>> x = torch.zeros(1, 8)
        >>> step = build.bind(x)
        >>> zeros = step().clone()
        >>> torch.equal(step(), zeros), torch.equal(build(x.fill_(1.0)), step())
        (True, True)
        """
        with speak_of_arguments():
            given, device = self._contract.read(inputs, named)
            if device is None:
                raise BadInputError(
                    "bind takes tensors, whose memory a session can use again\ngive tensors, or call the build with arrays"
                )
            require_memory(given)
            from optpipe.api.bound_call import BoundCall

            with self._lock:
                return BoundCall(self, given, device)

    def _require_device(self, device: Any) -> None:
        """Raises BadInputError if the session, which is loaded, does not take tensors on that GPU."""
        if self.device != "cuda":
            raise BadInputError(
                f'the inputs are on {device}, and this build runs on the CPU\nmove them with .cpu(), or build with device="cuda"'
            )
        if device.index not in (None, self._index):
            raise BadInputError(
                f"the inputs are on {device}, and this build's session on cuda:{self._index}\nmove them there with .to()"
            )
        if not self._takes_tensors:
            raise BadInputError(
                f"{self.backend} does not take tensors on a GPU\ngive arrays, or tensors on the CPU"
            )

    def require_present(self) -> None:
        """Raises StageError if its files were removed from the workspace."""
        from optpipe.models.artifacts.engine_files import list_engine_files
        from optpipe.workspace.entry import MANIFEST

        entry = self._stored.entry
        if not all(entry.file(name).exists() for name in (MANIFEST, *list_engine_files(entry))):
            raise self._describe_removal()

    def _describe_removal(self) -> StageError:
        return StageError(
            f"{self.label} ({self.id}) was removed from {self.workspace.path}",
            remedy="build it again: Model.build finds or makes it",
        )

    def _open(self) -> Any:
        """Loads the session; the caller holds the lock."""
        from optpipe.backends.base import RunsOnDevice
        from optpipe.backends.registry import BACKENDS, load_artifact

        self.require_present()
        backend, entry = BACKENDS[self.backend], self._stored.entry
        if (why_not := backend.find_run_blocker(self.info)) is not None:
            raise MissingError(f"{self.label} cannot run on this machine: " + why_not)
        with keep_caller_state(), self._use_stream():
            self._session = load_artifact(entry, self.workspace.store)
        self._takes_tensors = isinstance(self._session, RunsOnDevice)
        self._file = str(self.path)
        return self._session

    def _require_file(self) -> None:
        """Frees the session and raises StageError if the file that it was loaded from was removed."""
        if not os.access(self._file, os.F_OK):  # half the time of a Path's exists
            self._unload()
            raise self._describe_removal()

    @contextmanager
    def _use_stream(self) -> Iterator[None]:
        """A stream for a session on a GPU, so that its work and torch's can be ordered without waiting."""
        if self.device == "cpu":
            yield
            return
        from optpipe.backends.cuda_streams import STREAMS

        self._index = torch.cuda.current_device()
        self._stream = STREAMS.take(self._index)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(
            self._stream
        )  # the weights are there before the first call

    def close(self) -> None:
        """Frees the session's memory."""
        with self._lock:
            self._unload()

    def _unload(self) -> None:
        session, self._session = self._session, None
        stream, self._stream = self._stream, None
        self._last_device = None
        if session is not None:
            session.__exit__(None, None, None)
        if stream is not None:
            from optpipe.backends.cuda_streams import STREAMS

            STREAMS.give_back(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _list_alone(self) -> "Builds":
        """The builds of which it is the only one."""
        from optpipe.api.builds import Builds

        return Builds(self.workspace, [self], model=self._model)

    def bench(self, **options: "Unpack[BenchOptions]") -> "Bench":
        """As `Builds.bench`, of this build alone."""
        return self._list_alone().bench(**options)

    @check_arguments
    def time(self, *, batch: int | None = None, seconds: float = 1.0) -> "Times":
        """Times calls in this process for trying things out: stored, and never evidence. `bench` measures what counts.

        The inputs are those that the build was verified on, repeated to `batch` (default: the profile's opt).
        """
        from optpipe.api.bench import time_build

        return time_build(self, batch, seconds)

    def evaluate(self, data: Any = None, **options: Any) -> "Evaluation":
        """As `Builds.evaluate`, of this build alone."""
        return self._list_alone().evaluate(data, **options)

    @check_arguments
    def signoff(
        self,
        policy: "Policy | str | os.PathLike[str]",
        *,
        evaluation: "Evaluation | None" = None,
        data: Any = None,
        metric: "Metric | None" = None,
        scores: "Sequence[SampleScore | Metric]" = (),
        waive: Mapping[str, str] | None = None,
        measure: bool = True,
        output: str | os.PathLike[str] | None = None,
        figures: bool = True,
    ) -> "Verdict":
        """Judges this build by a policy and writes a dossier, after measuring what the policy needs and is missing.

        Limits of accuracy need an `evaluation` of this build, or `data`, with a `metric` where the model's task has none. `scores` are
        further scores, as in `Builds.evaluate`, which `[scores.NAME]` of a policy limits. `waive` gives the reason by criterion.
        Judging unchanged evidence again returns the same dossier.

        Raises BadInputError, before anything is measured, for a policy or data that do not fit.
        """
        from optpipe.api.verdict import sign_off_build

        return sign_off_build(
            self,
            policy,
            evaluation=evaluation,
            data=data,
            metric=metric,
            scores=scores,
            waive=waive or {},
            measure=measure,
            output=output,
            figures=figures,
        )

    def model(self) -> "SourceModel | None":
        """The model that it was built from in this program; None if it was found in the workspace."""
        return self._model

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or an unpickled build is found in the workspace again, and loads a session when it is called."""
        return _restore_build, (str(self.workspace.store.workspace.absolute()), self.id)

    def __repr__(self) -> str:
        state = "" if self.ok else ", precision or outputs not as required"
        return f"Build({self._stored.card.name!r}, {self.label}, {self.id}{state})"

    def _repr_html_(self) -> str:
        return self._list_alone()._repr_html_()


def find_build(workspace: "Workspace", ident: str, source: "SourceModel | None" = None) -> Build:
    """The stored build with this ID, and its newest verification."""
    from optpipe.models.artifacts.lookup import stored_from_entry

    store = workspace.store
    entry = store.find(ident, ArtifactInfo)
    checked = [
        check
        for check in store.list_entries(VerificationInfo)
        if entry.id in check.manifest.parents
    ]
    stored = stored_from_entry(entry, store)
    return Build(workspace, stored, checked[-1] if checked else None, source)


def _restore_build(folder: str, ident: str) -> Build:
    from optpipe.api.workspace import Workspace

    with speak_of_arguments():
        return find_build(Workspace(folder), ident)
