"""A call of a build on tensors that stay where they are, checked once."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optpipe.api.calling import pack_outputs
from optpipe.core.errors import BadInputError, OptpipeError

if TYPE_CHECKING:
    from optpipe.api.build import Build


class BoundCall:
    """A call of a build on the same tensors: `build.bind(tensor)`. Each call may overwrite the outputs of the one before.

    After `build.close()` it raises BadInputError. Calls from several threads take turns.
    """

    def __init__(self, build: "Build", inputs: Mapping[str, Any], device: Any) -> None:
        from optpipe.backends.base import PreparesCalls, RunsOnDevice

        session = build._session or build._open()
        if device.type != "cpu":
            build._require_device(device)
        elif not isinstance(session, RunsOnDevice):
            raise BadInputError(f"{build.backend} does not take tensors\ncall the build")
        self.build, self.inputs = build, dict(inputs)
        self._session, self._lock = session, build._lock
        plain = {name: value.detach() for name, value in inputs.items()}
        self._run = (
            session.prepare(plain)
            if isinstance(session, PreparesCalls)
            else lambda: session.run_on(plain)
        )
        self._outputs = build.card.outputs

    def __call__(self) -> Any:
        with self._lock:
            if self.build._session is not self._session:
                raise BadInputError(
                    f"{self.build.label} was closed\nbind its inputs again: build.bind(...)"
                )
            try:
                outputs = self._run()
            except OptpipeError as error:
                error.word_for_python()
                raise
        return pack_outputs(outputs, self._outputs, as_tensors=True)

    def __repr__(self) -> str:
        return f"BoundCall({self.build!r}, {', '.join(self.inputs)})"
