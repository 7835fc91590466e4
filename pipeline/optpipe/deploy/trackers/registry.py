"""The trackers by name, and the export of a dossier that cannot lose or delay a verdict."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, StageError, escape, first_line
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.plugins import Registry, load_plugins
from optpipe.core.process import start_python
from optpipe.core.records import record_from_files
from optpipe.core.verdict import VerdictRecord
from optpipe.core.wording import Call
from optpipe.deploy.trackers.contract import Export, Tracker
from optpipe.deploy.trackers.mlflow import MlflowTracker
from optpipe.deploy.trackers.model_card import ModelCardTracker
from optpipe.deploy.trackers.wandb import WandbTracker
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.seal import SUMS, find_seal_problems

SECONDS = 120.0
"""A tracker that takes longer after a sign-off is given up; the dossier stays, and can be exported later."""
INTERRUPTED = "it was interrupted"
_OWN = MlflowTracker(), WandbTracker(), ModelCardTracker()


def read_tracker_plugin(name: str, plugin: Any) -> Tracker:
    """Raises BadInputError for an object that is no tracker, or that has another name."""
    tracker = plugin() if isinstance(plugin, type) else plugin
    if not isinstance(tracker, Tracker) or type(tracker).send is Tracker.send:
        raise BadInputError("is no optpipe.deploy.trackers.contract.Tracker with a send(export)")
    if getattr(tracker, "name", None) != name:
        raise BadInputError(f"is registered as '{name}', and its name is another")
    return tracker


TRACKERS: Registry[Tracker] = Registry("tracker", {tracker.name: tracker for tracker in _OWN})
TRACKERS.update(load_plugins("optpipe.trackers", TRACKERS, read_tracker_plugin))


def require_tracker(name: str) -> Tracker:
    """Raises BadInputError for an unknown name, MissingError if its library is not installed."""
    if name not in TRACKERS:
        raise BadInputError(
            f"there is no tracker {escape(name)!r}; trackers are {', '.join(TRACKERS)}",
            remedy=TRACKERS.explain_missing(name),
        )
    tracker = TRACKERS[name]
    if tracker.needs and find_spec(tracker.needs) is None:
        raise MissingError(
            f"the tracker {name} requires {tracker.needs}; install it with `{tracker.install}`"
        )
    return tracker


def export_dossier(folder: Path, name: str, output: Path | None = None) -> str:
    """Sends a dossier, whose seal must be whole, to the tracker `name`; returns where it is.

    Raises BadInputError if it is no whole dossier, StageError if the tracker fails.
    """
    tracker = require_tracker(name)
    files = Files(folder)
    if problems := find_seal_problems(files):
        raise BadInputError(f"{folder}: {problems[0]}; nothing was exported")
    export = Export(
        folder, record_from_files(files, VERDICT, VerdictRecord), files.hash(SUMS), output
    )
    try:
        return tracker.send(export)
    except Exception as error:
        raise StageError(
            f"{name} did not take {folder}: {type(error).__name__}: {escape(first_line(error))[:300]}"
        ) from error


def export_after_signoff(
    folder: Path, names: tuple[str, ...], listener: Listener, seconds: float = SECONDS
) -> Mapping[str, str]:
    """Exports a finished dossier in processes of their own. What fails, takes longer than `seconds`, or is interrupted is a warning.

    Returns where it is, by tracker.
    """
    places, interrupted = {}, False
    for name in names:
        try:
            with listener.step(f"export to {name}"):
                place, why = (
                    ("", INTERRUPTED) if interrupted else _export_apart(folder, name, seconds)
                )
        except (
            KeyboardInterrupt
        ):  # the user does not want to wait for a tracker; the verdict stands
            place, why, interrupted = "", INTERRUPTED, True
        if why:
            again = Call("signoff export", folder, to=name)
            listener.warn(
                f"the dossier was not exported to {name}: " + why + "\nlater: `" + again + "`"
            )
        else:
            places[name] = place
    return places


def _export_apart(folder: Path, name: str, seconds: float) -> tuple[str, str]:
    """Where a dossier is after `optpipe signoff export` in a process of its own, and why it is not."""
    words = "signoff", "export", str(folder), "--to", name
    with start_python("optpipe", *words, stdout=PIPE, stderr=PIPE) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except TimeoutExpired:
            process.kill()
            return "", f"it took longer than {seconds:.0f} s"
        except BaseException:
            process.kill()
            raise

    why = _find_reason(errors.decode(errors="replace")) if process.returncode else ""
    return output.decode(errors="replace").strip(), why


def _find_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error")]
    return escape((named or lines or ["it failed without a message"])[-1])
