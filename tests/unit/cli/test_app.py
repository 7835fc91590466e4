import errno
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import typer

import optpipe.cli
from optpipe.cli.app import app, print_outcome
from optpipe.cli.groups import Outcome

SCHEMAS = Path(optpipe.cli.__file__).with_name("documents.schema.json")
HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "tensorrt_rtx",
    "nvidia.dali",
    "modelopt",
    "polars",
    "numpy",
    "PIL",
)


@pytest.mark.parametrize("command", [[], ["build"], ["doctor"], ["store", "ls"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys\nfrom optpipe.cli.app import app\n"
        f"try:\n    app({[*command, '--help']!r})\nexcept SystemExit:\n    pass\n"
        f"print('IMPORTED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "Usage:" in done.stdout
    assert done.stdout.rstrip().endswith("IMPORTED []")


@pytest.mark.slow
def test_doctor_names_every_backend_and_how_to_get_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optpipe", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    document, schemas = json.loads(done.stdout), json.loads(SCHEMAS.read_text())
    jsonschema.validate(document, {**schemas, "$ref": "#/documents/doctor"})
    findings = {each["name"]: each for each in document["findings"]}
    for backend in (
        "tensorrt",
        "tensorrt-rtx",
        "torch-tensorrt",
        "onnxruntime",
        "inductor",
        "torch",
    ):
        assert f"backend {backend}" in findings
    assert all(each["install"] for each in findings.values() if not each["found"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    ["store", "ls", "--json", "--nope"], ["store", "show", "--json"], ["nope", "--json"], ["run", "digits", "--json"],
    ["store", "show", "0", "--json"],
])  # fmt: skip
def test_wrong_use_too_is_one_json_document(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optpipe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["exit_status"] == 2
    assert error["message"].splitlines()[0] in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full", "/a"), "no space left at /a"),
        (PermissionError(errno.EACCES, "denied", "/a"), "cannot read or write at /a: denied"),
        (shutil.Error([("/a", "/b", "full")]), "cannot copy to /b: full"),
    ],
)
def test_what_a_file_system_refuses_is_one_line(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Outcome:
        raise error

    with pytest.raises(typer.Exit) as ended:
        print_outcome(fails)()
    assert ended.value.exit_code == 4
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_one_line(form: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "optpipe", "store", "ls", *form]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    assert done.returncode == 4
    assert "no space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unexpected_error_of_the_system_is_a_bug_and_shows_itself() -> None:
    def fails() -> Outcome:
        raise BlockingIOError(errno.EAGAIN, "again")

    with pytest.raises(BlockingIOError):
        print_outcome(fails)()


def test_what_the_terminal_cannot_show_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with pytest.raises(typer.Exit):
        print_outcome(lambda: Outcome({}, lambda _: "5 µs ─ 7"))()
    assert written.getvalue() == "5 µs ? 7\n".encode("latin-1")


CLOSED = "standard output is closed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("store ls", 4),
        ("store ls --json", 4),
        ("--help", 4),
        ("--version", 4),
        ("store show nope --json", 2),
        ("store ls --nope --json", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("closing", "reads"), [("", True), (">&-", False)])
def test_a_closed_output_is_one_line_and_the_commands_own_status(
    words, status, closing, reads, tmp_path
):
    """Where a reader has gone (`| head`) the status is the result's; where there never was one, a success is none."""
    shell = f'({sys.executable} -m optpipe {words} {closing}; echo "status $?" >&2) | true'
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    wanted = 0 if reads and status == 4 else status
    assert f"status {wanted}" in done.stderr
    assert done.stderr.count(CLOSED) == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closing", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_result_is_written_where_other_streams_are_closed(closing: str, tmp_path: Path) -> None:
    shell = f"{sys.executable} -m optpipe store ls --json {closing}"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["entries"] == []


@pytest.mark.slow
def test_progress_that_nobody_reads_ends_nothing() -> None:
    program = (
        "from optpipe.report.progress import Terminal\n"
        "with Terminal() as terminal:\n"
        "    for at in range(3):\n        terminal.warn(f'{at} ' * 9)\n"
        "print('done')"
    )
    shell = f"{sys.executable} -c {shlex.quote(program)} 2> >(true)"
    done = subprocess.run(
        ["bash", "-c", f"{shell}; true"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "done\n"


def test_a_broken_pipe_inside_a_command_is_a_bug_and_no_closed_output() -> None:
    def fails() -> Outcome:
        raise BrokenPipeError(errno.EPIPE, "a worker's")

    with pytest.raises(RuntimeError, match="broken pipe to another process"):
        print_outcome(fails)()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3])
def test_a_signal_while_it_starts_is_one_line_and_the_status_of_interrupted(
    number: int, delay_s: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "optpipe", "doctor"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    time.sleep(delay_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    early = process.returncode == 1 and b"KeyboardInterrupt" in said and b"__main__.py" not in said
    if early or process.returncode in (-number, 0):  # Python itself had not begun, or all was done
        return
    assert process.returncode == 130
    assert len(said.splitlines()) == 1
    assert said.startswith(b"optpipe: interrupted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_after_all_is_done_does_not_change_the_status(number: int) -> None:
    code = (
        "import atexit, os, sys; atexit.register(os.kill, os.getpid(), int(sys.argv.pop()))\n"  # registered first, called last
        "from optpipe.__main__ import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "--help", str(int(number))], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("build",), "--images"), (("build",), "--data"), (("build",), "--calibration"),
        (("build", "--precision", "auto"), "--calibration"),
        (("bench",), "--images"), (("bench",), "--from-images"), (("calibrate",), "--data"), (("evaluate",), "--data"),
        (("preprocess",), "--images"), (("profile",), "--images"), (("sweep",), "--calibration"), (("evaluate",), "--task"),
    ],
)  # fmt: skip
def test_data_that_are_not_there_are_refused_before_a_model_is_loaded(
    command, option, capfd, tmp_path
):
    name, *more = command
    with pytest.raises(SystemExit) as ended:
        app([name, "digits", *more, option, "nowhere", "--workspace", str(tmp_path / "workspace")])
    assert ended.value.code == 2
    named = (
        "--images/--data"
        if name in ("build", "calibrate") and option != "--calibration"
        else option
    )
    assert capfd.readouterr().err.splitlines() == [
        f"optpipe: {named} nowhere: no such file or folder"
    ]


@pytest.mark.parametrize("words", ["verify LONG", "store ls --workspace LONG", "bench LONG"])
def test_a_name_that_no_file_can_have_is_bad_input(words, capfd):
    with pytest.raises(SystemExit) as ended:
        app(words.replace("LONG", "a" * 5000).split())
    said = capfd.readouterr().err
    assert ended.value.code == 2
    assert "too long for a file" in said
    assert len(said.splitlines()) == 1
