"""Who deploys a dossier opens each of its files once: nobody can change one between its check and its use."""

import ctypes
import os
import struct
from collections import Counter
from contextlib import contextmanager

import pytest

from optpipe.core.events import SilentListener
from optpipe.deploy.signed_build import open_signed_build
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.baselines import store_baseline

IN_OPEN, IN_ISDIR = 0x20, 0x40000000
POLICY = b"schema = 1\n[[latency]]\np50 = '50 ms'\nbatch_size = 1\n[preprocessing]\nminimum_agreement = '50 %'\n"


@contextmanager
def count_opens(folder):
    """How often the kernel opened each file below `folder`, for whichever library."""
    library, opened = ctypes.CDLL(None), Counter()
    descriptor = library.inotify_init1(os.O_NONBLOCK)
    places = {
        library.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN): path
        for path in (folder, *folder.rglob("*"))
        if path.is_dir()
    }
    try:
        yield opened
        content, at = os.read(descriptor, 1 << 20), 0
        while at < len(content):
            place, mask, _, length = struct.unpack_from("iIII", content, at)
            name = content[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            opened[(places[place] / name).relative_to(folder).as_posix()] += not mask & IN_ISDIR
            at += 16 + length
    finally:
        os.close(descriptor)


@pytest.fixture
def folder(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    workspace.preprocess()
    wanted = SignoffRequest("digits", policy_from_toml(POLICY))
    return sign_off(wanted, workspace.store, tmp_path / "dossier", None, SilentListener(), figures=False).folder


def test_no_file_of_a_dossier_is_opened_twice(workspace, folder, monkeypatch):
    for name in (
        "card_from_file",
        "_find_samples",
        "_find_preprocessing",
    ):  # of the workspace, which is not looked at here
        monkeypatch.setattr(f"optpipe.deploy.signed_build.{name}", lambda *_: None)
    monkeypatch.setattr(type(workspace.store), "verify_entry", lambda _, entry, *__: entry)
    with count_opens(folder) as opened:
        assert open_signed_build(folder, workspace.store, None).measured
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name: count for name, count in opened.items() if count > 1} == {}
    assert files <= set(opened)


def test_what_is_approved_is_what_was_verified(tmp_path, folder):
    verified = verify_dossier(folder)
    with count_opens(folder) as opened:
        target = store_baseline(verified.files, tmp_path / "w")
    assert +opened == Counter()
    assert verify_dossier(target).problems == ()
