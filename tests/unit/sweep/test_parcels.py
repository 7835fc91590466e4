"""What travels arrives whole or not at all."""

import hashlib
import io
import sys
import tarfile

import pytest
from fsspec.registry import _registry
from tests.fakes.entries import artifact_info

from optpipe.core.entries import ArtifactInfo, ModelInfo, ReferenceInfo, VerificationInfo, WeightsRecord
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.sweep.transport import (
    get_chunk,
    list_all,
    list_needed,
    pack,
    put_chunks,
    remove_folder,
    require_bucket,
    unpack,
)
from optpipe.workspace.store import Store


@pytest.fixture
def built(tmp_path):
    """A store with a model and an artifact of it."""
    store = Store(tmp_path / "here")

    def fill(info):
        def make(folder):
            (folder / "model.onnx").write_bytes(b"engine" * 1000)
            return info

        return make

    info = ModelInfo("m", "m", WeightsRecord("random", "0" * 64), simplified=False, own_precision=None)
    model, _ = store.produce(ModelInfo, {"m": 1}, fill(info), listener=SilentListener())
    artifact, _ = store.produce(
        ArtifactInfo, {"a": 1}, fill(artifact_info()), parents=(model.id,), listener=SilentListener()
    )
    return store, artifact


def test_what_a_bench_needs_arrives_as_it_was(built, tmp_path):
    store, artifact = built
    there = Store(tmp_path / "there")
    names = list_needed(store, artifact.id)
    assert sorted(names) == sorted(list_all(store.workspace))
    unpack(pack(store.workspace, names), there)
    assert there.verify_entry(there.find(artifact.id)).manifest == artifact.manifest
    unpack(pack(store.workspace, names), there)
    assert len(there.list_entries()) == 2


def test_only_the_reference_that_the_artifact_was_verified_on_is_sent(built, tmp_path):
    store, artifact = built
    model = store.find(artifact.manifest.parents[0])

    def reference(samples):
        info = ReferenceInfo("images", samples, "0" * 64, "source model", ())
        recipe = {"samples": samples}
        return store.produce(ReferenceInfo, recipe, lambda _: info, parents=(model.id,), listener=SilentListener())[0]

    own = reference(800)
    info = VerificationInfo("source model", 800, 0.1, 61.2, None, None, None, (), 80, True)
    parents = (artifact.id, own.id)
    checked, _ = store.produce(VerificationInfo, {}, lambda _: info, parents=parents, listener=SilentListener())
    reference(8)
    sent = [f"store/{each.path.name}" for each in (artifact, model, own, checked)]
    assert sorted(list_needed(store, artifact.id)) == sorted(sent)


def test_a_byte_that_changed_on_the_way_is_refused(built, tmp_path):
    store, artifact = built
    (content,) = pack(store.workspace, list_needed(store, artifact.id))
    at = content.index(b"engineengine")
    there = Store(tmp_path / "there")
    changed = content[:at] + b"X" + content[at + 1 :]
    with pytest.raises(StageError, match="chunk 1 does not match its SHA-256"):
        unpack([changed], there)
    with pytest.raises(StageError, match="damaged in transfer"):
        unpack([content[:3000]], there)
    with pytest.raises(StageError, match=r"model.onnx: changed"):  # before it was packed
        unpack([seal(changed[32:])], there)


def seal(content):
    return hashlib.sha256(content).digest() + content


def test_a_byte_that_changed_before_it_left_is_refused(built):
    store, artifact = built
    artifact.file("model.onnx").write_bytes(b"other")
    with pytest.raises(StageError, match="damaged"):
        list_needed(store, artifact.id)


@pytest.mark.parametrize(("name", "kind"), [("../../escaped", tarfile.REGTYPE), ("escaped", tarfile.SYMTYPE)])
def test_nothing_is_written_outside_of_the_store_and_no_links(tmp_path, name, kind):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        found = tarfile.TarInfo(name)
        found.type, found.linkname = kind, "/"
        tar.addfile(found, io.BytesIO())
    with pytest.raises(StageError, match="escaped is not a file of a workspace"):
        unpack([seal(file.getvalue())], Store(tmp_path / "there"))
    assert not list(tmp_path.rglob("escaped"))


def test_chunks_travel_through_a_bucket_too(built, tmp_path):
    store, artifact = built
    bucket = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    names = list(put_chunks(bucket, pack(store.workspace, list_needed(store, artifact.id))))
    there = Store(tmp_path / "there")
    unpack(map(get_chunk, names), there)
    assert there.find(artifact.id).find_damage() is None
    remove_folder(bucket)
    remove_folder(bucket)
    with pytest.raises(StageError, match="no such bucket or object"):
        get_chunk(names[0])
    with pytest.raises(StageError, match="cannot write nope://"):
        list(put_chunks("nope://x", [b"1"]))


def test_a_bucket_is_tried_before_anything_runs(tmp_path, monkeypatch):
    require_bucket(f"file://{tmp_path}/bucket")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "in-the-way").write_text("")
    with pytest.raises(BadInputError, match="check its name, the credentials and the endpoint"):
        require_bucket(f"file://{tmp_path}/in-the-way")
    with pytest.raises(BadInputError, match="expected a folder, s3://"):
        require_bucket("nope://x")
    for module, url, extra in (("s3fs", "s3://bucket", "s3"), ("gcsfs", "gs://bucket", "gcs")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
        with pytest.raises(
            MissingError,
            match=rf"every node: pip install 'optpipe\[{extra}\]'",
        ):
            require_bucket(url)
