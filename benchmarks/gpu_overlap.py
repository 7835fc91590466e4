"""What lets DALI and inference overlap on a GPU, and what holds it back: hardware queues, launches, DALI's kernels.

usage, from the project's root on a GPU host: python3 benchmarks/gpu_overlap.py OUTPUT [BUDGET_S]
Each process measures preprocessing alone, inference alone, and variants of the overlapped loop, all in one run, and
writes one line per row to OUTPUT/rows.jsonl at once. At the end one variant runs under nsys; OUTPUT/trace.txt says what
ran at the same time as what. At most 200 seconds; steps for which no time is left are named and skipped. `--cpu` tries
the script itself where there is no GPU.
"""

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "pipeline"))

from optpipe.stages.preprocess import dali_graph, dali_pipeline  # noqa: E402
from optpipe.stages.preprocess.dali_pipeline import DaliPlan, reading_pipeline  # noqa: E402

WARM_S, MEASURE_S, ALONE_S = 0.5, 1.5, 1.2
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Variant:
    """One way of doing it."""

    name: str
    load: float = 1.0
    resize: str = "exact"
    odd_files: bool = False  # the branch for them in the graph, where no file is odd
    minibatch: int = 128
    cpu_share: float = 0.0
    prefetch: int = 2
    threads: int = 8
    in_flight: int = 2
    handover: str = "in place"  # or "graph": copied into one of two fixed inputs, whose CUDA graph is replayed

    def plan(self, batch, cpu):
        """The DALI plan."""
        dali_graph.MINIBATCH = self.minibatch
        where = {"decode": "cpu", "device": "cpu"} if cpu else {"decode": "mixed", "device": "gpu"}
        return DaliPlan(
            **where,
            threads=2 if cpu else self.threads,
            batch_size=batch,
            hw_decoder_load=self.load,
            odd_files=self.odd_files,
            cpu_share=0.0 if cpu else self.cpu_share,
            resize=self.resize,
            prefetch=self.prefetch,
        )


BASE = Variant("prefetch 2")
VARIANTS = (
    BASE,
    Variant("prefetch 3", prefetch=3),
    Variant("32 pictures per kernel", minibatch=32),
    Variant("256 pictures per kernel", minibatch=256),
    Variant("graphs, copied in", handover="graph", prefetch=3),
    Variant("fused resize", resize="fused"),
)
ALONE = (  # preprocessing without a model: what the CPU's cores add to the hardware decoder
    BASE,
    Variant("prefetch 3", prefetch=3),
    Variant("32 pictures per kernel", minibatch=32),
    Variant("with the branch for odd files", odd_files=True),
    Variant("load 0.9", load=0.9),
    *(Variant(f"CPU decodes {share}", threads=16, prefetch=3, cpu_share=share) for share in (0.0625, 0.125, 0.25)),
    Variant("CPU decodes 0.125, 12 threads", threads=12, prefetch=3, cpu_share=0.125),
)
SETTINGS = (  # (name, environment, batch, stream priority, variants)
    ("32 queues, batch 256", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 256, 0, VARIANTS),
    ("preprocessing alone, 32 queues", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 256, 0, ALONE),
    ("8 queues, batch 256", {}, 256, 0, (BASE,)),
    ("32 queues, batch 64", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 64, 0, VARIANTS[:2]),
    ("32 queues, inference first", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 256, -1, (BASE,)),
    ("32 queues, batch 128", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 128, 0, (BASE,)),
)


def say(text):
    """A line with the time."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


# --- one process ----------------------------------------------------------------------------------------------------


class Cpu:
    """The same interface without a GPU, to try the script."""

    def __init__(self, session, _):
        self.session = session
        self.stream = None

    def launch(self, tensor, _):
        """Runs to the end."""
        name = self.session.inputs[0].name
        return self.session.run({name: np.asarray(tensor).astype(self.session.inputs[0].dtype)})

    def wait(self, _):
        """Nothing is pending."""


class Gpu:
    """Launches on one stream; the answer is an event and pinned memory."""

    def __init__(self, session, stream):
        import torch

        self.torch, self.session, self.stream = torch, session, stream
        self.spec, self.answer = session.inputs[0], session.outputs[0].name
        self.dtype = getattr(torch, self.spec.dtype)
        self.placed, self.fixed, self.turn = {}, {}, 0

    def fixed_pair(self, shape):
        """Two sets of buffers, each with a CUDA graph."""
        if shape not in self.fixed:
            zeros = {self.spec.name: np.zeros(shape, self.spec.dtype)}
            self.fixed[shape] = [self.session.bind(zeros) for _ in range(2)]
            for each in self.fixed[shape]:
                for _ in range(3):
                    each.launch()
            self.torch.cuda.synchronize()
        return self.fixed[shape]

    def launch(self, tensor, variant):
        """Enqueues inference on a batch; the stream already waits for the pixels."""
        torch = self.torch
        pixels = torch.from_dlpack(tensor)
        if pixels.dtype != self.dtype:
            pixels = pixels.to(self.dtype)
        kept = [pixels]
        if variant.handover == "graph":
            pair = self.fixed_pair(tuple(pixels.shape))
            self.turn += 1
            binding = pair[self.turn % 2]
            binding.inputs[self.spec.name].copy_(pixels, non_blocking=True)
        else:
            binding = self.in_place(pixels)
        binding.launch()
        best = torch.topk(binding.outputs[self.answer].reshape(len(pixels), -1), 5).indices
        host = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        host.copy_(best, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.stream)
        return event, host, kept

    def in_place(self, part):
        """A binding on DALI's own memory."""
        key = (part.data_ptr(), tuple(part.shape))
        if key not in self.placed:
            like = self.fixed_pair(tuple(part.shape))[0].outputs
            outputs = {name: self.torch.empty_like(each) for name, each in like.items()}
            self.placed[key] = self.session.bind_in_place({self.spec.name: part}, outputs)
        return self.placed[key]

    def wait(self, answer):
        """Until the answer is on the host."""
        answer[0].synchronize()


def rate_of(step, seconds, batch, warm=6):
    """Images per second of `step`, called again and again without a pause; also the spread over ten windows."""
    for _ in range(warm):
        step()
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        step()
    stamps = [time.perf_counter()]
    while stamps[-1] - stamps[0] < seconds or len(stamps) < 12:
        step()
        stamps.append(time.perf_counter())
    windows = [len(each) * batch / sum(each) for each in np.array_split(np.diff(stamps), 10) if len(each)]
    return batch * (len(stamps) - 1) / (stamps[-1] - stamps[0]), min(windows), max(windows)


def preprocessing_alone(files, transform, plan):
    """DALI by itself."""
    pipeline = reading_pipeline(files, transform, plan)
    found = rate_of(pipeline.run, ALONE_S, plan.batch_size, warm=plan.prefetch + 2)
    del pipeline
    return found


def inference_alone(consumer, tensor, batch, variant):
    """The model by itself on a fixed tensor, `in_flight` launches ahead."""
    pending = deque()

    def step():
        pending.append(consumer.launch(tensor, variant))
        while len(pending) > variant.in_flight:
            consumer.wait(pending.popleft())

    found = rate_of(step, ALONE_S, batch)
    while pending:
        consumer.wait(pending.popleft())
    return found


def overlapped(files, transform, plan, consumer, variant, profiled=nullcontext):
    """Both at once: images per second and where the joining thread waited."""
    pipeline = reading_pipeline(files, transform, plan)
    stream = consumer.stream
    pending, spent = deque(), {"dali": 0.0, "launch": 0.0, "answer": 0.0}

    def fetch():
        use = () if stream is None else (stream,)
        return pipeline.share_outputs(*use)

    def give_back():
        pipeline.release_outputs()
        pipeline.schedule_run()

    def consume(outputs):
        begun = time.perf_counter()
        pending.append((consumer.launch(outputs[0].as_tensor(), variant), outputs))
        spent["launch"] += time.perf_counter() - begun

    def settle():
        begun = time.perf_counter()
        while len(pending) > variant.in_flight:
            consumer.wait(pending.popleft()[0])
        spent["answer"] += time.perf_counter() - begun

    def step():
        begun = time.perf_counter()
        outputs = fetch()
        spent["dali"] += time.perf_counter() - begun
        consume(outputs)
        give_back()
        settle()

    for _ in range(plan.prefetch):
        pipeline.schedule_run()
    for _ in range(plan.prefetch + 4):
        step()
    for name in spent:
        spent[name] = 0.0
    with profiled():
        found = rate_of(step, MEASURE_S, plan.batch_size)
    total = sum(spent.values()) or 1.0
    while pending:
        consumer.wait(pending.popleft()[0])
    return (*found, {name: round(value / total, 3) for name, value in spent.items()})


def checksums(files, transform, plan, consumer, variant, *, overlap):
    """Per file a checksum of the pixels that DALI handed over, with the model running beside it or not.

    nvJPEG's hardware decoder is said to write without waiting for the stream: a buffer that is still read would show.
    """
    import torch

    pipeline = reading_pipeline(files, transform, plan)
    found, pending = {}, deque()
    weights = None
    for _ in range(plan.prefetch):
        pipeline.schedule_run()
    for _ in range(len(files) // plan.batch_size * 3):
        outputs = pipeline.share_outputs(consumer.stream)
        pixels = torch.from_dlpack(outputs[0].as_tensor())
        if weights is None:
            generator = torch.Generator(device="cuda").manual_seed(0)
            weights = torch.rand(pixels[0].numel(), device="cuda", dtype=torch.float32, generator=generator)
        answer = consumer.launch(outputs[0].as_tensor(), variant) if overlap else None
        sums = pixels.reshape(len(pixels), -1).float() @ weights
        index = np.asarray(outputs[1].as_cpu().as_tensor()).ravel().tolist()
        pending.append((index, sums, answer, outputs))
        if not overlap:
            torch.cuda.synchronize()
        pipeline.release_outputs()
        pipeline.schedule_run()
        while len(pending) > 2:
            _add(found, pending.popleft())
    while pending:
        _add(found, pending.popleft())
    return found


def _add(found, entry):
    index, sums, _, _ = entry
    for each, value in zip(index, sums.tolist(), strict=True):
        found.setdefault(each, set()).add(round(value, 1))


def worker(job):
    """One process: the parts alone, then every variant; each row is written at once."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform

    imagenet = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = Transform((Decode(), Resize((232,)), CenterCrop(224, 224), Rescale(), imagenet, Pack()))
    dali_pipeline.is_odd = lambda *_: True  # so that the plan alone decides about the branch
    files = sorted(Path(job["photographs"]).glob("*.jpg"))
    batch, cpu = job["batch"], job["cpu"]
    rows = Path(job["rows"])

    def keep(row):
        with rows.open("a") as out:
            out.write(json.dumps({"setting": job["name"], "batch": batch, **row}) + "\n")
        shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        say(f"{job['name']}: {shown}")

    stream, context = None, nullcontext()
    if not cpu:
        import torch

        stream = torch.cuda.Stream(priority=job["priority"])
        context = torch.cuda.stream(stream)
    if job["name"].startswith("preprocessing alone"):
        for variant in (Variant(**each) for each in job["variants"]):
            rate, low, high = preprocessing_alone(files, transform, variant.plan(batch, cpu))
            keep({"what": variant.name, "images_per_s": rate, "low": low, "high": high})
        os._exit(0)
    with context:
        options = {"threads": 1} if cpu else {"nhwc": True, "cuda_graph": True, "cudnn_search": "EXHAUSTIVE"}
        session = BACKENDS["onnxruntime"].load(Path(job["directory"]), job["info"], job["info"]["device"], options)
        consumer = (Cpu if cpu else Gpu)(session, stream)
        variants = [Variant(**each) for each in job["variants"]]
        values = np.random.default_rng(0).standard_normal((batch, 3, 224, 224)).astype(np.float32)
        tensor = values if cpu else torch.from_numpy(values).cuda()
        say(f"{job['name']}: loaded")
        inference, low, high = inference_alone(consumer, tensor, batch, variants[0])
        keep({"what": "inference alone", "images_per_s": inference, "low": low, "high": high})
        alone = {}
        for variant in variants:
            plan = variant.plan(batch, cpu)
            key = replace(plan, prefetch=2)
            if key not in alone:
                alone[key], low, high = preprocessing_alone(files, transform, plan)
                keep({"what": f"preprocessing alone ({variant.name})", "images_per_s": alone[key]})
            if job.get("profile"):
                profile(files, transform, plan, consumer, variant)
                continue
            try:
                rate, low, high, waits = overlapped(files, transform, plan, consumer, variant)
            except Exception as error:  # noqa: BLE001 - the next variant must run
                keep({"what": variant.name, "error": str(error)[-300:]})
                continue
            share = rate / min(inference, alone[key])
            keep({"what": variant.name, "images_per_s": rate, "low": low, "high": high, "share": share, "waits": waits})
        if job.get("check") and not cpu:
            plan = BASE.plan(batch, cpu)
            still = checksums(files, transform, plan, consumer, BASE, overlap=False)
            moving = checksums(files, transform, plan, consumer, BASE, overlap=True)
            unequal = [
                index for index in still if max(still[index] | moving[index]) - min(still[index] | moving[index]) > 1
            ]
            keep({"what": "pixels", "files": len(still), "other pixels beside inference": len(unequal)})
        again, low, high = inference_alone(consumer, tensor, batch, variants[0])
        keep({"what": "inference alone, again", "images_per_s": again, "low": low, "high": high})
    os._exit(0)  # nothing is left to be written, and pipelines with work in flight take their time


def profile(files, transform, plan, consumer, variant):
    """Bounds nsys's capture to half a second of the steady state."""
    import torch

    class Captured:
        def __enter__(self):
            torch.cuda.cudart().cudaProfilerStart()

        def __exit__(self, *_):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()

    global MEASURE_S, WARM_S
    MEASURE_S, WARM_S = 0.4, 0.0
    overlapped(files, transform, plan, consumer, variant, Captured)


# --- the trace ------------------------------------------------------------------------------------------------------


def merged(spans):
    """Disjoint intervals."""
    result = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


def shared_ns(one, other):
    """Length of the intersection of two lists of disjoint intervals."""
    total, i, j = 0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def summarized(export):
    """What ran at the same time as what, as text."""
    with sqlite3.connect(export) as database:
        kernels = database.execute(
            "SELECT k.start, k.end, k.streamId, s.value, k.gridX * k.gridY * k.gridZ FROM CUPTI_ACTIVITY_KIND_KERNEL k"
            " JOIN StringIds s ON s.id = k.demangledName ORDER BY k.start"
        ).fetchall()
        calls = database.execute(
            "SELECT s.value, COUNT(*), SUM(r.end - r.start), MAX(r.end - r.start) FROM CUPTI_ACTIVITY_KIND_RUNTIME r"
            " JOIN StringIds s ON s.id = r.nameId GROUP BY s.value ORDER BY 3 DESC LIMIT 25"
        ).fetchall()
        try:
            copies = database.execute(
                "SELECT copyKind, COUNT(*), SUM(end - start), SUM(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY GROUP BY copyKind"
            ).fetchall()
        except sqlite3.Error:
            copies = []
    if not kernels:
        return "no kernels were recorded"
    of_dali = [row for row in kernels if "dali" in row[3].lower() or "nvjpeg" in row[3].lower()]
    of_model = [row for row in kernels if row not in set(of_dali)]
    span = kernels[-1][1] - kernels[0][0]
    ours, theirs = merged([row[:2] for row in of_dali]), merged([row[:2] for row in of_model])
    both = shared_ns(ours, theirs)
    busy = [sum(end - start for start, end in each) for each in (ours, theirs)]
    lines = [
        f"span {span / 1e6:.2f} ms; model busy {busy[1] / 1e6:.2f} ms ({busy[1] / span:.1%}), DALI's kernels busy {busy[0] / 1e6:.2f} ms"
        f" ({busy[0] / span:.1%}), both {both / 1e6:.2f} ms ({both / max(busy[0], 1):.1%} of DALI's)",
        "",
        f"{'kernel':90} {'count':>6} {'sum ms':>9} {'mean µs':>8} {'max µs':>8} {'blocks':>7}",
    ]
    by_name = {}
    for start, end, _, name, grid in kernels:
        entry = by_name.setdefault(name, [0, 0, 0, 0])
        entry[0] += 1
        entry[1] += end - start
        entry[2] = max(entry[2], end - start)
        entry[3] = max(entry[3], grid)
    for name, (count, total, longest, grid) in sorted(by_name.items(), key=lambda item: -item[1][1])[:40]:
        lines.append(
            f"{name[:90]:90} {count:6} {total / 1e6:9.3f} {total / count / 1e3:8.1f} {longest / 1e3:8.1f} {grid:7}"
        )
    lines += ["", "streams: id, kernels, sum ms, first and last ms, longest gap ms"]
    streams = {}
    for row in kernels:
        streams.setdefault(row[2], []).append(row)
    for stream, rows in sorted(streams.items(), key=lambda item: -sum(r[1] - r[0] for r in item[1]))[:30]:
        gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(rows)]
        first, last = (each / 1e6 for each in (rows[0][0] - kernels[0][0], rows[-1][1] - kernels[0][0]))
        total = sum(row[1] - row[0] for row in rows) / 1e6
        lines.append(
            f"{stream:6} {len(rows):6} {total:9.3f} {first:9.2f} {last:9.2f} {max(gaps, default=0) / 1e6:8.3f}"
        )
    lines += ["", "API calls: count, sum ms, longest ms"]
    lines += [f"{name[:60]:60} {count:7} {total / 1e6:10.3f} {most / 1e6:9.3f}" for name, count, total, most in calls]
    lines += [
        "",
        *(
            f"copies of kind {kind}: {count}, {total / 1e6:.2f} ms, {size / 1e6:.1f} MB"
            for kind, count, total, size in copies
        ),
    ]
    lines += [
        "",
        "a window of 25 ms: every half millisecond, M: the model's kernels, D: DALI's, by share of the time (0…9)",
    ]
    middle = kernels[len(kernels) // 2][0]
    for name, spans in (("M", theirs), ("D", ours)):
        cells = []
        for slot in range(50):
            begin = middle + slot * 500_000
            cells.append(str(min(9, shared_ns(spans, [[begin, begin + 500_000]]) * 10 // 500_000)))
        lines.append(f"{name} {''.join(cells)}")
    return "\n".join(lines)


def traced(job, out, work, target="trace.txt"):
    """Runs one variant under nsys and writes what it shows."""
    job_file = work / "profile.json"
    job_file.write_text(json.dumps({**job, "profile": True, "rows": str(out / "rows-under-nsys.jsonl")}))
    recording = work / "overlap"
    recording.with_suffix(".nsys-rep").unlink(missing_ok=True)
    command = ["nsys", "profile", "--trace", "cuda", "--sample", "none", "--cpuctxsw", "none", "--capture-range"]
    command += [
        "cudaProfilerApi",
        "--capture-range-end",
        "stop",
        "--output",
        str(recording),
        "--force-overwrite",
        "true",
    ]
    subprocess.run([*command, sys.executable, __file__, "--worker", str(job_file)], timeout=90, check=False)
    found = next((path for path in work.glob("overlap*.nsys-rep")), None)
    if found is None:
        say("nsys left no recording")
        return
    export = work / "overlap.sqlite"
    subprocess.run(
        ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(export), str(found)],
        timeout=60,
        check=False,
        capture_output=True,
    )
    text = summarized(export)
    (out / target).write_text(text + "\n")
    print(text[:6000])


# --- all of it ------------------------------------------------------------------------------------------------------


def prepared(out, work, cpu):
    """Photographs and the artifact, made at the same time."""
    environment = {**os.environ, "OPTPIPE_WORKSPACE": str(work / "workspace")}
    environment["PYTHONPATH"] = f"{ROOT / 'pipeline'}:{environment.get('PYTHONPATH', '')}"
    count = "128" if cpu else "2048"
    made = [sys.executable, str(ROOT / "benchmarks/photographs.py"), str(work / "photographs"), count]
    build = [sys.executable, "-m", "optpipe", "build", "resnet50", "--weights", "random", "--backend", "onnxruntime"]
    build += ["--precision", "fp32" if cpu else "fp16", "--batch", "1:64:256", *(["--device", "cpu"] if cpu else [])]
    with (out / "build.log").open("w") as log, (out / "photographs.log").open("w") as other:
        processes = [
            subprocess.Popen(build, env=environment, stdout=log, stderr=log),
            subprocess.Popen(made, env=environment, stdout=other, stderr=other),
        ]
        for process in processes:
            process.wait(timeout=100)
    from optpipe.core.store import Store

    entries = [each for each in Store(work / "workspace").entries() if each.manifest.kind == "artifact"]
    entry = next(each for each in entries if each.info["backend"] == "onnxruntime")
    return {
        "directory": str(entry.path),
        "info": dict(entry.info),
        "photographs": str(work / "photographs"),
        "cpu": cpu,
    }


def dataloader(photographs, rows, cpu):
    """torch's DataLoader in whole rounds of its workers, on the same files."""
    from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
    from optpipe.stages.preprocess.throughput import dataloader_job, throughputs

    imagenet = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = Transform((Decode(), Resize((232,)), CenterCrop(224, 224), Rescale(), imagenet, Pack()))
    cores = len(os.sched_getaffinity(0))
    device = "cpu" if cpu else "cuda"
    os.environ["PYTHONPATH"] = f"{ROOT / 'pipeline'}:{os.environ.get('PYTHONPATH', '')}"
    jobs = [dataloader_job(transform, workers, 64, device, 2.0) for workers in (cores, cores * 3 // 4)]
    for found in throughputs(sorted(photographs.glob("*.jpg")), jobs):
        row = found.to_dict()
        what = f"DataLoader, {row['threads']} workers"
        kept = {"setting": "", "what": what, "images_per_s": found.images_per_s, "ci": row["ci"], "why": row["error"]}
        with rows.open("a") as out:
            out.write(json.dumps(kept) + "\n")
        say(str(kept))


def main(out, budget_s, cpu):
    """Every setting in a process of its own, as long as there is time."""
    out.mkdir(parents=True, exist_ok=True)
    rows = out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = prepared(out, work, cpu)
        say("photographs and artifact are there")
        traced_yet = cpu
        for number, (name, environment, batch, priority, variants) in enumerate(SETTINGS):
            left = budget_s - (time.monotonic() - BEGAN)
            if left < 15:
                say(f"no time for {name}")
                continue
            job = {
                **base,
                "name": name,
                "batch": 16 if cpu else batch,
                "priority": priority,
                "variants": [asdict(each) for each in variants],
                "rows": str(rows),
                "check": number == 0,
            }
            job_file = work / "job.json"
            job_file.write_text(json.dumps(job))
            with (out / f"process-{number}.log").open("w") as log:
                command = [sys.executable, __file__, "--worker", str(job_file)]
                try:
                    done = subprocess.run(
                        command, env={**os.environ, **environment}, timeout=max(20, left), check=False, stderr=log
                    )
                    say(f"{name}: exit {done.returncode}")
                except subprocess.TimeoutExpired:
                    say(f"{name}: out of time")
            if number == 0 and not traced_yet:
                os.environ.update(environment)
                traced({**job, "variants": [asdict(BASE)], "check": False}, out, work)
                traced_yet = True
                os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if budget_s - (time.monotonic() - BEGAN) > 15:
            dataloader(Path(base["photographs"]), rows, cpu)
        if not cpu and budget_s - (time.monotonic() - BEGAN) > 35:
            variants = [asdict(BASE)]
            job |= {"name": "8 queues, as it was", "batch": 256, "priority": 0, "check": False}
            traced({**job, "variants": variants}, out, work, "trace-8-queues.txt")
    table(out, rows)


def table(out, rows):
    """The rows as Markdown."""
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    lines = ["| setting | what | images/s | of the slower part | waits |", "|---|---|---|---|---|"]
    for row in found:
        rate = f"{row['images_per_s']:,.0f}" if "images_per_s" in row else row.get("error", "")
        share = f"{row['share']:.3f}" if "share" in row else ""
        rest = (
            row.get("waits") or {k: v for k, v in row.items() if k in ("files", "other pixels beside inference")} or ""
        )
        lines.append(f"| {row['setting']} | {row['what']} | {rate} | {share} | {rest} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(Path(sys.argv[-1]).read_text()))
    else:
        rest = [each for each in sys.argv[1:] if each != "--cpu"]
        main(Path(rest[0]), float(rest[1]) if len(rest) > 1 else 200.0, "--cpu" in sys.argv)
