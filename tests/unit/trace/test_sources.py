"""Sources beyond CUDA and NVTX: how they are asked for, what each stage says of them, and what a refusal says."""

import base64
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tests.golden.nsys_export import THREAD, Recording
from tests.golden.phenomena import GEMM

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import SilentListener
from optpipe.trace.against import ComparedStage, compare_stages
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.details import OsCallKind, classify_os_call, details_from_trace
from optpipe.trace.nsys import Capture, list_program_lines, make_nsys_command, record_program
from optpipe.trace.nsys import Recording as Recorded
from optpipe.trace.program import HOOK, drop_empty_step, has_ended_well
from optpipe.trace.python_stacks import read_python_stacks
from optpipe.trace.read import Trace, trace_from_folder, trace_from_sqlite, write_trace
from optpipe.trace.record import add_crash
from optpipe.trace.report import (
    ProgramRun,
    StageSubject,
    profile_from_trace,
)
from optpipe.trace.rules import StageFacts
from optpipe.trace.sources import (
    Source,
    SourceState,
    find_known_refusal,
    list_source_options,
    sources_from_text,
)

Read = Callable[[Recording], Trace]


def recorded_with_all() -> Recording:
    """Two iterations: 40 µs in `data`, of which a read takes 30, then a kernel of 20 µs; off the CPU for 10 µs."""
    trace = Recording()
    for iteration in range(2):
        begin = 1000 * iteration
        trace.range("iter", begin, begin + 900)
        trace.range("data", begin + 10, begin + 50)
        trace.os_call("read", begin + 15, begin + 45)
        trace.os_call("pthread_mutex_lock", begin + 60, begin + 65)
        trace.os_call("read", begin + 15, begin + 45, THREAD + 1)
        trace.kernel(GEMM, begin + 106, begin + 126, launch=(begin + 101, begin + 105))
        trace.metric("SMs Active [Throughput %]", begin + 110, 80)
        trace.metric("SMs Active [Throughput %]", begin + 400, 0)
        trace.metric("NVLink RX [Throughput %]", begin + 400, 0)
        trace.stack(begin + 20, ("read", "/usr/lib/libc.so.6"), ("load", "/home/me/secret/lib.so"))
        trace.stack(begin + 80, ("0x7f001234", "/usr/lib/libcuda.so"), ("load", "/x/lib.so"))
        trace.switch(begin + 20, is_in=False)
        trace.switch(begin + 30, is_in=True)
    return trace


def test_each_source_is_cut_to_the_stage(read: Read) -> None:
    whole = analysis_from_trace(read(recorded_with_all()))
    found = details_from_trace(whole, None, ())
    data = details_from_trace(whole, "data", ())
    assert found.span_ns == 1_900_000
    assert data.span_ns == 80_000
    assert found.os_calls is not None
    assert data.os_calls is not None
    assert found.os_calls.by_kind_ns == {OsCallKind.FILES: 60_000, OsCallKind.LOCKS: 10_000}
    assert data.os_calls.by_kind_ns == {OsCallKind.FILES: 60_000}
    assert [(row.name, row.count, row.share) for row in data.os_calls.rows] == [("read", 2, 0.75)]
    [metric] = found.metrics
    assert (metric.samples, metric.mean, metric.mean_busy, metric.maximum) == (4, 40, 80, 80)
    assert data.metrics == ()
    assert found.native is not None
    assert found.native.samples == 4
    rows = {(row.function, row.place): row for row in found.native.rows}
    assert rows["read", "libc.so.6"].self_share == 0.5
    assert rows["(no symbol)", "libcuda.so"].self_samples == 2
    assert rows["load", "lib.so"].total_share == 1
    assert found.switches is not None
    assert (found.switches.count, found.switches.off_cpu_ns) == (2, 20_000)


def test_paths_of_libraries_are_not_kept(read: Read, tmp_path: Path) -> None:
    write_trace(read(recorded_with_all()), tmp_path / "kept")
    assert not [
        path
        for path in (tmp_path / "kept").rglob("*")
        if path.is_file() and b"secret" in path.read_bytes()
    ]


def test_details_come_back_from_the_folder(read: Read, tmp_path: Path) -> None:
    trace = read(recorded_with_all())
    write_trace(trace, tmp_path / "kept")
    again = trace_from_folder(tmp_path / "kept")
    for name, frame in trace.details.items():
        assert frame.cast({pl.Categorical: pl.String}).equals(
            again.details[name].cast({pl.Categorical: pl.String})
        )
    made = [details_from_trace(analysis_from_trace(each), None, ()) for each in (trace, again)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("call", "limit"),
    [("read", LimitingFactor.IO), ("recvfrom", LimitingFactor.IO), ("poll", LimitingFactor.CPU)],
)
def test_reading_is_a_limit_apart_from_the_cpu(
    read: Read, call: str, limit: LimitingFactor
) -> None:
    trace = Recording()
    for iteration in range(3):
        begin = 1000 * iteration
        trace.range("iter", begin, begin + 990)
        trace.os_call(call, begin + 110, begin + 900)
        trace.kernel(GEMM, begin + 6, begin + 96, launch=(begin + 1, begin + 5))
    assert profile_from_trace(read(trace)).bottleneck.verdict is limit


@pytest.mark.parametrize(
    ("call", "limit"), [("pread64", LimitingFactor.IO), ("nanosleep", LimitingFactor.CPU)]
)
def test_reading_without_a_gpu(read: Read, call: str, limit: LimitingFactor) -> None:
    trace = Recording()
    for iteration in range(3):
        trace.range("iter", 100 * iteration, 100 * iteration + 90)
        trace.os_call(call, 100 * iteration + 1, 100 * iteration + 89)
    found = profile_from_trace(read(trace)).bottleneck
    assert found.verdict is limit


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("read", OsCallKind.FILES),
        ("fread_unlocked", OsCallKind.FILES),
        ("openat64", OsCallKind.FILES),
        ("__fxstat64", OsCallKind.FILES),
        ("pthread_cond_wait", OsCallKind.LOCKS),
        ("sem_timedwait", OsCallKind.LOCKS),
        ("epoll_wait", OsCallKind.WAITING),
        ("waitpid", OsCallKind.WAITING),
        ("recvmsg", OsCallKind.NETWORK),
        ("mmap64", OsCallKind.MEMORY),
        ("ioctl", OsCallKind.OTHER),
        ("readlink_and_more", OsCallKind.OTHER),
    ],
)
def test_kinds_of_os_calls(name: str, kind: OsCallKind) -> None:
    assert classify_os_call(name) is kind


def test_the_list_of_sources() -> None:
    assert sources_from_text("cpu, python", "--record") == (Source.CPU, Source.PYTHON)
    assert sources_from_text("all", "--record") == tuple(Source)
    for wrong in ("gpu-metric", "", "cpu,nothing"):
        with pytest.raises(BadInputError):
            sources_from_text(wrong, "--record")


@pytest.mark.parametrize(
    ("version", "device_option"),
    [
        ("2022.4.2.1", "--gpu-metrics-device"),
        ("2023.4.1", "--gpu-metrics-device"),
        ("2025.3.2.0", "--gpu-metrics-devices"),
        ("2026.1", "--gpu-metrics-devices"),
    ],
)
def test_options_by_version(version: str, device_option: str) -> None:
    """nsys 2025.3 knows no --sampling-frequency: the default rate needs no option."""
    options = list_source_options((Source.GPU_METRICS, Source.CPU), version)
    assert device_option in options
    assert not [word for word in options if word.startswith("--sampling")]
    assert list_source_options((), version) == ["--sample", "none", "--cpuctxsw", "none"]


def test_a_source_that_a_version_lacks_is_refused_with_the_way_out() -> None:
    refused = find_known_refusal(Source.PYTHON, "2022.4.2.1", on_gpu=True)
    assert refused is not None
    assert "2023.2" in refused.remedy
    assert find_known_refusal(Source.PYTHON, "2025.3.2.0", on_gpu=True) is None
    assert find_known_refusal(Source.GPU_METRICS, "2025.3", on_gpu=False) is not None


def test_a_source_that_recorded_nothing_says_so(read: Read) -> None:
    trace = Recording()
    trace.range("iter", 0, 10)
    granted = (SourceState(Source.CPU, True), SourceState(Source.OS_CALLS, True))
    found = details_from_trace(analysis_from_trace(read(trace)), None, granted)
    assert [state.recorded for state in found.sources] == [False, False]
    assert all("recording" in state.why for state in found.sources)


def test_a_programs_recording_ends_with_its_first_process(tmp_path: Path) -> None:
    words = make_nsys_command(tmp_path / "r", Capture(on_gpu=False, whole=True), "2025.3")
    assert words[-2:] == ["--wait", "primary"]
    assert "nvtx" in words
    ended = Capture(on_gpu=True, whole=True, duration_s=2.0, sources=(Source.OS_CALLS,))
    words = make_nsys_command(tmp_path / "r", ended, "2025.3")
    assert words[words.index("--duration") + 1] == "2"
    assert words[words.index("--kill") + 1] == "sigterm"
    assert "osrt" in words[words.index("--trace") + 1]


def _write_stacks(path: Path, payload: bytes, domain: str = "Python Periodic Sampling") -> Path:
    events = [
        {"data": ["", "train", "/home/me/secret/train.py", "load", "&lt;module&gt;"]},
        {"NvtxEvent": {"Type": 75, "DomainId": "3", "Text": domain}},
        {
            "NvtxEvent": {
                "Type": 34,
                "DomainId": "3",
                "Timestamp": "1500",
                "GlobalTid": str(THREAD),
                "Payload": {"BinaryData": [{"Data": base64.b64encode(payload).decode()}]},
            }
        },
    ]
    path.write_text("\n".join(map(json.dumps, events)) + "\n")
    return path


@pytest.mark.parametrize("header", [struct.pack("<QII", 0, 1, 2), struct.pack("<QQ", 0, 2)])
def test_python_stacks_have_lines_and_no_paths(tmp_path: Path, header: bytes) -> None:
    payload = header + struct.pack("<QQQ", 3, 2, 12) + struct.pack("<QQII", 4, 2, 40, 712)
    found = read_python_stacks(_write_stacks(tmp_path / "a.json", payload))
    assert found.unread == 0
    rows = found.frames.select("depth", "name", "place").cast({pl.Categorical: pl.String}).rows()
    assert rows == [(0, "load", "train.py:12"), (1, "<module>", "train.py:40")]


def test_a_python_stack_in_an_unknown_format_is_counted(tmp_path: Path) -> None:
    odd = struct.pack("<QII", 0, 1, 5) + struct.pack("<QQQ", 3, 2, 12)
    found = read_python_stacks(_write_stacks(tmp_path / "a.json", odd))
    assert (found.unread, found.frames.height) == (1, 0)
    (tmp_path / "b.json").write_bytes(b"\x00\xff not json")
    with pytest.raises(StageError):
        read_python_stacks(tmp_path / "b.json")


FAKE_TORCH = {
    "__init__.py": "",
    "cuda/__init__.py": "",
    "cuda/nvtx.py": """
calls = []
def mark(name): pass
def range_push(name): calls.append("+" + name)
def range_pop(): calls.append("-")
def range_start(name): calls.append("[" + name); return 1
def range_end(number): calls.append("]")
""",
    "nn/__init__.py": "",
    "nn/modules/__init__.py": "",
    "nn/modules/module.py": """
before, after = [], []
def register_module_forward_pre_hook(hook): before.append(hook)
def register_module_forward_hook(hook, always_call=False): after.append(hook)
class Module:
    def __init__(self, **parts): self.parts = parts
    def named_modules(self, prefix=""):
        yield prefix, self
        for name, part in self.parts.items():
            yield from part.named_modules(prefix + "." * bool(prefix) + name)
    def __call__(self):
        for hook in before: hook(self, ())
        for part in self.parts.values(): part()
        for hook in after: hook(self, (), None)
""",
    "utils/__init__.py": "",
    "utils/data/__init__.py": "",
    "utils/data/dataloader.py": """
class IterableDataset: pass
class DataLoader:
    def __init__(self, dataset, batch_size=1, num_workers=0, timeout=None, persistent_workers=False):
        if persistent_workers and num_workers == 0: raise ValueError("persistent_workers needs workers")
        self.num_workers, self.timeout, self.persistent_workers = num_workers, timeout, persistent_workers
class _BaseDataLoaderIter:
    def __init__(self, count): self._index_sampler, self._num_yielded = range(count), 0
    def __iter__(self): return self
    def __next__(self):
        if self._num_yielded == len(self._index_sampler): raise StopIteration
        self._num_yielded += 1
""",
}


def _run_marked(tmp_path: Path, program: str, marks: str) -> str:
    for name, text in FAKE_TORCH.items():
        (tmp_path / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / name).write_text(text)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins; builtins.MINE = 1\n")
    path = os.pathsep.join(map(str, (HOOK, tmp_path / "mine", tmp_path)))
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path, "OPTPIPE_MARKS": marks},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_the_marks_of_a_loop_open_one_step_for_each_batch(tmp_path: Path) -> None:
    program = """
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.cuda import nvtx
for _ in _BaseDataLoaderIter(2): nvtx.calls.append("work")
print(" ".join(nvtx.calls), MINE)
"""
    first = "[optpipe.step +optpipe.loader:0 +optpipe.data - - work ]"
    step = "[optpipe.step +optpipe.data - work ]"
    assert _run_marked(tmp_path, program, "loops") == f"{first} {step} +optpipe.data - 1"


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(3, "3 persistent 3 None own 7"), (0, "0 plain 0 None own 7")],
    ids=["more", "none"],
)
def test_a_trial_gives_loaders_its_workers_whatever_the_program_asks_for(
    tmp_path: Path, workers: int, expected: str
) -> None:
    """Of an iterable data set each worker would read everything: its loader keeps what it has."""
    program = """
from torch.utils.data.dataloader import DataLoader, IterableDataset
class Mine(DataLoader):
    def __init__(self, dataset): super().__init__(dataset, 8, num_workers=2, persistent_workers=True)
mine, usual = Mine([1]), DataLoader([1], 8)
own = DataLoader(IterableDataset(), num_workers=7)
print(mine.num_workers, "persistent" if mine.persistent_workers else "plain", usual.num_workers, usual.timeout, "own", own.num_workers)
"""
    assert _run_marked(tmp_path, program, f"loops,workers={workers}") == expected


def test_the_marks_of_modules_name_their_paths(tmp_path: Path) -> None:
    program = """
from torch.nn.modules.module import Module
from torch.cuda import nvtx
Module(layer1=Module(conv=Module()))()
print(" ".join(call.replace("optpipe.module:", "") for call in nvtx.calls), MINE)
"""
    assert _run_marked(tmp_path, program, "loops,modules") == "+ +layer1 +layer1.conv - - - 1"


def test_a_long_recording_keeps_every_nth_sample(read: Read, tmp_path: Path) -> None:
    """14 s of 60 metrics on 8 GPUs are 8 million rows; a table of a dossier has at most 2 million."""
    trace = recorded_with_all()
    for at in range(200):
        for name in ("SMs Active [Throughput %]", "DRAM Read Bandwidth [Throughput %]"):
            trace.metric(name, 2000 + at, 50)
    made = read(trace)
    write_trace(made, tmp_path / "kept", most_rows=100)
    again = trace_from_folder(tmp_path / "kept")
    assert 40 <= again.metrics.height <= 100
    by_name = again.metrics.group_by("name").len()["len"].to_list()
    assert max(by_name) - min(by_name) <= 4, "a sample time is kept with all its metrics"
    assert again.os_calls.height == made.os_calls.height


def test_clocks_are_megahertz(read: Read) -> None:
    """nsys 2025.3 names them so, and counts hertz."""
    trace = recorded_with_all()
    trace.metric("GPC Clock Frequency [MHz]", 110, 1_980_000_000)
    found = details_from_trace(analysis_from_trace(read(trace)), None, ())
    clock = next(row for row in found.metrics if "Clock" in row.name)
    assert clock.mean == 1980


def test_the_step_that_found_no_batch_is_not_stored(read: Read) -> None:
    trace = Recording()
    for step in range(3):
        begin = 100 * step
        trace.range("optpipe.step", begin, begin + 90)
        trace.kernel(GEMM, begin + 6, begin + 60, launch=(begin + 1, begin + 5))
    full = read(trace)
    trace.range("optpipe.step", 300, 310)
    trace.range("evaluate", 300, 400)
    kept = drop_empty_step(read(trace)).ranges
    assert kept["name"].to_list() == ["optpipe.step"] * 3 + ["evaluate"]
    assert drop_empty_step(full).ranges.height == 3


def test_lines_of_nsys_are_not_those_of_the_program(tmp_path: Path) -> None:
    """What nsys 2022.4 and 2025.3 print; the program's lines resemble them."""
    log = f"""one
Generated 5 tokens
[INFO] saved to /data/recording.wav
Generating '/tmp/nsys-report-a8b3.qdstrm'
[1/1] [========================100%] recording.nsys-rep
Generated:
    {tmp_path}/recording.qdstrm
Importer error status: The importer binary and its dependencies were not found.
Unable to retrieve the importer version: skipping importation of the QDSTRM file.
/usr/lib/libz.so: version mismatch
"""
    assert list_program_lines(Recorded(None, 1, log)) == [
        "one",
        "Generated 5 tokens",
        "[INFO] saved to /data/recording.wav",
        "/usr/lib/libz.so: version mismatch",
    ]


def test_a_report_of_an_earlier_run_is_not_read(tmp_path: Path, monkeypatch) -> None:
    """nsys makes a report in the first run of a folder, and only a stream in the second."""
    nsys = tmp_path / "nsys"
    nsys.write_text('#!/bin/sh\nlast="$1"; for word; do last="$word"; done\necho new > "$last"\n')
    nsys.chmod(0o755)
    monkeypatch.setenv("OPTPIPE_NSYS", str(nsys))
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in ("recording.nsys-rep", "recording.qdstrm"):
        came = record_program([str(folder / name)], folder, Capture(on_gpu=False, whole=True))
        assert came.recording is not None
        assert came.recording.name == name


def test_os_calls_alone_have_their_own_time(read: Read) -> None:
    trace = Recording()
    for at in range(0, 300, 100):
        trace.os_call("read", at, at + 90)
    profile = profile_from_trace(read(trace), facts=StageFacts(expects_gpu=False))
    assert profile.measured.totals.span_ns == 290_000
    assert profile.bottleneck.verdict is LimitingFactor.IO


def test_a_server_that_ends_as_asked_has_ended_well() -> None:
    def run(status: int) -> ProgramRun:
        return ProgramRun(("server",), status, 2.0)

    assert [has_ended_well(run(status), 2.0) for status in (0, 143, -15, 137, 1)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not has_ended_well(run(143), None), "somebody else ended it"


def test_metrics_are_those_of_the_gpu_that_ran_the_kernels(tmp_path: Path) -> None:
    """With CUDA_VISIBLE_DEVICES=1, CUDA's first GPU is nsys's second; the first one may be somebody else's, and busy."""
    trace = Recording()
    trace.gpu("NVIDIA A100")
    trace.gpu("NVIDIA H200", cuda=0)
    trace.kernel("gemm", 100, 900, (10, 20))
    for at in range(100, 900, 100):
        trace.metric("SMs Active [Throughput %]", at, 99, gpu=0)
        trace.metric("SMs Active [Throughput %]", at, 40, gpu=1)
    read = trace_from_sqlite(trace.write(tmp_path / "trace.sqlite"))
    [found] = details_from_trace(analysis_from_trace(read), None, ()).metrics
    assert (found.device, found.mean) == (0, 40)
    assert read.gpus[0].name == "NVIDIA H200"


def test_metrics_keep_nsys_numbers_where_none_is_of_a_used_gpu(tmp_path: Path) -> None:
    trace = Recording()
    trace.gpu("NVIDIA H200", cuda=0)
    trace.gpu("NVIDIA H200")
    trace.metric("SMs Active [Throughput %]", 100, 40, gpu=1)
    read = trace_from_sqlite(trace.write(tmp_path / "trace.sqlite"))
    assert read.metrics["device"].to_list() == [1]


CRASHING_NSYS = """#!/bin/sh
last="$1"; for word; do last="$word"; done
folder="$OPTPIPE_RECORDING"
echo start >> "$folder/starts"
if [ "{begins}" = yes ]; then : > "$folder/begun"; fi
if [ "$(wc -l < "$folder/starts")" -le {crashes} ]; then {end}; fi
echo recorded > "$folder/recording.qdstrm"
"""


@pytest.mark.parametrize(
    ("crashes", "end", "begins", "starts", "crash"),
    [
        (1, "kill -SEGV $$", "no", 2, "signal 11"),
        (1, "echo \"terminate called after throwing 'x'\"; exit 1", "no", 2, "terminate called after throwing 'x'"),
        (1, "echo '/a/W.cpp(166): Throw in function Quad::Waiter::Waiter(int)'; exit 1", "no", 2, "exception in Quad::Waiter::Waiter"),
        (2, "kill -ABRT $$", "no", 2, "signal 6"),
        (1, "kill -SEGV $$", "yes", 1, ""),
        (1, "echo no permission; exit 1", "no", 1, ""),
        (1, "kill -TERM $$", "no", 1, ""),
        (0, "", "no", 1, ""),
    ],
    ids=["once", "in words", "an exception of nsys 2022.4", "twice", "the program had begun", "a refusal", "ended by somebody", "no crash"],
)  # fmt: skip
def test_nsys_that_crashes_before_the_program_begins_is_started_once_more(
    tmp_path: Path, monkeypatch, crashes: int, end: str, begins: str, starts: int, crash: str
) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text(CRASHING_NSYS.format(crashes=crashes, end=end or ":", begins=begins))
    nsys.chmod(0o755)
    monkeypatch.setenv("OPTPIPE_NSYS", str(nsys))
    folder = tmp_path / "scratch"
    folder.mkdir()
    came = record_program(["/bin/true"], folder, Capture(on_gpu=False, whole=True))
    assert len((folder / "starts").read_text().splitlines()) == starts
    assert came.crash == crash
    assert (came.recording is None) == (crashes >= starts)


def test_a_crash_of_nsys_stands_in_the_profile_and_is_no_difference(tmp_path: Path) -> None:
    trace = Recording()
    trace.range("iter", 0, 10)
    read = trace_from_sqlite(trace.write(tmp_path / "trace.sqlite"))
    listener = SilentListener()
    came = Recorded(tmp_path / "recording.qdstrm", 0, "", crash="signal 11")
    marked = add_crash(read, came, listener)
    assert "after a crash" in marked.tracer
    assert "signal 11" in listener.warnings[0]
    sides = [
        ComparedStage(StageSubject("a", "program"), select_measured_part(analysis_from_trace(each)))
        for each in (read, marked)
    ]
    assert not [line for line in compare_stages(*sides).notes if "profiler" in line]
