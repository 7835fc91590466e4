"""What someone changes in a dossier who knows the format, and the verifier that shares no code with optpipe."""

import json
import runpy
from pathlib import Path

from optpipe.core.files import hash_file
from optpipe.workspace.seal import seal_folder

VERIFIER = Path(__file__).parents[2] / "verifier" / "verify_dossier.py"
examine = runpy.run_path(str(VERIFIER))["examine"]


def edit(path, *steps, value=None):
    """Sets what lies at `steps` to `value`, or to what `value` makes of it."""
    document = inner = json.loads(path.read_text())
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = value(inner[steps[-1]]) if callable(value) else value
    path.write_text(json.dumps(document))


def tell_hash(path):
    """Puts the hash and the size of a build's raw file into its manifest."""
    stated = {"sha256": hash_file(path), "size_bytes": path.stat().st_size}
    edit(path.with_name("manifest.json"), "files", path.name, value=stated)


def seal_anew(folder):
    """The hashes of all files in the manifests of their runs, and the seal of the dossier."""
    for path in folder.glob("**/runs/*/manifest.json"):
        there = sorted(each for each in path.parent.rglob("*") if each.is_file() and each != path)
        hashes = {
            each.relative_to(path.parent).as_posix(): {
                "sha256": hash_file(each),
                "size_bytes": each.stat().st_size,
            }
            for each in there
        }
        edit(path, "files", value=hashes)
    seal_folder(folder)
