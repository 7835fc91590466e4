"""`digits` is exported once per session, whatever the number of workers; each module begins with a copy of that store."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optpipe.cli.app import app
from optpipe.core.records import read_record
from optpipe.evaluate.result import Evaluation
from optpipe.measure.validity import find_reasons
from tests.integration import fork_server

ROOT = Path(__file__).parents[2]
SERVER = os.environ.get("OPTPIPE_TRITON")
needs_server = pytest.mark.skipif(
    SERVER is None,
    reason="OPTPIPE_TRITON names no environment with nvidia-pytriton; .ci/run makes one",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever runs commands as a user does is of the slow tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    def expect(self, status: int) -> "Ran":
        """Itself, if it ended so."""
        assert self.status == status, self.stdout + self.stderr
        return self


def optpipe(
    *arguments: object, cwd: Path | None = None, workspace: Path | None = None, **environment: str
) -> Ran:
    """Runs the command as a user does, in a forked process, or in a fresh one for variables that imports read."""
    options = () if workspace is None else ("--workspace", workspace)
    words = [*map(str, (*arguments, *options))]
    if (
        environment.keys() <= fork_server.TAKEN
        and os.environ.get("PYTHONPATH") == fork_server.PYTHONPATH
    ):
        ran = Ran(*fork_server.run_forked(words, cwd or Path.cwd(), environment))
    else:
        command = [sys.executable, "-m", "optpipe", *words]
        variables = {**os.environ, "COLUMNS": fork_server.WIDTH, **environment}
        done = subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        ran = Ran(done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def write_digits_card(path: Path) -> Path:
    """Writes the card of `digits` for the ONNX file of the card's name in its folder."""
    left_out = ("weights", "source", 'name = "digits"')
    text = (
        (ROOT / "models" / "digits.toml")
        .read_text()
        .replace("../calibration", str(ROOT / "calibration"))
    )
    own = (f'name = "{path.stem}"', f'source = "{path.stem}.onnx"')
    path.write_text(
        "\n".join((*own, *(line for line in text.splitlines() if not line.startswith(left_out))))
    )
    return path


SHARED_MACHINE = ("--waive", "trust.environment", "--because", "tests share the machine")
"""Options of a sign-off whose policy judges no time: other tests may make every process INVALID."""


def ignore_host(folder: Path) -> dict[str, str]:
    """Variables of commands that find no measurement INVALID, whatever else runs on the machine; `folder` is for a file."""
    name = f"{find_reasons.__module__}.{find_reasons.__name__}"
    (folder / "sitecustomize.py").write_text(
        f"import {find_reasons.__module__}\n\n{name} = lambda evidence: ()\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="session")
def shared(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], object]], Path]:
    """`shared(name, make)`: a folder that `make(folder)` fills once, whatever the number of workers; tests copy it."""
    own = tmp_path_factory.getbasetemp()
    place = own if worker_id == "master" else own.parent  # the workers' common folder

    def find(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = place / name, place / f"{name}.done"
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return find


@pytest.fixture(scope="session")
def exported(shared) -> Callable[[Path], Path]:
    """`exported(workspace)`: a workspace that holds `digits` exported, and built in FP32 for ONNX Runtime on the CPU."""
    build = (
        "build",
        "digits",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
    )

    def make(folder: Path) -> None:
        optpipe(*build, workspace=folder).expect(0)

    return lambda workspace: shutil.copytree(shared("exported", make), workspace)


@pytest.fixture(scope="session")
def shapes(shared) -> Callable[[str, Path], Path]:
    """`shapes(model, workspace)`: a workspace that holds `model` in FP32 and INT8, evaluated, and its DALI pipeline."""

    def copy(model: str, workspace: Path) -> Path:
        def make(folder: Path) -> None:
            optpipe(
                "build",
                model,
                "--precision",
                "fp32,int8",
                "--backend",
                "onnxruntime",
                "--device",
                "cpu",
                workspace=folder,
            ).expect(0)
            optpipe("evaluate", model, workspace=folder).expect(0)
            ran = optpipe(
                "preprocess", model, "--set", "decode=cpu", "--no-throughput", workspace=folder
            )
            assert ran.status in (0, 5), (
                ran.stderr
            )  # too few images to prove a change of half a point in a score

        return Path(shutil.copytree(shared(model, make), workspace))

    return copy


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]) -> Path:
    """A working directory whose `.optpipe` holds `digits` in FP32 and FP16 for TensorRT-RTX and ONNX Runtime."""
    folder = tmp_path_factory.mktemp("digits")
    exported(folder / ".optpipe")
    ran = optpipe("build", "digits", "--precision", "fp32,fp16", "--json", cwd=folder).expect(0)
    (folder / "build.json").write_text(ran.stdout)
    return folder


SCORE_POLICY = """schema = 1
name = "score"
model = "{model}"

[build]
backend = "onnxruntime"
precision = "{precision}"

[accuracy]
{limit}
"""


def sign_off(
    inside: Callable[..., Ran], model: str, folder: Path, limit: str, precision: str = "int8"
) -> int:
    """The exit status of `signoff` by a policy with that limit on accuracy and none on a time."""
    (folder / "policy.toml").write_text(
        SCORE_POLICY.format(model=model, precision=precision, limit=limit)
    )
    ran = inside(
        *("signoff", model, "--policy", "policy.toml", "--no-measure", "--no-figures"),
        *SHARED_MACHINE,
        cwd=folder,
    )
    assert ran.status != 2, ran.stderr
    return ran.status


def build_and_evaluate(
    model: str, folder: Path, train: Path, validation: Path
) -> tuple[Ran, Evaluation]:
    """A text model in FP32 and in INT8 calibrated on `train`, both evaluated: the finished command and its record."""
    optpipe(
        "build",
        model,
        "--precision",
        "fp32,int8",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
        "--calibration",
        train,
        cwd=folder,
    ).expect(0)
    judged = optpipe(
        "evaluate", model, "--data", validation, "--accuracy-budget", "20%", cwd=folder
    ).expect(0)
    run = next((folder / ".optpipe" / "runs").glob("evaluate-*"))
    found = read_record(run / "evaluate.json", Evaluation)
    assert {row.precision for row in found.results} == {"source", "fp32", "int8"}
    return judged, found


def require_three_verdicts(
    inside: Callable[..., Ran], model: str, folder: Path, found: Evaluation
) -> None:
    """PASS, FAIL and INCONCLUSIVE of the evaluated INT8 build by three policies on its score; the time is not judged."""
    inside(
        "bench",
        found.model,
        "--precision",
        "int8",
        "--length",
        "16",
        "--batch",
        "1",
        "--processes",
        "3",
        "--min-time",
        "0.1",
        "--max-time",
        "1",
        "--percentile",
        "50",
        "--max-cv",
        "1000%",
        cwd=folder,
    ).expect(0)
    row = next(row for row in found.results if row.precision == "int8")
    assert row.scores or row.accuracy
    score = row.scores.scores[0].value if row.scores else row.accuracy.top1
    open_ended = (
        row.scores is not None and row.scores.scores[0].ci[1] >= 0.999
    )  # Spearman's interval from few pairs
    for limit, status in (
        ('maximum_drop = "20 points"', 0),
        ('minimum_score = "99.9 points"', 5 if open_ended else 1),
        (f'minimum_score = "{100 * score:.2f} points"', 5),
    ):
        assert sign_off(inside, model, folder, limit) == status, limit


POLICY = """schema = 1
name = "digits in deployment"
model = "digits"
[build]
backend = "onnxruntime"
precision = "fp32"
[accuracy]
maximum_drop = "2 points"
[preprocessing]
minimum_agreement = "98 %"
[size]
maximum = "1 MiB"
"""
"""What a busy machine can decide too: no limit on a time."""


@dataclass(frozen=True)
class Signed:
    """A sealed dossier on `digits`, and the workspace that it was made in."""

    workspace: Path
    dossier: Path


@pytest.fixture(scope="session")
def signed(shared, exported):
    """`signed(folder)`: a copy of the real walk on `digits`: evaluated, preprocessed, measured, signed off with PASS."""

    def make(folder: Path) -> None:
        workspace = exported(folder / "workspace")
        (folder / "policy.toml").write_text(POLICY)
        images = ROOT / "calibration" / "digits" / "validation"
        for words in (
            ("evaluate", "digits"),
            ("preprocess", "digits", "--images", images, "--no-throughput"),
            (
                *(
                    "bench",
                    "digits",
                    "--batch",
                    "1,8",
                    "--processes",
                    "3",
                    "--min-time",
                    "0.1",
                    "--max-time",
                    "1",
                ),
                *("--percentile", "50", "--max-cv", "400%", "--option", "onnxruntime.threads=1"),
            ),
            (
                "signoff",
                "digits",
                "--policy",
                "policy.toml",
                "--no-measure",
                "--no-figures",
                "--output",
                "dossier",
            ),
        ):
            optpipe(*words, cwd=folder, workspace=workspace).expect(0)

    def copy(folder: Path) -> Signed:
        shutil.copytree(shared("signed", make), folder)
        return Signed(folder / "workspace", folder / "dossier")

    return copy


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """`run("build", "digits")` in an empty directory."""
    return lambda *arguments, **environment: optpipe(*arguments, cwd=tmp_path, **environment)


@pytest.fixture
def inside(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """`optpipe` without a process of its own, for what ends before any work begins: most of its time would be imports."""

    def run(*arguments: object, cwd: Path) -> Ran:
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", fork_server.WIDTH)
        with pytest.raises(SystemExit) as ended:
            app([*map(str, arguments)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err, err
        return Ran(int(ended.value.code or 0), out, err)

    return run
