"""Dossiers that state more than a dossier has: both verifiers refuse them by what the files state, before they read the rows."""

import json
import resource
import shutil
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import VERIFIER, examine, seal_anew

from optpipe.signoff.verify import check_dossier

POLICY = """schema = 1
[build]
precision = "int8"
[[latency]]
p50 = "50 ms"
batch_size = 1
[accuracy]
maximum_drop = "9 points"
"""
MEMORY_BYTES = 3 * 2**30
"""The limit of a verifier's address space: an honest dossier of this size takes a tenth of it."""


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    workspace = make_workspace(folder / "workspace")
    int8 = workspace.artifact("int8")
    workspace.bench(int8, count=200, processes=3)
    workspace.evaluate(int8)
    return workspace.sign_off(POLICY, folder / "one")[1]


@pytest.fixture
def dossier(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "one")


def number_a_class(dossier):
    (path,) = dossier.glob("runs/evaluate-*/predictions.parquet")
    rows = pl.read_parquet(path)
    name = next(each for each in rows.columns if rows[each].dtype.is_integer())
    rows.with_columns(pl.lit(10**9).cast(rows[name].dtype, strict=False).alias(name)).write_parquet(
        path
    )


def repeat_rows(dossier):
    path = next(iter(sorted(dossier.glob("runs/bench-*/samples/*.parquet"))))
    rows = pl.read_parquet(path).head(1)
    rows[np.zeros(3_000_000, np.int64)].write_parquet(path, compression="zstd")


def add_limits(dossier):
    limits = '[[latency]]\np50 = "50 ms"\nbatch_size = 1\n' * 2_000
    (dossier / "policy.toml").write_text(POLICY + limits)


def nest(dossier):
    (path,) = dossier.glob("runs/evaluate-*/evaluate.json")
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def fill_a_document(dossier):
    (path,) = dossier.glob("runs/evaluate-*/evaluate.json")
    document = json.loads(path.read_text()) | {"model": "x" * (2**26 + 1)}
    path.write_text(json.dumps(document))


LARGE = {
    number_a_class: "class",
    repeat_rows: "too large",
    add_limits: "2002 limits",
    nest: "too deep",
    fill_a_document: "too large",
}


@pytest.mark.slow
@pytest.mark.parametrize("enlarge", LARGE, ids=lambda each: each.__name__)
def test_what_is_too_large_is_refused_by_both_verifiers_in_little_memory(dossier, enlarge):
    reason = LARGE[enlarge]
    enlarge(dossier)
    seal_anew(dossier)
    assert reason in " ".join(check_dossier(dossier).problems).replace(",", "")
    ran = subprocess.run(
        [sys.executable, "-P", str(VERIFIER), str(dossier)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        check=False,
    )
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert reason in ran.stdout


@pytest.mark.slow
def test_the_honest_dossier_is_accepted(honest):
    assert not check_dossier(honest).problems
    assert not examine(honest)[0].differs
