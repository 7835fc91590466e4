"""Workspaces in object stores: merged and pushed whole or not at all, over fsspec's memory and files, and moto's S3 where it is."""

import json
import os
import secrets

import fsspec
import pytest
from fsspec.registry import known_implementations
from tests.fakes.entries import artifact_info, put

from optpipe.backends.registry import verify_for_loading
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.sweep.ledger import merge_workspaces, push_workspace
from optpipe.workspace.remote import open_remote
from optpipe.workspace.store import Store

QUIET = SilentListener()


@pytest.fixture(scope="module")
def s3():
    """An address of moto's S3 server on this machine, with a bucket."""
    server = pytest.importorskip("moto.server", reason="needs moto[server] and s3fs")
    pytest.importorskip("s3fs", reason="needs moto[server] and s3fs")
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    threaded.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    """An empty folder in an object store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{secrets.token_hex(8)}"
    if request.param == "file":
        return f"file://{tmp_path / 'bucket'}"
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def theirs(tmp_path):
    """A workspace with two builds, the second of which runs code when it is loaded."""
    store = Store(tmp_path / "theirs")
    put(store, artifact_info(), {"a": 1}, files={"model.onnx": b"graph", "more/notes.txt": b"n"})
    package = artifact_info(backend="inductor", file="model.pt2")
    put(store, package, {"b": 1}, files={"model.pt2": b"engine"})
    return store


def list_names(store):
    return sorted(
        f"{path.parent.name}/{path.name}"
        for path in store.workspace.glob("store/*")
        if path.is_dir()
    )


def test_what_was_pushed_is_merged_and_foreign(theirs, tmp_path, url):
    target = open_remote(url)
    target.require_writable()
    assert push_workspace(theirs, target, QUIET) == len(list_names(theirs)) > 1
    assert push_workspace(theirs, target, QUIET) == 0

    mine = Store(tmp_path / "mine")
    found = merge_workspaces([url], mine, QUIET)
    assert (found.added, found.damaged, found.conflicts) == (len(list_names(theirs)), (), ())
    assert list_names(mine) == list_names(theirs)
    assert merge_workspaces([url], mine, QUIET).present == found.added
    built = mine.list_entries(ArtifactInfo)
    package = next(each for each in built if each.info.file == "model.pt2")
    with pytest.raises(StageError, match=r"was not built in .* runs code"):
        verify_for_loading(package, mine)


def test_a_changed_byte_is_damaged_and_not_copied(theirs, tmp_path, url):
    target = open_remote(url)
    push_workspace(theirs, target, QUIET)
    broken = next(name for name in target.list_entries(("store",)) if "artifact-" in name)
    files = [
        path for path in target.system.find(f"{target.root}/{broken}") if "manifest" not in path
    ]
    target.system.pipe_file(files[0], b"other bytes")
    mine = Store(tmp_path / "mine")
    found = merge_workspaces([url], mine, QUIET)
    assert url in found.damaged[0]
    assert not (mine.workspace / broken).exists()


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../../outside", "..\\outside"])
def test_a_name_that_leads_out_is_not_followed(theirs, tmp_path, name):
    url = f"memory://{secrets.token_hex(8)}"
    target = open_remote(url)
    push_workspace(theirs, target, QUIET)
    broken = target.list_entries(("store",))[0]
    place = f"{target.root}/{broken}/manifest.json"
    manifest = json.loads(target.system.cat_file(place))
    manifest["files"][name] = {"sha256": "0" * 64, "size_bytes": 1}
    target.system.pipe_file(place, json.dumps(manifest).encode())
    mine = Store(tmp_path / "deep" / "mine")
    found = merge_workspaces([url], mine, QUIET)
    assert len(found.damaged) == 1
    assert not list(tmp_path.rglob("*outside*"))


class Ends(Exception):
    """The connection."""


@pytest.mark.parametrize("after", range(5))
def test_an_interrupted_copy_leaves_nothing_that_is_taken_for_whole(
    theirs, tmp_path, monkeypatch, after
):
    url = f"memory://{secrets.token_hex(8)}"
    target, mine = open_remote(url), Store(tmp_path / "mine")
    names = len(list_names(theirs))
    with monkeypatch.context() as patch:
        interrupt(patch, target.system, "put_file", after)
        with pytest.raises(StageError, match="run the command again"):
            push_workspace(theirs, target, QUIET)
    assert len(target.list_entries(("store",))) < names
    push_workspace(theirs, target, QUIET)
    with monkeypatch.context() as patch:
        interrupt(patch, target.system, "get_file", after)
        with pytest.raises(StageError, match="run the command again"):
            merge_workspaces([url], mine, QUIET)
    assert len(list_names(mine)) < names
    assert not any((mine.workspace / "tmp").glob("*"))
    for entry in mine.list_entries():
        mine.verify_entry(entry)
    merge_workspaces([url], mine, QUIET)
    assert list_names(mine) == list_names(theirs)


def interrupt(patch, system, name, after):
    """The call `name` of a file system fails after that many."""
    whole, calls = getattr(type(system), name), iter(range(after))

    def call(self, *arguments, **options):
        if next(calls, None) is None:
            raise Ends("connection reset by peer")
        return whole(self, *arguments, **options)

    patch.setattr(type(system), name, call)


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("nowhere://bucket/x", BadInputError, "Protocol not known: nowhere"),
        ("memory://", BadInputError, "names no folder"),
        ("memory://empty-folder", BadInputError, "no finished entry or run"),
        ("file:///no/such/folder", BadInputError, "no finished entry or run"),
    ],
)
def test_what_is_no_workspace_is_refused_before_anything_is_copied(
    tmp_path, theirs, url, kind, message
):
    mine = Store(tmp_path / "mine")
    with pytest.raises(kind, match=message):
        merge_workspaces([theirs.workspace, url], mine, QUIET)
    assert list_names(mine) == []


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(
        known_implementations,
        "optpipe-absent",
        {"class": "no_such_library.FileSystem", "err": "Install no_such_library to access it"},
    )
    with pytest.raises(MissingError, match="Install no_such_library"):
        open_remote("optpipe-absent://bucket/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(BadInputError, match="credentials"):
        open_remote(f"file://{tmp_path / 'closed'}/x").require_writable()


class TestS3:
    def test_missing_credentials_and_buckets_are_named(self, s3, monkeypatch, tmp_path):
        with pytest.raises(
            BadInputError, match="check its name, the credentials, and the endpoint"
        ):
            open_remote("s3://no-such-bucket/x").require_writable()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(BadInputError, match="credentials"):
            open_remote("s3://bucket/x").require_writable()
