"""Workspaces merge in any order, records of jobs too; what travels between nodes arrives as it was."""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info, put_verified
from tests.fakes.entries import put as put_entry
from tests.fakes.sweeps import make_cell, make_record

from optpipe.backends.registry import verify_for_loading
from optpipe.core.entries import ArtifactInfo, Environment, ModelInfo, WeightsRecord
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import SilentListener, as_steps, finish_steps
from optpipe.core.files import hash_file
from optpipe.core.records import json_from_record
from optpipe.sweep.cluster import list_all, list_needed, pack, unpack
from optpipe.sweep.job import JobState
from optpipe.sweep.ledger import (
    claim_job,
    keep_backed,
    list_conflicts,
    merge_workspaces,
    read_job,
    read_jobs,
    sort_records,
    write_job,
)
from optpipe.workspace.entry import MANIFEST, Manifest
from optpipe.workspace.files import hash_files
from optpipe.workspace.store import Store


def put(workspace, folder, name, content, created):
    path = workspace / folder / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "model.bin").write_text(content)
    recipe = {} if folder == "store" else None
    made = Manifest(
        "a", "1", recipe, (), hash_files(path), {}, Environment(), "optpipe", created, created
    )
    (path / "manifest.json").write_bytes(json_from_record(made))


def content_of(workspace):
    """Everything that a merge decides about; of equal entries the manifests say when each was made."""
    kept = ("store", "runs", "removed")
    return {
        str(path.relative_to(workspace)): "" if path.name == "manifest.json" else hash_file(path)
        for folder in kept
        for path in sorted((workspace / folder).rglob("*"))
        if path.is_file()
    }


def merge(target, *sources):
    return merge_workspaces(sources, Store(target), SilentListener())


entries = st.tuples(
    st.sampled_from(["store", "runs"]), st.sampled_from(["a-1", "a-2"]), st.sampled_from("xyz")
)
states = st.sampled_from([JobState.DONE, JobState.INVALID, JobState.FAILED])
jobs = st.tuples(st.integers(1, 2), states, st.sampled_from("12"))
workspaces = st.lists(
    st.tuples(st.lists(entries, max_size=4), st.lists(jobs, max_size=3)), min_size=1, max_size=4
)


def make_workspace(path, made):
    (path / "store").mkdir(parents=True)
    for folder, name, content in made[0]:
        put(path, folder, f"{name}-{content}", content, "1")  # a name has one content
    for batch, state, started in made[1]:
        write_job(
            path,
            make_record(make_cell(batch=batch), state, started=started, run=f"bench-{started}"),
        )
    return path


@pytest.mark.slow
@settings(max_examples=12)
@given(workspaces, st.randoms(use_true_random=False))
def test_any_order_and_any_grouping_give_the_same_workspace(made, random):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sources = [make_workspace(root / f"s{at}", one) for at, one in enumerate(made)]
        merge(root / "forward", *sources)
        shuffled = random.sample(sources, len(sources))
        for source in (*shuffled, *shuffled):
            merge(root / "one-by-one", source)
        cut = random.randint(0, len(sources))
        for name, part in (("left", sources[:cut]), ("right", sources[cut:])):
            if part:
                merge(root / name, *part)
        halves = [root / name for name in ("right", "left") if (root / name).is_dir()]
        merge(root / "tree", *halves)
        assert (
            content_of(root / "forward")
            == content_of(root / "one-by-one")
            == content_of(root / "tree")
        )
        contents = set(content_of(root / "forward").values())
        files = {hash_file(path) for source in sources for path in source.glob("*/*/model.bin")}
        assert files <= contents, "nothing is lost"


def test_of_two_contents_of_one_name_the_first_is_kept_and_the_other_said(tmp_path):
    put(tmp_path / "a", "store", "artifact-1", "new", "2")
    put(tmp_path / "b", "store", "artifact-1", "old", "1")
    found = merge(tmp_path / "w", tmp_path / "a", tmp_path / "b")
    assert found.status == 1
    assert f"{tmp_path / 'b'}/store/artifact-1 differs" in found.conflicts[0]
    assert (tmp_path / "w" / "store" / "artifact-1" / "model.bin").read_text() == "new"


def test_the_same_build_made_twice_is_one(tmp_path):
    put(tmp_path / "a", "store", "artifact-1", "same", "2")
    put(tmp_path / "b", "store", "artifact-1", "same", "1")
    found = merge(tmp_path / "w", tmp_path / "a", tmp_path / "b")
    assert (found.status, found.added, found.present) == (0, 1, 1)


def test_what_is_damaged_is_not_copied_and_the_rest_is(tmp_path):
    put(tmp_path / "a", "runs", "bench-1", "whole", "1")
    put(tmp_path / "a", "runs", "bench-2", "whole", "1")
    (tmp_path / "a" / "runs" / "bench-1" / "model.bin").write_text("other")
    record = write_job(tmp_path / "a", make_record(make_cell()))
    manifest = record / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"state": "done"', '"state": "failed"'))
    found = merge(tmp_path / "w", tmp_path / "a")
    assert found.status == 4
    said = [("bench-1/" in each or "bench-1:" in each, "changed" in each) for each in found.damaged]
    assert said == [(True, True), (False, True)]
    assert [path.name for path in (tmp_path / "w" / "runs").iterdir()] == ["bench-2"]


def test_a_folder_that_is_no_workspace_is_refused_before_anything_is_copied(tmp_path):
    put(tmp_path / "a", "runs", "bench-1", "whole", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="not a workspace"):
        merge(tmp_path / "w", tmp_path / "a", tmp_path / "empty")
    assert not (tmp_path / "w").exists()
    with pytest.raises(BadInputError, match="itself"):
        merge(tmp_path / "a", tmp_path / "a")


@pytest.fixture
def built(tmp_path):
    store, files = Store(tmp_path / "here"), {"model.onnx": b"engine" * 1000}
    info = ModelInfo(
        "m", "m", WeightsRecord("random", "0" * 64), simplified=False, own_precision=None
    )
    model = put_entry(store, info, {"m": 1}, files=files)
    return store, put_entry(store, artifact_info(), {"a": 1}, (model,), files)


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
    own, checked = put_verified(store, model, artifact, 800)
    put_entry(store, replace(own.info, samples=8), {"samples": 8}, (model,))
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


@pytest.mark.parametrize(
    ("name", "kind"), [("../../escaped", tarfile.REGTYPE), ("escaped", tarfile.SYMTYPE)]
)
def test_nothing_is_written_outside_of_the_store_and_no_links(tmp_path, name, kind):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        found = tarfile.TarInfo(name)
        found.type, found.linkname = kind, "/"
        tar.addfile(found, io.BytesIO())
    with pytest.raises(StageError, match="escaped is not a file of a workspace"):
        unpack([seal(file.getvalue())], Store(tmp_path / "there"))
    assert not list(tmp_path.rglob("escaped"))


PACKAGE = {"backend": "inductor", "file": "model.pt2"}


def store_package(store, name="model.pt2", **changes):
    info = artifact_info(**{**PACKAGE, **changes})
    return put_entry(store, info, {"file": name, **changes}, files={name: b"engine"}).id


def test_code_of_another_workspace_is_not_loaded_until_approved(tmp_path):
    theirs, mine = Store(tmp_path / "theirs"), Store(tmp_path / "mine")
    graph = put_entry(theirs, artifact_info(), {"a": 1}, files={"model.onnx": b"graph"}).id
    package = store_package(theirs)
    merge(mine.workspace, theirs.workspace)
    verify_for_loading(mine.find(graph, ArtifactInfo), mine)
    foreign = mine.find(package, ArtifactInfo)
    with pytest.raises(StageError, match=r"was not built in .* runs code"):
        verify_for_loading(foreign, mine)
    mine.verify_entry(foreign)
    mine.approve(foreign)
    verify_for_loading(foreign, mine)
    verify_for_loading(theirs.find(package, ArtifactInfo), theirs)


@pytest.mark.parametrize(
    "way", [shutil.copytree, lambda source, target: target.symlink_to(source)], ids=["copy", "link"]
)
def test_a_folder_that_was_put_into_the_store_is_foreign(tmp_path, way):
    theirs, mine = Store(tmp_path / "theirs"), Store(tmp_path / "mine")
    name = theirs.find(store_package(theirs), ArtifactInfo).path.name
    mine.root.mkdir(parents=True)
    way(theirs.root / name, mine.root / name)
    with pytest.raises(StageError, match="was not built in"):
        verify_for_loading(mine.find(name, ArtifactInfo), mine)


def test_an_approved_entry_that_is_replaced_is_foreign_again(tmp_path):
    theirs, mine = Store(tmp_path / "theirs"), Store(tmp_path / "mine")
    ident = store_package(mine)
    other = put_entry(
        theirs, artifact_info(**PACKAGE, model="evil"), {"b": 1}, files={"model.pt2": b"evil"}
    )
    place = mine.find(ident, ArtifactInfo).path
    shutil.rmtree(place)
    shutil.copytree(other.path, place)
    with pytest.raises(StageError, match="was not built in"):
        verify_for_loading(mine.find(place.name, ArtifactInfo), mine)


@pytest.mark.parametrize(
    ("info", "files"),
    [
        ({"file": "model.onnx"}, ["model.onnx", "model.pt2"]),
        ({"file": "model.onnx", "more_files": ("model.pt2",)}, ["model.onnx", "model.pt2"]),
        ({"file": "model.onnx"}, ["model.onnx"]),
        ({"file": "model.pt2", "backend": "onnxruntime"}, ["model.pt2", "model.onnx"]),
        ({"file": "model.pt2"}, ["other"]),
        ({"file": "model.pt2", "details": {"static_batches": [4]}}, ["model.pt2", "batch-4.pt2"]),
        ({"file": "model.onnx", "backend": "tensorrt-rtx"}, ["model.onnx", "model.engine"]),
        ({"file": "model.onnx", "backend": "nobody's"}, ["model.onnx"]),
    ],
)
def test_what_a_backend_would_load_must_be_what_the_manifest_names(tmp_path, info, files):
    """Also of an entry that was approved, since its size and hash are those of the named file."""
    store = Store(tmp_path)
    content = dict.fromkeys(files, b"x")
    made = put_entry(store, artifact_info(**{**PACKAGE, **info}), {"a": 1}, files=content)
    with pytest.raises(StageError, match=r"damaged|not installed"):
        verify_for_loading(made, store)


def test_an_unlisted_package_beside_the_listed_file_is_not_loaded(tmp_path):
    store = Store(tmp_path)
    made = store.find(store_package(store, "other"), ArtifactInfo)
    made.file("model.pt2").write_bytes(b"evil")
    with pytest.raises(StageError, match=r"no hash of model.pt2"):
        verify_for_loading(made, store)


def test_an_entry_with_a_link_is_not_merged(tmp_path):
    theirs, mine = Store(tmp_path / "theirs"), Store(tmp_path / "mine")
    made = theirs.find(store_package(theirs), ArtifactInfo)
    made.file("more").symlink_to("/dev/zero")
    assert "symbolic link" in merge(mine.workspace, theirs.workspace).damaged[0]
    assert not list(mine.root.glob("*"))


def test_a_foreign_package_is_built_again_and_not_taken_for_ones_own(tmp_path):
    theirs, mine = Store(tmp_path / "theirs"), Store(tmp_path / "mine")
    ident = store_package(theirs)
    merge(mine.workspace, theirs.workspace)

    def make(folder):
        (folder / "model.pt2").write_bytes(b"own")
        return artifact_info(**PACKAGE)

    for stored in (False, True):
        steps = mine.produce_in_steps(
            ArtifactInfo,
            {"file": "model.pt2"},
            lambda folder: as_steps(make, folder),
            parents=(),
            listener=SilentListener(),
            runs_code=True,
        )
        made, was_stored = finish_steps(steps)
        assert (made.id, was_stored) == (ident, stored)
        assert verify_for_loading(made, mine).file("model.pt2").read_bytes() == b"own"


CELL = make_cell()
RECORDS = [
    make_record(CELL, JobState.DONE, run="bench-2", started="2"),
    make_record(CELL, JobState.DONE, run="bench-1", started="1"),
    make_record(CELL, JobState.FAILED, "killed", started="0"),
    make_record(CELL, JobState.INVALID, "drift", started="0"),
]


@given(st.permutations(RECORDS))
def test_the_record_that_counts_is_the_oldest_result_in_any_order(records):
    assert sort_records(records)[0].run == "bench-1"


def test_records_are_read_as_they_were_written_and_one_written_twice_is_one(tmp_path):
    for record in (*RECORDS, *RECORDS):
        write_job(tmp_path, record)
    (found,) = read_jobs(tmp_path).values()
    assert sorted(map(str, found)) == sorted(map(str, RECORDS))
    assert read_job(tmp_path, RECORDS[0].key) == RECORDS[1]
    assert read_job(tmp_path, "0" * 16) is None


def test_verdicts_that_differ_are_a_conflict_and_a_crash_before_a_result_is_none():
    assert list(list_conflicts({"key": RECORDS[:3]})) == []
    assert "done in bench-2, done in bench-1, invalid" in next(list_conflicts({"key": RECORDS}))


def halve_a_figure(text):
    content = json.loads(text)
    content["info"]["group"]["figures"]["p50"]["estimate"]["value"] /= 2
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda text: text[:-20], "delete the folder"), (halve_a_figure, "was changed")],
)
def test_a_damaged_or_changed_record_is_named_and_not_believed(tmp_path, change, said):
    path = write_job(tmp_path, RECORDS[0]) / MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(BadInputError, match=said) as error:
        read_jobs(tmp_path)
    assert str(path.parent) in str(error.value)


def test_a_job_is_claimed_once(tmp_path):
    with (
        claim_job(tmp_path, "k") as first,
        claim_job(tmp_path, "k") as second,
        claim_job(tmp_path, "other") as third,
    ):
        assert (first, second, third) == (True, False, True)
    with claim_job(tmp_path, "k") as again:
        assert again


def test_a_record_whose_run_was_removed_no_longer_counts(tmp_path):
    for record in RECORDS:
        write_job(tmp_path, record)
    (tmp_path / "runs" / "bench-2").mkdir(parents=True)
    (tmp_path / "runs" / "bench-2" / "manifest.json").touch()
    (found,) = keep_backed(tmp_path, read_jobs(tmp_path)).values()
    assert [one.run for one in found] == ["bench-2", None, None]
