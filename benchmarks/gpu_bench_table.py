"""Prints what benchmarks/gpu_bench.sh wrote as Markdown, and keeps it as summary.md beside the JSON documents."""

import json
import sys
from pathlib import Path

TO_BEAT = {  # ms per batch, measured on one H200 with bare scripts; "fp32" of ONNX Runtime's defaults is TF32
    ("onnxruntime", "tf32"): {1: 0.57, 64: 5.47, 256: 19.7},
    ("onnxruntime", "fp16"): {1: 0.44, 64: 3.11, 256: 11.5},
    ("onnxruntime", "int8"): {1: 1.11, 64: 6.92, 256: 26.6},
    ("torch", "fp32"): {1: 3.22, 64: 9.50, 256: 34.1},
    ("torch", "fp16"): {1: 0.86, 64: 4.13, 256: 15.0},
    ("inductor", "fp16"): {64: 2.81},
}
COMPILED_IMAGES_PER_S = 27_900


def read(folder, name):
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def p50(row, part):
    """In ms."""
    return median_ms((row.get("parts_ns") or {}).get(part))


def median_ms(summary):
    found = ((summary or {}).get("percentiles") or {}).get("p50")
    return found["value"] / 1e6 if found else None


def sweep_lines(sweep):
    yield "| backend | precision | batch | graph | compute p50 ms | latency p50 ms | images/s | CV | verdict | reasons |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sweep.get("measurements", []):
        latency, codes = (
            row["latency_ns"] or {},
            ",".join(reason["code"] for reason in row["reasons"]),
        )
        cells = [
            *(row["subject"][name] for name in ("backend", "precision")),
            row["load"]["batch_size"],
            row["subject"]["cuda_graph"],
        ]
        cells += [
            _text(p50(row, "compute")),
            _text(median_ms(latency)),
            _text((row["throughput_images_per_s"] or {}).get("value"), 0),
        ]
        cells += [_text((latency.get("cv") or {}).get("value"), 4), row["verdict"], codes]
        yield "| " + " | ".join(str(cell) for cell in cells) + " |"


def _text(value, digits=4) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def beat_lines(sweep, loops):
    best = {}
    for row in sweep.get("measurements", []):
        if compute := p50(row, "compute"):
            size = row["load"]["batch_size"]
            best[row["subject"]["backend"], row["subject"]["precision"], size] = (
                size / compute * 1e3
            )
    for (backend, precision), noted in TO_BEAT.items():
        ours = {size: best.get((backend, precision, size)) for size in noted}
        pairs = [
            f"batch {size} {size / rate * 1e3:.3f} ms against {noted[size]}"
            for size, rate in ours.items()
            if rate
        ]
        if pairs:
            yield f"- {backend} {precision}: {'; '.join(pairs)}"
    top = max((rate for (_, _, size), rate in best.items() if size == 256), default=None)
    compiled = loops.get("torch_compile_reduce_overhead_fp16", [])
    same = [
        row["images_per_s"]
        for row in compiled
        if row["batch_size"] == 256 and "images_per_s" in row
    ]
    if top:
        share = top / COMPILED_IMAGES_PER_S
        yield f"- best of all at 256: {top:,.0f} images/s, {share:.3f} of the noted torch.compile {COMPILED_IMAGES_PER_S:,}"
    if top and same:
        yield f"- torch.compile reduce-overhead in the same run: {same[0]:,.0f} images/s; ours is {top / same[0]:.3f} of it"


def loop_lines(loops):
    yield "| backend | precision | batch | optpipe compute p50 ms | bare loop, same session ms | ratio | bare API, own session ms |"
    yield "|---|---|---|---|---|---|---|"
    for row in loops.get("loops", []):
        if "error" in row:
            yield f"{row.get('arguments', '')}: {row['error']}"
            continue
        cells = [
            row["backend"],
            row["precision"],
            row["batch_size"],
            _text(row["optpipe_ms"]),
            _text(row["loop_ms"]),
        ]
        cells += [_text(row["optpipe_over_loop"]), _text(row.get("own_session_ms"))]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    folder = Path(sys.argv[1])
    sweeps = sorted(each.stem for each in folder.glob("sweep-*.json"))
    rows = [row for name in sweeps for row in read(folder, name).get("measurements", [])]
    sweep, loops = (
        {"measurements": rows or read(folder, "smoke").get("measurements", [])},
        read(folder, "loops"),
    )
    lines = [
        "## Sweep",
        *sweep_lines(sweep),
        "",
        "## Against the figures to beat",
        *beat_lines(sweep, loops),
        "",
    ]
    lines += ["## Against bare loops", *loop_lines(loops), "", "## Scenarios, limits, energy"]
    for name in ("end-to-end", "offline", "multi-stream", "server", "slo", "energy"):
        lines += [f"### {name}", *sweep_lines(read(folder, name))]
        lines += [f"limit: {json.dumps(limit)}" for limit in read(folder, name).get("limits", ())]
    for row in read(folder, "energy").get("measurements", []):
        lines.append(
            f"energy {row['subject']['backend']}: {json.dumps(row['energy_j_per_image'] or row['energy_why_not'])}"
        )
    if pair := read(folder, "pair").get("comparison"):
        lines.append(f"pair: {pair['verdict']} {json.dumps(pair['ratio'])}")
    text = "\n".join(lines) + "\n"
    (folder / "summary.md").write_text(text)
    print(text)


main()
