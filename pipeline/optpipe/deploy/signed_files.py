"""Copies of the signed build's files, without the paths of this machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from optpipe.core.records import json_from_record
from optpipe.deploy.signed_build import SignedBuild
from optpipe.workspace.entry import MANIFEST, drop_folder, strip_folders
from optpipe.workspace.files import write_bytes


def copy_artifact(build: SignedBuild, folder: Path) -> None:
    """Copies the artifact; its manifest loses the folders of this machine."""
    shutil.copytree(build.artifact.path, folder)
    write_bytes(folder / MANIFEST, json_from_record(strip_folders(build.artifact.manifest)))


def write_card(build: SignedBuild, path: Path) -> None:
    """Writes the model card without the paths of this machine."""
    card = replace(build.card, data={}, source=drop_folder(build.card.source)).to_dict()
    write_bytes(path, json.dumps(card, indent=1).encode() + b"\n")
