"""The place of all stored entries and runs, and the listener to progress."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.api.arguments import check_arguments
from optpipe.api.door import enter
from optpipe.api.progress import choose_listener
from optpipe.core.entries import Device
from optpipe.core.events import Listener
from optpipe.core.wording import DEFAULT_WORKSPACE
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.api.builds import Builds


class Workspace:
    """A folder of builds, data, and runs, which the command line reads too.

    `path` defaults to the environment variable OPTPIPE_WORKSPACE, otherwise to `.optpipe`. Nothing is created before something
    is stored. `listener` gets progress and warnings; by default there is a bar in a terminal or notebook, and nothing elsewhere.

    >>> import optpipe as op
    >>> op.Workspace("work")
    Workspace('work')
    """

    @check_arguments
    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, listener: Listener | None = None
    ) -> None:
        chosen = path if path is not None else os.environ.get("OPTPIPE_WORKSPACE")
        self.path = Path(chosen or DEFAULT_WORKSPACE)
        self._folder = self.path.absolute()
        self.listener = listener

    def __repr__(self) -> str:
        return f"Workspace({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workspace) and other._folder == self._folder

    def __hash__(self) -> int:
        return hash(self._folder)

    @property
    def store(self) -> Store:
        """The store below `path`, as optpipe's own functions take it; a program may change its folder."""
        return Store(self._folder)

    @contextmanager
    def call(self, name: str, **arguments: object) -> Iterator[Listener]:
        """Passes the door of `optpipe.api.door` for one call of the library, whose `arguments` are recorded."""
        listener = self.listener if self.listener is not None else choose_listener()
        with enter(self.store, listener, name, arguments) as spoken:
            yield spoken

    @check_arguments
    def builds(
        self,
        model: str,
        *,
        precision: str | None = None,
        backend: str | None = None,
        device: Device | None = None,
    ) -> "Builds":
        """The newest stored build of each backend, precision, and device of `model`: a name, a source, or an ID.

        Raises BadInputError if there is none.
        """
        from optpipe.api.builds import builds_from_store

        with self.call("Workspace.builds", model=model):
            return builds_from_store(self, model, precision, backend, device)


def resolve_workspace(workspace: "Workspace | str | os.PathLike[str] | None") -> Workspace:
    """A Workspace of a path, or the default one."""
    return workspace if isinstance(workspace, Workspace) else Workspace(workspace)
