"""`sweep --on ray --store s3://… and gs://…`: three Ray nodes and real HTTP servers of both on this machine."""

import re
import threading

import pytest

from optpipe.core.errors import BadInputError, StageError
from optpipe.sweep import transport
from optpipe.sweep.job import SweepOptions
from optpipe.sweep.ledger import read_jobs
from optpipe.sweep.transport import get_chunk, put_chunks, remove_folder, require_bucket
from optpipe.workspace.entry import load_run
from tests.fakes.buckets import change_byte, list_objects
from tests.fakes.ray_sweeps import assert_each_once, sweep
from tests.integration.conftest import optpipe

BUCKETS = pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket"])


@BUCKETS
def test_jobs_travel_through_a_bucket_and_leave_nothing_in_it(cluster, tmp_path, url):
    record = sweep(tmp_path, (1,), shared=f"{url}/sweeps")
    assert_each_once(tmp_path, record, 2)
    assert list_objects(url) == []


@BUCKETS
def test_writers_at_once_get_back_what_each_wrote(cluster, url):
    contents = {at: [bytes([at]) * 1000, bytes([at + 100])] for at in range(8)}
    written = {}

    def write(at):
        written[at] = list(put_chunks(f"{url}/writers", contents[at]))

    writers = [threading.Thread(target=write, args=(at,)) for at in contents]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert {at: [get_chunk(name) for name in names] for at, names in written.items()} == contents
    assert len({name for names in written.values() for name in names}) == 16
    remove_folder(f"{url}/writers")
    assert list_objects(url) == []


@BUCKETS
def test_a_byte_that_changes_in_the_bucket_is_found_by_the_node(cluster, tmp_path, url, monkeypatch):
    def spoil(folder, chunks):
        for name in put_chunks(folder, chunks):
            change_byte(name, url)
            yield name

    monkeypatch.setattr(transport, "put_chunks", spoil)
    record = sweep(tmp_path, (1,), kinds=("cpu-a",), shared=url)
    (row,) = record.rows
    assert (row.state, row.reason) == ("failed", "damaged in transfer: chunk 1 does not match its SHA-256")
    assert not [each for each in (tmp_path / "runs").iterdir() if not each.name.startswith("job-")]


@BUCKETS
def test_a_byte_that_changes_in_the_bucket_is_found_by_the_driver_and_the_job_runs_again(
    cluster, tmp_path, url, monkeypatch
):
    spoiled = []

    def get(name):
        if not spoiled:
            spoiled.append(name)
            change_byte(name, url)
        return get_chunk(name)

    monkeypatch.setattr(transport, "get_chunk", get)
    record = sweep(tmp_path, (1,), kinds=("cpu-a",), shared=url, limits=SweepOptions(retries=2, pending_s=60))
    assert spoiled
    assert_each_once(tmp_path, record, 1)


def test_a_real_model_as_a_user_runs_it(cluster, tmp_path):
    quick = ("--processes", "1", "--min-time", "0.2", "--max-time", "3", "--set", "percentile=90", "--max-cv", "500%")
    ran = optpipe(
        "sweep", "digits", "--precision", "fp32", "--backend", "onnxruntime", "--gpu", "cpu-a", "--batch", "1,8",
        "--on", "ray", "--store", "s3://bucket/user", *quick, "--json", workspace=tmp_path,
    )  # fmt: skip
    assert ran.status in (0, 5), ran.stderr
    assert {row["state"] for row in ran.document["rows"]} <= {"done", "invalid"}
    for records in read_jobs(tmp_path).values():
        assert load_run(tmp_path / "runs" / records[0].run).find_problems() == []
    assert list_objects("s3://bucket") == []


@BUCKETS
def test_a_bucket_that_is_not_there_is_not_made(cluster, url):
    other = url.replace("bucket", "nobody-has-made-this")
    with pytest.raises(BadInputError, match="no such bucket or object\ncheck its name"):
        require_bucket(other)
    require_bucket(f"{url}/deep/below")
    assert list_objects(url) == []


def test_a_folder_that_cannot_be_removed_is_said_and_loses_nothing(cluster, tmp_path, monkeypatch):
    def fail(folder):
        raise StageError(f"cannot remove {folder}: the server did not respond in time")

    monkeypatch.setattr(transport, "remove_folder", fail)
    with pytest.warns(UserWarning, match=r"cannot remove s3://bucket/optpipe-.* remove it yourself") as said:
        record = sweep(tmp_path, (1,), kinds=("cpu-a",), shared="s3://bucket")
    assert_each_once(tmp_path, record, 1)
    remove_folder(re.search(r"s3://\S+(?=:)", str(said[0].message))[0])
    assert list_objects("s3://bucket") == []
