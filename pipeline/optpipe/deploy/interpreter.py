"""Another Python environment that runs optpipe's own worker on its own runtime: what an upgrade would bring."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optpipe
from optpipe.core.errors import BadInputError, MissingError, escape

NEEDED = ("numpy", "msgspec", "typing_extensions")
"""What the worker imports beside the runtime."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can run the worker."""

    program: str
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    """Of the packages that decide outputs and latency, those it has."""


_PROBE = """
import importlib.util, json, sys
from importlib import metadata
needed, asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for name in asked:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"missing": [each for each in needed if importlib.util.find_spec(each) is None], "versions":
  {"python": "%d.%d.%d" % sys.version_info[:3], **found}}))
"""


def open_interpreter(
    path: Path | None, packages: Sequence[str], scratch: Path, modules: Path | None = None
) -> Interpreter:
    """The interpreter of an environment, or this one; `packages` are those whose versions matter, `modules` a folder to import from.

    Raises BadInputError where `path` is not an environment, MissingError with the command where the worker lacks a package.
    """
    program = sys.executable if path is None else str(_find_program(path))
    source = scratch / "source"
    source.mkdir(exist_ok=True)
    if not (source / "optpipe").exists():  # alone: its site-packages would bring this environment's runtime along
        (source / "optpipe").symlink_to(Path(optpipe.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    inherited = [kept["PYTHONPATH"]] if path is None and "PYTHONPATH" in kept else []
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(source), *([str(modules)] if modules else []), *inherited]),
    }
    told = subprocess.run(
        [program, "-c", _PROBE, json.dumps(NEEDED), json.dumps(list(packages))],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if told.returncode != 0:
        raise BadInputError(f"--python {path}: the interpreter does not start: {escape(told.stderr.strip()[-200:])}")
    facts = json.loads(told.stdout)
    if facts["missing"]:
        names = " ".join(each.replace("_", "-") for each in NEEDED)
        raise MissingError(
            f"--python {path} lacks {', '.join(facts['missing'])}, which the worker needs: uv pip install -p {path} {names}"
        )
    return Interpreter(program, environment, facts["versions"])


def _find_program(path: Path) -> Path:
    for each in (path / "bin" / "python", path):
        if each.is_file() and os.access(each, os.X_OK):
            return each.absolute()
    raise BadInputError(f"--python {path}: neither an interpreter nor a Python environment")
