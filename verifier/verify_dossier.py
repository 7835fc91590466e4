#!/usr/bin/env python3
"""Checks a dossier of `optpipe signoff` without optpipe: its hashes, every judged figure, and the verdict.

    usage: python3 verify_dossier.py DOSSIER

Written from docs/dossier-format.md, version 1, whose sections are named below as §. Needs Python 3.11, and `polars` to
read Parquet. Exit status: 0 the dossier agrees with its raw files, 1 it differs, 5 nothing differs but a judged figure
was not recomputed (an `open` line names it), 2 not a dossier or wrong use, 3 no polars.
"""

import hashlib
import io
import json
import os
import re
import stat
import sys
import tomllib
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, namedtuple
from datetime import UTC, datetime, timedelta
from decimal import MAX_EMAX, MIN_EMIN, Context
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, chain, combinations, compress, groupby, pairwise, takewhile
from math import (
    ceil,
    erfc,
    exp,
    expm1,
    hypot,
    inf,
    isclose,
    isfinite,
    isnan,
    lgamma,
    log,
    log1p,
    log10,
    nan,
    sqrt,
)
from operator import eq, mul, ne, sub
from pathlib import Path
from random import Random
from statistics import NormalDist, correlation, fmean, median, quantiles, stdev
from string import punctuation

try:
    import polars
except ImportError:
    sys.exit(print("reading Parquet needs a package: pip install polars", file=sys.stderr) or 3)

ORDER = FAIL, INCONCLUSIVE, PASS = "FAIL", "INCONCLUSIVE", "PASS"
SUMS, SEAL = (
    "SHA256SUMS",
    ("SHA256SUMS", "SHA256SUMS.sha256", "SHA256SUMS.sig", "approval.json", "approval.json.sig"),
)
STAMP = "SHA256SUMS.tsr"
FILES = re.compile(
    r"(request|verdict|comparison)\.json|policy\.toml|report\.(html|md)|junit\.xml|"
    r"builds/[^/]+/(manifest\.json|errors\.parquet)|(baseline/)?runs/[^/]+/(.+/)?[^/]+\.(json|parquet|png)"
)
PLAIN = re.compile(r"[ -\[\]-~]+")  # printable ASCII without a backslash
KEYS = {  # of the request and of the verdict, sorted
    "request.json": [
        "artifact",
        "baseline",
        "baseline_artifact",
        "baseline_network",
        "baselines",
        "candidates",
        "created_utc",
        "drawn_with",
        "measurements",
        "model",
        "network",
        "optpipe",
        "other_file",
        "policy_utc",
        "previous",
        "removed",
        "schema_version",
        "since",
        "verifications",
        "verifier",
        "waivers",
    ],
    "verdict.json": [
        "artifact",
        "baseline",
        "created_utc",
        "criteria",
        "dossier_name",
        "expires_if",
        "groups",
        "loosened",
        "model",
        "notes",
        "optpipe",
        "policy",
        "runs",
        "runs_left_out",
        "since",
        "verdict",
    ],
}
SIZES = {  # §1.1, at most
    "files": 10_000,
    "bytes": 2**29,
    "JSON bytes": 2**26,
    "JSON nesting": 64,
    "policy bytes": 2**18,
    "limits": 500,
    "columns": 1_000,
    "rows": 2_000_000,
    "values": 50_000_000,
    "uncompressed bytes": 2**29,
    "text bytes": 2**28,
    "pixels of a mask": 2**26,
    "pixels": 2**30,
    "pairs of boxes": 2**27,
    "bytes of predictions in JSON": 2**24,
    "rows of traces": 2**20,
    "bytes of answers and tags": 2**25,
    "numbers of true values": 2**22,
    "numbers that are counted": 2**25,
    "class": 2**20,
    "class of a box": 20_000,
}
STATED = {
    "cached-answer",
    "died",
    "impossible",
    "interrupted",
    "not-steady",
    "out-of-memory",
    "refused",
    "stale-answer",
    "too-few-samples",
    "wrong-output",
}
UNTRAINED = "random", "unknown"
MAX_SHARE_ELSEWHERE = 0.01  # §8.3
REQUIRED_SHARE = 0.8  # §8.3
LIMITS = {
    "max_cv": 0.025,
    "max_drift": 0.025,
    "max_other_cpu_share": 0.1,
    "max_clock_change": 0.03,
    "max_gpu_temperature_c": 85,
}
LOAD = {
    "batch_size": "b{}",
    "length": "l{}",
    "scenario": "{}",
    "streams": "{}x",
    "rate_per_s": "{:g}qps",
    "mode": "{}",
}
GAP = log1p(0.05)
STATED_AT = 0.95  # the confidence of the intervals that an evaluation states
# Names and units of §4: the unit of each limit; one called `minimum…`, and that of a precision, is a lower limit.
# made by .ci/tables.py: limits
TAILS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
ASKED = {
    "p50": 50.0,
    "p90": 90.0,
    "p95": 95.0,
    "p99": 99.0,
    "p99.9": 99.9,
    "mean_p90": 90.0,
    "mean_p95": 95.0,
    "mean_p99": 99.0,
}
SCORES = (
    "top1",
    "mIoU",
    "pixel-accuracy",
    "AP",
    "AP50",
    "AP75",
    "Spearman",
    "F1",
    "EM",
    "recall",
    "precision",
    "R2",
    "RMSE",
    "MAE",
)
UNITS = {
    "ns": {"ns": 1.0, "us": 1000.0, "µs": 1000.0, "ms": 1000000.0, "s": 1000000000.0},
    "images/s": {"images/s": 1.0, "samples/s": 1.0},
    "samples/s": {"images/s": 1.0, "samples/s": 1.0},
    "queries/s": {"queries/s": 1.0},
    "fraction": {"%": 0.01},
    "bytes": {
        "B": 1.0,
        "KiB": 1024.0,
        "MiB": 1048576.0,
        "GiB": 1073741824.0,
        "kB": 1000.0,
        "MB": 1000000.0,
        "GB": 1000000000.0,
    },
    "J/image": {"J/image": 1.0, "mJ/image": 0.001, "J/sample": 1.0, "mJ/sample": 0.001},
    "J/sample": {"J/image": 1.0, "mJ/image": 0.001, "J/sample": 1.0, "mJ/sample": 0.001},
    "W": {"W": 1.0, "mW": 0.001, "kW": 1000.0},
    "images/s/W": {"images/s/W": 1.0, "samples/s/W": 1.0},
    "samples/s/W": {"images/s/W": 1.0, "samples/s/W": 1.0},
    "dB": {"dB": 1.0},
    "times": {"times": 1.0, "x": 1.0, "": 1.0},
    "1": {"": 1.0},
    "points": {
        "points": 1.0,
        "point": 1.0,
        "pt": 1.0,
        "top1": 1.0,
        "mIoU": 1.0,
        "pixel-accuracy": 1.0,
        "AP": 1.0,
        "AP50": 1.0,
        "AP75": 1.0,
        "Spearman": 1.0,
        "F1": 1.0,
        "EM": 1.0,
        "recall": 1.0,
        "precision": 1.0,
        "R2": 1.0,
        "RMSE": 1.0,
        "MAE": 1.0,
    },
}
SECTIONS = {
    "latency": {
        "p50": "ns",
        "p90": "ns",
        "p95": "ns",
        "p99": "ns",
        "p99.9": "ns",
        "mean_p90": "ns",
        "mean_p95": "ns",
        "mean_p99": "ns",
    },
    "throughput": {"minimum": "images/s"},
    "regression": {
        "p50": "fraction",
        "p90": "fraction",
        "p95": "fraction",
        "p99": "fraction",
        "p99.9": "fraction",
        "throughput": "fraction",
    },
    "memory": {"maximum": "bytes"},
    "energy": {"maximum": "J/image"},
    "efficiency": {"minimum": "images/s/W"},
    "power": {"maximum": "W"},
    "load_time": {"maximum": "ns"},
    "stability": {"maximum_cv": "fraction"},
    "speedup": {"minimum": "times"},
    "accuracy": {
        "maximum_drop": "points",
        "minimum_score": "points",
        "minimum_top1": "fraction",
        "minimum_agreement": "fraction",
        "maximum_f1_drop": "points",
    },
    "preprocessing": {"minimum_agreement": "fraction", "minimum_snr": "dB"},
    "outputs": {
        "minimum_snr": "dB",
        "minimum_cosine": "1",
        "minimum_agreement": "fraction",
        "maximum_abs_error": "1",
    },
    "precision": {
        "fp32": "fraction",
        "tf32": "fraction",
        "fp16": "fraction",
        "bf16": "fraction",
        "int8": "fraction",
        "fp8": "fraction",
    },
    "size": {"maximum": "bytes"},
    "tensor_cores": {"minimum_share": "fraction"},
}
SCORE_LIMITS = {"maximum_drop": "points", "minimum": "fraction", "maximum": "fraction"}
FIGURES = {
    "throughput": "throughput",
    "memory": "memory",
    "energy": "energy",
    "efficiency": "efficiency",
    "power": "power",
    "load_time": "load_time",
    "stability": "cv",
}
LISTED = {"power": "W", "load_time": "ns"}
WITNESSED = ("load_time",)
OPTIONAL = ("energy", "memory", "power", "load_time")
SENSED = ("energy", "power")
# end
RATES = {
    "throughput": "throughput_images_per_s",
    "tokens": "throughput_tokens_per_s",
    "energy": "energy_j_per_image",
}
PLUGIN_UNITS = [unit for unit in UNITS if unit not in ("points", "1", "queries/s")]
COSINE = ("reference_square", "output_square", "product", "difference_square", "finite")
USUAL_SNR = {"fp32": 60, "tf32": 40, "fp16": 33.979400087, "bf16": 20, "int8": 10, "fp8": 10}
OVERLAPS = 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.8999999999999999, 0.95
LEVELS = {"AP": range(10), "AP50": [0], "AP75": [5]}  # the overlaps of a score
AVERAGED = {*LEVELS, "mIoU"}  # scores that are means over classes
ON_DEVICE = ("h2d_ns", "compute_ns", "d2h_ns")
ALWAYS_READ = {"time_ns", "other_cpu_cores", "worker_cpu_cores", "worker_waited_cores"}
TIMES_APART_S = 5.0  # §5.5, §5.6
ERROR_SUMS = (  # §8.2: r, d, o, q, s, m
    "reference_square",
    "difference_square",
    "output_square",
    "product",
    "difference_sum",
    "difference_max",
)
# made by .ci/tables.py: columns
COLUMNS = {
    "samples": {
        "phase": "UInt8",
        "stream": "UInt16",
        "input": "UInt32",
        "images": "UInt32",
        "scheduled_ns": "Int64",
        "start_ns": "Int64",
        "end_ns": "Int64",
        "enqueue_ns": "Int64",
        "h2d_ns": "Int64",
        "compute_ns": "Int64",
        "d2h_ns": "Int64",
    },
    "machine": {
        "time_ns": "Int64",
        "other_cpu_cores": "Float64",
        "worker_cpu_cores": "Float64",
        "worker_rss_bytes": "Int64",
        "cpu_mhz": "Float64",
        "worker_waited_cores": "Float64",
        "gpu_sm_mhz": "Int64",
        "gpu_mem_mhz": "Int64",
        "gpu_temperature_c": "Int64",
        "gpu_power_w": "Float64",
        "gpu_energy_mj": "Int64",
        "gpu_utilization": "Int64",
        "gpu_used_bytes": "Int64",
        "gpu_worker_bytes": "Int64",
        "gpu_other_processes": "Int64",
        "gpu_throttle_reasons": "Int64",
    },
    "errors": {
        "output": "String",
        "values": "Int64",
        "finite": "Boolean",
        "reference_square": "Float64",
        "output_square": "Float64",
        "difference_square": "Float64",
        "product": "Float64",
        "difference_sum": "Float64",
        "difference_max": "Float64",
        "reference_best": "UInt32",
        "output_best": "UInt32",
    },
    "images": {
        "image": "String",
        "mean_levels": "Float64",
        "max_levels": "Float64",
        "class": "Int64",
        "reference_class": "Int64",
        "dali_class": "Int64",
        "values": "Int64",
        "finite": "Boolean",
        "reference_square": "Float64",
        "output_square": "Float64",
        "difference_square": "Float64",
        "product": "Float64",
        "difference_sum": "Float64",
        "difference_max": "Float64",
        "truth": "any",
        "reference_prediction": "any",
        "dali_prediction": "any",
    },
    "predictions": {
        "path": "String",
        "sha256": "String",
        "label": "String",
        "group": "String",
        "class": "Int64",
        "truth": "any",
        "NAME:best": "List(Int64)",
        "NAME:prediction": "any",
        "NAME:part.SCORE": "List(Float64)",
    },
    "api": {
        "start_ns": "Int64",
        "end_ns": "Int64",
        "thread": "Int64",
        "correlation_id": "Int64",
        "name": "String",
    },
    "kernels": {
        "start_ns": "Int64",
        "end_ns": "Int64",
        "device": "Int64",
        "stream": "Int64",
        "correlation_id": "Int64",
        "pid": "Int64",
        "name": "String",
        "blocks": "Int64",
        "graph_node": "Int64",
    },
    "copies": {
        "start_ns": "Int64",
        "end_ns": "Int64",
        "device": "Int64",
        "stream": "Int64",
        "correlation_id": "Int64",
        "pid": "Int64",
        "bytes": "Int64",
        "kind": "String",
        "source_memory": "String",
        "target_memory": "String",
        "graph_node": "Int64",
    },
    "ranges": {"start_ns": "Int64", "end_ns": "Int64", "thread": "Int64", "name": "String"},
    "metrics": {"time_ns": "Int64", "device": "Int64", "name": "String", "value": "Float64"},
    "os_calls": {"start_ns": "Int64", "end_ns": "Int64", "thread": "Int64", "name": "String"},
    "stacks": {
        "time_ns": "Int64",
        "thread": "Int64",
        "sample": "Int64",
        "depth": "Int64",
        "name": "String",
        "place": "String",
        "language": "String",
    },
    "switches": {"time_ns": "Int64", "thread": "Int64", "is_in": "Boolean"},
}
WHOLE = (
    "api",
    "copies",
    "errors",
    "kernels",
    "metrics",
    "os_calls",
    "ranges",
    "stacks",
    "switches",
)
# end
# Keys and types of §1.3. A shape is a name, or a list that begins with what it is.
# made by .ci/tables.py: shapes
DOCUMENTS = {
    "request.json": "DossierRequest",
    "verdict.json": "VerdictRecord",
    "manifest.json": "Manifest",
    "evaluate.json": "Evaluation",
    "preprocess.json": "PreprocessRecord",
    "measurements.json": "MeasurementsRecord",
    "comparison.json": "PairedComparison",
    "turns.json": "TurnsRecord",
    "profile.json": "ProfileRecord",
    "artifact": "ArtifactInfo",
    "calibration": "CalibrationInfo",
    "graph": "GraphInfo",
    "methods": "MethodsInfo",
    "model": "ModelInfo",
    "recovered": "RecoveredInfo",
    "reference": "ReferenceInfo",
    "selection": "SelectionInfo",
    "sensitivity": "SensitivityInfo",
    "verification": "VerificationInfo",
    "run": "RunInfo",
}
WORDS = {
    "Verdict": ["word", "PASS", "FAIL", "INCONCLUSIVE"],
    "Dimension": [
        "word",
        "ns",
        "images/s",
        "samples/s",
        "queries/s",
        "fraction",
        "points",
        "bytes",
        "J/image",
        "J/sample",
        "W",
        "images/s/W",
        "samples/s/W",
        "dB",
        "times",
        "1",
    ],
    "Scenario": ["word", "single-stream", "multi-stream", "offline", "server"],
    "Mode": ["word", "compute", "end-to-end"],
    "Rule": ["word", "ratio", "class mean"],
    "Validity": ["word", "VALID", "INVALID"],
    "PairMetric": ["word", "p50", "p90", "p99", "mean", "throughput"],
    "Change": ["word", "faster", "slower", "no difference shown"],
    "Stage": ["word", "export", "quantize", "build", "preprocess", "inference"],
    "KernelKind": [
        "word",
        "matrix",
        "attention",
        "normalization",
        "pooling",
        "reduction",
        "softmax",
        "layout",
        "cast",
        "elementwise",
        "image",
        "other",
    ],
    "LimitingFactor": [
        "word",
        "CPU",
        "launch",
        "I/O",
        "copy",
        "synchronization",
        "memory-bound GPU",
        "math-bound GPU",
        "GPU below its peaks",
        "GPU",
        "withheld",
    ],
    "Source": ["word", "gpu-metrics", "os-calls", "cpu", "python", "modules"],
    "OsCallKind": ["word", "files", "network", "locks", "waiting", "memory", "other"],
    "TraceChange": ["word", "appeared", "vanished", "fused", "slower", "faster", "same"],
    "Precision": ["word", "fp32", "tf32", "fp16", "bf16", "int8", "fp8"],
}
SHAPES = {
    "DossierRequest": {
        "model": "text",
        "artifact": "text",
        "waivers": ["map", "text"],
        "baseline": ["or", "text", "null"],
        "baseline_artifact": ["or", "text", "null"],
        "optpipe": "text",
        "created_utc": "text",
        "drawn_with": ["map", "text"],
        "measurements?": ["map", "integer"],
        "removed?": ["list", "text"],
        "baselines": "integer",
        "verifications": "integer",
        "candidates?": ["map", "integer"],
        "other_file?": ["list", "text"],
        "network?": ["or", "text", "null"],
        "baseline_network?": ["or", "text", "null"],
        "since?": ["or", "text", "null"],
        "policy_utc?": ["or", "text", "null"],
        "verifier?": "text",
        "previous?": ["or", "PreviousSignoff", "null"],
        "schema_version": "integer",
    },
    "PreviousSignoff": {
        "dossier_name": "text",
        "verdict": "Verdict",
        "created_utc": "text",
        "figures": ["map", "PreviousFigure"],
    },
    "PreviousFigure": {"value": "number", "low": "number", "high": "number"},
    "VerdictRecord": {
        "verdict": "Verdict",
        "dossier_name": "text",
        "model": "text",
        "artifact": "JudgedArtifact",
        "policy": "PolicyReference",
        "criteria": ["list", "CriterionResult"],
        "notes": ["list", "Note"],
        "baseline": ["or", "text", "null"],
        "expires_if": ["list", "text"],
        "runs": ["list", "text"],
        "created_utc": "text",
        "optpipe": "text",
        "groups?": ["list", "MeasurementGroup"],
        "since?": ["or", "text", "null"],
        "runs_left_out?": ["list", "text"],
        "loosened?": ["list", "LoosenedLimit"],
    },
    "JudgedArtifact": {
        "id": "text",
        "backend": "text",
        "precision": "text",
        "sha256": ["or", "text", "null"],
        "size_bytes": ["or", "integer", "null"],
        "weights": ["or", "text", "null"],
    },
    "PolicyReference": {"name": "text", "sha256": "text"},
    "CriterionResult": {
        "name": "text",
        "verdict": "Verdict",
        "reason": "text",
        "limit": "text",
        "remedy?": ["or", "text", "null"],
        "observed?": ["or", "number", "text", "null"],
        "ci?": ["or", ["row", "number", "number"], "null"],
        "threshold?": ["or", "number", "text", "null"],
        "unit?": ["or", "Dimension", "null"],
        "about?": "text",
        "source?": "text",
        "waived?": ["or", "text", "null"],
    },
    "Note": {"code": "text", "message": "text", "remedy": "text"},
    "MeasurementGroup": {
        "subject": "Subject",
        "load": "LoadSpec",
        "processes": "integer",
        "runs": ["list", "text"],
        "figures": ["map", "GroupFigure"],
        "left_out?": ["list", "LeftOut"],
    },
    "Subject": {
        "artifact": "text",
        "backend": "text",
        "precision": "text",
        "device": "text",
        "model?": ["or", "text", "null"],
        "sha256?": ["or", "text", "null"],
        "options?": ["map", ["or", "truth", "integer", "text"]],
        "cuda_graph?": ["or", "truth", "null"],
        "threads?": ["or", "integer", "null"],
        "affinity?": ["or", ["list", "integer"], "null"],
        "weights?": ["or", "text", "null"],
        "packages?": ["list", "text"],
    },
    "LoadSpec": {
        "batch_size": "integer",
        "scenario": "Scenario",
        "mode": "Mode",
        "streams": "integer",
        "rate_per_s?": ["or", "number", "null"],
        "min_seconds": "number",
        "max_seconds": "number",
        "percentile": "number",
        "warm_up_seconds": "number",
        "max_warm_up_seconds": "number",
        "output_checks": "integer",
        "cache_probes": "integer",
        "length?": ["or", "integer", "null"],
        "images?": ["or", "truth", "null"],
    },
    "GroupFigure": {
        "estimate": "Estimate",
        "processes": ["list", "number"],
        "between": ["or", "number", "null"],
        "inside": ["or", "number", "null"],
        "unit?": ["or", "Dimension", "null"],
    },
    "Estimate": {
        "value": "number",
        "low?": ["or", "number", "null"],
        "high?": ["or", "number", "null"],
        "note?": ["or", "text", "null"],
    },
    "LeftOut": {"run": "text", "measurement": "text", "codes": ["list", "text"]},
    "LoosenedLimit": {"name": "text", "value": "number", "usual": "number", "message": "text"},
    "Manifest": {
        "kind": "text",
        "id": "text",
        "recipe": ["or", ["map", "any"], "null"],
        "parents": ["list", "text"],
        "files": ["map", "FileHash"],
        "info": ["map", "any"],
        "environment": "Environment",
        "command": "text",
        "started_utc": "text",
        "finished_utc": "text",
        "status": ["word", "complete", "interrupted"],
        "schema_version": "integer",
    },
    "FileHash": {"sha256": "text", "size_bytes": "integer"},
    "Environment": {
        "python": "text",
        "platform": "text",
        "cpu": "text",
        "cpu_count?": ["or", "integer", "null"],
        "packages?": ["map", "text"],
        "gpus?": ["list", "Gpu"],
    },
    "Gpu": {
        "index": "integer",
        "name": "text",
        "compute_capability": "text",
        "memory_bytes": "integer",
        "driver": "text",
    },
    "Evaluation": {
        "model": "text",
        "source": "text",
        "model_id": "text",
        "weights": "WeightsRecord",
        "dataset": "Dataset",
        "accuracy_budget": ["or", "number", "null"],
        "results": ["list", "EvaluatedModel"],
        "run_dir": "text",
        "warnings?": ["list", "text"],
        "task": "text",
        "scoring?": "text",
        "sampled?": ["map", "ScoreRule"],
    },
    "WeightsRecord": {
        "source": "text",
        "sha256": "text",
        "seed?": ["or", "integer", "null"],
        "drawn?": ["or", "text", "null"],
        "converted_from?": ["or", "text", "null"],
        "trained": "truth",
    },
    "Dataset": {
        "name": "text",
        "kind": "text",
        "sha256": "text",
        "count": "integer",
        "unreadable": ["list", "text"],
        "labeled": "truth",
        "classes": "integer",
        "labels?": ["list", "text"],
        "truncated": "integer",
        "validation?": ["or", "truth", "null"],
        "groups?": ["or", "integer", "null"],
    },
    "EvaluatedModel": {
        "backend": "text",
        "precision": "text",
        "device": "text",
        "samples": "integer",
        "artifact?": ["or", "text", "null"],
        "why_not?": ["or", "text", "null"],
        "failed": "truth",
        "calibrated_on": "integer",
        "snr_db?": ["or", "number", "null"],
        "same_sizes": "truth",
        "agreement?": ["or", "Agreement", "null"],
        "accuracy?": ["or", "Accuracy", "null"],
        "scores?": ["or", "TaskScores", "null"],
        "verdict?": ["or", "Verdict", "null"],
        "sha256?": ["or", "text", "null"],
        "sampled?": ["map", "SampledFigure"],
    },
    "Agreement": {
        "share": "number",
        "ci": ["row", "number", "number"],
        "score_shift?": ["or", ["map", "number"], "null"],
    },
    "Accuracy": {
        "top1": "number",
        "top1_ci": ["row", "number", "number"],
        "top5": ["or", "number", "null"],
        "macro_f1": "number",
        "macro_f1_drop": "number",
        "macro_f1_drop_ci": ["row", "number", "number"],
        "drop": "number",
        "drop_ci": ["row", "number", "number"],
        "lost": "integer",
        "won": "integer",
        "top5_ci?": ["or", ["row", "number", "number"], "null"],
        "macro_f1_ci?": ["or", ["row", "number", "number"], "null"],
    },
    "TaskScores": {"scores": ["list", "Score"], "classes": ["list", "ClassScore"]},
    "Score": {
        "name": "text",
        "value": "number",
        "ci": ["row", "number", "number"],
        "drop": "number",
        "drop_ci": ["row", "number", "number"],
    },
    "ClassScore": {
        "label": "text",
        "value": "number",
        "drop": "number",
        "ci?": ["or", ["row", "number", "number"], "null"],
        "drop_ci?": ["or", ["row", "number", "number"], "null"],
    },
    "SampledFigure": {
        "value": ["or", "number", "null"],
        "ci": ["or", ["row", "number", "number"], "null"],
        "drop": ["or", "number", "null"],
        "drop_ci": ["or", ["row", "number", "number"], "null"],
        "why_not?": ["or", "text", "null"],
    },
    "ScoreRule": {"title": "text", "rule": "Rule", "lower_is_better": "truth", "source": "text"},
    "PreprocessRecord": {
        "model": "text",
        "classifies": "truth",
        "trained": "truth",
        "pipeline": "PipelineRecord",
        "images": "ImagesRecord",
        "parity": "ParityRecord",
        "throughput": ["or", "ThroughputTuning", "null"],
        "verdict": "Verdict",
        "run_dir": "text",
        "warnings?": ["list", "text"],
        "task?": ["or", "text", "null"],
        "model_sha256?": ["or", "text", "null"],
    },
    "PipelineRecord": {
        "id": "text",
        "path": "text",
        "sha256": "text",
        "plan": "DaliPlan",
        "steps": ["list", ["map", "any"]],
    },
    "DaliPlan": {
        "decode": ["word", "cpu", "mixed"],
        "device": ["word", "cpu", "gpu"],
        "threads": "integer",
        "batch_size": "integer",
        "hw_decoder_load": "number",
        "edge_cases": "truth",
        "prefetch": "integer",
    },
    "ImagesRecord": {"folder": "text", "count": "integer", "unreadable?": ["list", "RefusedImage"]},
    "RefusedImage": {"image": "text", "reason": "text"},
    "ParityRecord": {
        "proof": "Proof",
        "images": "integer",
        "steps": ["list", "StepDifference"],
        "far": "integer",
        "refused": ["list", "RefusedImage"],
        "worst?": ["list", "WorstImage"],
    },
    "Proof": {
        "verdict": "Verdict",
        "reason": "text",
        "remedy": ["or", "text", "null"],
        "output": "OutputError",
        "top1_agreement": ["or", "PreprocessAgreement", "null"],
        "accuracy": ["or", "PreprocessAccuracy", "null"],
        "task_score?": ["or", "TaskScore", "null"],
        "prediction_agreement?": ["or", "PreprocessAgreement", "null"],
    },
    "OutputError": {
        "name": "text",
        "max_abs": "number",
        "mean_abs": "number",
        "relative": "number",
        "snr_db": ["or", "number", "null"],
        "cosine": "number",
        "finite": "truth",
    },
    "PreprocessAgreement": {
        "images": "integer",
        "share": "number",
        "ci": ["row", "number", "number"],
        "equal?": ["or", "integer", "null"],
    },
    "PreprocessAccuracy": {"reference": "number", "dali": "number"},
    "TaskScore": {
        "name": "text",
        "reference": "number",
        "dali": "number",
        "drop": "number",
        "drop_ci": ["row", "number", "number"],
    },
    "StepDifference": {
        "step": "text",
        "mean_levels": "number",
        "max_levels": "number",
        "off_share": "number",
        "images": "integer",
    },
    "WorstImage": {
        "image": "text",
        "mean_levels": "number",
        "max_levels": "number",
        "file": "text",
        "difference_times": "number",
    },
    "ThroughputTuning": {
        "tried": ["list", "ThroughputRecord"],
        "dataloader": "ThroughputRecord",
        "dali": "ThroughputRecord",
        "speedup": "number",
        "speedup_ci": ["or", ["row", "number", "number"], "null"],
        "seed": "integer",
    },
    "ThroughputRecord": {
        "implementation": "text",
        "plan": ["or", "DaliPlan", "null"],
        "loader": ["or", "LoaderPlan", "null"],
        "images_per_s": ["or", "number", "null"],
        "ci": ["or", ["row", "number", "number"], "null"],
        "batches": "integer",
        "repeats_images_per_s": ["list", "number"],
        "other_cpu_cores": ["or", "number", "null"],
        "error?": ["or", "text", "null"],
    },
    "LoaderPlan": {
        "workers": "integer",
        "batch_size": "integer",
        "device": ["word", "cpu", "cuda"],
    },
    "MeasurementsRecord": {"measurements": ["list", "Measurement"], "schema_version": "integer"},
    "Measurement": {
        "id": "text",
        "subject": "Subject",
        "load": "LoadSpec",
        "verdict": "Validity",
        "reasons": ["list", "Reason"],
        "samples": "integer",
        "warm_up_samples": "integer",
        "duration_s": "number",
        "latency_ns?": ["or", "LatencySummary", "null"],
        "parts_ns?": ["map", "LatencySummary"],
        "throughput_images_per_s?": ["or", "Estimate", "null"],
        "throughput_batches_per_s?": ["or", "number", "null"],
        "throughput_tokens_per_s?": ["or", "Estimate", "null"],
        "device_peak_bytes?": ["or", "integer", "null"],
        "host_peak_bytes?": ["or", "integer", "null"],
        "energy_j_per_image?": ["or", "Estimate", "null"],
        "energy_why_not?": ["or", "text", "null"],
        "figures?": ["map", "ProcessFigure"],
        "output_check?": ["or", "OutputCheck", "null"],
        "inputs?": ["or", "InputPool", "null"],
        "arrivals_seed?": ["or", "integer", "null"],
        "limits?": ["map", "number"],
        "caveats?": ["list", "text"],
        "interrupted": "truth",
        "process": "integer",
        "second_stage": "truth",
        "samples_file?": ["or", "text", "null"],
        "machine_file?": ["or", "text", "null"],
        "started_utc?": "text",
    },
    "Reason": {
        "code": "text",
        "message": "text",
        "remedy": "text",
        "invalidates": "truth",
        "evidence?": ["map", ["or", "number", "integer", "text"]],
    },
    "LatencySummary": {
        "samples": "integer",
        "percentiles": ["map", "Estimate"],
        "minimum": "number",
        "maximum": "number",
        "mean": "number",
        "stddev": "number",
        "withheld": ["map", "text"],
        "cv?": ["or", "Estimate", "null"],
        "confidence": "number",
        "median?": ["or", "number", "null"],
    },
    "ProcessFigure": {
        "value": ["or", "number", "null"],
        "unit": "Dimension",
        "distribution": "text",
        "why_not?": ["or", "text", "null"],
    },
    "OutputCheck": {
        "checked": "integer",
        "passed": "truth",
        "reference": "text",
        "relative_error?": ["or", "number", "null"],
        "tolerance?": ["or", "text", "null"],
        "why_not?": ["or", "text", "null"],
        "tells_inputs_apart?": ["or", "truth", "null"],
    },
    "InputPool": {
        "kind": "text",
        "count": "integer",
        "real": "integer",
        "seed": "integer",
        "sha256": "text",
        "rotated": "integer",
        "rotated_bytes": "integer",
        "padding": "number",
        "lengths?": ["or", ["row", "integer", "integer"], "null"],
    },
    "PairedComparison": {
        "metric": "PairMetric",
        "ratio": "Ratio",
        "baseline_artifact": "text",
        "contender_artifact": "text",
        "baseline_ns": ["list", "number"],
        "contender_ns": ["list", "number"],
        "first_rounds": "integer",
        "seed": "integer",
        "invalid": ["map", "integer"],
        "invalid_processes": "integer",
        "measurements": ["list", "text"],
        "schema_version": "integer",
    },
    "Ratio": {
        "value": "number",
        "ci": ["row", "number", "number"],
        "change": "Change",
        "rounds": "integer",
        "confidence": "number",
        "p_value": "number",
        "smallest_visible": "number",
    },
    "TurnsRecord": {
        "load": "LoadSpec",
        "over": "Subject",
        "judged": "Subject",
        "seed": "integer",
        "speedups": ["list", "number"],
        "over_ns": ["list", "number"],
        "judged_ns": ["list", "number"],
        "schema_version": "integer",
    },
    "ProfileRecord": {
        "stages": ["list", "StageProfile"],
        "failed?": ["map", "text"],
        "program?": ["or", "ProgramRun", "null"],
        "against?": ["or", "ProfileDifference", "null"],
    },
    "StageProfile": {
        "subject": "StageSubject",
        "folder": "text",
        "range": ["or", "text", "null"],
        "facts": "StageFacts",
        "profile": "TraceProfile",
        "details?": ["or", "StageDetails", "null"],
        "modules?": ["or", "ModuleTree", "null"],
        "loop?": ["or", "Loop", "null"],
        "counters?": ["or", "Counters", "null"],
        "energy?": ["or", "EnergyUse", "null"],
    },
    "StageSubject": {
        "name": "text",
        "kind": ["word", "build", "inference", "preprocess", "program"],
        "artifact?": ["or", "text", "null"],
        "precision?": ["or", "text", "null"],
        "device?": ["or", "text", "null"],
        "batch_size?": ["or", "integer", "null"],
        "length?": ["or", "integer", "null"],
        "sha256?": ["or", "text", "null"],
    },
    "StageFacts": {
        "stage?": ["or", "Stage", "null"],
        "backend?": ["or", "text", "null"],
        "options?": ["map", "any"],
        "expects_gpu": "truth",
        "unprofiled_iteration_ns?": ["or", "number", "null"],
    },
    "TraceProfile": {
        "source": "text",
        "tracer": "text",
        "gpus": ["list", "TraceGpu"],
        "trace_quality": "Quality",
        "scope": "text",
        "measured": "TraceViews",
        "iterations": ["or", "Iterations", "null"],
        "gaps": ["list", "Gap"],
        "tensor_cores": ["or", "TensorCores", "null"],
        "roofline": ["or", "Roofline", "null"],
        "bottleneck": "Bottleneck",
        "findings": ["list", "ProfileFinding"],
    },
    "TraceGpu": {"name": "text", "multiprocessors?": ["or", "integer", "null"]},
    "Quality": {"verdict": "Verdict", "checks": ["list", "Check"], "withheld": ["map", "text"]},
    "Check": {
        "name": "text",
        "verdict": "Verdict",
        "detail": "text",
        "withholds?": ["list", "text"],
    },
    "TraceViews": {
        "totals": "Totals",
        "kernels": ["list", "KernelRow"],
        "api": ["list", "CallRow"],
        "copies": ["list", "CopyRow"],
        "ranges": ["list", "RangeRow"],
    },
    "Totals": {
        "kernels": "integer",
        "streams": "integer",
        "kernel_ns": ["or", "integer", "null"],
        "api_ns": ["or", "integer", "null"],
        "memcpy_ns": ["or", "integer", "null"],
        "memset_ns": ["or", "integer", "null"],
        "copy_beside_compute_ns": ["or", "integer", "null"],
        "span_ns": "integer",
        "busy_ns": ["or", "integer", "null"],
        "idle_ns": ["or", "integer", "null"],
        "idle_by_cause": ["map", "integer"],
    },
    "KernelRow": {
        "name": "text",
        "count": "integer",
        "total_ns": "integer",
        "share": "number",
        "in_classic_list": "truth",
        "kind": "KernelKind",
        "tensor_core": ["or", "truth", "null"],
        "mean_ns": "number",
    },
    "CallRow": {
        "name": "text",
        "count": "integer",
        "total_ns": "integer",
        "share": "number",
        "in_classic_list": "truth",
    },
    "CopyRow": {
        "kind": ["or", "text", "null"],
        "source_memory": ["or", "text", "null"],
        "target_memory": ["or", "text", "null"],
        "count": "integer",
        "total_ns": "integer",
        "bytes": "integer",
        "bytes_per_s": ["or", "number", "null"],
    },
    "RangeRow": {
        "name": "text",
        "count": "integer",
        "wall_ns": "integer",
        "gpu_ns": ["or", "integer", "null"],
        "kernel_ns": ["or", "integer", "null"],
        "kernels": ["or", "integer", "null"],
        "projected_ns": ["or", "integer", "null"],
        "busy_ns": "integer",
    },
    "Iterations": {
        "range": "text",
        "count": "integer",
        "first_wall_ns": ["or", "integer", "null"],
        "median_other_wall_ns": ["or", "number", "null"],
        "period_ns": ["or", "number", "null"],
        "unprofiled_ns": ["or", "number", "null"],
        "median_gpu_ns": "number",
        "kernels": "number",
    },
    "Gap": {
        "start_ns": "integer",
        "duration_ns": "integer",
        "by_cause": ["map", "integer"],
        "before": ["or", "text", "null"],
        "host": "text",
    },
    "TensorCores": {
        "basis": ["word", "kernels", "layers"],
        "eligible": "integer",
        "used": "integer",
        "unknown": "integer",
        "eligible_ns": "integer",
        "used_ns": "integer",
        "kernel_ns": "integer",
        "named_ns": "integer",
        "time_share": "number",
        "iterations": "integer",
        "layers": ["list", "LayerUse"],
        "eligible_ns_by_iteration?": ["list", "integer"],
        "used_ns_by_iteration?": ["list", "integer"],
    },
    "LayerUse": {
        "name": "text",
        "op": ["or", "text", "null"],
        "type": ["or", "text", "null"],
        "count": "integer",
        "time_ns": "integer",
        "share": "number",
        "eligible": "truth",
        "used": ["or", "truth", "null"],
        "could_save_ns": "integer",
        "reason": ["or", "text", "null"],
        "kernel": "text",
    },
    "Roofline": {
        "peaks": "Peaks",
        "batch_size": "integer",
        "macs": "integer",
        "edge_bytes": "integer",
        "bound_ns": "number",
        "types_without_peak": ["list", "text"],
        "layers_ns": "number",
        "math_share": "number",
        "measured_ns": ["or", "number", "null"],
        "times_bound": ["or", "number", "null"],
        "layers": ["list", "LayerRoof"],
    },
    "Peaks": {
        "device": "text",
        "source": "text",
        "flops_per_s": ["map", "number"],
        "bytes_per_s": "number",
    },
    "LayerRoof": {
        "cost": "NodeCost",
        "intensity": "number",
        "bound_ns": "number",
        "measured_ns": ["or", "number", "null"],
    },
    "NodeCost": {
        "name": "text",
        "op": "text",
        "type": "text",
        "macs": "integer",
        "bytes": "integer",
        "channels?": ["or", ["row", "integer", "integer"], "null"],
        "fused_bytes?": ["or", "integer", "null"],
    },
    "Bottleneck": {
        "verdict": "LimitingFactor",
        "share": "number",
        "shares": ["map", "number"],
        "why": "text",
        "idle_scale": "number",
        "busy_share?": ["or", "number", "null"],
    },
    "ProfileFinding": {
        "rule": "text",
        "evidence": "text",
        "gain_ns": "integer",
        "advice": "text",
        "gain_share": "number",
        "host_times": "truth",
    },
    "StageDetails": {
        "sources?": ["list", "SourceState"],
        "span_ns": "integer",
        "metrics?": ["list", "MetricRow"],
        "os_calls?": ["or", "OsCalls", "null"],
        "python?": ["or", "Stacks", "null"],
        "native?": ["or", "Stacks", "null"],
        "switches?": ["or", "Switches", "null"],
    },
    "SourceState": {"name": "Source", "recorded": "truth", "why?": "text", "remedy?": "text"},
    "MetricRow": {
        "name": "text",
        "device": "integer",
        "samples": "integer",
        "mean": "number",
        "mean_busy": ["or", "number", "null"],
        "maximum": "number",
    },
    "OsCalls": {
        "threads": "integer",
        "by_kind_ns": ["map", "integer"],
        "rows": ["list", "OsCallRow"],
    },
    "OsCallRow": {
        "name": "text",
        "kind": "OsCallKind",
        "count": "integer",
        "total_ns": "integer",
        "share": "number",
    },
    "Stacks": {
        "language": "text",
        "samples": "integer",
        "threads": "integer",
        "rows": ["list", "StackRow"],
    },
    "StackRow": {
        "function": "text",
        "place": "text",
        "self_samples": "integer",
        "total_samples": "integer",
        "self_share": "number",
        "total_share": "number",
    },
    "Switches": {"count": "integer", "off_cpu_ns": "integer", "threads": "integer"},
    "ModuleTree": {
        "iterations": "integer",
        "kernel_ns": "integer",
        "named_ns": "integer",
        "rows": ["list", "ModuleRow"],
        "groups": ["list", "ModuleGroup"],
    },
    "ModuleRow": {
        "path": "text",
        "depth": "integer",
        "kernels": "integer",
        "time_ns": "integer",
        "self_ns": "integer",
        "share": "number",
        "matrix_ns": "integer",
        "tensor_core_ns": "integer",
        "precisions": ["list", "text"],
        "kernel": "text",
    },
    "ModuleGroup": {
        "paths": ["list", "text"],
        "kernels": "integer",
        "time_ns": "integer",
        "share": "number",
    },
    "Loop": {
        "range": "text",
        "iterations": "integer",
        "iterations_per_s": "number",
        "period_ns": "Spread",
        "data_range": ["or", "text", "null"],
        "data_wait_ns": ["or", "Spread", "null"],
        "gpu_busy_ns": ["or", "Spread", "null"],
        "idle_before_first_launch_ns": ["or", "Spread", "null"],
        "blocking_copies": "number",
        "blocking_copy_ns": "number",
    },
    "Spread": {"median": "number", "low": "number", "high": "number"},
    "Counters": {
        "tool": "text",
        "kernels?": ["list", "KernelCounters"],
        "why?": "text",
        "remedy?": "text",
    },
    "KernelCounters": {
        "name": "text",
        "launches": "integer",
        "duration_ns?": ["or", "number", "null"],
        "dram_read_bytes?": ["or", "number", "null"],
        "dram_written_bytes?": ["or", "number", "null"],
        "dram_peak_percent?": ["or", "number", "null"],
        "sm_peak_percent?": ["or", "number", "null"],
        "occupancy_percent?": ["or", "number", "null"],
        "theoretical_occupancy_percent?": ["or", "number", "null"],
        "tensor_pipe_percent?": ["or", "number", "null"],
        "waves?": ["or", "number", "null"],
        "blocks?": ["or", "number", "null"],
        "threads_per_block?": ["or", "number", "null"],
        "registers_per_thread?": ["or", "number", "null"],
        "occupancy_limit?": ["or", "text", "null"],
    },
    "EnergyUse": {
        "seconds": "number",
        "iterations": "integer",
        "gpu_j?": ["or", "number", "null"],
        "gpu_why_not?": "text",
        "cpu_j?": ["or", "number", "null"],
        "cpu_why_not?": "text",
    },
    "ProgramRun": {
        "command": ["list", "text"],
        "exit_status": "integer",
        "wall_s": "number",
        "output_tail?": "text",
        "energy?": ["or", "EnergyUse", "null"],
    },
    "ProfileDifference": {
        "against": "text",
        "stages": ["list", "StageDifference"],
        "unmatched": ["list", "text"],
    },
    "StageDifference": {
        "before": "text",
        "after": "text",
        "notes": ["list", "text"],
        "per_iteration": "truth",
        "iterations": ["row", "integer", "integer"],
        "totals": ["list", "Difference"],
        "kinds": ["list", "Difference"],
        "modules": ["list", "Difference"],
        "kernels": ["list", "Difference"],
    },
    "Difference": {
        "name": "text",
        "before": "Side",
        "after": "Side",
        "change_ns": "number",
        "interval_ns": ["or", ["row", "number", "number"], "null"],
        "change": "TraceChange",
    },
    "Side": {"count": "number", "mean_ns": "number", "deviation_ns": ["or", "number", "null"]},
    "ArtifactInfo": {
        "model": "text",
        "source": "text",
        "backend": "text",
        "precision": "Precision",
        "device": ["word", "cpu", "cuda"],
        "file": "text",
        "weights": "WeightsRecord",
        "precision_proof": "PrecisionProof",
        "options?": ["map", "any"],
        "details?": ["map", "any"],
        "remarks?": ["list", "text"],
        "mixed?": ["or", "MixedPrecision", "null"],
        "more_files?": ["list", "text"],
        "ranges?": "text",
        "recovery?": ["list", "RecoveryStep"],
        "packages?": ["list", "text"],
    },
    "PrecisionProof": {
        "share": "PrecisionShare",
        "proven": "truth",
        "reason": "text",
        "others": ["list", "LayerType"],
        "others_count": "integer",
        "placement?": ["or", "Placement", "null"],
    },
    "PrecisionShare": {
        "layers": ["map", "number"],
        "macs": ["map", "number"],
        "total_macs": "integer",
        "unknown?": ["list", "UnknownProducts"],
        "stored?": ["list", "StoredWeights"],
    },
    "UnknownProducts": {"op": "text", "type": "text", "count": "integer"},
    "StoredWeights": {"form": "text", "type": "text", "count": "integer"},
    "LayerType": {
        "name": "text",
        "op": "text",
        "type": "text",
        "macs": ["or", "integer", "null"],
        "stored?": "text",
    },
    "Placement": {
        "provider": "text",
        "nodes": "integer",
        "count": "integer",
        "share": "number",
        "elsewhere": ["list", "PlacedNode"],
        "unit": "text",
    },
    "PlacedNode": {"name": "text", "op": "text", "provider": "text", "share": "number"},
    "MixedPrecision": {
        "budget": "Budget",
        "metric": "text",
        "samples": "integer",
        "cost": "PrecisionCost",
        "kept": ["list", "KeptLayer"],
        "total_macs": "integer",
    },
    "Budget": {"limit": "number", "unit": ["word", "dB", "points"]},
    "PrecisionCost": {
        "snr_db": ["or", "number", "null"],
        "drop?": ["or", "number", "null"],
        "drop_ci?": ["or", ["row", "number", "number"], "null"],
    },
    "KeptLayer": {"layer": "text", "op": "text", "macs": "integer", "reason": "text"},
    "RecoveryStep": {
        "name": "text",
        "did": "text",
        "snr_db?": ["or", "number", "null"],
        "gain_db?": ["or", "number", "null"],
        "gain_ci?": ["or", ["row", "number", "number"], "null"],
        "drop?": ["or", "number", "null"],
        "drop_ci?": ["or", ["row", "number", "number"], "null"],
        "seconds": "number",
        "kept": "truth",
    },
    "CalibrationInfo": {
        "model": "text",
        "set": "SampleSetSummary",
        "methods": ["list", "text"],
        "tensors": "integer",
    },
    "SampleSetSummary": {"name": "text", "sha256": "text", "count": "integer", "seed": "integer"},
    "GraphInfo": {
        "precision": "Precision",
        "tool?": ["or", "text", "null"],
        "target?": ["or", "text", "null"],
        "method?": ["or", "text", "null"],
        "set?": ["or", "SampleSetSummary", "null"],
        "int8_layers?": ["list", "text"],
        "kept?": ["list", "SkippedLayer"],
        "mixed?": ["or", "MixedPrecision", "null"],
        "ranges?": "text",
        "remarks?": ["list", "text"],
        "recovery?": ["list", "RecoveryStep"],
    },
    "SkippedLayer": {"layer": "text", "reason": "text"},
    "MethodsInfo": {"images": "integer", "costs": ["map", "PrecisionCost"], "best": "text"},
    "ModelInfo": {
        "name": "text",
        "source": "text",
        "weights": "WeightsRecord",
        "simplified": "truth",
        "own_precision": ["or", "Precision", "null"],
        "left_out?": ["list", "text"],
        "card?": ["or", "text", "null"],
        "remarks?": ["list", "text"],
        "content?": "text",
    },
    "RecoveredInfo": {
        "name": "text",
        "source": "text",
        "weights": "WeightsRecord",
        "simplified": "truth",
        "own_precision": ["or", "Precision", "null"],
        "left_out?": ["list", "text"],
        "card?": ["or", "text", "null"],
        "remarks?": ["list", "text"],
        "content?": "text",
        "steps?": ["list", "RecoveryStep"],
    },
    "ReferenceInfo": {
        "samples_kind": "text",
        "samples": "integer",
        "samples_sha256": "text",
        "origin": "text",
        "export_parity": ["list", "OutputError"],
        "data?": "text",
        "held_out?": ["list", "text"],
        "constant": "truth",
    },
    "SelectionInfo": {
        "budget": "Budget",
        "images": "integer",
        "metric": "text",
        "keep": ["list", "text"],
        "layers": "integer",
        "tried": ["list", "KeptTrial"],
    },
    "KeptTrial": {"kept": "integer", "macs_share": "number", "cost": "PrecisionCost"},
    "SensitivityInfo": {
        "images": "integer",
        "layers": ["list", "LayerCost"],
        "total_macs": "integer",
    },
    "LayerCost": {"layer": "text", "cost": "PrecisionCost", "macs": "integer"},
    "VerificationInfo": {
        "reference": "text",
        "samples": "integer",
        "tolerance_relative": "number",
        "snr_db": ["or", "number", "null"],
        "top1_agreement": ["or", "number", "null"],
        "top1_accuracy": ["or", "number", "null"],
        "source_top1_accuracy": ["or", "number", "null"],
        "outputs": ["list", "OutputError"],
        "values": "integer",
        "passed": ["or", "truth", "null"],
        "data?": "text",
        "selected?": ["list", "text"],
        "box_agreement?": ["or", "number", "null"],
        "steps?": ["or", "integer", "null"],
        "trajectory?": ["list", "OutputError"],
    },
    "RunInfo": {
        "model?": ["or", "text", "null"],
        "trained?": ["or", "truth", "null"],
        "measurements?": ["or", "integer", "null"],
        "commit?": "text",
        "optpipe?": "text",
    },
}
# end
TYPES = {"text": str, "integer": int, "number": (int, float), "truth": bool, "null": type(None)}
ALIGNED = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}
KERNELS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {  # §8.3
        "attention": r"fmha|flash_?(fwd|attn|attention)|attention|sdpa",
        "other": r"nchwtonhwc|nhwctonchw|AddPadding|transpose|permute|reorder|reformat|nhwc2nchw|nchw2nhwc|im2col|concat|"
        r"split_?k?_?copy|CatArray|(batch|layer|group|rms)_?norm|bn_fw|bn_inf|pool|softmax|jpeg|huffman|dct|"
        r"resample|resize|crop|mirror|slice_?flip|SliceKernel|colou?r|dali|warp_?affine|ycbcr|nvimgcodec",
        "matrix": r"gemm|gemv|nvjet|xmma|cutlass|convolve|conv\dd|_conv|convolution|fprop|dgrad|wgrad|winograd|"
        r"[hisd]cudnn|([hisd]|[hiqb]g)mma|wgmma|matmul|dot_kernel|triton_(tem|mm|bmm)|splitkreduce|tensorop|"
        r"s\d{3,5}(gemm|cudnn)",
        "helper": r"splitk?reduce|gemv|dot_kernel",
        "plain": r"triton_(tem|mm|bmm|conv)|triton_.*convolution|simt|ffma|sgemm(?!.*(tensor|s\d{3,5}))|dgemm(?!.*dmma)|"
        r"scudnn|winograd|gemv|gemmk1|splitk?reduce|gemmSN|dot_kernel|implicit_convolve|explicit_convolve|"
        r"conv2d_grouped_direct|convolve_common_engine|depthwise",
        "tensor": r"tensor_?op|(?<![a-z])_?tensor\d+x\d+x\d+|[hidqsbg]mma(?![a-z]*_?sync_none)|wgmma|tcgen05|utc\w*mma|nvjet|"
        r"xmma|(884|1688|16816|16832|8816|16864)(gemm|fprop|dgrad|wgrad|cudnn|_|\b)|SM(80|90|100|120)_\d+x\d+x\d+|"
        r"fmha|flash_?(fwd|attn|attention)|wmma",
    }.items()
}
LIBRARY = re.compile(
    r"(cuBLAS|cuBLASLt|cuDNN|cuSOLVER|cuSPARSE|CUB|CCCL|NCCL|DALI|nvjpeg|nvJPEG|nvImageCodec|"
    r"TensorRT internal|GIL Trace|Python Periodic Sampling)[: ]"
)
LAUNCH, BEGIN, END = (
    re.compile(rf"(cuda|cu)({names})")
    for names in (
        "LaunchKernel|LaunchCooperativeKernel|GraphLaunch",
        "StreamBeginCapture",
        "StreamEndCapture",
    )
)

Estimate = namedtuple("Estimate", "value interval tail", defaults=(None,))
"""`tail` is the interval of its own distribution, if that is another one."""
Seen = namedtuple(
    "Seen",
    "value ci blocked source interval number lost gap repeated",
    defaults=(nan, None, True, "", None, 0, 0, 0.0, 0.0),
)
"""An observation, by a `number` of processes, without those that were `lost`. Without `ci` it is exact.

`interval` is that of its own distribution."""


class Record(dict):
    """A JSON object, the fields of which are attributes too."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


# ---- distributions and estimates (§6, §8.1)


@cache
def beta(a, b, x):
    """The regularized incomplete beta function, by its continued fraction."""
    if min(a, b) <= 0 or not 0 < x < 1:
        return float(a <= 0 or (b > 0 and x >= 1))
    if x > (a + 1) / (a + b + 2):
        return 1 - beta(b, a, 1 - x)
    rest = 1.0
    for m in range(200 + int(10 * sqrt(a + b)), 0, -1):
        odd = (a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        rest = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / (1 - odd / rest)
    scale = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)
    return exp(scale) / a / (1 - (a + b) * x / (a + 1) / rest)


@cache
def invert_beta(a, b, share):
    return bisect_left(range(2**60), share, key=lambda step: beta(a, b, step / 2**60)) / 2**60


def t_quantile(confidence, freedom):
    """The value that |T| exceeds with the probability 1 − confidence."""
    return sqrt(freedom * (1 / invert_beta(freedom / 2, 0.5, 1 - confidence) - 1))


class Mean(namedtuple("Mean", "value error freedom")):
    def interval(self, confidence):
        half = t_quantile(confidence, self.freedom) * self.error
        return self.value - half, self.value + half


def estimate_score(value, list_parts, samples, least=0.0, most=1.0, effect=1.0):
    """A score of samples, to which they or groups of them contribute the parts."""

    def tail(confidence, goes_on=True):
        """Beyond its end the parabola goes on in a straight line, as the p-value does; that of few parts is 0.5."""
        parts = list_parts()
        if len(parts) < 20 or not isfinite(sum(parts)):
            return [-inf, inf]
        n, mean, bounds = len(parts), fmean(parts), []
        squares, cubes = (sum((part - mean) ** power for part in parts) for power in (2, 3))
        error = sqrt(squares * n / (n - 1) + 3 * effect**2)
        for side in (-1, 1):
            lean = (side * cubes + effect**3) / (squares + effect**2) / 3
            t, end = t_quantile(confidence, n - 1), error / (-2 * lean) if lean < 0 else inf
            far = t * error / 2 if goes_on and t > end else None
            t = min(t, end)
            bounds.append(
                value + side * (t * error + t**2 * lean if far is None else far) / samples
            )
        return bounds

    def interval(confidence):
        return [max(least, min(most, bound)) for bound in tail(confidence, goes_on=False)]

    return Estimate(value, interval, tail)


def estimate_mean(values, members=None):
    """The mean of values from 0 to 1: an exact share if they are 0 or 1, and no samples share a group."""
    n, hits = len(values), sum(values)
    if members:
        parts = partial(add_up, values, members)
        return estimate_score(fmean(values), parts, n, effect=find_size(members))
    if not {*values} <= {0, 1}:
        return estimate_score(fmean(values), lambda: values, n)
    return Estimate(
        hits / n,
        lambda confidence: [
            invert_beta(hits, n - hits + 1, (1 - confidence) / 2),
            invert_beta(hits + 1, n - hits, (1 + confidence) / 2),
        ],
    )


def number_groups(table):
    """The group of each sample, from 0; None without a column of them, and if each sample is alone (§8.1)."""
    names = [*map(str, table.get("group", ()))]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return [places[name] for name in names] if len(places) < len(names) else None


def find_size(members):
    """The number of samples in the group of a typical sample."""
    sizes = Counter(members or ())
    return sum(size**2 for size in sizes.values()) / sizes.total() if members else 1.0


def add_up(values, members):
    """The sums over groups of the deviations from the mean."""
    sums, mean = [0.0] * (max(members) + 1), fmean(values)
    for value, group in zip(values, members):
        sums[group] += value - mean
    return sums


def estimate_ratio(parts, wholes):
    """The ratio of two sums over samples, with the ratio estimator of survey sampling."""
    n, ratio = len(parts), sum(parts) / sum(wholes)
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes))
    return Mean(ratio, sqrt(n / (n - 1) * squares) / sum(wholes), n - 1)


def bound_part(parts, wholes, confidence):
    """The interval of a ratio of sums whose windows are parts of wholes; None for fewer than three."""
    part, whole, n = sum(parts), sum(wholes), len(parts)
    if n < 3:
        return None
    if all(piece * whole == part * total for piece, total in zip(parts, wholes)):
        unseen, ratio = 1 - ((1 - confidence) / 2) ** (1 / n), part / whole
        return ratio * (1 - unseen), ratio + (1 - ratio) * unseen
    low, high = estimate_ratio(parts, wholes).interval(confidence)
    return max(0.0, low), min(1.0, high)


def mean_from_runs(runs, first=None):
    """Rules 1 and 2; `first` counts the values of the first stage, which begin each run."""
    every, means, number = [*chain(*runs)], [fmean(run) for run in runs], len(runs)
    known = [value for run, size in zip(runs, first or map(len, runs)) for value in run[:size]]
    if len(known) < 3:
        return None
    pooled, freedom = (
        Mean(fmean(every), stdev(known) / sqrt(len(every)), len(known) - 1),
        len(every) - number,
    )
    if number < 2 or freedom < 1:
        return pooled
    between = sum(len(run) * (mean - pooled.value) ** 2 for run, mean in zip(runs, means))
    within = sum((value - mean) ** 2 for run, mean in zip(runs, means) for value in run)
    if (
        between + within == 0
        or beta(freedom / 2, (number - 1) / 2, within / (within + between)) >= 0.25
    ):
        error = pooled.error * sqrt(len(every) * sum(1 / len(run) for run in runs)) / number
        return Mean(fmean(means), error, min(pooled.freedom, 1.5 * (number - 1)))
    return Mean(fmean(means), stdev(means) / sqrt(number), number - 1)


def find_speeds(values):  # §6
    """The interval by the share of the slower values, as a function of the confidence; None if they are not of two kinds."""
    ordered = sorted(values)
    gaps = [high - low for low, high in pairwise(ordered)]
    if len(ordered) < 3 or not max(gaps) > 0:
        return None
    place = gaps.index(max(gaps)) + 1
    fast, slow, slower = fmean(ordered[:place]), fmean(ordered[place:]), len(ordered) - place

    def interval(confidence):
        least = invert_beta(slower, place + 1, (1 - confidence) / 2)
        most = invert_beta(slower + 1, place, (1 + confidence) / 2)
        return fast + least * (slow - fast), fast + most * (slow - fast)

    return interval


def join(*intervals):
    """The widest of intervals, as a function of the confidence."""

    def interval(confidence):
        lows, highs = zip(*(compute(confidence) for compute in intervals if compute))
        return min(lows), max(highs)

    return interval


def compare_speeds(late, early):  # §8.4
    """The interval of the logarithm of the ratio of two means, each with its `find_speeds`; None if neither has two."""

    def interval(confidence):
        sides = [
            (max(log(mean / low), 0.0), max(log(high / mean), 0.0))
            for mean, speeds in (late, early)
            for low, high in [speeds(confidence) if speeds else (mean, mean)]
        ]
        (below, above), (under, over) = sides
        middle = log(late[0] / early[0])
        return middle - hypot(below, over), middle + hypot(above, under)

    return interval if late[1] or early[1] else None


def widen(value, low, high, processes, lost, confidence, gap, percent, repeated=0.0):
    """Allows for the processes that were left out, a speed that no process had, and a change that all of them repeat."""
    share = invert_beta(lost + 1, processes, (1 + confidence) / 2)
    reach = log1p(share * expm1(gap))
    tail = percent > 50 and share >= 1 - percent / 100 and gap > 0
    most = hypot(gap, log(high / value)) if tail else reach
    low, high = min(low, value * exp(-reach)), max(high, value * exp(most))
    return low * exp(-repeated), high * exp(repeated)


def bound_repeated_change(tries):
    """The change that the ends of all processes share, as a logarithm."""
    ordered = [measurement.x for measurement in keep_valid(tries) if len(measurement.x) >= 64]
    medians = [(x.tail(len(x) // 8).median(), x.median()) for x in ordered]
    changes = [log(last / middle) for last, middle in medians if min(last, middle) > 0]
    mean = mean_from_runs([changes]) if changes else None
    low, high = mean.interval(0.975) if mean else (0.0, 0.0)
    return max(abs(low), abs(high)) if low > 0 or high < 0 else 0.0


def sum_binomial(most, trials, share):
    """P(X <= most) of a binomial X."""
    return 1 - beta(most + 1, trials - most, share)


def bound_next(values, confidence):
    n = len(values)
    return (
        Mean(fmean(values), stdev(values) * sqrt(1 + 1 / n), n - 1).interval(confidence)[1]
        if n >= 3
        else inf
    )


# ---- tasks (§8.1): predictions and truths of one sample, and scores over samples


def divide(part, whole):
    return part / whole if whole else nan


def measure_mask(png):  # §8.1
    """Width and height of a gray PNG file of 8 bits, as it declares them."""
    if png[:16] != b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" or png[24:29] != b"\x08\0\0\0\0":
        raise ValueError("a mask is not an 8-bit gray PNG file without interlacing")
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


@lru_cache(4)
def read_mask(png):  # §8.1
    """The pixels of a mask, row by row, each after a 0, in a column."""
    width, height = measure_mask(png)
    if not 0 < width * height <= SIZES["pixels of a mask"]:
        raise ValueError(f"too large (§1.1): a mask of {width} times {height} pixels")
    plain = inflate_mask(png, height * (width + 1))
    if any(plain[:: width + 1]):
        raise ValueError("a mask has rows with a filter")
    kind = polars.Array(polars.UInt8, len(plain))
    whole = polars.Series([plain], dtype=polars.Binary)
    return whole.bin.reinterpret(dtype=kind, endianness="little").explode()


def inflate_mask(png, size):
    """The data of a PNG file, which inflate to `size` bytes; no more than these are inflated."""
    at, kinds, packed = 8, [], []
    while at < len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4])
        if zlib.crc32(png[at + 4 : end]) != int.from_bytes(png[end : end + 4]):
            raise ValueError("a mask has a chunk with another checksum")
        kinds.append(png[at + 4 : at + 8])
        packed.append(png[at + 8 : end])
        at = end + 4
    if kinds != [b"IHDR", *[b"IDAT"] * (len(kinds) - 2), b"IEND"] or packed[-1]:
        raise ValueError("a mask has other chunks than IHDR, IDAT, and IEND")
    stream = zlib.decompressobj()
    plain = stream.decompress(b"".join(packed[1:]), size + 1)
    if len(plain) != size or not stream.eof or stream.unused_data:
        raise ValueError("a mask has other data than its pixels")
    return plain


def pair_pixels(left, right):
    """How often each pair of classes occurs in two masks of one width and height."""
    if left[16:24] != right[16:24]:
        raise ValueError("the masks of a sample have different sizes")
    pairs = read_mask(left).cast(polars.UInt16) * 256 + read_mask(right)
    runs = pairs.rename("pair").rle().struct.unnest()
    counts = Counter(dict(runs.group_by("value").agg(polars.col("len").sum()).rows()))
    counts[0] -= measure_mask(left)[1]  # the filters of the rows
    return Counter({divmod(pair, 256): number for pair, number in counts.items() if number})


def count_pixels(truth, mask):
    pairs = pair_pixels(truth, mask)
    return Counter({pair: number for pair, number in pairs.items() if pair[0] != 255})


def compare_masks(left, right):
    pairs = pair_pixels(left, right)
    return sum(number for (a, b), number in pairs.items() if a == b) / pairs.total()


def score_pixels(pairs):
    true, predicted, right = Counter(), Counter(), Counter()
    for (truth, guess), number in pairs.items():
        true[truth] += number
        predicted[guess] += number
        right[truth] += number * (truth == guess)
    shares = [
        right[label] / (true[label] + predicted[label] - right[label]) for label in true | predicted
    ]
    return {"mIoU": fmean(shares or [nan]), "pixel-accuracy": divide(right.total(), true.total())}


def find_entities(tags):
    entities, begin, kind, before = set(), 0, None, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, dash, rest = tag.partition("-")
        now = None if tag == "O" else rest if dash else tag
        if kind is not None and (now != kind or prefix in (*"BSU",) or before in (*"ELSU",)):
            entities.add((kind, begin, place))
            kind = None
        if kind is None:
            begin, kind = place, now
        before = prefix
    return entities


def count_entities(truth, tags):
    true, predicted = map(find_entities, (truth, tags))
    return Counter(right=len(true & predicted), found=len(predicted), true=len(true))


def score_entities(sums):
    right, predicted, true = sums["right"], sums["found"], sums["true"]
    return {
        "F1": divide(2 * right, predicted + true),
        "precision": divide(right, predicted),
        "recall": divide(right, true),
    }


def compare_texts(left, right):
    if len(left) != len(right):
        raise ValueError("two vectors have different lengths")
    return sum(map(mul, left, right)) / max(hypot(*left) * hypot(*right), sys.float_info.min)


def list_pairs(truths, rows):
    """The cosine and the rating of each pair of texts; cosines within 10⁻⁶ of the least become equal."""
    members, least = defaultdict(list), -inf
    for (number, rating), row in zip(truths, rows):
        members[number].append((row, rating))
    pairs = [
        (compare_texts(first, second), rating)
        for (first, rating), (second, _) in (
            members[number] for number in sorted(members) if number >= 0
        )
    ]
    for place, (cosine, rating) in sorted(enumerate(pairs), key=lambda pair: pair[1][0]):
        least = least if cosine <= least + 1e-6 else cosine
        pairs[place] = least, rating
    return pairs


def correlate(pairs):
    """Spearman's correlation."""
    ranks = []
    for values in zip(*pairs):
        ordered = sorted(values)
        ranks.append(
            [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]
        )
    return 0.0 if any(len({*series}) < 2 for series in ranks) else correlation(*ranks)


def intersect(left, right):
    wide, high = (
        min(left[at] + left[at + 2], right[at] + right[at + 2]) - max(left[at], right[at])
        for at in (0, 1)
    )
    return max(wide, 0.0) * max(high, 0.0)


def compare_boxes(left, right):
    """F1 of the shown boxes of both, each paired with the free one of its class that overlaps it most."""
    mine, theirs = ([row for row in rows if row[4] >= 0.25] for rows in (left, right))
    free, pairs = defaultdict(list), 0
    for row in theirs:
        free[row[5]].append(row)
    for row in mine:
        alike, size = free[row[5]], row[2] * row[3]
        both = [intersect(row, box) for box in alike]
        shares = [part / (size + box[2] * box[3] - part) for part, box in zip(both, alike)]
        if max(shares, default=0.0) >= 0.5:
            alike.pop(shares.index(max(shares)))
            pairs += 1
    number = len(mine) + len(theirs)
    return 2 * pairs / number if number else 1.0


def match_boxes(truths, boxes):
    """Of one class in one image, best box first: the score, and by overlap 1 (right), 0 (wrong), or None (a crowd's)."""
    taken = [set() for _ in OVERLAPS]
    for box in sorted(boxes, key=lambda row: -row[4])[:100]:
        near, flags, size = [], [], box[2] * box[3]
        for place, truth in enumerate(truths):
            both = intersect(box, truth)
            share = both and both / (size if truth[6] else size + truth[2] * truth[3] - both)
            near += [(not truth[6], share, place)] if share >= OVERLAPS[0] else []
        for least, gone in zip(OVERLAPS, taken if near else ()):
            free = (
                candidate
                for candidate in near
                if candidate[1] >= least and not (candidate[0] and candidate[2] in gone)
            )
            alone, _, place = max(free, default=(None, 0, 0))
            flags.append(0 if alone is None else 1 if alone else None)
            gone |= {place} if alone else set()
        yield box[4], flags or (0,) * len(OVERLAPS)


@cache
def list_hits(objects):
    """The number of hits that reaches each of 101 recalls."""
    return [
        bisect_left(range(objects + 1), at * 0.01, 1, key=lambda hits: hits / objects)
        for at in range(101)
    ]


def score_boxes(truths, predictions, groups, of):
    last, objects, boxes = (
        max((row[4] for rows in truths for row in rows), default=-1),
        defaultdict(Counter),
        defaultdict(list),
    )
    if last >= SIZES["class of a box"]:
        raise ValueError(f"a true box is of class {last}")
    for image, pair in zip(of, zip(truths, predictions)):
        for label in {
            row[4 + side] for side in (0, 1) for row in pair[side] if row[4 + side] <= last
        }:
            both = [[row for row in pair[side] if row[4 + side] == label] for side in (0, 1)]
            objects[label][image] += sum(not row[6] for row in both[0])
            boxes[label] += [(score, image, flags) for score, flags in match_boxes(*both)]
    number = {label: counts.total() for label, counts in objects.items()}

    @cache
    def list_rights(label, level):
        """Of each right box, best first, the wrong ones before it and its group; by group the places of wrong ones."""
        rights, wrongs, wrong = [], defaultdict(list), 0
        for _, group, flags in sorted(boxes[label], key=lambda row: -row[0]):
            if flags[level]:
                rights.append((wrong, group))
            elif flags[level] == 0:
                wrongs[group].append(len(rights))
                wrong += 1
        return rights, wrongs

    @lru_cache(4096)
    def find_precision(label, level, left_out):
        (rights, wrongs), there = (
            list_rights(label, level),
            number[label] - objects[label][left_out],
        )
        gone, precisions = wrongs.get(left_out, ()), []
        for place, (wrong, group) in enumerate(rights):
            if group != left_out:
                hits = len(precisions) + 1
                precisions.append(hits / (hits + wrong - bisect_right(gone, place)))
        best = [*accumulate(reversed(precisions), max)]
        return sum(best[-hits] for hits in list_hits(there) if hits <= len(best)) / 101

    @cache
    def count_shown(least):
        sums = [Counter() for _ in range(groups + 1)]
        for _, group, flags in (row for rows in boxes.values() for row in rows if row[0] >= least):
            sums[group][flags[0]] += 1
        for group, there in (entry for counts in objects.values() for entry in counts.items()):
            sums[group]["objects"] += there
        return sums, sum(sums, Counter())

    def score(name, left_out=-1):
        if name in LEVELS:
            there = [label for label in number if number[label] > objects[label][left_out]]
            precisions = [
                find_precision(label, level, left_out if left_out in objects[label] else -1)
                for label in there
                for level in LEVELS[name]
            ]
            return fmean(precisions or [nan])
        sums, total = count_shown(int(name[3:-1]) / 100 if "@" in name else 0.25)
        left = total - sums[left_out]
        return (
            left[1] / max(left["objects"], 1)
            if name == "recall"
            else 2 * left[1] / max(left[1] + left[0] + left["objects"], 1)
        )

    return score


def count_labels(truth, predicted):
    return Counter(right=len({*truth} & {*predicted}), found=len({*predicted}), true=len({*truth}))


def normalize_answer(text):
    bare = text.lower().translate(str.maketrans("", "", punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def score_answer(truths, answer):
    """F1 over words and exact match of an answer, each the best over the truths."""
    words, scores = normalize_answer(answer), []
    counted = Counter(words)
    for known in [*filter(None, map(normalize_answer, truths))] or [[]]:
        right = sum(min(number, counted[word]) for word, number in Counter(known).items())
        same = float(words == known)
        f1 = 2 * right / (len(words) + len(known)) if words and known else same
        scores.append((f1, same))
    return [*map(max, zip(*scores))]


def compare_labels(left, right):
    either = {*left} | {*right}
    return len({*left} & {*right}) / len(either) if either else 1.0


def count_errors(truth, predicted):
    """The sums of one sample by output; a Counter keeps no negative ones, so the truths are split by sign."""
    sums = Counter(units=1)
    for at, (target, value) in enumerate(zip(truth, predicted, strict=True)):
        sums[at, "outputs"] = 1
        sums[at, "square"], sums[at, "distance"] = (value - target) ** 2, abs(value - target)
        sums[at, "above"], sums[at, "below"], sums[at, "power"] = (
            max(target, 0.0),
            max(-target, 0.0),
            target**2,
        )
    return sums


def score_errors(sums):
    n, squares, distances = sums["units"], [], []
    for at in [key[0] for key in sums if key[-1] == "outputs"]:
        middle = (sums[at, "above"] - sums[at, "below"]) / n
        variance = max(sums[at, "power"] / n - middle**2, 0.0)
        squares.append(divide(sums[at, "square"] / n, variance))
        distances.append(divide(sums[at, "distance"] / n, sqrt(variance)))
    error = fmean(squares)
    return {
        "R2": max(1 - error, -1.0),
        "RMSE": min(sqrt(error), 1.0),
        "MAE": min(fmean(distances), 1.0),
    }


def find_effect(name, before):
    """Of a sample whose prediction is drawn from the truths instead."""
    effects = {"RMSE": sqrt(12) / (2 * max(before, 0.05)), "MAE": sqrt(2)}
    return effects.get(name, sqrt(12))


def list_leaves(value, path=()):
    """What a JSON value holds, by its place; of a container also its kind and length."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        leaves = {(*path, type(value).__name__): len(value)}
        for key, part in pairs:
            leaves |= list_leaves(part, (*path, (type(value).__name__, key)))
        return leaves
    return {path: value}


def compare_numbers(source, build):
    """1 for equal predictions, where numbers with a fraction may differ by 1% of the spread of the source's at their place."""
    before, after = ([list_leaves(prediction) for prediction in some] for some in (source, build))
    numbers = {}
    for leaves in before:
        for path, value in leaves.items():
            if type(value) in (int, float):
                numbers.setdefault(path, []).append(value)
    room = {}
    for path, values in numbers.items():
        middle = fmean(values)
        room[path] = 0.01 * sqrt(fmean([(value - middle) ** 2 for value in values]))

    def is_same(left, right, path):
        if {type(left), type(right)} not in ({float}, {int, float}):
            return type(left) is type(right) and left == right
        both_nan = left != left and right != right
        return left == right or both_nan or abs(left - right) <= max(room[path], 1e-6 * abs(left))

    return [
        float(
            expected.keys() == actual.keys()
            and all(is_same(expected[path], actual[path], path) for path in expected)
        )
        for expected, actual in zip(before, after)
    ]


def read_prediction(text):
    require_flat(text, "a prediction")
    return json.loads(text)


def compare_texts_of_json(source, build):
    return compare_numbers(
        *([read_prediction(row["prediction"]) for row in some] for some in (source, build))
    )


class Task(
    namedtuple(
        "Task",
        "scores agree count finish spread least effect errors agree_all",
        defaults=(None, None, None, 0, 1, (), None),
    )
):
    """Names of its scores, of which the most is 1; and functions of one sample's predictions, and of sums over samples.

    `spread` has a sample's amounts of truth by class, from its sums, or from its truth without them.
    `effect` may depend on a score's name and value; `errors` are better when lower; `agree_all` compares all samples together.
    """

    def find_effect(self, name, before):
        return self.effect(name, before) if callable(self.effect) else self.effect

    def score(self, truths, predictions, members=None):
        """The number of units; a score by name, without a group of them if one is given; and its parts by name."""
        if self.count and not self.finish:
            columns = zip(*map(self.count, truths, predictions))
            values = dict(zip(self.scores, map(list, columns)))
            parts = {name: add_up(x, members) if members else x for name, x in values.items()}
            return len(truths), lambda name: fmean(values[name]), parts.__getitem__, None
        units = list_pairs(truths, predictions) if self.least and not self.finish else truths
        n, groups = len(units), min(max(members) + 1 if members else len(units), 1000)
        of = [at % max(groups, 1) for at in members or range(n)]
        sizes = Counter(of)
        if self.finish:
            rows = [*map(self.count, truths, predictions)]
            amounts = [*map(self.spread, rows)] if self.spread else None
            sums = [Counter() for _ in range(groups)]
            for at, row in zip(of, rows):
                sums[at] = sums[at] + row
            sums, total = [*sums, Counter()], sum(sums, Counter())

            def score(name, left_out=-1):
                return self.finish(total - sums[left_out])[name]
        elif self.spread:
            score, amounts = (
                score_boxes(truths, predictions, groups, of),
                [*map(self.spread, truths)],
            )
        else:
            amounts = None

            def score(_, left_out=-1):
                return correlate([pair for at, pair in zip(of, units) if at != left_out])

        @cache
        def list_parts(name):
            whole = score(name)
            return [
                (n - sizes[at]) * (whole - score(name, at))
                for at in range(groups if groups > 1 else 0)
            ]

        return n, score, list_parts, amounts


def find_largest_effect(amounts, averaged):
    """The change by a lost sample of the class that feels it most, times the number of samples."""
    if not averaged:
        amounts = [Counter(all=counts.total()) for counts in amounts]
    total, influence = sum(amounts, Counter()), Counter()
    for counts in amounts:
        shares = {label: counts[label] / whole for label, whole in total.items()}
        lost = len(amounts) * sum(shares.values()) / max(len(total), 1)
        for label, share in shares.items() if lost else ():
            influence[label] += share * lost
    return max(1.0, *influence.values())


def find_absent_effect(amounts, labels):
    """The change by a lost class that is named and has no truth, times the number of samples; 0 if there is none."""
    there = {label for label, total in sum(amounts, Counter()).items() if total}
    absent = sum(
        place not in there and label not in ("", "N/A", "__background__")
        for place, label in enumerate(labels)
    )
    return len(amounts) / (len(there) + absent) if absent else 0.0


TASKS = {
    "classification": Task(
        ["top1"], lambda left, right: left[0] == right[0], lambda truth, best: [best[0] == truth]
    ),
    "user": Task(
        ["score"],
        None,
        lambda _, prediction: [prediction["score"]],
        agree_all=compare_texts_of_json,
    ),
    "question-answering": Task(["F1", "EM"], eq, score_answer),
    "multi-label-classification": Task(
        ["F1", "precision", "recall"],
        compare_labels,
        count_labels,
        score_entities,
        lambda sums: Counter(all=sums["true"]),
    ),
    "regression": Task(
        ["R2", "RMSE", "MAE"],
        None,
        count_errors,
        score_errors,
        least=-1,
        effect=find_effect,
        errors=("RMSE", "MAE"),
        agree_all=compare_numbers,
    ),
    "segmentation": Task(
        ["mIoU", "pixel-accuracy"],
        compare_masks,
        count_pixels,
        score_pixels,
        lambda pairs: sum((Counter({true: n}) for (true, _), n in pairs.items()), Counter()),
    ),
    "token-classification": Task(
        ["F1", "precision", "recall"],
        lambda *tags: fmean([*map(eq, *tags)] or [1.0]),
        count_entities,
        score_entities,
        lambda sums: Counter(all=sums["true"]),
    ),
    "detection": Task(
        [*LEVELS, "F1", "recall"],
        compare_boxes,
        spread=lambda truths: Counter(box[4] for box in truths if not box[6]),
    ),
    "embedding": Task(
        ["Spearman"], lambda *texts: max(compare_texts(*texts), 0.0), least=-1, effect=6 / sqrt(15)
    ),
}

# ---- scores of plug-ins (§8.1.1): each sample's value, weight, and group, and the rule that joins them


LARGEST_PART = 2**31
OF_TASKS = {"agreement", "score", "drop", "top1", "top5"}  # with SCORES: no names of such scores


def is_part(part, is_error):
    if not part or len(part) != 3 or None in part or not all(map(isfinite, part)):
        return False
    value, weight, group = part
    counts = all(
        number == int(number) and 0 <= number <= LARGEST_PART for number in (weight, group)
    )
    return counts and 0 <= value <= (LARGEST_PART if is_error else weight)


def join_parts(name, sums):
    groups = [group for of, group in sums if of == "weight"]
    shares = [sums["value", group] / sums["weight", group] for group in groups]
    return {name: min(fmean(shares or [nan]), 1)}


def make_part_task(name, stated, parts):
    """The task of one such score, of the parts of both models; a ratio is that of a single group."""
    is_ratio, errors = stated.rule == "ratio", (name,) * stated.lower_is_better
    if is_ratio and all(weight == 1 and value <= 1 for value, weight, _ in parts):
        return Task([name], None, lambda _, part: [part[0]], errors=errors)

    def count(_, part):
        value, weight, group = part
        group = 0 if is_ratio else group
        return Counter({("value", group): value, ("weight", group): weight})

    def spread(sums):
        return Counter({group: n for (of, group), n in sums.items() if of == "weight"})

    return Task([name], None, count, partial(join_parts, name), spread, errors=errors)


# ---- one measurement (§5)


DIRECT_LAGS = 1000
"""Lags of an autocovariance that are summed one by one; all others come from one multiplication."""


class Correlation:
    """The autocorrelation of integers from 0, such as ranks: how many independent values they are worth."""

    def __init__(self, series):
        self.series, self.mean, self.n = series, series.mean(), len(series)
        self.varies = self.n >= 4
        if self.varies:
            y = series - self.mean
            self.spread = y.dot(y)
            self.varies = self.spread > 1e-18 * series.cast(polars.Float64).dot(series)
        if self.varies:
            covariances = self.list_covariances(y)
            pairs = takewhile(lambda pair: pair > 0, map(sum, zip(covariances, covariances)))
            kept = list(pairs)
            self.excess = 2 * sum(accumulate(kept, min)) / self.spread - 1
            self.pairs = len(kept)

    def list_covariances(self, y):
        """n times that of each lag; `y` are the values less their mean."""
        for lag in range(min(self.n, DIRECT_LAGS)):
            yield y.slice(0, self.n - lag).dot(y.slice(lag))
        if self.n > DIRECT_LAGS:
            total, products = [0, *accumulate(self.series)], multiply_lags(self.series.to_list())
            for lag in range(DIRECT_LAGS, self.n):
                both = total[self.n - lag] + total[-1] - total[lag]
                yield products(lag) - self.mean * both + (self.n - lag) * self.mean**2

    def count(self, caution=0.0):
        """N of §5.1."""
        if not self.varies:
            return self.n
        doubt = 1 + caution * sqrt(2 * (4 * self.pairs + 1) / self.n)
        return self.n / max(1.0, self.excess * doubt)


def multiply_lags(series):
    """Of integers from 0: Σ v[i]·v[i + lag], for any lag, as digits of the product of two long numbers."""
    n, width = len(series), len(str(len(series) * max(series) ** 2))
    exact = Context(prec=2 * n * width + 1, Emax=MAX_EMAX, Emin=MIN_EMIN)
    texts = (
        "".join([f"{value:0{width}}" for value in numbers]) for numbers in (series, series[::-1])
    )
    digits = str(exact.multiply(*map(exact.create_decimal, texts))).zfill(2 * n * width)
    return lambda lag: int(digits[(n + lag) * width : (n + lag + 1) * width])


class Latencies:
    """The latencies of one measurement in order, of which the percentiles are asked several times."""

    def __init__(self, x):
        self.x, self.ordered = x, x.sort()
        self.values = cache(self.values)

    @cached_property
    def ranks(self):
        return Correlation((2 * self.x.rank("average") - 1).cast(polars.Int64))

    def values(self, percent):
        """The percentile, and N of the indicators of latencies up to it."""
        q = self.ordered[max(ceil(len(self.x) * percent / 100 - 1e-9), 1) - 1]
        return float(q), Correlation((self.x <= q).cast(polars.Int64)).count(1.0)


def show_percentiles(latencies, percents, confidence):  # §5.1
    """Those that are not withheld, by name."""
    n, percentiles = len(latencies.x), {}
    for percent in sorted(percents) if n else ():
        p = percent / 100
        enough = max(2, ceil(log((1 - confidence) / 2) / log(1 - min(p, 1 - p)) - 1e-9))
        if p**n + n * (1 - p) * p ** (n - 1) > 0.01 or latencies.ranks.count() < min(25, n / 2):
            break
        if latencies.ordered[0] == latencies.ordered[-1]:
            break
        ranks = latencies.ranks.count(1.0) if p <= 0.5 else 5 / 3 * latencies.ranks.count()
        q, counted = latencies.values(percent)
        if int(min(counted, ranks)) < enough:
            break
        percentiles[f"p{percent:g}"] = q
    return percentiles


def cut_into_medians(s):  # §5.3
    b = min(20, len(s) // 4) // 2 * 2
    size, longer = divmod(len(s), max(b, 1))
    cuts = [at * size + min(at, longer) for at in range(b + 1)]
    return [s.slice(low, high - low).median() for low, high in pairwise(cuts)]


def find_drift(s):  # §5.3
    """(p, change)."""
    m, trends = cut_into_medians(s), [(1.0, 0.0)]
    b = len(m)
    folded = [(m[b // 2 - 1 - at] + m[b // 2 + at]) / 2 for at in range(b // 2)]
    for series in (m, folded) if b >= 8 else ():
        k, pairs = len(series), list(combinations(enumerate(series), 2))
        score = sum((late > early) - (late < early) for (_, early), (_, late) in pairs)
        p = erfc(max(0, abs(score) - 1) / sqrt(k * (k - 1) * (2 * k + 5) / 18) / sqrt(2))
        slope = median((late - early) / (j - i) for (i, early), (j, late) in pairs)
        trends.append((p, slope * (k - 1) / (median(m) or inf)))
    p, change = min(trends, key=lambda trend: trend[0])
    return min(1.0, 2 * p), change


def multiply(left, right):
    return sum(map(mul, left, right))


def regress_on_trend(series, trend):  # §5.3
    """The two-sided p-value of a trend in autoregressive noise."""
    count, trend = len(series), [value - fmean(trend) for value in trend]
    centered = [value - fmean(series) for value in series]
    slope = multiply(trend, centered) / multiply(trend, trend)
    rest = [value - slope * at for value, at in zip(centered, trend)]
    square = multiply(rest, rest)
    rho = multiply(rest[1:], rest[:-1]) / square if square > 0 else 0.0
    rho = min(max(rho + (2 + 4 * rho) / count, 0.0), 1.0)
    walks = rho >= 1 - 1 / sqrt(count)
    kept, freedom = (1.0, count - 2) if walks else (rho, count - 3)
    y, x = ([now - kept * last for last, now in pairwise(values)] for values in (series, trend))
    if not walks:
        y, x = ([value - fmean(values) for value in values] for values in (y, x))
    slope = multiply(x, y) / multiply(x, x)
    rest = [value - slope * at for at, value in zip(x, y)]
    error = sqrt(multiply(rest, rest) / freedom / multiply(x, x))
    if not error:
        return float(slope == 0)
    return beta(freedom / 2, 0.5, freedom / (freedom + (slope / error) ** 2))


def is_slow_noise(s):  # §5.3
    """Whether noise with the correlation of the medians explains their trend."""
    m = cut_into_medians(s)
    if len(m) < 8 or min(m) <= 0:
        return True
    trends = range(len(m)), [abs(at - (len(m) - 1) / 2) for at in range(len(m))]
    return 2 * min(regress_on_trend([*map(log, m)], trend) for trend in trends) > 1e-6


def remove_input_costs(s, inputs, repeats):  # §5.2
    """The service times as if all inputs cost the same."""
    table = polars.DataFrame({"s": s, "input": inputs}).with_columns(
        cost=polars.col("s").median().over("input"), count=polars.len().over("input")
    )
    if table["input"].n_unique() < 2 or table["count"].min() < repeats or table["cost"].min() <= 0:
        return s
    return s / table["cost"] * s.median()


def is_bimodal(s):  # §5.4
    n, v = len(s), s.log().sort().to_list() if s.min() > 0 else []
    if len(v) < 40:
        return False
    scale = max(min(map(sub, v[n // 2 :], v)) / 1.349, 1e-4)
    start, end = v[0] - 3 * scale, v[-1] + 3 * scale
    cell = max(scale / 8, (end - start) / 25600)
    edges = [start + at * cell for at in range(ceil((end + cell - start) / cell))]
    below, reach = [bisect_left(v, edge) for edge in edges], int(1.2 * scale / cell) + 1
    kernel = [exp(-((j * cell / (0.3 * scale)) ** 2) / 2) for j in range(-reach, reach + 1)]
    counts = [0] * reach + list(map(sub, below[1:], below)) + [0] * reach
    density = [sum(map(mul, kernel, counts[at : at + len(kernel)])) for at in range(len(edges) - 1)]
    peaks = {
        at for at in range(1, len(density) - 1) if density[at - 1] < density[at] >= density[at + 1]
    }
    highest = density.index(max(density))
    for other in peaks - {highest}:
        valley = min(range(min(highest, other), max(highest, other) + 1), key=density.__getitem__)
        centers = [edges[at] + cell / 2 for at in (other, valley)]
        b, a = (
            bisect_left(v, center + 0.6 * scale) - bisect_left(v, center - 0.6 * scale)
            for center in centers
        )
        deep, both = (
            density[valley] < density[other] / 2,
            min(below[valley], n - below[valley]) >= 0.05 * n,
        )
        apart = abs(edges[highest] - edges[other]) >= log1p(0.04)
        if deep and both and apart and a + b and beta(b, a + 1, 0.5) < 0.03:
            return True
    return False


def list_codes(record):
    return [reason.code for reason in record.reasons if reason.invalidates]


def find_codes(record, rows, machine, s):  # §5.2
    """`rows` and `machine` are those during the measurement, `s` the service times."""
    limits, load = Record(LIMITS | record.limits), record.load
    if (repeats := record.limits.get("input_repeats")) is not None:
        s = remove_input_costs(s, rows["input"], max(repeats, 10))
    p, change = find_drift(s)
    drifted = p <= 0.01 and abs(change) > limits.max_drift
    other, waited = (
        fmean(machine[name] or [0]) for name in ("other_cpu_cores", "worker_waited_cores")
    )
    cores = len(record.subject.affinity or "1")
    capped = [bool(int(mask) & 0x04) for mask in machine["gpu_throttle_reasons"][1:-1]]
    cuts = [part * len(capped) // 4 for part in range(5)]
    share = max(record.limits.get("power_cap_share", inf), 0.25)
    steady = len(capped) >= 8 and all(fmean(capped[a:b]) >= share for a, b in pairwise(cuts))
    names = ("gpu_mem_mhz", "cpu_mhz") if steady else ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz")
    clocks = [machine[name][1:-1] for name in names]
    spans = [
        quantiles(clock, n=20, method="inclusive")
        for clock in clocks
        if len(clock) >= 3 and max(clock) > 0
    ]
    before = polars.col("end_ns").shift(1)
    late = rows.select(
        "end_ns", "start_ns", late=polars.col("scheduled_ns") <= before, before=before
    ).filter("late")
    paced = (
        load.scenario == "server"
        and load.rate_per_s is not None
        and len(s) >= 40
        and len(late) >= 20
    )
    busy, idle = late["end_ns"] - late["start_ns"], late["start_ns"] - late["before"]
    rules = {
        "not-watched": record.machine_file is None
        or len(machine["time_ns"]) < int((rows["end_ns"].max() - rows["start_ns"].min()) / 1e9),
        "loaded-host": (
            other > limits.max_other_cpu_share * cores
            if record.subject.device == "cpu"
            else waited > limits.max_other_cpu_share / 2
        ),
        "busy-gpu": max(machine["gpu_other_processes"], default=0) > 0,
        "throttled": any(int(mask) & 0xE8 for mask in machine["gpu_throttle_reasons"]),
        "clocks-moved": any(1 - span[0] / span[-1] > limits.max_clock_change for span in spans),
        "hot": max(machine["gpu_temperature_c"], default=0) > limits.max_gpu_temperature_c,
        "drift": drifted and not ("drift_risk" in record.limits and is_slow_noise(s)),
        "bimodal": is_bimodal(s),
        "dispersion": len(s) > 1 and s.std() / s.mean() > limits.max_cv,
        "falling-behind": paced and load.rate_per_s >= 1e9 / max(1.0, busy.mean() + idle.median()),
    }
    return STATED & {*list_codes(record)} | {code for code, holds in rules.items() if holds}


def measure(record, rows, machine):  # §5.1
    """What follows from the samples without percentiles; `rows` are those of phase 1, sorted by their end."""
    inputs, load = record.inputs or {}, record.load
    first, last = rows["start_ns"].min(), rows["end_ns"].max()
    inside = [at for at, time in enumerate(machine["time_ns"]) if first <= time <= last]
    inside, during = inside[len(inside) > 2 :], defaultdict(list)
    during |= {
        name: [column[at] for at in inside if column[at] is not None]
        for name, column in machine.items()
    }
    x, times = (rows["end_ns"] - rows[since] for since in ("scheduled_ns", "start_ns"))
    n, images, seconds = len(x), rows["images"].cast(polars.Int64).sum(), (last - first) / 1e9
    busy = times.sum() if load.scenario in ("single-stream", "multi-stream") else last - first
    rate = images / max(busy, 1) * 1e9
    energy = during["gpu_energy_mj"]
    read = [at for at in inside if machine["gpu_energy_mj"][at] is not None]
    long = len(read) >= 12 and images
    window = machine["time_ns"][read[-1]] - machine["time_ns"][read[0]] if long else 0
    owned, clock = (
        [reading for reading in machine[name] if reading is not None]
        for name in ("gpu_worker_bytes", "gpu_sm_mhz")
    )
    most = max(owned, default=0)
    peak = (
        max(0, most - inputs.get("rotated_bytes", 0))
        if most > 0 and inputs
        else record.device_peak_bytes
    )
    power = (energy[-1] - energy[0]) * 1e6 / window if window >= 8e9 else None
    figures = {
        "throughput": rate,
        "tokens": rate * (load.length or 0) * (1 - inputs.get("padding", 0.0)) or None,
        "cv": x.std() / x.mean() if n > 1 and x.mean() else None,
        "energy": None if power is None else power * seconds / images,
        "memory": record.host_peak_bytes if record.subject.device == "cpu" else peak,
    }
    service = times if rows["compute_ns"].has_nulls() else rows["compute_ns"]
    latencies = Latencies(x)
    return {
        "codes": find_codes(record, rows, during, service.cast(polars.Float64)),
        "figures": figures,
        "power": power,
        "x": x,
        "latencies": latencies,
        "times": times[:1000].to_list(),
        "median": float(latencies.ordered[(n - 1) // 2]) if 0.5**n * (1 + n) <= 0.01 else None,
        "clock": median(clock) if clock else None,
        "peak": peak,
        "seconds": seconds,
    }


def follow(queries):
    """Whether none of them, (start, end, …) in order, starts before the one before ends."""
    return all(before[1] <= after[0] for before, after in pairwise(queries))


def break_rules(load, device, table):  # §5.6
    """The rules of queries by name, and whether they hold; `table` has the queries of one process."""
    column = polars.col
    queries = table.sort("start_ns", "end_ns", "phase")
    warm, measured = (queries.filter(column("phase") == phase) for phase in (0, 1))
    streams = load.streams if load.scenario == "multi-stream" else 1
    due, start, end, busy = (
        column(name) for name in ("scheduled_ns", "start_ns", "end_ns", "busy_ns")
    )
    queries = queries.with_columns(busy_ns=end - start)
    unmeasured = ON_DEVICE if device == "cpu" else ("h2d_ns", "d2h_ns")
    absent = unmeasured if device == "cpu" or load.mode == "compute" else ()
    compute = measured["compute_ns"].drop_nulls()

    def hold(rule):
        """Whether all rows hold it; a null does not break it."""
        return queries.filter(~rule).is_empty()

    return {
        "phases": len(warm) + len(measured) == len(table)
        and (
            warm.is_empty()
            or measured.is_empty()
            or warm["end_ns"].max() <= measured["start_ns"].min()
        ),
        "images": hold(
            column("images")
            == polars.when(column("phase") == 1).then(streams).otherwise(1) * load.batch_size
        ),
        "times": hold(
            (due >= 0) & (due <= start) & (start <= end) & (end < 2**62)
            if load.scenario == "server"
            else (due >= 0) & (due == start) & (start <= end) & (end < 2**62)
        ),
        "one query at a time": load.scenario == "offline" or hold(end.shift(1) <= start),
        "streams": hold(
            column("stream") < (load.streams if load.scenario in ("multi-stream", "offline") else 1)
        ),
        "parts": hold((column("enqueue_ns") >= 0) & (column("enqueue_ns") <= busy))
        and all(table[name].null_count() == len(table) for name in absent)
        and all(hold(column(name) >= 0) for name in ON_DEVICE)
        and hold(polars.sum_horizontal(ON_DEVICE) <= 1.001 * busy + 1000)
        and all(
            table[name].null_count() in (0, len(table))
            for table in (warm, measured)
            for name in ON_DEVICE
        )
        and (len(compute) < 100 or compute.n_unique() > 1),
    }


def is_due(load, seed, table):  # §5.6
    """Whether a server's queries were due as the seed draws them, from some place in the warm-up on."""
    if load.scenario != "server" or seed is None or load.get("rate_per_s") is None:
        return (seed is None) == (load.scenario != "server")
    due = table.filter(polars.col("phase") == 1).sort("start_ns")["scheduled_ns"].to_list()
    gaps, draw = [after - before for before, after in pairwise(due)], Random(f"arrivals {seed}")
    drawn = [round(draw.expovariate(load.rate_per_s) * 1e9) for _ in range(len(table))]
    places = [at for at in range(1, len(drawn)) if gaps and abs(drawn[at] - gaps[0]) <= 1]
    return not gaps or any(
        len(drawn) - at >= len(gaps) and all(abs(a - b) <= 1 for a, b in zip(drawn[at:], gaps))
        for at in places
    )


def follow_inputs(load, rotated, table):  # §5.6
    """Whether the inputs of each stream's measured queries are in their order."""
    if rotated < 1:
        return True
    steps, last = set(), {}
    measured = table.filter(polars.col("phase") == 1).sort("start_ns")
    for stream, number in measured.select("stream", "input").rows():
        if stream in last:
            steps.add((number - last[stream]) % rotated)
        last[stream] = number
    known = load.scenario == "offline" or steps <= {1 % rotated}
    return known and len(steps) < 2 and (table["input"].max() or 0) < rotated


def is_sound(load):  # §5.6
    several = load.scenario in ("multi-stream", "offline")
    rate = load.get("rate_per_s")
    return (
        load.streams >= 1
        and (several or load.streams == 1)
        and (rate is not None and 0 < rate < inf if load.scenario == "server" else rate is None)
        and 0 < load.percentile < 100
        and 0 < load.min_seconds <= load.max_seconds < inf
        and 0 <= load.warm_up_seconds <= load.max_warm_up_seconds < inf
        and min(load.output_checks, load.cache_probes) >= 0
        and load.get("length") != 0
    )


def has_power(machine):  # §5.6
    """Whether the energy counter advances as the power says."""
    names = ("time_ns", "gpu_energy_mj", "gpu_power_w")
    rows = [row for row in zip(*(machine.get(name, ()) for name in names)) if None not in row]
    if len(rows) < 12 or rows[-1][0] - rows[0][0] < 8e9:
        return True
    power = sum((p + q) / 2 * (t - s) / 1e9 for (s, _, p), (t, _, q) in pairwise(rows))
    return power / 1.5 <= (rows[-1][1] - rows[0][1]) / 1e3 <= power * 1.5


def fits_memory(machine, most):  # §5.6
    used, mine = (
        max((reading for reading in machine.get(name, ()) if reading is not None), default=None)
        for name in ("gpu_used_bytes", "gpu_worker_bytes")
    )
    if used is None:
        return True
    return (most is None or used <= most) and (mine is None or mine <= 1.05 * used + 2**26)


def find_impossible(record, table, machine, count, most=None):  # §5.6
    """The rules that raw data break; `table` has every query, `machine` every reading, and is empty without a file."""
    load, measured = record.load, table.filter(polars.col("phase") == 1)
    begun, ended = (measured[name] for name in ("start_ns", "end_ns"))
    begun, ended = (begun.min(), ended.max()) if len(measured) else (0, 0)
    read = [reading for values in machine.values() for reading in values if reading is not None]
    times = machine.get("time_ns", ())
    energy = [reading for reading in machine.get("gpu_energy_mj", ()) if reading is not None]
    cpus, inputs = record.subject.affinity, record.inputs or {}
    peaks = record.host_peak_bytes, record.device_peak_bytes
    shortest, longest = inputs.get("lengths") or (1, 1)
    rules = break_rules(load, record.subject.device, table) | {
        "readings": all(isfinite(reading) and reading >= 0 for reading in read)
        and all(a <= b for a, b in chain(pairwise(times), pairwise(energy)))
        and max((share or 0 for share in machine.get("gpu_utilization", ())), default=0) <= 100,
        "watched": not (machine and len(measured) and record.duration_s >= 2)
        or any(begun <= time <= ended for time in times),
        "pace": sum(after - at < 5e7 for at, after in pairwise(times)) <= 2,
        "length": record.verdict != "VALID"
        or record.duration_s >= min(load.min_seconds, load.max_seconds) / 2,
        "processors": cpus is None
        or (0 < len(cpus) == len({*cpus}) <= (count or inf) and min(cpus) >= 0),
    }
    rules["counts"] = (
        min(load.batch_size, load.streams) >= 1
        and record.process >= 0
        and all(peak is None or peak >= 0 for peak in peaks)
        and (
            not inputs
            or (
                0 <= inputs["real"] <= inputs["count"]
                and inputs["count"] >= 1
                and min(inputs.get("rotated") or 0, inputs.get("rotated_bytes") or 0) >= 0
                and 0 <= inputs.get("padding", 0.0) <= 1
                and 1 <= shortest <= longest
            )
        )
    )
    rules |= {
        "energy": has_power(machine),
        "memory": fits_memory(machine, most),
        "the load": is_sound(load),
        "inputs": follow_inputs(load, inputs.get("rotated") or 0, table),
        "arrivals": is_due(load, record.get("arrivals_seed"), table),
    }
    wrong = [name for name, holds in rules.items() if not holds]
    return wrong, (table["start_ns"].min() or 0, table["end_ns"].max() or 0)


def find_other_clock(run):  # §5.6
    """How many seconds more the clocks differ at one time than at another, above what is tolerated; or 0."""
    dated = sorted(
        (
            datetime.fromisoformat(measurement.started_utc).timestamp(),
            measurement.id,
            *measurement.span,
        )
        for measurement in run.measured
        if measurement.span
    )
    ends = [begun for begun, *_ in dated[1:]]
    ends += [datetime.fromisoformat(run.finished_utc).timestamp()]
    before = max((begun - first / 1e9 for begun, _, first, _ in dated), default=-inf)
    after = min((end - last / 1e9 for end, (*_, last) in zip(ends, dated)), default=inf)
    return before - after if before - after > TIMES_APART_S else 0


def are_copies(left, right):  # §5
    """Whether both processes, (durations, readings), are one that was counted twice."""
    (mine, seen), (theirs, also) = left, right
    number = min(len(mine), len(theirs))
    near = sum(abs(a - b) <= max(2.0, 1e-5 * b) for a, b in zip(mine, theirs))
    few = 0 < number < 20 and mine[:number] == theirs[:number]
    return few or (number >= 20 and near > number / 2) or (bool(seen) and seen == also)


def list_processes(run, at):
    """(place, durations of the first measured queries, readings without their times)."""
    for measurement in run.measured:
        yield f"{run.place}: {measurement.id}", measurement.times[:1000], measurement.readings
    if run.kind == "turns":
        for name in sorted(run.files):
            table = at.table(f"{run.place}/{name}", None) if name.startswith("samples/") else {}
            rows = [*zip(*map(table.get, ("phase", "end_ns", "start_ns")))] if table else []
            rows = sorted((row for row in rows if row[0] == 1), key=lambda row: row[1])
            yield f"{run.place}: {name}", [end - start for _, end, start in rows][:1000], ()


def check_copies(at, runs, folder):
    processes = [process for run in runs for process in list_processes(run, at)]
    for (place, *first), (elsewhere, *second) in combinations(processes, 2):
        at.check(not are_copies(first, second), f"{elsewhere}: a copy of {place}")
    places = Counter(place for place, *_ in processes)
    at.check(max(places.values(), default=1) < 2, f"{folder}: a measurement occurs twice")


def check_sums(at, place, rows):  # §8.2
    """The sums of each row are those of two vectors."""
    if not rows:
        return
    columns = [rows[name] for name in (*ERROR_SUMS, "values", "finite")]
    kinds = [float] * len(ERROR_SUMS) + [int, bool]
    typed = all(type(value) is kind for column, kind in zip(columns, kinds) for value in column)
    at.check(typed, f"{place}: sums of other types, or missing")
    wrong = [
        number
        for number, (r, d, o, q, s, m, v, finite) in enumerate(zip(*columns) if typed else ())
        if finite
        and not (
            all(map(isfinite, (r, d, o, q, s, m)))
            and min(r, d, o, s, m, v) >= 0
            and abs(r + o - 2 * q - d) <= 1e-9 * (r + o)
            and all(
                low <= (1 + 1e-6) * high
                for low, high in ((m, s), (s, v * m), (m * m, d), (d, v * m * m), (s * s, v * d))
            )
        )
    ]
    at.check(not wrong, f"{place}: impossible sums (§8.2) in rows {wrong[:5]}")


# ---- groups (§6): lists of tries of one build with the same settings under one load, sorted by time


def keep_valid(tries):
    return [measurement for measurement in tries if not measurement.codes]


def count_processes(tries):
    return len({(measurement.run, measurement.process) for measurement in keep_valid(tries)})


def read_raw(measurement, name):
    """The figure of a process as its samples give it, even where it would be withheld."""
    if name in ASKED and len(measurement.x):
        return float(
            measurement.latencies.ordered[
                max(ceil(len(measurement.x) * ASKED[name] / 100 - 1e-9), 1) - 1
            ]
        )
    return read_figure(measurement, name)


def read_figure(measurement, name, medians=True):
    figure = measurement.figures.get(name.removeprefix("mean_"))
    return measurement.median if figure is None and name == "p50" and medians else figure


def read_counted(measurement, name, medians):
    """The figure of a process among others: a percentile of all requests without an interval too."""
    figure, p, n = (
        read_figure(measurement, name, medians),
        TAILS.get(name, 0.0) / 100,
        len(measurement.x),
    )
    if figure is None and medians and p > 0.5 and p**n + n * (1 - p) * p ** (n - 1) <= 0.01:
        return read_raw(measurement, name)
    return figure


def keep_requested(tries, name):
    asked = [
        measurement for measurement in tries if measurement.load.percentile >= ASKED.get(name, 0.0)
    ]
    others = [
        measurement
        for measurement in keep_valid(tries)
        if measurement.load.percentile < ASKED.get(name, 0.0)
    ]
    return (
        asked
        if asked and any(read_figure(measurement, name, False) is None for measurement in others)
        else tries
    )


def summarize(tries, name, at):
    """What `compute_figure` finds, once for each figure of a group."""
    key = name, at.confidence, *map(id, tries)
    if key not in at.figures:
        at.figures[key] = compute_figure(tries, name, at)
    return at.figures[key]


def compute_figure(tries, name, at):
    """The figure over processes: its values, their contributions by run, mean, interval, and left-out gap."""
    medians, runs, percent = (
        count_processes(tries) >= 3,
        defaultdict(lambda: defaultdict(list)),
        TAILS.get(name, 0.0),
    )
    for measurement in sorted(keep_valid(tries), key=lambda measurement: measurement.second_stage):
        if read_counted(measurement, name, medians) is not None:
            runs[measurement.run][measurement.second_stage, measurement.process].append(measurement)
    runs = [*runs.values()]
    parts = [
        [
            fmean(read_counted(measurement, name, medians) for measurement in process)
            for process in run.values()
        ]
        for run in runs
    ]
    figures, low, high = [*chain(*parts)], None, None
    first = [sum(not second for second, _ in run) for run in runs]
    samples = [
        [polars.concat([measurement.x for measurement in process]) for process in run.values()]
        for run in runs
    ]
    if percent > 50 and samples:
        estimates = jackknife([*chain(*samples)], percent)
        parts = [[next(estimates) for _ in run] for run in runs]
    spoilt, gap = (
        [read_raw(measurement, name) for measurement in tries if measurement.codes],
        0.0 if name == "cv" else GAP,
    )
    if min(figures, default=0) > 0:
        gap = max(
            [gap, *(abs(log(value / fmean(figures))) for value in spoilt if value and value > 0)]
        )
    mean, alone = mean_from_runs(parts, first), gap
    stretches = (
        min(len(measurement.x) / 30, measurement.latencies.ranks.count())
        for measurement in tries
        if len(measurement.x)
    )
    if percent > 50 and sum(stretches) < log(0.025) / log(percent / 100):
        alone = max(gap, log1p(0.15))
    value = mean.value if mean else fmean(chain(*parts)) if figures else None
    steady = name in ("cv", "memory")
    repeated = 0.0 if steady else bound_repeated_change(tries)
    speeds = None if steady or percent > 50 else find_speeds(figures)
    if mean:
        confidence = at.confidence("bench")
        low, high = join(mean.interval, speeds)(confidence)
        if name in SENSED:
            low, high = low / 1.05, high / 0.95
        if percent > 50:
            least, most = invert_share(samples, first, percent, confidence)
            low, high = min(low, least), max(high, most)
        if name != "memory" and value > 0:
            counted = len(figures), len(spoilt)
            low, high = widen(value, low, high, *counted, at.policy, alone, percent, repeated)
        low = max(low, 0.0)
        if low == high and name != "memory":
            low = high = None
    return Record(
        figures=figures,
        parts=parts,
        mean=mean,
        speeds=speeds,
        gap=gap,
        alone=alone,
        repeated=repeated,
        lost=len(spoilt),
        unknown=bool(figures) and any(not (value or 0) > 0 for value in spoilt),
        spoilt=[value for value in spoilt if value],
        estimate={"value": value, "low": low, "high": high},
    )


def jackknife(processes, percent):
    """Each process's contribution to the percentile of all requests."""
    ordered = polars.concat(
        [
            polars.DataFrame({"value": process}).with_columns(
                owner=polars.lit(owner), weight=polars.lit(1 / len(process))
            )
            for owner, process in enumerate(processes)
        ]
    ).sort("value", maintain_order=True)

    def find(without):
        kept = polars.col("owner") != without
        totals = ordered.select(
            polars.when(kept).then("weight").otherwise(0.0).cum_sum()
        ).to_series()
        return ordered["value"][
            totals.search_sorted(totals[-1] * percent / 100 * (1 - 1e-12), "left")
        ]

    left, k = (
        [find(owner) for owner in range(len(processes))] if len(processes) > 1 else [0.0],
        len(processes),
    )
    return (find(-1) + (k - 1) * (fmean(left) - estimate) for estimate in left)


def invert_share(runs, first, percent, confidence):
    """The interval of the percentile of all requests by the share of each process beyond a value."""
    runs = [[process.sort() for process in run] for run in runs]
    values, tail = polars.concat([*chain(*runs)]).sort(), 1 - percent / 100

    def bound(value, kind, side):
        shares = [
            [1 - process.search_sorted(value, kind) / len(process) for process in run]
            for run in runs
        ]
        mean = mean_from_runs(shares, first)
        error = max(mean.error, sqrt(max(mean.value * (1 - mean.value), 0.0) / len(values)))
        return mean.value + side * t_quantile(confidence, mean.freedom) * error

    highest = bisect_left(
        range(len(values) - 1), True, key=lambda at: bound(values[at], "right", 1) <= tail
    )
    lowest = bisect_left(
        range(len(values)), True, key=lambda at: bound(values[at], "left", -1) < tail
    )
    return float(values[max(lowest - 1, 0)]), float(values[highest])


def as_texts(options):
    return {
        key: str(option).lower() if isinstance(option, bool) else str(option)
        for key, option in sorted(options.items())
    }


def group_up(measured):
    groups = defaultdict(list)
    for measurement in sorted(
        measured, key=lambda measurement: (measurement.started_utc, measurement.run)
    ):
        groups[measurement.artifact, measurement.key, str(measurement.settings)].append(measurement)
    return sorted(groups.values(), key=lambda tries: (tries[-1].started_utc, tries[-1].run))


def select(measured, where=()):
    """The group with the newest measurement by load key, for the loads that `where` selects."""
    newest = {tries[-1].key: tries for tries in group_up(measured)}
    return {
        key: tries
        for key, tries in newest.items()
        if all(a in (None, b) for a, b in zip(where, key))
    }


# ---- files (§1, §2)


def digest(content):
    if not isinstance(content, bytes):
        content = json.dumps(
            content, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
    return hashlib.sha256(content).hexdigest()


class Dossier:
    def __init__(self, folder):
        self.folder, self.differs, self.open, self.stated = folder, [], [], []
        self.figures, self.asked = {}, {}

    def confidence(self, kind):  # §9
        """That of the intervals of one kind of evidence."""
        return 1 - (1 - self.policy) / self.parts[kind]

    def check(self, holds, line):
        self.differs += [] if holds else [line]

    def compare(self, place, stated, computed):
        """Compares every part of `computed` with what is stated."""
        if isinstance(stated, dict) and isinstance(computed, dict):
            for key, value in computed.items():
                self.compare(f"{place}: {key}", stated.get(key), value)
        elif (
            isinstance(stated, list) and isinstance(computed, list) and len(stated) == len(computed)
        ):
            self.compare(place, dict(enumerate(stated)), dict(enumerate(computed)))
        elif isinstance(stated, dict) and "value" in stated:
            self.compare(place, stated["value"], computed)
        else:
            numbers = {type(stated), type(computed)} <= {int, float}
            same = (
                isclose(stated, computed, rel_tol=1e-6, abs_tol=1e-12)
                if numbers
                else stated == computed
            )
            alike = isinstance(stated, bool) == isinstance(computed, bool)
            self.check(same and alike, f"{place} is {stated!r}, recomputed {computed!r}")

    def path(self, name):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name}: not the name of a file in the dossier")
        return self.folder / name

    def bytes(self, name):
        """The content of a regular file; a pipe is not waited for."""
        number = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise ValueError(f"{name}: not a regular file")
            content = file.read(SIZES["bytes"] + 1)
        if len(content) > SIZES["bytes"]:
            raise ValueError(f"{name}: more bytes than a dossier has")
        return content

    def json(self, name):
        def read_object(pairs):
            self.check(len(dict(pairs)) == len(pairs), f"{name}: a key occurs twice")
            return Record(pairs)

        def refuse(word):
            raise ValueError(f"{name}: {word} is not JSON")

        def read_integer(text):
            if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
                refuse(f"{text[:24]}, a number of more than 64 bits,")
            return int(text)

        text = self.bytes(name).decode("utf-8")
        require_flat(text, name)
        document = json.loads(
            text,
            object_pairs_hook=read_object,
            parse_constant=refuse,
            parse_int=read_integer,
            parse_float=lambda text: float(text) if isfinite(float(text)) else refuse(text[:24]),
        )
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
        if isinstance(document, dict):
            version, model = document.get("schema_version", 1), document.get("model")
            known = type(version) is int and version == 1
            self.check(known, f"{name}: schema_version is {version!r}")
            spaced = isinstance(model, str) and model != model.strip()
            self.check(not spaced, f"{name}: the model is called {model!r}")
        self.check_shape(name, document)
        return document

    def check_shape(self, name, document):  # §1.3
        """Of the request, the verdict, and of records of builds and runs; renderings and others are not read."""
        folder, _, file = name.rpartition("/")
        if file not in DOCUMENTS or (name == "comparison.json") or not (folder or file in KEYS):
            return
        wrong = find_misshapen(document, DOCUMENTS[file], name)
        if not wrong and file == "manifest.json":
            kind = document.kind if folder.startswith("builds/") else "run"
            wrong = find_misshapen(document.info, DOCUMENTS.get(kind, "null"), f"{name}: info")
        self.check(not wrong, wrong)

    def frame(self, name):
        """The rows of a Parquet file; None without the file."""
        if not self.path(name).is_file():
            return None
        content = self.bytes(name)
        measure_parquet(content, name)
        frame = polars.read_parquet(io.BytesIO(content))
        if sum(map(count_text_bytes, frame.iter_columns())) > SIZES["text bytes"]:
            raise ValueError(f"{name}: too large (§1.1): its texts")
        return frame

    def raw(self, name, kind):
        """A raw file of a bench run, the columns and types of which are those of §5.6; None without it."""
        frame, nullable = self.frame(name), {*ON_DEVICE, *COLUMNS["machine"]} - ALWAYS_READ
        if frame is None:
            return None
        types = {column: str(kind) for column, kind in frame.schema.items()}
        if types != COLUMNS[kind] or any(
            frame[column].has_nulls() for column in {*types} - nullable
        ):
            raise ValueError(f"{name}: other columns or types than those of the format")
        return frame

    def table(self, name, kind, classes=False):
        """The columns as lists; with `classes`, no whole number is larger than that of a class."""
        frame = self.frame(name)
        if frame is not None and kind:
            require_columns(frame, kind, name)
            self.measure_answers(frame, name)
        for column in frame.iter_columns() if classes and frame is not None else ():
            numbers = column
            while numbers.dtype == polars.List:
                numbers = numbers.explode()
            if numbers.dtype.is_integer() and not numbers.is_between(-1, SIZES["class"] - 1).all():
                raise ValueError(f"{name}: a number of {column.name} is not that of a class")
        return {} if frame is None else frame.to_dict(as_series=False)

    def measure_answers(self, frame, name):  # §1.1
        """What all tables ask for, by what they declare; no mask is inflated, and no text parsed before."""
        columns = [column for column in frame.iter_columns() if column.dtype == polars.Binary]
        sides = (measure_mask(png) for png in chain(*columns) if png is not None)
        self.asked[name] = {
            "pixels": sum(width * height for width, height in sides),
            "pairs of boxes": count_box_pairs(frame),
            "bytes of predictions in JSON": count_prediction_bytes(frame),
            "bytes of answers and tags": count_answer_bytes(frame),
            "numbers of true values": len(frame) * find_longest_truth(frame),
        }
        summed = sum(map(Counter, self.asked.values()), Counter())
        summed["numbers that are counted"] = len(frame) * count_kinds(frame)
        for what, number in summed.items():
            if number > SIZES[what]:
                raise ValueError(f"{name}: too large (§1.1): {number} {what}")
        for best in (column for column in frame.iter_columns() if column.name.endswith(":best")):
            if (best.list.len().max() or 0) > 5:
                raise ValueError(f"{name}: {best.name} has more than 5 classes")


BOXES = polars.List(polars.List(polars.Float64))


def list_classes(frame, name):
    """(sample, class, score) of each box of a column; a true one has no score."""
    at = 4 if name == "truth" else 5
    rows = frame.select(box=polars.col(name)).with_row_index("sample").explode("box").drop_nulls()
    box = polars.col("box").list
    score = polars.lit(1.0) if at == 4 else box.get(4, null_on_oob=True)
    return rows.select("sample", box.get(at, null_on_oob=True).alias("class"), score=score)


def count_box_pairs(frame):
    """The boxes of one class and sample that are compared: true with predicted, and those of the source with others."""
    names = [name for name, kind in frame.schema.items() if kind == BOXES]
    tables = {name: list_classes(frame, name) for name in names}
    first = next(
        (tables[name] for name in ("source:prediction", "reference_prediction") if name in tables),
        None,
    )
    truths, pairs = tables.pop("truth", None), 0
    shown = None if first is None else first.filter(polars.col("score") >= 0.25)
    for reference, most in ((truths, 100), (shown, SIZES["rows"])):
        for predicted in tables.values() if reference is not None else ():
            mine, theirs = (
                table.group_by("sample", "class").len() for table in (reference, predicted)
            )
            both = mine.join(theirs, on=("sample", "class"), nulls_equal=True)
            judged = polars.min_horizontal("len_right", most).cast(polars.Int64)
            pairs += both.select((polars.col("len") * judged).sum()).item()
    return pairs


def count_prediction_bytes(frame):
    fields = [
        column.struct.field("prediction")
        for column in frame.iter_columns()
        if column.dtype == polars.Struct and "prediction" in column.struct.fields
    ]
    return sum(map(count_text_bytes, fields))


def count_answer_bytes(frame):
    texts = [column for column in frame.iter_columns() if column.name.endswith(":prediction")]
    texts = [column for column in texts if column.dtype == polars.String]
    if frame.schema.get("truth") == polars.List(polars.String):
        texts.append(frame["truth"])
    return sum(map(count_text_bytes, texts))


def find_longest_truth(frame):
    is_list = frame.schema.get("truth") == polars.List(polars.Float64)
    return (frame["truth"].list.len().max() or 0) if is_list else 0


def count_kinds(frame):
    """The kinds that are counted for each sample: classes up to the largest, different tags, or groups of parts."""
    kinds = [0]
    for column in frame.iter_columns():
        name, kind = column.name, column.dtype
        if kind == polars.List(polars.Int64) and not name.endswith(":best"):
            kinds.append(1 + max(column.explode().max() or 0, 0))
        elif kind == polars.List(polars.String) and name != "truth":
            kinds.append(column.explode().n_unique())
        elif kind == polars.List(polars.Float64) and ":part." in name:
            kinds.append(column.list.get(2, null_on_oob=True).n_unique())
        elif kind == BOXES and name == "truth":
            kinds.append(1 + int(list_classes(frame, name)["class"].max() or 0))
    return max(kinds)


def find_misshapen(value, shape, place):  # §1.3
    """The first place where a value has another shape, and what is wrong there; None without one."""
    if shape == "any":
        return None
    if isinstance(shape, str) and shape in TYPES:
        fits = isinstance(value, TYPES[shape]) and isinstance(value, bool) == (shape == "truth")
        return None if fits else f"{place} is not {shape}"
    if isinstance(shape, str) and shape in WORDS:
        return find_misshapen(value, WORDS[shape], place)
    if isinstance(shape, str):
        shapes = SHAPES[shape]
        if not isinstance(value, dict):
            return f"{place} is no object"
        known = {key.rstrip("?") for key in shapes}
        other = sorted(
            {*value} - known | {key for key in shapes if key not in {*value, f"{key.rstrip('?')}?"}}
        )
        if other:
            return f"{place}: has another key, or lacks one: {', '.join(other)}"
        parts = ((key.rstrip("?"), shape) for key, shape in shapes.items())
        parts = ((value[key], shape, f"{place}: {key}") for key, shape in parts if key in value)
        return next(filter(None, (find_misshapen(*part) for part in parts)), None)
    kind, *inner = shape
    if kind == "or":
        every = [find_misshapen(value, shape, place) for shape in inner]
        return None if None in every else every[0]
    if kind == "word":
        return None if value in inner else f"{place} is none of {', '.join(inner)}"
    if kind == "map":
        fits, parts = isinstance(value, dict), value.items() if isinstance(value, dict) else ()
        pairs = ((part, inner[0], f"{place}: {key}") for key, part in parts)
    else:
        fits = isinstance(value, list) and (kind == "list" or len(value) == len(inner))
        wanted = inner * len(value) if fits and kind == "list" else inner
        pairs = (
            (entry, shape, f"{place}[{at}]")
            for at, (entry, shape) in enumerate(zip(value, wanted) if fits else ())
        )
    if not fits:
        return f"{place} is no {kind}"
    return next(filter(None, (find_misshapen(*pair) for pair in pairs)), None)


def require_columns(frame, kind, place):  # §1.2
    for column in frame.iter_columns():
        name = re.sub(
            r"^(source|[0-9a-f]{12})(?=:(best|prediction|part\.[a-z][a-z0-9_-]*)$)",
            "NAME",
            column.name,
        )
        name = re.sub(r"^NAME:part\..*$", "NAME:part.SCORE", name)
        wanted = COLUMNS[kind].get(name)
        known = wanted in ("any", str(column.dtype)) or str(column.dtype) == "Null"
        if wanted is None or not known:
            raise ValueError(f"{place}: {column.name!r} of type {column.dtype} is no column")
        if kind in ("errors", "images") and not name.endswith("class") and column.has_nulls():
            raise ValueError(f"{place}: {column.name!r} lacks a value")
    if kind in WHOLE and COLUMNS[kind].keys() - {*frame.columns}:
        raise ValueError(
            f"{place}: lacks columns {sorted(COLUMNS[kind].keys() - {*frame.columns})}"
        )


# ---- sizes (§1.1): what a file says of itself, before it is read


def require_flat(text, name):
    """Raises ValueError for JSON that is too long or too deep; braces inside of texts are left out."""
    if len(text) > SIZES["JSON bytes"]:
        raise ValueError(f"{name}: too large (§1.1): {len(text)} bytes of JSON")
    depth = 0
    for mark in re.findall(r'"(?:[^"\\]|\\.)*+"|[\[{\]}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark, 0)
        if depth > SIZES["JSON nesting"]:
            raise ValueError(f"{name}: too deep (§1.1)")


def count_text_bytes(column):
    while column.dtype == polars.List:
        column = column.explode()
    if column.dtype == polars.Struct:
        return sum(count_text_bytes(column.struct.field(field)) for field in column.struct.fields)
    if column.dtype == polars.Binary:
        return column.bin.size().cast(polars.Int64).sum()
    return column.str.len_bytes().cast(polars.Int64).sum() if column.dtype == polars.String else 0


def read_number(data, at):
    """An unsigned number of Thrift's compact protocol, and the place after it."""
    value = shift = 0
    while data[at] & 0x80:
        value, at, shift = value | (data[at] & 0x7F) << shift, at + 1, shift + 7
        if shift > 63:
            raise ValueError("a number in Parquet is too long")
    return value | data[at] << shift, at + 1


def read_thrift(data, at, kind=12):
    """A value of Thrift's compact protocol, in which Parquet states its sizes; a structure is a dictionary by number."""
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        number, at = read_number(data, at)
        return number >> 1 ^ -(number & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = read_number(data, at)
        return None, at + size
    if kind in (9, 10):
        size, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if size == 15:
            size, at = read_number(data, at)
        values = []
        for _ in range(size):
            value, at = read_thrift(data, at, 3 if inner in (1, 2) else inner)
            values.append(value)
        return values, at
    if kind != 12:
        raise ValueError("Parquet has no such type")
    fields, number = {}, 0
    while data[at]:
        step, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if step:
            number += step
        else:
            number, at = read_thrift(data, at, 4)
        fields[number], at = read_thrift(data, at, inner)
    return fields, at + 1


def measure_parquet(content, name):
    """The values and uncompressed bytes by the headers of all pages. Raises ValueError for more than §1.1 allows."""

    def refuse(what):
        raise ValueError(f"{name}: too large (§1.1): {what}")

    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1" or start < 4:
        raise ValueError(f"{name}: not Parquet")
    footer, _ = read_thrift(content, start)
    groups = footer.get(4, ())
    rows, values, size = max(footer[3], sum(group[3] for group in groups)), 0, 0
    if rows > SIZES["rows"]:
        refuse(f"{rows} rows")
    if sum(len(group[1]) for group in groups) > SIZES["columns"]:
        refuse("its columns")
    for column in (column[3] for group in groups for column in group[1]):
        at = min(column[9], column.get(11) or column[9])
        end = at + column[7]
        while at < end:
            page, at = read_thrift(content, at)
            numbers = page.get(5) or page.get(8) or page.get(7) or {}
            values, size, at = values + 1 + numbers.get(1, 0), size + page[2], at + page[3]
            if min(page[2], page[3], numbers.get(1, 0)) < 0:
                raise ValueError(f"{name}: a negative size in Parquet")
            if values > SIZES["values"] or size > SIZES["uncompressed bytes"]:
                refuse(f"{values} values, {size} bytes")
    return values, size, rows


def check_sizes(at):
    """Of all files together; nothing is read here but the sizes that they state."""
    names, size, values, bytes_, traced = [], 0, 0, 0, 0
    for path in at.folder.rglob("*"):
        names.append(path.relative_to(at.folder).as_posix())
        if len(names) > SIZES["files"]:
            raise ValueError(f"too many files (§1.1): more than {SIZES['files']}")
        if path.is_symlink() or not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            at.differs.append(f"{names[-1]}: neither a regular file nor a folder with files")
            continue
        size += path.lstat().st_size if path.is_file() else 0
        if size > SIZES["bytes"]:
            raise ValueError(f"too large (§1.1): more than {SIZES['bytes']} bytes")
    for name in () if at.differs else names:
        if name.endswith(".parquet"):
            more = measure_parquet(at.bytes(name), name)
            values, bytes_ = values + more[0], bytes_ + more[1]
            traced += more[2] * bool(re.match("runs/profile-[^/]+/.*/tables/", name))
            if values > SIZES["values"] or bytes_ > SIZES["uncompressed bytes"]:
                raise ValueError(f"too large (§1.1): {values} values, {bytes_} bytes of them")
            if traced > SIZES["rows of traces"]:
                raise ValueError(f"too large (§1.1): {traced} rows of traces")
    return sorted(names)


def check_seal(at):
    listed, lines = at.bytes(SUMS), []
    for name in check_sizes(at):
        if at.path(name).is_file() and name not in (*SEAL, STAMP):
            at.check(FILES.fullmatch(name), f"{name!r}: not part of a dossier")
            at.check(PLAIN.fullmatch(name), f"{name!r}: not printable ASCII, or a backslash")
            lines.append(f"{digest(at.bytes(name))}  {name}\n")
            if name.endswith(".json"):
                at.json(name)
    alike = len({line.lower().rpartition("  ")[2] for line in lines}) < len(lines)
    at.check(not alike, "two paths differ in the case of letters alone")
    changed = sorted({*lines} ^ {*listed.decode().splitlines(keepends=True)})
    at.differs += [f"{SUMS}: changed, missing, or added: {line}" for line in changed]
    at.check(changed or "".join(lines).encode() == listed, f"{SUMS}: not sorted, or a path twice")
    at.compare(SEAL[1], at.bytes(SEAL[1]).decode(), f"{digest(listed)}  {SUMS}\n")
    if (at.folder / SEAL[3]).exists():
        at.compare(SEAL[3], at.json(SEAL[3]), {"dossier": digest(listed)})
    signed = [name for name in (SEAL[2], SEAL[4]) if (at.folder / name).exists()]
    at.stated += [f"{name}: whose it is, tells ssh-keygen -Y verify" for name in signed] or [
        "not signed: nobody vouches for the order and number of samples, the predictions, and the engine that gave them"
    ]


def list_der(data):
    """The (tag, content) of the values of DER that follow each other."""
    while data:
        tag, size, start = data[0], data[1], 2
        if size & 0x80:
            start += size & 0x7F
            size = int.from_bytes(data[2:start])
        if size > len(data) - start:
            raise ValueError(f"{STAMP}: not in DER")
        yield tag, data[start : start + size]
        data = data[start + size :]


def walk_der(data, *steps):
    """The content of a value in nested ones, by its place in each."""
    for step in steps:
        data = [*list_der(data)][step][1]
    return data


def check_stamp(at):  # §1
    """The digest and the time of the token; its signature is not checked."""
    if not (at.folder / STAMP).exists():
        return
    answer = at.bytes(STAMP)
    at.check(len([*list_der(answer)]) == 1, f"{STAMP}: more than one answer")
    status, token = walk_der(answer, 0, 0, 0), walk_der(answer, 0, 1)
    info = walk_der(token, 1, 0, 2, 1, 0, 0)  # signed data, its content, TSTInfo
    algorithm, imprint = walk_der(info, 2, 0, 0), walk_der(info, 2, 1)
    sums = hashlib.sha256(at.bytes(SUMS)).digest()
    at.check(not int.from_bytes(status), f"{STAMP}: its status is not granted")
    same = algorithm == bytes.fromhex("608648016503040201") and imprint == sums
    at.check(same, f"{STAMP}: is of another dossier")
    text = walk_der(info, 4).decode()
    time = datetime.strptime(text[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    minute, created = timedelta(minutes=1), datetime.fromisoformat(at.request.created_utc)
    late = created > time + minute or time > datetime.now(UTC) + minute
    at.check(not late, f"{STAMP}: {time} is before the verdict or after now")
    at.stated.append(f"{STAMP}: {time}; whose time it is, tells openssl ts -verify")


def read_builds(at):
    builds = {}
    for path in sorted((at.folder / "builds").glob("*/")):
        build = builds[path.name.rpartition("-")[2]] = at.json(f"builds/{path.name}/manifest.json")
        ident = digest({"kind": build.kind, "recipe": build.recipe})[:12]
        build.place, expected = f"builds/{path.name}", {"id": ident, "schema_version": 1}
        at.compare(build.place, build, expected | {"place": f"builds/{build.kind}-{ident}"})
    for name, build in builds.items():
        place, info, recipe = build.place, build.info, build.recipe
        if at.path(f"{place}/errors.parquet").is_file():
            kept = {"sha256": digest(at.bytes(f"{place}/errors.parquet"))}
            at.compare(place, {"errors.parquet": {}} | build.files, {"errors.parquet": kept})
        absent = {*re.findall(r'"(\w*)"', json.dumps(recipe))} & {*builds} - {name, *build.parents}
        at.check(not absent, f"{place}: its recipe names {sorted(absent)}, which are no parents")
        if "weights" in info:
            trained = info.weights.source not in UNTRAINED
            at.compare(f"{place}: trained", info.weights.trained, trained)
        if build.kind == "artifact":
            parents = [builds[parent] for parent in build.parents if parent in builds]
            models = [parent.info.weights for parent in parents if parent.kind == "model"]
            expected = {
                key: recipe[key] for key in ("backend", "precision", "device") if key in recipe
            }
            at.compare(place, info, expected | ({"weights": models[0]} if models else {}))
            files = {name: build.files[name] for name in (info.file, *info.get("more_files", ()))}
            build.size = sum(file.size_bytes for file in files.values())
            hashes = {name: file.sha256 for name, file in files.items()}
            build.engine = digest(hashes) if len(hashes) > 1 else hashes[info.file]
            share = info.precision_proof.share
            shares = [*share.macs.values(), *share.layers.values()]
            at.check(all(0 <= share <= 1 for share in shares), f"{place}: shares not from 0 to 1")
            counts = [part.count for part in share.get("unknown", ())]
            at.check(
                all(count >= 1 for count in counts), f"{place}: products of unknown cost below 1"
            )
        elif build.kind == "model" and "default" not in (
            asked := recipe.get("model", {}).get("weights", {})
        ):
            at.compare(f"{place}: random", info.weights.source == "random", "random" in asked)
        elif build.kind == "verification" and "errors.parquet" in build.files:
            errors = f"{place}/errors.parquet"
            at.check(at.path(errors).is_file(), f"{errors}: is missing")
            table = at.table(errors, "errors")
            check_sums(at, errors, table)
            more = max(Counter(table.get("output", ())).values(), default=0) > info.samples
            at.check(not more, f"{errors}: more rows of an output than samples")
            at.compare(errors, [*info.outputs, *info.get("trajectory", ())], pool_errors(table))
    return builds


def split_outputs(table):
    """The rows of each output, in order."""
    for output in dict.fromkeys(table.get("output", ())):
        kept = [row for row, name in enumerate(table["output"]) if name == output]
        yield output, {key: [column[row] for row in kept] for key, column in table.items()}


def pool_errors(table):  # §8.3
    """The stated errors of each output, over all samples together."""
    pooled, worst = [], 1e30
    for name, rows in split_outputs(table):
        finite = all(rows["finite"])
        sums = {key: sum(rows[key]) for key in (*ERROR_SUMS, "values")} if finite else {}
        norm, distance, length = (
            sqrt(sums[f"{of}_square"]) if finite else 0.0
            for of in ("reference", "difference", "output")
        )
        relative = distance / norm if norm else worst if distance or not finite else 0.0
        cosine = sums["product"] / (norm * length) if norm * length else float(not distance)
        figures = {"name": name, "finite": finite, "relative": relative}
        figures["max_abs"] = max(rows["difference_max"]) if finite else worst
        figures["mean_abs"] = sums["difference_sum"] / max(sums["values"], 1) if finite else worst
        figures["snr_db"] = (-20 * log10(relative) if relative else None) if finite else -worst
        figures["cosine"] = max(-1.0, min(1.0, cosine)) if finite else 0.0
        pooled.append(figures)
    return pooled


def read_run(at, place, builds, needed):
    """A run, checked by itself; of a bench run its measurements."""
    run, there = at.json(f"{place}/manifest.json"), {}
    for path in (at.folder / place).rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            there[path.relative_to(at.folder / place).as_posix()] = {
                "sha256": digest(path.read_bytes())
            }
    run |= {"name": place.rpartition("/")[2], "place": place, "measured": [], "pairs": []}
    run.comparison = at.json(f"{place}/comparison.json") if "comparison.json" in there else None
    record = at.json(f"{place}/{'measurements' if run.kind == 'bench' else run.kind}.json")
    parents = {*run.parents}
    kinds = ("bench", "turns", "evaluate", "preprocess", "profile")
    at.check(
        run.kind in (kinds if place.startswith("runs/") else kinds[:1]),
        f"{place}: no kind of run is {run.kind!r} here",
    )
    run.record, expected = (
        record,
        {"files": there, "schema_version": 1, "name": f"{run.kind}-{run.id}"},
    )
    if run.kind == "evaluate":
        artifacts = {row.artifact for row in record.results} - {None}
        for row in record.results:
            used = row.get("calibrated_on") or 0
            at.check(0 <= used <= row.samples, f"{place}: calibrated on {used} of {row.samples}")
        at.check(
            artifacts <= parents,
            f"{place}: {sorted(artifacts)} were evaluated, not all are parents",
        )
        for artifact in artifacts & {*builds}:
            at.compare(f"{place}: weights", record.weights, builds[artifact].info.weights)
        expected["info"] = {"trained": record.weights.source not in UNTRAINED}
    elif run.kind == "turns":
        expected["info"] = {"measurements": len(record.speedups)}
        check_turns(at, run, builds)
    elif run.kind == "bench":
        subjects = {measurement.subject.artifact for measurement in record.measurements}
        whole = subjects == parents or (subjects < parents and run.status == "interrupted")
        at.check(whole, f"{place}: parents are {sorted(parents)}, measured were {sorted(subjects)}")
        at.check({*record} == {"measurements", "schema_version"}, f"{place}: other keys")
        needed = needed | ({at.request.baseline_artifact} if run.comparison else set())
        measurements = [
            read_measurement(at, run, stated, builds, needed) for stated in record.measurements
        ]
        run.measured, expected["info"] = (
            [measurement for measurement in measurements if measurement],
            {"measurements": len(measurements)},
        )
        spans = sorted(
            (*measurement.span, measurement.id) for measurement in run.measured if measurement.span
        )
        for (_, end, first), (start, _, second) in pairwise(spans):
            at.check(end <= start, f"{place}: {second} began before {first} ended, on one machine")
        apart = find_other_clock(run)
        at.check(not apart, f"{place}: its clocks differ by {apart:.1f} s at times (§5.6)")
        run.pairs = pair_up(at, run) if run.comparison else []
    at.compare(place, run, expected)
    return run


def check_turns(at, run, builds):  # §5.5
    """The rounds of two builds in turns, recomputed from their queries."""
    record, sides = run.record, (run.record.over, run.record.judged)
    at.check(
        {*run.parents} == {side.artifact for side in sides},
        f"{run.place}: parents are not its builds",
    )
    known = [builds.get(side.artifact) for side in sides]
    at.check(
        all(known) and len({(*build.parents, None)[0] for build in known}) == 1,
        f"{run.place}: compares builds that are not known to be of one model",
    )
    at.check(all(map(has_settings, sides)), f"{run.place}: threads or CUDA graphs (§5)")
    for subject, build in zip(sides, known):
        if build:
            expected = {key: build.info[key] for key in ("backend", "precision", "device")}
            expected["sha256"] = subject.sha256 and build.engine
            expected["packages"] = build.info.get("packages") or []
            expected |= list_repeated(subject, build)
            stated = subject | {
                "device": subject.device.partition(":")[0],
                "packages": subject.get("packages") or [],
            }
            at.compare(f"{run.place}: {subject.artifact}", stated, expected)
    medians, speedups, spans = ([], []), [], []
    for turn in range(len(record.speedups)):
        queries, all_queries = [], []
        for side, times in enumerate(medians):
            place = f"{run.place}/samples/{'ab'[side]}{turn:03}.parquet"
            table = at.raw(place, "samples")
            all_queries += zip(table["start_ns"], table["end_ns"])
            device, measured = sides[side].device, table.filter(polars.col("phase") == 1)
            rules = break_rules(record.load, device, measured)
            rules["phases"] = break_rules(record.load, device, table)["phases"]
            broken = [name for name, holds in rules.items() if not holds]
            at.check(not broken, f"{place}: impossible raw data (§5.5): {', '.join(broken)}")
            rows = [
                (start, side, end - start)
                for start, end in zip(measured["start_ns"], measured["end_ns"])
            ]
            times.append(median(ns for *_, ns in rows))
            queries += rows
        taken = [(start, start + ns) for start, _, ns in sorted(queries)]
        at.check(follow(taken), f"{run.place}: queries of both builds overlap in round {turn}")
        spans.append((min(all_queries)[0], max(end for _, end in all_queries)))
        blocks = [
            (side, log(median(ns for *_, ns in block)))
            for side, block in groupby(sorted(queries), key=lambda query: query[1])
        ]
        pairs = [[], []]
        for (side, before), (_, after) in pairwise(blocks):
            pairs[side].append(after - before if side else before - after)
        at.check(min(map(len, pairs)) >= 4, f"{run.place}: round {turn} has too few pairs")
        speedups.append(exp(fmean(median(pair or [0.0]) for pair in pairs)))
    at.check(follow(spans), f"{run.place}: a round began before the one before had ended")
    begun, ended = (datetime.fromisoformat(run[key]) for key in ("started_utc", "finished_utc"))
    took = (spans[-1][1] - spans[0][0]) / 1e9 if spans else 0.0
    lasted = (ended - begun).total_seconds() + TIMES_APART_S
    at.check(took <= lasted, f"{run.place}: its queries took longer than the run")
    at.compare(
        run.place,
        record,
        {"speedups": speedups, "over_ns": medians[0], "judged_ns": medians[1], "schema_version": 1},
    )
    environment = run.environment
    facts = {f"packages.{name}": version for name, version in environment.packages.items()}
    gpu = (*(environment.get("gpus") or ()), {})[0]
    facts |= {"gpu": gpu.get("name", "none"), "driver": gpu.get("driver", "none")}
    run.facts = facts | {key: environment.get(key, "none") for key in ("cpu", "python")}
    run.machine = [run.facts[key] for key in ("gpu", "driver", "cpu")]
    settings = [
        as_texts(side.options) | {"affinity": side.affinity and sorted(side.affinity)}
        for side in sides
    ]
    run.settings = settings[1]
    run.alike = str(
        [*map(record.load.get, LOAD), [side.artifact for side in sides], settings, run.machine]
    )


def observe_speedup(criterion, at):  # §8.5
    turns = [
        run
        for run in at.turns
        if criterion.over in (run.record.over.artifact, run.record.over.precision)
        and all(
            wanted is None or wanted == has
            for wanted, has in zip(criterion.where, map(run.record.load.get, LOAD))
        )
    ]
    same = [run for run in turns if run.alike == turns[-1].alike]
    logs = [[*map(log, run.record.speedups)] for run in same]
    mean, number = mean_from_runs(logs) if logs else None, sum(map(len, logs))
    if not mean or number < 4:
        return []
    value, (low, high) = exp(mean.value), map(exp, mean.interval(at.confidence("turns")))
    blocked = any(run.record.judged.sha256 not in (None, at.build.engine) for run in same)
    ci = widen(value, low, high, number, 0, at.policy, GAP, 0.0)
    return [
        Seen(
            value,
            ci,
            blocked,
            turns[-1].name,
            lambda confidence: [*map(exp, mean.interval(confidence))],
            number,
            0,
            GAP,
        )
    ]


def to_key(record):
    return tuple(record.load[key] for key in LOAD)


def list_repeated(subject, build):  # §5
    """What a subject repeats of its artifact's record, if it does."""
    weights = build.info.weights
    names = {
        "model": build.info.model,
        "weights": weights.sha256 if weights.trained else weights.source,
    }
    return {key: name for key, name in names.items() if subject.get(key) is not None}


def has_settings(subject):  # §5
    threads = subject.get("threads")
    return (subject.get("cuda_graph") is None or subject.device != "cpu") and (
        threads is None or subject.options.get("threads") == threads
    )


def read_measurement(at, run, record, builds, needed):
    """A measurement with what is judged of it; None if the dossier does not contain its samples."""
    place, subject, latency = f"{run.place}: {record.id}", record.subject, record.latency_ns
    if build := builds.get(subject.artifact):
        expected = {key: build.info[key] for key in ("backend", "precision", "device")}
        expected["sha256"] = subject.sha256 and build.engine
        expected["packages"] = build.info.get("packages") or []
        expected |= list_repeated(subject, build)
        stated = {
            "device": subject.device.partition(":")[0],
            "packages": subject.get("packages") or [],
        }
        at.compare(place, subject | stated, expected)
    at.check(has_settings(subject), f"{place}: contradicts itself (§5): its threads or CUDA graphs")
    kinds = {"samples": record.samples_file, "machine": record.machine_file}
    for kind, name in kinds.items():
        at.check(
            name in (None, f"{kind}/{record.id}.parquet"), f"{place}: its file of {kind} is {name}"
        )
    names = [
        record[key] and f"{run.place}/{record[key]}" for key in ("samples_file", "machine_file")
    ]
    missing = [name for name in names if name and not at.path(name).is_file()]
    at.check(not missing or subject.artifact not in needed, f"{place}: {missing} are missing")
    if names[0] in missing:
        return None
    table, machine = (at.raw(name, kind) if name else None for name, kind in zip(names, kinds))
    machine, span = {} if machine is None else machine.to_dict(as_series=False), None
    if table is not None:
        gpus = [gpu.memory_bytes for gpu in run.environment.get("gpus") or ()]
        count = run.environment.get("cpu_count")
        wrong, span = find_impossible(record, table, machine, count, max(gpus, default=None))
        at.check(not wrong, f"{place}: impossible raw data (§5.6): {', '.join(wrong)}")
        span = span if len(table) else None
    environment = run.environment
    facts = {f"packages.{name}": version for name, version in environment.packages.items()}
    gpu = (*(environment.get("gpus") or ()), {})[0]
    facts |= {"gpu": gpu.get("name", "none"), "driver": gpu.get("driver", "none")}
    facts |= {key: environment.get(key, "none") for key in ("cpu", "python")}
    settings = as_texts(subject.options) | {
        "affinity": subject.affinity and sorted(subject.affinity)
    }
    measurement = Record(
        record,
        run=run.name,
        artifact=subject.artifact,
        place=place,
        facts=facts,
        settings=settings,
        x=polars.Series(dtype=polars.Int64),
        times=(),
        figures={},
        units={},
        span=span,
        readings=tuple(zip(*(machine[name] for name in machine if name != "time_ns")))
        if len(machine.get("time_ns", ())) >= 8
        else (),
        median=None,
        clock=None,
        codes={*list_codes(record)} or {"no-samples"},
        key=to_key(record),
        machine=[facts[key] for key in ("gpu", "driver", "cpu")],
    )
    expected = dict.fromkeys(
        (
            "latency_ns",
            "host_peak_bytes",
            "device_peak_bytes",
            "throughput_batches_per_s",
            *RATES.values(),
        )
    )
    expected |= {"verdict": "INVALID", "samples": 0, "duration_s": 0.0}
    rows = None if table is None else table.filter(phase=1).sort("end_ns", maintain_order=True)
    if rows is not None and len(rows):
        measurement |= measure(record, rows, defaultdict(list, machine))
        names = (*latency.percentiles, *latency.withheld)
        shown = show_percentiles(
            measurement.latencies, {float(name[1:]) for name in names}, latency.confidence
        )
        latency = {
            "percentiles": dict.fromkeys(names) | shown,
            "median": measurement.median,
            "cv": measurement.figures["cv"],
            "samples": len(measurement.x),
            "minimum": float(measurement.x.min()),
            "maximum": float(measurement.x.max()),
            "mean": measurement.x.mean(),
            "stddev": measurement.x.std() if len(measurement.x) > 1 else 0.0,
        }
        expected = {
            "verdict": "INVALID" if measurement.codes else "VALID",
            "codes": sorted(measurement.codes),
            "latency_ns": latency,
            "samples": len(measurement.x),
            "warm_up_samples": len(table) - len(rows),
            "duration_s": measurement.seconds,
            "device_peak_bytes": measurement.peak,
            "throughput_batches_per_s": measurement.figures["throughput"] / record.load.batch_size,
            **{key: measurement.figures[name] for name, key in RATES.items()},
        }
        measurement.figures |= show_percentiles(measurement.latencies, TAILS.values(), at.policy)
        own = record.get("figures") or {}
        possible = all(
            name not in measurement.figures
            and re.fullmatch(r"(?!(mean_)?p[0-9.]+$)[a-z][a-z0-9_-]*", name)
            and (figure.value is None or 0 <= figure.value < inf)
            and (
                name not in LISTED
                or (figure.unit, figure.distribution) == (LISTED[name], "optpipe")
            )
            for name, figure in own.items()
        )
        at.check(possible, f"{place}: figures are negative, or called as others")
        own = own if possible else {}
        if "power" in own:
            at.compare(f"{place}: power", own["power"], {"value": measurement.power})
        measurement.figures |= {name: figure.value for name, figure in own.items()}
        measurement.units = {name: figure.unit for name, figure in own.items()}
        if stated := sorted(own.keys() - LISTED.keys()):
            at.stated.append(f"{place}: figures of plug-ins: {', '.join(stated)}")
        lines = [f"{run.place}: {name}" for name in sorted(own.keys() & {*WITNESSED})]
        at.stated += [line for line in lines if line not in at.stated]
    at.compare(place, record | {"codes": sorted(list_codes(record))}, expected)
    return measurement


def pair_up(at, run):  # §8.4
    """The pairs of processes of an interleaved comparison, whose order, figures, and ratio are checked."""
    stated, by_id = run.comparison, {measurement.id: measurement for measurement in run.measured}
    order, turns = Random(f"order {stated.seed}"), range(len(stated.baseline_ns))
    computed = {
        "measurements": [f"{side}{turn:03}" for turn in turns for side in order.sample("ab", 2)]
    }
    names = [[f"{side}{turn:03}" for side in "ab"] for turn in turns]
    pairs = (
        [[by_id[name] for name in pair] for pair in names]
        if by_id.keys() >= {*chain(*names)}
        else []
    )
    if pairs and stated.metric in (*TAILS, "throughput"):
        figures = [
            [read_figure(measurement, stated.metric) for measurement in pair] for pair in pairs
        ]
        sides = [
            [1e9 / value if stated.metric == "throughput" else value for value in side]
            for side in zip(*figures)
        ]
        mean = mean_from_runs(
            [[log(new) - log(old) for old, new in zip(*sides)]], [stated.first_rounds]
        )
        computed |= {
            "baseline_ns": sides[0],
            "contender_ns": sides[1],
            "invalid_processes": sum(bool(measurement.codes) for measurement in chain(*pairs)),
            "ratio": {
                "value": exp(mean.value),
                "ci": [exp(bound) for bound in mean.interval(0.99)],
            },
        }
    at.compare(f"{run.place}/comparison.json", stated, computed)
    return pairs


# ---- the policy (§4) and what is observed for it (§7, §8)


QUANTITY = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")


def parse(text, unit):
    """A limit in the base unit; a factor and a number without a unit need no quotes."""
    plain = unit in ("1", "times") and type(text) in (int, float)
    match = None if plain else QUANTITY.fullmatch(text)
    value = float(text) if plain else float(match[1]) * UNITS[unit][match[2]]
    if not isfinite(value):
        raise ValueError(f"{text} is no limit")
    return value


PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(rf"""(?<![A-Za-z0-9_"'-]){PART}(?:[ \t]*+\.[ \t]*+{PART}){{64,}}+""")


def read_toml(at, name):
    content = at.bytes(name)
    if len(content) > SIZES["policy bytes"]:
        raise ValueError(f"{name}: too large (§1.1): {len(content)} bytes")
    text = content.decode("utf-8-sig")
    if LONG_KEY.search(text):
        raise ValueError(f"{name}: too large (§1.1): a key of more than 64 parts")
    return tomllib.loads(text)


COUNTS = "batch_size", "length", "streams", "steps"  # §4: whole numbers from 1 to 10⁶
OF_LOAD = "batch_size", "length", "scenario", "mode", "streams", "rate"
MEASURED = (
    *("latency", "throughput", "regression", "memory", "energy", "efficiency", "power"),
    *("load_time", "stability"),
)
MORE_KEYS = {  # of a section, beside its limits
    **dict.fromkeys(MEASURED, OF_LOAD),
    "speedup": ("over", "batch_size", "length"),
    "accuracy": ("at_threshold",),
    "outputs": ("output", "steps"),
}
OTHER_TABLES = {
    "build": ("artifact", "backend", "precision", "options"),
    "evidence": ("preregistered",),
    "environment": ("gpu", "driver", "cpu", "python", "packages"),
}
LARGEST = {"fraction": 1.0, "1": 1.0, "points": 100.0}
NEEDS_GPU = "energy", "efficiency", "power", "tensor_cores"


def list_policy_tables(document):
    """(name, table, its limits with their units, its other keys) of each table of limits."""
    for section, limits in SECTIONS.items():
        tables = document.get(section, [])
        for table in tables if isinstance(tables, list) else [tables]:
            yield section, table, limits, MORE_KEYS.get(section, ())
    for section in ("metrics", "scores"):
        for name, stated in document.get(section, {}).items():
            for table in stated if isinstance(stated, list) else [stated]:
                limits, more = (
                    ({"minimum": None, "maximum": None}, OF_LOAD)
                    if section == "metrics"
                    else (SCORE_LIMITS, ())
                )
                yield f"{section}.{name}", table, limits, more


def require_policy(document):  # §4
    """Raises ValueError for what no policy has."""

    def require(holds, what):
        if not holds:
            raise ValueError(f"policy.toml: {what}")

    require(type(document.get("schema")) is int and document["schema"] == 1, "schema is not 1")
    top = {"schema", "name", "model", "confidence", *OTHER_TABLES, *SECTIONS, "metrics", "scores"}
    require({*document} <= top, f"no key is called {sorted({*document} - top)}")
    require(0.5 <= parse(document["confidence"], "fraction") < 1, "confidence")
    texts = [(key, document[key]) for key in ("name", "model") if key in document]
    for name, keys in OTHER_TABLES.items():
        table = document.get(name, {})
        require(isinstance(table, dict) and {*table} <= {*keys}, f"keys of [{name}]")
        texts += [
            (key, value)
            for key, value in table.items()
            if key not in ("options", "packages", "preregistered")
        ]
    texts += document.get("environment", {}).get("packages", {}).items()
    require(type(document.get("evidence", {}).get("preregistered", False)) is bool, "preregistered")
    options = document.get("build", {}).get("options", {}).values()
    texts += [
        ("an option", option) for option in options if not isinstance(option, bool | int | float)
    ]
    precision = document.get("build", {}).get("precision")
    require(precision in (None, *WORDS["Precision"][1:]), f"precision {precision!r}")
    for name, table, limits, more in list_policy_tables(document):
        require(isinstance(table, dict) and {*table} <= {*limits, *more}, f"keys of [{name}]")
        require({*limits} & {*table}, f"[{name}] sets no limit")
        for key in table.keys() & {*COUNTS}:
            require(type(table[key]) is int and 1 <= table[key] <= 10**6, f"{name}.{key}")
        texts += [(key, table[key]) for key in ("over", "output") if key in table]
        scenario = table.get("scenario")
        for key in ("scenario", "mode"):
            require(table.get(key) in (None, *WORDS[key.title()][1:]), f"{name}.{key}")
        require(scenario != "server" or "rate" in table, f"[{name}] has no rate")
        require(scenario != "multi-stream" or "streams" in table, f"[{name}] has no streams")
        require("rate" not in table or scenario == "server", f"{name}.rate")
        require(
            "streams" not in table or scenario in ("multi-stream", "offline"), f"{name}.streams"
        )
        require("rate" not in table or parse(table["rate"], "queries/s") > 0, f"{name}.rate")
        require(name != "speedup" or "over" in table, "[speedup] has no over")
        require(not {"steps", "output"} <= {*table}, "steps and output")
        at = parse(table.get("at_threshold", "25%"), "fraction") * 20
        require(abs(at - round(at)) < 1e-7 and 1 <= round(at) <= 19, f"{name}.at_threshold")
        require("at_threshold" not in table or "maximum_f1_drop" in table, f"{name}.at_threshold")
    for key, value in texts:
        require(
            isinstance(value, str) and value.strip() and value.isprintable(), f"{key} is no text"
        )
    criteria = [*read_policy(document)]
    require(len(criteria) <= SIZES["limits"], f"too large (§1.1): {len(criteria)} limits")
    names = Counter(criterion.name for criterion in criteria)
    require(criteria and max(names.values()) == 1, "no limit, or one twice")
    for criterion in criteria:
        if criterion.section != "environment":
            require_limit(criterion, require)
    require_no_contradiction(criteria, precision, require)


def require_limit(criterion, require):
    """A limit can be met, and not by everything."""
    limit, unit = criterion.limit, criterion.unit.replace("sample", "image")
    free = criterion.section == "metrics" and unit == "1"
    require(limit >= 0, f"{criterion.name} is negative")
    require(not criterion.least or free or 0 < limit <= LARGEST.get(unit, inf), criterion.name)
    require(
        criterion.least or limit > 0 or unit not in ("ns", "bytes", "J/image", "W"), criterion.name
    )
    if criterion.section == "metrics":
        own = criterion.key in (*ASKED, *FIGURES, "cv", "tokens", "mean", "build_time")
        require(not own, f"[metrics.{criterion.key}] is not a plug-in's")
    own_score = (
        criterion.name.startswith("accuracy.maximum_f1_drop") or criterion.section == "scores"
    )
    require(not own_score or criterion.asked_score in (None, "F1"), criterion.name)
    if criterion.section == "scores":
        require(criterion.asked_score is None, criterion.name)
        name = criterion.key.removeprefix("drop of ")
        known = re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in {*SCORES, *OF_TASKS}
        require(known, f"[scores.{name}] is not a plug-in's")
    errors = {*TASKS["regression"].errors}
    require(criterion.key != "minimum_score" or criterion.score not in errors, criterion.name)


def require_no_contradiction(criteria, precision, require):
    """No limit makes another one pointless or impossible."""
    tails = [criterion for criterion in criteria if criterion.section == "latency"]
    for lower, higher in combinations(sorted(tails, key=lambda criterion: ASKED[criterion.key]), 2):
        alike = lower.where == higher.where and lower.key.startswith("m") == higher.key.startswith(
            "m"
        )
        require(not alike or lower.limit <= higher.limit, f"{lower.name} has no effect")
    shares = {
        criterion.key: criterion.limit for criterion in criteria if criterion.section == "precision"
    }
    require(sum(shares.values()) <= 1 + 1e-9, "shares of precision add up to more than all")
    others = [share for name, share in shares.items() if precision not in (None, name)]
    require(max(others, default=0.0) <= 0.5, "precision contradicts [build]")
    environment = {
        criterion.name: criterion.limit
        for criterion in criteria
        if criterion.section == "environment"
    }
    gpu = (
        any(criterion.section in NEEDS_GPU for criterion in criteria)
        or "environment.driver" in environment
    )
    require(environment.get("environment.gpu") != "none" or not gpu, "a limit needs a GPU")


def read_policy(document):
    """The criteria in their order."""
    wanted = document.get("environment", {})
    facts = {key: wanted[key] for key in ("gpu", "driver", "cpu", "python") if key in wanted}
    facts |= {f"packages.{name}": version for name, version in wanted.get("packages", {}).items()}
    for key, value in facts.items():
        yield Record(
            name=f"environment.{key}",
            section="environment",
            key=key,
            least=None,
            limit=value,
            unit=None,
        )
    sections = [(section, document.get(section, [])) for section in SECTIONS]
    tables = [
        (section, table)
        for section, stated in sections
        for table in ([stated] if isinstance(stated, dict) else stated)
    ]
    for (section, table), key in [
        (pair, key) for pair in tables for key in SECTIONS[pair[0]] if key in pair[1]
    ]:
        load, slug = read_load(table)
        text, f1 = str(table[key]), f"F1@{parse(table.get('at_threshold', '25%'), 'fraction'):.0%}"
        named = find_score(text)
        score = f1 if key == "maximum_f1_drop" else named
        output, steps, unit = table.get("output"), table.get("steps"), SECTIONS[section][key]
        over = table.get("over")
        parts = score, output, steps and f"{steps}-steps", over and f"over-{over}"
        name = ".".join(filter(None, (section, key, *slug, *parts)))
        yield Record(
            name=name,
            section=section,
            key=key,
            score=score,
            asked_score=named,
            output=output,
            steps=steps,
            over=over,
            least=key.startswith("minimum") or section == "precision",
            limit=parse(table[key], unit),
            unit=unit.replace("image", "sample") if "sample" in text else unit,
            where=[*map(load.get, LOAD)],
        )
    for name, stated in document.get("metrics", {}).items():
        for table in [stated] if isinstance(stated, dict) else stated:
            for key in [key for key in table if key in ("minimum", "maximum")]:
                yield read_plugin_limit(name, key, table)
    for name, stated in document.get("scores", {}).items():
        for table in [stated] if isinstance(stated, dict) else stated:
            for key in [key for key in SCORE_LIMITS if key in table]:
                yield read_score_limit(name, key, table)


def find_score(text):
    """The score that a limit names as its unit."""
    match = QUANTITY.fullmatch(text) if isinstance(text, str) else None
    return match[2] if match and match[2] in SCORES else None


def read_load(table):
    """The load that a table selects, and its part of the criterion's name."""
    load = table | ({"rate_per_s": parse(table["rate"], "queries/s")} if "rate" in table else {})
    return load, [form.format(load[name]) for name, form in LOAD.items() if name in load]


def read_plugin_limit(name, key, table):
    """A limit of `[metrics.NAME]`, whose unit says what the metric is."""
    (load, slug), text = read_load(table), str(table[key])
    wanted = re.sub("sample", "image", text.strip().lstrip("+-0123456789.eE").strip())
    unit = next(
        (dimension for dimension in PLUGIN_UNITS if wanted and wanted in UNITS[dimension]), "1"
    )
    return Record(
        name=".".join(("metrics", name, key, *slug)),
        section="metrics",
        key=name,
        score=None,
        output=None,
        steps=None,
        over=None,
        least=key == "minimum",
        limit=parse(table[key], unit),
        unit=unit.replace("image", "sample") if "sample" in text else unit,
        where=[*map(load.get, LOAD)],
    )


def read_score_limit(name, key, table):
    """A limit of `[scores.NAME]`."""
    unit = SCORE_LIMITS[key]
    return Record(
        name=".".join(("scores", name, key)),
        section="scores",
        key=f"drop of {name}" if key == "maximum_drop" else name,
        score=None,
        asked_score=find_score(table[key]),
        output=None,
        steps=None,
        over=None,
        least=key == "minimum",
        limit=parse(table[key], unit),
        unit=unit,
        where=[None] * len(LOAD),
    )


def see(estimate, confidence, blocked, source, hidden=(0.0, 0.0), least=-inf, most=inf, factor=1):
    """An estimate times `factor`; `hidden` moves its bounds, which stay in the interval from `least` to `most`."""
    low, high = map(sum, zip(estimate.interval(confidence), hidden))
    return Seen(
        factor * estimate.value,
        (factor * max(low, least), factor * min(high, most)),
        blocked,
        source,
        lambda confidence: [
            factor * bound
            for bound in (getattr(estimate, "tail", None) or estimate.interval)(confidence)
        ],
    )


def is_blocked(tries, at):
    counted, known = keep_valid(tries) or tries, (None, at.build.engine)
    return not keep_valid(tries) or any(
        measurement.caveats or measurement.subject.sha256 not in known for measurement in counted
    )


def invert(seen):
    """One over a positive figure (§6)."""
    if seen.value is None or not seen.value > 0:
        return Seen(source=seen.source)
    ci = seen.ci and None not in seen.ci and seen.ci[0] > 0 and (1 / seen.ci[1], 1 / seen.ci[0])

    def interval(confidence):
        low, high = seen.interval(confidence)
        return [1 / high, 1 / low if low > 0 else inf]

    return seen._replace(
        value=1 / seen.value,
        ci=ci or None,
        blocked=seen.blocked or not ci,
        interval=seen.interval and interval,
    )


def observe_group(tries, name, at):
    if name == "efficiency":
        return invert(observe_group(tries, "energy", at))
    tries = keep_requested(tries, name)
    summary, source = summarize(tries, name, at), tries[-1].run
    (value, low, high), mean, n = summary.estimate.values(), summary.mean, len(summary.figures)
    lacks = name not in OPTIONAL and n != count_processes(tries)
    blocked = is_blocked(tries, at) or low is None or lacks or summary.unknown
    if value is None:
        return Seen(source=source)
    if name == "memory":
        peak, bound = max(summary.figures), bound_next(summary.figures, at.confidence("bench"))
        bound += 2**21 * (min(summary.figures) == peak)
        most = max(peak, bound, *summary.spoilt) if isfinite(bound) else peak
        return Seen(peak, (peak, most), blocked, source)
    number, interval = n if summary.alone > 0 else 0, mean and join(mean.interval, summary.speeds)
    if mean and name in SENSED:
        both = interval

        def interval(confidence):
            return [bound / 1.05 for bound in both(confidence)]

    bounds = mean and (low, high)
    speeds = number, summary.lost, summary.alone, summary.repeated
    return Seen(value, bounds, blocked, source, interval, *speeds)


def rank_evaluations(at):  # §8.1
    """The evaluations of the judged file with its predictions; the first counts."""
    return [run for run, row in list_evaluations(at) if row and row.get("why_not") is None]


def has_failed(at):  # §8.1
    """Whether the build failed when it was evaluated on some data for the last time."""
    last = {}
    for run, row in list_evaluations(at):
        data, started = (run.record.dataset.sha256, run.record.get("task")), run.started_utc
        if row and (row.failed or row.get("why_not") is None):
            last[data] = max(last.get(data, ("", False)), (started, row.failed))
    return any(failed for _, failed in last.values())


def list_evaluations(at):
    """The evaluations of the judged file, in the order in which they count, with its row."""
    mine = [
        run
        for run in at.newest
        if run.kind == "evaluate" and at.id in run.parents and run.name not in at.early
    ]
    best = [run.record.dataset.sha256 for run in mine if run.record.dataset.get("validation")]
    mine.sort(key=lambda run: run.record.dataset.sha256 not in best[:1])
    return [
        (run, {row.artifact: row for row in run.record.results}.get(at.id))
        for run in mine
        if not any(
            row.artifact == at.id and row.sha256 not in (None, at.build.engine)
            for row in run.record.results
        )
    ]


def observe_accuracy(at):  # §8.1
    """By name; every evaluation is recomputed on the way."""
    observed, ranked = {}, rank_evaluations(at)
    others = [run for run in at.newest if run.kind == "evaluate" and run not in ranked]
    for run in [*ranked, *others]:
        row = {row.artifact: row for row in run.record.results}.get(at.id)
        counts = row and run in ranked and not observed
        task, table = (
            run.record.get("task", "classification"),
            at.table(f"{run.place}/predictions.parquet", "predictions", classes=True),
        )
        if not 0 <= (run.record.dataset.get("classes") or 0) <= SIZES["class"]:
            raise ValueError(f"{run.place}: {run.record.dataset.classes} classes")
        task = TASKS["user" if task.startswith("user:") else task.removeprefix("text-")]
        columns = ("class", "best") if task is TASKS["classification"] else ("truth", "prediction")
        rows = [
            row for row in run.record.results if f"{row.artifact or 'source'}:{columns[1]}" in table
        ]
        check_samples(at, run, table)
        data = run.record.dataset
        wrong = find_impossible_answer(
            run.record.get("task", "classification"),
            table,
            columns[0],
            data.classes,
            data.get("labels") or (),
        )
        at.check(not wrong, f"{run.place}: impossible (§8.1.2): {wrong}")
        if wrong:
            continue
        figures = {
            row.artifact: estimate_answers(at, run, task, columns, table, row) for row in rows
        }.get(at.id, {})
        groups, data = len({*table.get("group", ())}) or None, run.record.dataset
        known = {"count": len(table[columns[0]]), "groups": groups}
        at.compare(f"{run.place}: dataset", {"groups": None} | data, known)
        at.check(None not in table.get("group", ()), f"{run.place}: a sample has no group")
        rules = check_rules(at, run, table, columns[0], rows)
        errors = {*task.errors, *(name for name, rule in rules.items() if rule.lower_is_better)}
        for name, figure in figures.items() if counts else ():
            sampled = name.removeprefix("drop of ") in rules
            least = 0 if name == "agreement" or sampled else task.least
            hidden = (1 - least) * row.calibrated_on / max(row.samples, 1)
            limits = (
                ((0, hidden), least - 1, 1 - least)
                if name.startswith("drop")
                else ((0, hidden) if name in errors else (-hidden, 0), least, 1)
            )
            observed[name] = (
                partial(
                    see, figure, at.confidence("evaluate"), not run.info.trained, run.name, *limits
                )
                if figure
                else Seen(source=run.name)
            )
    return observed


def check_rules(at, run, table, truths, rows):  # §8.1.1
    """The rules of scores of plug-ins, and whether nothing else has parts."""
    rules = run.record.get("sampled") or {}
    scored = {name.partition(":part.")[2] for name in table if ":part." in name}
    at.check(scored <= {*rules}, f"{run.place}: parts of {scored - {*rules}} have no rule")
    labeled = run.info.trained and None not in table[truths]
    at.check(not rules or labeled, f"{run.place}: scores of plug-ins without truths or training")
    others = (row for row in run.record.results if row not in rows)
    at.check(not any(row.get("sampled") for row in others), f"{run.place}: scores of no answers")
    if rules:
        at.stated.append(f"{run.place}: what each sample adds to {', '.join(sorted(rules))}")
    return rules


def check_samples(at, run, table):
    """The rows are samples of the data set, each once, and equal labels are of one class."""
    paths, hashes = table["path"], table["sha256"]
    lines = "".join(f"{known}  {path}\n" for known, path in zip(hashes, paths))
    at.compare(f"{run.place}: dataset: sha256", run.record.dataset.sha256, digest(lines.encode()))
    at.check(paths, f"{run.place}: has no sample")
    at.check(len({*paths} - {None}) == len(paths), f"{run.place}: a sample occurs twice")
    for name, answers in table.items():
        distinct = not name.endswith(":best") or all(
            answer and len({*answer}) == len(answer) for answer in answers
        )
        at.check(distinct, f"{run.place}: {name} is empty or names a class twice")
    classes = {*zip(table.get("label", ()), table.get("class", ()))}
    labels = [label for label, _ in classes if label is not None]
    at.check(len({*labels}) == len(labels), f"{run.place}: one label is of two classes")
    rows = [row.artifact or "source" for row in run.record.results]
    predicted = {name.partition(":")[0] for name in table if ":" in name}
    at.check(predicted <= {*rows}, f"{run.place}: predictions of {predicted - {*rows}} have no row")
    at.check(len({*rows}) == len(rows), f"{run.place}: a build has two rows")
    if copies := len(hashes) - len({*hashes}):
        at.stated.append(f"{run.place}: {copies} of {len(hashes)} samples are copies of others")


def are_boxes(boxes, label, numbers):  # §8.1.2
    """Whether all have finite numbers, an area, and the whole number of a class at `label`."""
    return all(
        len(box) == numbers
        and all(map(isfinite, box))
        and max(map(abs, box[:4])) <= 2**20
        and min(box[2:4]) > 0
        and 0 <= box[label] == int(box[label])
        for box in boxes
    )


def are_classes(numbers, classes):
    return all(type(number) is int and 0 <= number < classes for number in numbers)


def is_mask(png, classes, ignored=()):
    pixels = read_mask(png)
    return (pixels.filter(~pixels.is_in(ignored)).max() or 0) < classes


def are_tags(tags, labels):
    return all(isinstance(tag, str) and tag and tag.isprintable() for tag in tags) and (
        not labels or {*tags} <= {*labels, "O"}
    )


def are_numbers(row, *_):
    return len(row) > 0 and all(map(isfinite, row))


def are_true_boxes(boxes, *_):
    last = SIZES["class of a box"]
    return are_boxes(boxes, 4, 7) and all(
        box[4] < last and box[5] >= 0 and box[6] in (0, 1) for box in boxes
    )


def is_scored(answer, *_):
    read_prediction(answer["prediction"])
    return answer["score"] is None or 0 <= answer["score"] <= 1


POSSIBLE = {  # §8.1.2: of a truth and of an answer, with the number of classes and their labels
    "classification": (
        lambda truth, classes, _: are_classes([truth], classes),
        lambda best, classes, _: are_classes(best, classes) and 0 < len({*best}) == len(best) <= 5,
    ),
    "segmentation": (
        lambda png, classes, _: is_mask(png, classes, (255,)),
        lambda png, classes, _: is_mask(png, classes),
    ),
    "detection": (
        are_true_boxes,
        lambda boxes, *_: are_boxes(boxes, 5, 6) and all(box[4] >= 0 for box in boxes),
    ),
    "token-classification": (lambda tags, _, labels: are_tags(tags, labels),) * 2,
    "question-answering": (
        lambda texts, *_: all(isinstance(text, str) for text in texts),
        lambda text, *_: isinstance(text, str),
    ),
    "multi-label-classification": (
        lambda some, classes, _: are_classes(some, classes) and some == sorted({*some}),
    )
    * 2,
    "regression": (are_numbers, are_numbers),
    "embedding": (
        lambda pair, *_: (
            pair == [-1, 0]
            or (len(pair) == 2 and 0 <= pair[0] == int(pair[0]) and isfinite(pair[1]))
        ),
        are_numbers,
    ),
    "user": (lambda *_: True, is_scored),
}


def find_impossible_answer(task, table, truths, classes, labels):  # §8.1.2
    """The column, and the sample, that breaks a rule; None if there is none."""
    task = "user" if task.startswith("user:") else task.removeprefix("text-")
    if task not in POSSIBLE:
        return None
    named = task in ("segmentation", "token-classification", "multi-label-classification")
    if task != "detection" and len(labels) not in ({0, classes} if named else {0}):
        return "the names of the classes", len(labels)
    true = table.get(truths, [None])
    names = [name for name in table if re.search(r"(:best|[:_]prediction)$", name)]
    named = [(name, table[name], POSSIBLE[task][1]) for name in names]
    named += [] if None in true else [(truths, true, POSSIBLE[task][0])]
    for name, values, holds in named:
        for at, value in enumerate(values):
            try:
                fine = holds(value, classes, labels)
            except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
                fine = False
            if not fine:
                return name, at
    alike = {"token-classification": True, "regression": True, "embedding": False}
    if task in alike:
        judged = alike[task] and None not in true
        columns = [table[name] for name in names] + ([true] if judged else [])
        for at, row in enumerate(zip(*columns)):
            if len({*map(len, row)}) > 1:
                return "the lengths", at
    if task == "embedding" and None not in true:
        members = defaultdict(list)
        for number, rating in (pair for pair in true if pair != [-1, 0]):
            members[number].append(rating)
        odd = [number for number, pair in members.items() if len(pair) != 2 or pair[0] != pair[1]]
        return ("the pairs", odd[0]) if odd else None
    return None


def describe_accuracy(classes, truths, source, build, members):  # §8.1
    """What an evaluation states of a classifier."""
    before, after = ([best[0] for best in predictions] for predictions in (source, build))
    rights = [(old == truth, new == truth) for truth, old, new in zip(truths, before, after)]
    f1, own_f1 = (
        compare_macro_f1(truths, before, after, members),
        measure_macro_f1(truths, after, members),
    )
    within = [float(truth in best) for truth, best in zip(truths, build)]
    top5 = estimate_mean(within, members) if classes > 5 else None
    return {
        "lost": rights.count((True, False)),
        "won": rights.count((False, True)),
        "macro_f1": own_f1.value,
        "macro_f1_ci": own_f1.interval(STATED_AT),
        "macro_f1_drop": f1.value,
        "macro_f1_drop_ci": f1.interval(STATED_AT),
        "top5": top5 and top5.value,
        "top5_ci": top5 and top5.interval(STATED_AT),
    }


def count_classes(truths, predictions):
    """By class, its truths and predictions together, and the predictions of it that are right."""
    return Counter(truths) + Counter(predictions), Counter(
        a for a, b in zip(truths, predictions) if a == b
    )


def score_macro_f1(truths, predictions):
    sizes, hits = count_classes(truths, predictions)
    return fmean(2 * hits[label] / size for label, size in sizes.items())


def list_influences(truths, predictions):
    """What each sample contributes to n times the macro F1."""
    sizes, hits = count_classes(truths, predictions)
    weights = {label: len(truths) / size / len(sizes) for label, size in sizes.items()}
    scores = {label: 2 * hits[label] / sizes[label] * weights[label] for label in sizes}
    return [
        2 * weights[truth] * (truth == prediction) - scores[truth] - scores[prediction]
        for truth, prediction in zip(truths, predictions)
    ]


def measure_macro_f1(truths, predictions, members):
    """The macro F1, as a score of samples."""
    value, parts = score_macro_f1(truths, predictions), list_influences(truths, predictions)
    return estimate_macro_f1(value, parts, truths, members, 0)


def compare_macro_f1(truths, before, after, members):
    """The drop of the macro F1, as a score of samples."""
    parts = [*map(sub, list_influences(truths, before), list_influences(truths, after))]
    drop = score_macro_f1(truths, before) - score_macro_f1(truths, after)
    return estimate_macro_f1(drop, parts, truths, members, -1)


def estimate_macro_f1(value, parts, truths, members, least):
    n, known = len(truths), Counter(truths)
    effect = max(1.0, n / (len(known) * min(known.values())))
    if members:
        parts, effect = add_up(parts, members), effect * find_size(members)
    return estimate_score(value, lambda: parts, n, least, 1, effect)


def estimate_answers(at, run, task, columns, table, row):
    truths, source, build = (
        table[name]
        for name in (
            columns[0],
            *(f"{name}:{columns[1]}" for name in ("source", row.artifact or "source")),
        )
    )
    figures, scores = {}, row.get("scores") and row.scores.scores
    members, size = number_groups(table), find_size(number_groups(table))
    shown = source if task is TASKS["question-answering"] else None
    shown = [best[0] for best in source] if task is TASKS["classification"] else shown
    if shown is None or len({*shown}) > 1:
        same = (
            task.agree_all(source, build) if task.agree_all else [*map(task.agree, source, build)]
        )
        figures["agreement"] = estimate_mean(same, members)
    (n, was, early, _), (_, now, late, amounts) = (
        task.score(truths, predictions, members) if None not in truths else (0, None, None, None)
        for predictions in (source, build)
    )
    for name in (*task.scores, *(at.thresholds if task is TASKS["detection"] else ())) if n else ():
        effect = task.find_effect(name, was(name))
        if amounts:
            effect = find_largest_effect(amounts, name in AVERAGED)
        if amounts and name in AVERAGED:
            labels = run.record.dataset.get("labels", ())
            effect = max(effect, find_absent_effect(amounts, labels))
        both = (was, early), (now, late)
        figures[name], figures[f"drop of {name}"] = compare_scores(
            task, name, *both, n, effect * size, members
        )
    sampled = estimate_parts(at, run, table, row, members if n else None, size)
    value = {name: figure.value for name, figure in figures.items()}
    expected = [
        {
            "name": name,
            "value": value[name],
            "drop": value[f"drop of {name}"],
            "ci": figures[name].interval(STATED_AT),
            "drop_ci": figures[f"drop of {name}"].interval(STATED_AT),
        }
        for name in task.scores
        if n
    ]
    if row.accuracy and n:
        again = describe_accuracy(run.record.dataset.classes, truths, source, build, members)
        at.compare(f"{run.place}: {row.artifact}: accuracy", row.accuracy, again)
    if row.accuracy:
        known = row.accuracy
        scores = [{"name": "top1", "value": known.top1, "drop": known.drop}]
        scores[0] |= {"ci": known.top1_ci, "drop_ci": known.drop_ci}
    stated = {
        "scores": scores or [],
        "agreement": row.agreement and row.agreement.share,
        "ci": row.agreement and row.agreement.ci,
        "samples": row.samples,
    }
    at.compare(
        f"{run.place}: {row.artifact}",
        stated,
        {
            "scores": expected if run.info.trained else [],
            "agreement": value.get("agreement"),
            "ci": figures["agreement"].interval(STATED_AT) if "agreement" in figures else None,
            "samples": len(source),
        },
    )
    first = task.scores[0]
    main = {"score": figures[first], "drop": figures[f"drop of {first}"]} if n else {}
    return figures | main | sampled


def compare_scores(task, name, source, build, n, effect, members):
    """The score of the second model, and its drop from that of the first."""
    (was, early), (now, late) = source, build
    first, second = (late, early) if name in task.errors else (early, late)
    width = 1 - task.least
    own = (
        estimate_score(now(name), partial(late, name), n, task.least, 1, effect)
        if task.finish or not task.count or members
        else estimate_mean(late(name))
    )
    loss = now(name) - was(name) if name in task.errors else was(name) - now(name)
    return own, estimate_score(
        loss, lambda: [*map(sub, first(name), second(name))], n, -width, width, effect
    )


def estimate_parts(at, run, table, row, members, size):  # §8.1.1
    """The scores of plug-ins and their drops by name; None for one that is withheld."""
    rules, stated = run.record.get("sampled") or {}, row.get("sampled") or {}
    place, figures = f"{run.place}: {row.artifact}: sampled", {}
    at.check(rules.keys() == stated.keys(), f"{place} has {[*stated]}, not {[*rules]}")
    for name, rule in rules.items():
        named = re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in {*SCORES, *OF_TASKS}
        at.check(bool(named), f"{run.place}: a plug-in's score is called {name}")
        columns = [
            table.get(f"{model}:part.{name}") for model in ("source", row.artifact or "source")
        ]
        parts = [part for column in columns for part in column or ()]
        sound = all(is_part(part, rule.lower_is_better) for part in parts)
        at.check(sound, f"{run.place}: parts of {name} are impossible")
        own = drop = None
        if named and sound and None not in columns and not do_groups_differ(rule, *columns):
            own, drop = compare_parts(name, rule, *columns, members, size)
        figures |= {name: own, f"drop of {name}": drop}
        known = stated.get(name) or {}
        at.check(bool(known.get("why_not")) == (own is None), f"{place}: {name}: why_not")
        expected = {
            "value": own and own.value,
            "ci": own and own.interval(STATED_AT),
            "drop": drop and drop.value,
            "drop_ci": drop and drop.interval(STATED_AT),
        }
        at.compare(f"{place}: {name}", known, expected)
    return figures


def do_groups_differ(rule, source, build):
    groups = ([part[2] for part in parts] for parts in (source, build))
    return rule.rule == "class mean" and any(map(ne, *groups))


def compare_parts(name, rule, source, build, members, size):
    """The score and its drop; twice None where one of them is not defined."""
    task = make_part_task(name, rule, [*source, *build])
    (n, was, early, _), (_, now, late, amounts) = (
        task.score(build, parts, members) for parts in (source, build)
    )
    if not isfinite(was(name) - now(name)):
        return None, None
    effect = task.find_effect(name, was(name))
    if amounts:
        effect = find_largest_effect(amounts, rule.rule == "class mean")
    return compare_scores(task, name, (was, early), (now, late), n, effect * size, members)


def find_snr(rows, confidence):
    """In dB with its interval; None without an error, no interval if few samples share the error."""
    noise, signal, n = rows["difference_square"], rows["reference_square"], len(rows["finite"])
    total, power, finite = sum(noise), sum(signal), all(rows["finite"])
    snr = None if not total else -10 * log10(total / power) if power else -600.0
    if not finite or not (total and power) or total**2 < 60 * sum(map(mul, noise, noise)):
        return (snr if finite else -1e30), None
    ratio = estimate_ratio(noise, signal)
    low, high = Mean(snr, 10 / log(10) * ratio.error / ratio.value, n - 1).interval(confidence)
    apart = [n * (bad - ratio.value * good) / total for bad, good in zip(noise, signal)]
    largest = max(1.0, *map(abs, apart))
    _, most = estimate_score(1, lambda: apart, n, 1e-6, inf, 100).interval(confidence)
    least, _ = estimate_score(1, lambda: apart, n, 1e-6, inf, largest).interval(confidence)
    return snr, [min(low, snr - 10 * log10(most)), max(high, snr - 10 * log10(least))]


def observe_preprocessing(at):  # §8.2
    """By name; every proof is recomputed on the way."""
    observed = {}
    for run in (run for run in at.newest if run.kind == "preprocess"):
        rows, record, parity = (
            at.table(f"{run.place}/images.parquet", "images"),
            run.record,
            run.record.parity,
        )
        for picture in parity.worst:
            at.path(f"{run.place}/{picture.file}")
        check_sums(at, f"{run.place}/images.parquet", rows)
        names = rows["image"]
        at.check(len({*names} - {None}) == len(names), f"{run.place}: an image occurs twice")
        proof, classes, (snr, ci) = (
            parity.proof,
            rows["reference_class"],
            find_snr(rows, at.confidence("preprocess")),
        )
        same = equal = (
            [*map(eq, classes, rows["dali_class"])]
            if record.classifies and len({*classes}) > 1
            else None
        )
        if not record.classifies and "dali_prediction" in rows:
            same = compare_predictions(record.task, rows)
        stated = {
            "snr_db": proof.output.snr_db,
            "equal": (proof.top1_agreement or {}).get("equal"),
            "share": (proof.get("prediction_agreement") or {}).get("share"),
        }
        share = estimate_mean(same).value if same and not equal else None
        at.compare(
            run.place,
            parity | stated,
            {"images": len(classes), "snr_db": snr, "equal": equal and sum(equal), "share": share},
        )
        at.compare(f"{run.place}: proof", proof, describe_proof(record, rows))
        if observed or run.name in at.early or not is_of_model(at, record):
            continue
        refused = bool(parity.refused)
        if same:
            few = not equal and len(same) < 100
            observed["agreement"] = see(
                estimate_mean(same),
                at.confidence("preprocess"),
                refused or few or not record.trained,
                run.name,
            )
        if snr is not None:
            observed["snr"] = Seen(snr, ci, refused or ci is None, run.name)
    return observed


def describe_proof(record, rows):  # §8.2
    """The figures of a proof of preprocessing, over all images together."""
    classes, dali, truths = rows["reference_class"], rows["dali_class"], rows.get("class", [None])
    (output,) = pool_errors({**rows, "output": ["output"] * len(classes)})
    agreement = accuracy = None
    if record.classifies:
        same = [*map(eq, classes, dali)]
        share = estimate_mean(same)
        agreement = {"images": len(same), "share": share.value, "ci": [*share.interval(0.95)]}
        if None not in truths:
            rights = ([*map(eq, labels, truths)] for labels in (classes, dali))
            accuracy = dict(zip(("reference", "dali"), map(fmean, rights)))
    return {"output": output, "top1_agreement": agreement, "accuracy": accuracy}


def is_of_model(at, record):
    hashes = None, at.model_sha256
    return record.model == at.build.info.model and record.get("model_sha256") in hashes


def compare_predictions(name, rows):
    """The agreement of each image's predictions; none if the reference's are the same for all images, or score 0."""
    task, before, shown = TASKS[name], rows["reference_prediction"], rows["reference_prediction"]
    if name == "detection":
        shown = [[box[:4] + box[5:] for box in boxes if box[4] >= 0.25] for boxes in before]
    alike = all(prediction == shown[0] for prediction in shown)
    if alike or ("truth" in rows and task.score(rows["truth"], before)[1](task.scores[0]) == 0):
        return None
    return [*map(task.agree, before, rows["dali_prediction"])]


def observe_tensor_cores(at, judged):  # §8.3
    """Of the newest profile of the judged file; every stage with all of its tables is recomputed on the way."""
    observed, profiles = [], [run for run in at.newest if run.kind == "profile"]
    every = [(run, stage) for run in profiles for stage in run.record.stages]
    at.stated += [
        f"{run.place}: views of traces and findings, which optpipe verify recomputes"
        for run in profiles
    ]
    for run, stage in (pair for pair in every if pair[1].subject.artifact):
        place, cores = f"{run.place}: {stage.subject.name}", stage.profile.tensor_cores
        mine = [name for name in run.files if name.startswith(f"{stage.folder}/")]
        whole = bool(mine) and all(at.path(f"{run.place}/{name}").is_file() for name in mine)
        passed = stage.profile.trace_quality.verdict == PASS
        if whole:
            ranges = at.table(f"{run.place}/{stage.folder}/tables/ranges.parquet", "ranges")
            known = {None, "all", *ranges.get("name", ())}
            at.check(stage.range in known, f"{place}: its trace has no range {stage.range!r}")
            times, steady = sum_kernels(at, run, stage)
            at.compare(
                place,
                stage.profile | {"is steady": passed},
                {"tensor_cores": times, "is steady": steady if times else passed},
            )
        file = {
            stage.subject.get("sha256")
            for stage in run.record.stages
            if stage.subject.artifact == at.id
        }
        counts = (
            stage.subject.artifact == at.id
            and file <= {None, at.build.engine}
            and run.name not in at.early
        )
        if observed or not counts or not (cores and any(cores.eligible_ns_by_iteration)):
            continue
        at.open += (
            []
            if whole
            else [f"{name}: the tables of {place} are not in the dossier" for name in judged]
        )
        if whole and not times:
            observed.append(Seen(source=run.name))
            continue
        used, eligible = cores.used_ns_by_iteration, cores.eligible_ns_by_iteration
        interval = bound_part(used, eligible, at.confidence("profile"))
        observed.append(
            Seen(sum(used) / sum(eligible), interval, not (whole and passed and interval), run.name)
        )
    return observed


@cache
def classify(kernel):
    """Whether it does matrix work, and whether it uses Tensor Cores, by its name."""
    is_of = {kind: bool(pattern.search(kernel)) for kind, pattern in KERNELS.items()}
    works = is_of["attention"] or (is_of["matrix"] and not is_of["other"])
    return works and not is_of["helper"], works and is_of["tensor"] and not is_of["plain"]


def sum_kernels(at, run, stage):
    """By iteration the eligible time and that on Tensor Cores; and whether the trace is steady.

    None if it is not complete, empty without two iterations.
    """
    folder, names = f"{run.place}/{stage.folder}", ("api", "kernels", "copies", "ranges")
    header, tables = (
        at.json(f"{folder}/trace.json"),
        [at.table(f"{folder}/tables/{name}.parquet", name) for name in names],
    )
    calls, kernels, copies, ranges = every = [
        [Record(zip(table, row)) for row in zip(*table.values())] for table in tables
    ]
    lost = any(
        row.start_ns is None
        or row.end_ns is None
        or not -(2**60) < row.start_ns <= row.end_ns < 2**60
        for row in chain(*every)
    )
    if lost or header.diagnostics or header.graph_launches_untraced or not kernels:
        return None, False
    first, last = next(
        ((row.start_ns, row.end_ns) for row in ranges if row.name == "optpipe.measure"), (0, 0)
    )
    launched = {
        (process, call.correlation_id): call
        for call in calls
        for process in (0, call.thread & ~0xFFFFFF)
    }
    calls, ranges = (
        [row for row in rows if first <= row.start_ns < last] for rows in (calls, ranges)
    )
    for row in chain(kernels, copies):
        row.call = launched.get((row.pid or 0, row.correlation_id))
    kernels, copies = (
        [row for row in rows if row.call and first <= row.call.start_ns < last]
        for rows in (kernels, copies)
    )
    if any(row.start_ns < row.call.start_ns - 1_000_000 for row in chain(kernels, copies)):
        return None, False
    answered, stops = (
        {id(row.call) for row in kernels + copies},
        [call.end_ns for call in calls if END.match(call.name)],
    )
    captures = [
        (call.start_ns, min((stop for stop in stops if stop >= call.start_ns), default=0))
        for call in calls
        if BEGIN.match(call.name)
    ]
    launches = [
        id(call) in answered
        for call in calls
        if LAUNCH.match(call.name)
        and (
            id(call) in answered
            or not any(start <= call.start_ns < stop for start, stop in captures)
        )
    ]
    if not kernels or launches.count(False) > 0.01 * len(launches):
        return None, False
    turns = sorted(
        (row for row in ranges if row.name == "optpipe.iteration"), key=lambda row: row.start_ns
    )
    by_thread = defaultdict(list)
    for turn in turns:
        by_thread[turn.thread].append((turn.start_ns, turn.end_ns))
    if not all(map(follow, by_thread.values())):
        return None, False
    if len(turns) < 2:
        return {}, False
    own = [
        [
            row
            for row in kernels + copies
            if row.call.thread == turn.thread and turn.start_ns <= row.call.start_ns < turn.end_ns
        ]
        for turn in turns
    ]
    counts, usual = (
        [sum("name" in row for row in rows) for rows in own],
        stage.facts.unprofiled_iteration_ns,
    )
    steady = any(counts) and (
        1 == len({*counts}) < len(counts) or 1 == len({*counts[1:]}) < len(counts) - 1
    )
    if steady and launches:
        ends = [(max(row.end_ns for row in rows), turn) for rows, turn in zip(own, turns) if rows]
        waited, walls = (
            sum(end - turn.start_ns for end, turn in ends),
            sum(turn.end_ns - turn.start_ns for _, turn in ends),
        )
        starts = [turn.start_ns for turn in turns] + [
            max(*(end for end, _ in ends), *(turn.end_ns for turn in turns))
        ]
        every = [*calls, *kernels, *copies, *ranges]
        span = max(row.end_ns for row in every) - min(row.start_ns for row in every)
        slower = (
            median(map(sub, starts[1:], starts)) / usual - 1
            if usual
            else header.overhead_ns / max(span, 1)
        )
        steady = (
            len({row.device for row in kernels}) == 1
            and waited <= 2 * max(walls, 1)
            and abs(slower) <= 0.2
        )
    return split_kernels(stage, ranges, turns, kernels), bool(steady and launches)


def split_kernels(stage, ranges, turns, kernels):
    starts, used, eligible, layers = (
        [turn.start_ns for turn in turns],
        Counter(),
        Counter(),
        defaultdict(list),
    )
    kernels.sort(key=lambda row: row.call.start_ns)
    for row in kernels:
        row |= {
            "layer": None,
            "ns": row.end_ns - row.start_ns,
            "turn": bisect_right(starts, row.call.start_ns) - 1,
        }
    for layer in sorted(ranges, key=lambda row: (row.start_ns, -row.end_ns)):
        inside = any(
            turn.thread == layer.thread and turn.start_ns <= layer.start_ns < turn.end_ns
            for turn in turns
        )
        if inside and layer.name != "optpipe.iteration" and not LIBRARY.match(layer.name):
            low, high = (
                bisect_left(kernels, time, key=lambda row: row.call.start_ns)
                for time in (layer.start_ns, layer.end_ns)
            )
            for row in kernels[low:high]:
                row.layer = layer.name if row.call.thread == layer.thread else row.layer
    by_layer = sum(row.ns for row in kernels if row.layer is not None) >= 0.5 * max(
        sum(row.ns for row in kernels), 1
    )
    for row in kernels:
        layers[row.layer if by_layer else row.name].append(row)
    costs = {
        layer.cost.name: layer.cost
        for layer in (stage.profile.roofline or {"layers": ()})["layers"]
    }
    for name, rows in layers.items():
        cost, (matrix, tensor) = (
            costs.get(name),
            map(any, zip(*(classify(row.name) for row in rows))),
        )
        multiple = ALIGNED.get(cost.type) if cost else 1
        aligned = multiple and not any(
            number % multiple for number in (cost and cost.channels) or ()
        )
        for row in rows if name is not None else ():
            eligible[row.turn] += row.ns * bool(
                (cost.macs if cost else matrix) and (tensor or aligned)
            )
            used[row.turn] += row.ns * classify(row.name)[1]
    every = sorted(turn for turn in eligible if turn >= 0)
    return {
        "eligible_ns_by_iteration": [eligible[turn] for turn in every],
        "used_ns_by_iteration": [used[turn] for turn in every],
    }


def observe_outputs(at):  # §8.3
    """By output and steps, the observations by name."""
    checked, observed = at.verification or Record(id=None, files=(), info={}), {}
    place, info = f"builds/verification-{checked.id}/errors.parquet", checked.info
    table, states = (
        at.table(place, "errors"),
        {state.name: state for state in info.get("trajectory") or ()},
    )
    confidence = at.confidence("outputs")
    for output, rows in split_outputs(table):
        peaks, finite, (snr, ci) = (
            rows["difference_max"],
            all(rows["finite"]),
            find_snr(rows, confidence),
        )
        peak = max(peaks) if finite else inf
        level = 200.0 if snr is None else max(snr, -200.0)
        calibrated = info.data.endswith("which INT8 and FP8 are calibrated on")
        seen = calibrated and at.build.info.precision in ("int8", "fp8")
        blocked, alike = (
            info.data == "seeded noise" or seen or len(peaks) < 20,
            len({*rows["reference_best"]}) < 2,
        )
        cosines = [*map(find_cosine, *(rows[name] for name in COSINE))]
        mean = estimate_score(fmean(cosines), lambda values=cosines: values, len(cosines), -1)
        same = estimate_mean([*map(eq, rows["output_best"], rows["reference_best"])])
        observed |= (
            {
                (output, info.get("steps") if output in states else None): {
                    "snr": Seen(
                        level,
                        ci if snr is not None and finite else (level, level),
                        blocked or (ci is None and finite and snr is not None),
                        place,
                    ),
                    "cosine": see(mean, confidence, blocked, place),
                    "agreement": see(same, confidence, blocked or alike, place),
                    "abs_error": Seen(
                        peak, (peak, max(peak, bound_next(peaks, confidence))), blocked, place
                    ),
                }
            }
            if any(rows["values"])
            else {}
        )
    return observed


def find_cosine(reference, output, product, difference, finite):
    square = reference * output
    return float(finite and (product / sqrt(square) if square > 0 else difference == 0))


def observe_rounds(old, new, at, name, blocked):  # §8.4, 1
    """By interleaved comparisons of both with these settings under this load; None with fewer than four rounds."""
    packages = [f"packages.{name}" for name in old.subject.get("packages") or ()]
    losses, spoilt, first, source = [], [], [], None
    same = old.subject.backend != new.subject.backend or old.settings == new.settings
    same = (
        same
        and packages
        and all(old.facts.get(package) == new.facts.get(package) for package in packages)
    )
    for run in (run for run in at.runs if same and run.pairs and run.name not in at.early):
        named = run.comparison.baseline_artifact, run.comparison.contender_artifact
        step = {(old.artifact, at.id): 1, (at.id, old.artifact): -1}.get(named)
        pairs = [pair[::step] for pair in run.pairs]
        alike = all(
            (measurement.key, measurement.settings, measurement.machine)
            == (new.key, side.settings, new.machine)
            for measurement, side in zip(pairs[0], (old, new))
        )
        figures = [
            [read_figure(measurement, name) for measurement in pair]
            if len(keep_valid(pair)) == 2
            else ()
            for pair in pairs
        ]
        lacking = any(None in pair for pair in figures)
        if (
            not step
            or not alike
            or (lacking and pairs[0][0].load.percentile < ASKED.get(name, 0.0))
        ):
            continue
        kept, sign = (
            [bool(pair) and None not in pair for pair in figures],
            -1 if name == "throughput" else 1,
        )
        blocked, source = blocked or lacking, run.name
        raw = [
            [read_raw(measurement, name) or 0 for measurement in pair]
            for pair in pairs
            if len(keep_valid(pair)) < 2
        ]
        spoilt += [sign * log(b / a) if min(a, b) > 0 else None for a, b in raw]
        if any(kept):
            losses.append([sign * log(pair[1] / pair[0]) for pair in compress(figures, kept)])
            first.append(sum(kept[: run.comparison.first_rounds]))
    mean, number = mean_from_runs(losses, first), sum(map(len, losses))
    if not mean or number < 4:
        return None
    blocked = blocked or None in spoilt
    gap = max([GAP, *(abs(loss - mean.value) for loss in spoilt if loss is not None)])
    return see_change(mean, at, blocked, source, number, len(spoilt), gap)


def observe_loss(group, name, at):  # §8.4
    new, approved = group[-1], select(at.baseline)
    base = approved.get(new.key, [*approved.values()][-1])
    both = [keep_requested(side, name) for side in (group, base)]
    blocked = any(measurement.caveats for measurement in keep_valid(base) or base) or is_blocked(
        both[0], at
    )
    networks = {at.request.network, at.request.baseline_network} - {None}
    blocked = blocked or len(networks) > 1
    paired = observe_rounds(base[-1], new, at, name, blocked)
    if paired or new.key not in approved:
        return paired or Seen(source=new.run)
    summaries, logs = [summarize(side, name, at) for side in both], []
    lacks = not keep_valid(base) or any(
        len(summary.figures) != count_processes(side) or summary.unknown
        for summary, side in zip(summaries, both)
    )
    clocks = [side[-1].clock for side in (group, base)]
    moved = new.machine != base[-1].machine or (all(clocks) and max(clocks) / min(clocks) > 1.05)
    apart = (
        len({measurement.run for side in both for measurement in keep_valid(side)}) > 1
        and min(len(summary.parts) for summary in summaries) < 2
    )
    scatter = (
        find_scatter(group_up([*at.measured, *at.baseline]), name, at)
        if apart
        else Mean(0.0, 0.0, inf)
    )
    if not scatter or not all(summary.mean and summary.mean.value > 0 for summary in summaries):
        return Seen(source=new.run)
    for mean, number in ((summary.mean, len(summary.parts)) for summary in summaries):
        least, most = (scatter.error, scatter.freedom) if apart and number < 2 else (0.0, inf)
        logs.append(
            Mean(log(mean.value), max(mean.error / mean.value, least), min(mean.freedom, most))
        )
    late, early = logs[::-1] if name == "throughput" else logs
    spread = late.error**2 + early.error**2
    shares = late.error**4 / late.freedom + early.error**4 / early.freedom
    freedom = min(
        spread**2 / shares if shares > 0 else late.freedom + early.freedom, scatter.freedom
    )
    sides = [(summary.mean.value, summary.speeds) for summary in summaries][
        :: -1 if name == "throughput" else 1
    ]
    processes, gap = (
        min(len(summary.figures) for summary in summaries),
        max(summary.gap for summary in summaries),
    )
    lost = max(summary.lost for summary in summaries)
    return see_change(
        Mean(late.value - early.value, sqrt(spread), freedom),
        at,
        blocked or lacks or moved,
        new.run,
        processes,
        lost,
        gap,
        TAILS.get(name, 0.0),
        sum(summary.repeated for summary in summaries),
        speeds=compare_speeds(*sides)
        if min(chain(*(summary.figures for summary in summaries))) > 0
        else None,
        mirrored=True,
    )


def find_scatter(groups, name, at):
    """The standard deviation of the logarithms of run means, and its freedom."""
    logs = [
        [log(fmean(run)) for run in summarize(group, name, at).parts if min(run) > 0]
        for group in groups
    ]
    freedom = sum(len(numbers) - 1 for numbers in logs if numbers)
    squares = sum((number - fmean(numbers)) ** 2 for numbers in logs for number in numbers)
    return Mean(0.0, sqrt(squares / freedom), freedom) if freedom else None


def see_change(
    mean,
    at,
    blocked,
    source,
    processes,
    lost,
    gap,
    percent=0.0,
    repeated=0.0,
    speeds=None,
    mirrored=False,
):
    """A loss by the mean of its logarithm, and by `speeds`; `mirrored` widens both directions of the ratio alike."""
    interval, ratio = join(mean.interval, speeds), exp(mean.value)
    low, high = map(exp, interval(at.confidence("regression")))
    known = processes, lost, at.policy, gap, percent, repeated
    below, above = widen(ratio, low, high, *known)
    if mirrored:
        least, most = widen(1 / ratio, 1 / high, 1 / low, *known)
        below, above = min(below, 1 / most), max(above, 1 / least)
    return Seen(
        ratio - 1,
        (below - 1, above - 1),
        blocked,
        source,
        lambda confidence: [*map(expm1, interval(confidence))],
        processes,
        lost,
        gap,
        repeated,
    )


def observe(criterion, at):
    """The observations of a criterion."""
    section, key, name, info = (
        criterion.section,
        criterion.key,
        criterion.key.partition("_")[2],
        at.build.info,
    )
    if section == "environment":
        tries = [
            measurement
            for group in select(at.measured).values()
            for measurement in keep_valid(group)
        ]
        known = [(measurement.facts, measurement.run) for measurement in tries] + [
            (run.facts, run.name) for run in at.turns
        ]
        facts = {facts.get(key, "none"): run for facts, run in known}
        return [Seen(value, None, False, run) for value, run in facts.items()]
    if section in ("precision", "size"):
        place, value, ci = f"builds/artifact-{at.id}/manifest.json", at.build.size, None
        if section == "precision":
            value, *ci = bound_share(info.precision_proof.share, key)
            ci = ci if ci[0] < ci[1] else None
        return [Seen(float(value), ci, False, place)]
    if section == "outputs":
        kept = {
            output: figures
            for (output, steps), figures in at.outputs.items()
            if steps == criterion.steps
        }
        return [
            figures[name] for output, figures in kept.items() if criterion.output in (None, output)
        ]
    if section in ("accuracy", "scores") and has_failed(at):
        return []
    if section in ("accuracy", "preprocessing", "scores"):
        figure = key if section == "scores" else key.rpartition("_")[2]
        score = f"drop of {criterion.score}" if figure == "drop" else criterion.score
        of = "accuracy" if section == "scores" else section
        estimate = at.seen[of].get(score if criterion.score else figure)
        return (
            [
                estimate(factor=100 if criterion.unit == "points" else 1)
                if callable(estimate)
                else estimate
            ]
            if estimate
            else []
        )
    if section == "tensor_cores":
        return at.seen[section]
    if section == "speedup":
        return observe_speedup(criterion, at)
    groups = (
        select(at.measured, criterion.where).values()
        if section != "regression" or at.baseline
        else ()
    )
    see_group = observe_loss if section == "regression" else observe_group
    seen = [see_group(group, FIGURES.get(section, key), at) for group in groups]
    if section != "metrics":
        return seen
    units = [{measurement.units.get(key) for measurement in group} - {None} for group in groups]
    return [
        observation._replace(
            blocked=observation.blocked or bool(as_images(measured) - as_images([criterion.unit]))
        )
        for observation, measured in zip(seen, units)
    ]


def as_images(units):
    """Rates and energies count images or samples."""
    return {unit.replace("sample", "image") for unit in units}


# ---- verdicts (§9)


def is_rejected(criterion, observation, level, at):
    """Whether the probability of the observation at the limit is at most `level`, by its own distribution."""
    limit, base, z = criterion.limit, float(criterion.section == "regression"), NormalDist().inv_cdf
    kind = LOOKS.get(criterion.section, "bench")
    if observation.number and base + observation.value > 0 < base + limit:
        far = abs(log(base + observation.value) - log(base + limit)) - observation.repeated
        share = expm1(max(far, 0.0)) / expm1(observation.gap) if far < observation.gap else 1.0
        chance = (
            sum_binomial(observation.lost, observation.number + observation.lost, share)
            if share < 1
            else 0.0
        )
        level -= chance
    if level <= 0:
        return False
    level /= at.parts[kind]
    wider = z(1 - level) / z(0.5 + at.confidence(kind) / 2)
    low, high = (
        observation.interval(1 - 2 * level)
        if observation.interval
        else (observation.value + (bound - observation.value) * wider for bound in observation.ci)
    )
    moved = exp(observation.repeated)
    above = (base + low) / moved > base + limit
    return (base + high) * moved < base + limit if criterion.least else above


def reject(observed, at):
    """The observations that Holm's procedure rejects."""
    tests = [
        (criterion, observation)
        for criterion, observations in observed
        if criterion.least is not None
        for observation in observations
        if not observation.blocked and observation.ci and observation.ci[0] < observation.ci[1]
    ]
    rejected, number = set(), -1
    while number < len(rejected) < len(tests):
        number, level = len(rejected), (1 - at.policy) / 2 / (len(tests) - len(rejected))
        rejected |= {
            id(observation)
            for criterion, observation in tests
            if is_rejected(criterion, observation, level, at)
        }
    return rejected


def judge(criterion, observations, rejected):
    """The judged fields of a criterion: those of its worst observation."""
    ranked, limit, least = [], criterion.limit, criterion.least
    for observation in observations:
        low, high = observation.ci or (observation.value, observation.value)
        margin = (
            -float(observation.value != limit)
            if least is None
            else low - limit
            if least
            else limit - high
        )
        beyond = least is not None and (high < limit if least else low > limit)
        fails = beyond and (low == high or id(observation) in rejected)
        verdict = (
            INCONCLUSIVE
            if observation.blocked
            else FAIL
            if fails
            else PASS
            if margin >= 0
            else INCONCLUSIVE
        )
        rank = (
            ORDER.index(verdict),
            not observation.blocked,
            -inf if isnan(margin) else margin,
            observation.source,
            len(ranked),
        )
        ranked.append((*rank, verdict, observation))
    verdict, worst = min(ranked)[-2:] if ranked else (INCONCLUSIVE, Seen())
    known = isinstance(worst.value, str) or isfinite(worst.value)
    return {
        "verdict": verdict,
        "source": worst.source,
        "threshold": limit,
        "unit": criterion.unit,
        "observed": worst.value if known else None,
        "ci": [*worst.ci] if known and worst.ci else None,
    }


def bound_share(share, kind):  # §8.3
    """The share of a type, and the lowest and highest that are possible with products of unknown cost or type."""
    known, unknown = share.macs or share.layers, share.get("unknown", ())
    value = low = known.get(kind, 0.0)
    high = min(value + known.get("unattributed", 0.0), 1.0)
    others = any(layer.type != kind for layer in unknown)
    same = any(layer.type in (kind, "unattributed") for layer in unknown)
    if unknown and not share.macs:
        low, high = float(not others), float(same)
        return (low if low == high else value), low, high
    return value, 0.0 if others else low, 1.0 if same else high


def judge_precision(info, policy):
    """FP32 and TF32 hold for every MAC, others for a share; a policy may state which is enough."""
    proof, wanted = info.precision_proof, info.precision
    whole = wanted in ("fp32", "tf32")
    stated = not whole and any(
        criterion.section == "precision" and criterion.key == wanted for criterion in policy
    )
    if not (proof.share.macs or proof.share.layers or proof.share.get("unknown")):
        return INCONCLUSIVE
    known = (proof.share.macs or proof.share.layers).get(wanted, 0.0)
    _, low, high = bound_share(proof.share, wanted)
    required = (1.0 if whole else REQUIRED_SHARE) - 1e-12
    placed = not proof.placement or proof.placement.share <= MAX_SHARE_ELSEWHERE
    if (proof.proven and placed and low >= required) or (stated and placed and known > 0):
        return PASS
    return INCONCLUSIVE if placed and low < required <= high else FAIL


def judge_trust(at, policy):
    checked, info = at.verification, at.build.info
    same = checked and checked.recipe.get("artifact", {}).get("sha256") == at.build.engine
    machines = {str(measurement.machine) for measurement in (*at.measured, *at.turns)}
    alone = len(machines) == 1 and (keep_valid(at.measured) or at.turns)
    return {
        "trust.weights": PASS if info.weights.source not in UNTRAINED else INCONCLUSIVE,
        "trust.precision": judge_precision(info, policy),
        "trust.outputs": {True: PASS, False: FAIL}.get(
            checked.info.passed if same else None, INCONCLUSIVE
        ),
        "trust.environment": PASS if alone else INCONCLUSIVE,
    }


def list_loosened(at):  # §10
    """The limits of evidence that were looser than usual."""
    limits = [
        measurement.limits
        for run in at.runs
        if run.kind == "bench" and at.id in run.parents
        for measurement in run.record.measurements
        if run.comparison or measurement.subject.artifact == at.id
    ]
    limits += [measurement.limits for measurement in at.baseline]
    for name, usual in LIMITS.items():
        loosest = max((stated.get(name, usual) for stated in limits), default=usual)
        if loosest > usual:
            yield {"name": name, "value": loosest, "usual": usual}
    asked, usual = (
        (at.verification or {"recipe": {}})["recipe"].get("minimum_snr_db"),
        USUAL_SNR[at.build.info.precision],
    )
    if asked is not None and asked < usual:
        yield {"name": "minimum_snr_db", "value": asked, "usual": usual}
    if at.policy < 0.95:
        yield {"name": "confidence", "value": at.policy, "usual": 0.95}


def sort_codes(group):
    """A stated group, with the codes of left-out measurements in order: they are sets."""
    left = [entry | {"codes": sorted({*entry.codes})} for entry in group.left_out]
    return group | {"left_out": left, "names of figures": sorted(group.figures)}


GROUP_FIGURES = (*TAILS, "throughput", "tokens", "energy", "cv", "memory")


def describe_group(stated, groups, at):
    """The judged fields of a group in verdict.json."""
    tries, figures = groups[tuple(stated.load[key] for key in LOAD)], {}
    valid, newest = keep_valid(tries), tries[-1]
    units = {name: unit for measurement in tries for name, unit in measurement.units.items()}
    for name in (*GROUP_FIGURES, *units):
        summary, values = summarize(tries, name, at), None
        if valid and summary.figures:
            values, estimate = summary.figures, summary.estimate
        elif not valid and (shown := read_figure(newest, name, False)) is not None:
            values, estimate = [shown], {"value": shown, "low": None, "high": None}
        if values:
            figures[name] = {"estimate": estimate, "processes": values, "unit": units.get(name)}
    left = [
        {
            "run": measurement.run,
            "measurement": measurement.id,
            "codes": sorted({*list_codes(measurement)}),
        }
        for measurement in tries
        if measurement.codes
    ]
    return {
        "subject": fill(newest.subject, stated.subject),
        "load": fill(newest.load, stated.load),
        "processes": count_processes(tries),
        "runs": [*dict.fromkeys(measurement.run for measurement in valid)],
        "left_out": left,
        "names of figures": sorted(figures),
        "figures": figures,
    }


def fill(record, stated):
    """A record with the keys of a stated one; a key that is absent says as much as an empty value."""
    empty = {key: value for key, value in stated.items() if value in (None, "", [], {})}
    return dict.fromkeys(stated) | empty | record


def is_reason(text):
    """One printable line with a letter that can be seen; Hangul fillers are letters that cannot."""
    letters = [
        letter for letter in text if letter.isalpha() and letter not in "\u115f\u1160\u3164\uffa0"
    ]
    return text.isprintable() and bool(letters)


def decide(judged, waivers):  # §9
    """The verdict over the criteria that are not waived."""
    counted = {verdict for name, verdict in judged.items() if name not in waivers}
    return min(counted or {INCONCLUSIVE}, key=ORDER.index)


def judge_dossier(at, document):
    """Judges the evidence, and compares the result with verdict.json."""
    verdict, request, build, policy = (
        at.json("verdict.json"),
        at.request,
        at.build,
        [*read_policy(document)],
    )
    at.outputs = observe_outputs(at)
    at.thresholds = {criterion.score for criterion in policy if criterion.key == "maximum_f1_drop"}
    at.seen = {"accuracy": observe_accuracy(at), "preprocessing": observe_preprocessing(at)}
    at.seen["tensor_cores"] = observe_tensor_cores(
        at, [criterion.name for criterion in policy if criterion.section == "tensor_cores"]
    )
    observed = [(criterion, observe(criterion, at)) for criterion in policy]
    stated, rejected = (
        {criterion.name: criterion for criterion in verdict.criteria},
        reject(observed, at),
    )
    trust, loosened = judge_trust(at, policy), [*list_loosened(at)]
    record = f"builds/artifact-{at.id}/manifest.json"
    proof = at.verification and f"{at.verification.place}/manifest.json"
    sources = {
        "trust.weights": {"source": record},
        "trust.precision": {"source": record},
        "trust.outputs": {"source": proof or ""},
    }
    empty = dict.fromkeys(("observed", "ci", "threshold", "unit"))
    expected = {
        name: {"verdict": judged} | empty | sources.get(name, {}) for name, judged in trust.items()
    }
    for criterion, observations in observed:
        name, said = criterion.name, stated[criterion.name].limit if criterion.unit else ""
        expected[name] = judge(criterion, observations, rejected)
        if said:
            words = re.sub("at most |at least |@.*|,", "", said).replace("sample", "image")
            limit = parse(words, criterion.unit.replace("sample", "image"))
            at.check(
                isclose(limit, criterion.limit, rel_tol=0.01),
                f"verdict.json: {name}: limit is {said}",
            )
    at.check({*request.waivers} <= {*expected}, "request.json: waives criteria that do not exist")
    for name, reason in request.waivers.items():
        at.check(is_reason(reason), f"request.json: the waiver of {name} has no reason")
    judged = {name: entry["verdict"] for name, entry in expected.items()}
    overall, groups = decide(judged, request.waivers), select(at.measured)
    at.compare(
        "verdict.json",
        verdict
        | {
            "keys": sorted({*verdict, "loosened"}),
            "number of groups": len(verdict.groups),
            "groups": [*map(sort_codes, verdict.groups)],
            "loosened": verdict.get("loosened", []),
        },
        {
            "keys": KEYS["verdict.json"],
            "number of groups": len(groups),
            "verdict": overall,
            "model": build.info.model,
            "dossier_name": "-".join(
                (
                    Path(build.info.model).stem,
                    build.info.backend,
                    build.info.precision,
                    re.sub("[-:]", "", request.created_utc[:19]),
                )
            ),
            "runs": sorted({measurement.run for measurement in at.measured}),
            "runs_left_out": sorted({measurement.run for measurement in at.left_out}),
            "artifact": {
                "id": at.id,
                "backend": build.info.backend,
                "precision": build.info.precision,
                "sha256": build.engine,
                "size_bytes": build.size,
                "weights": build.info.weights.source,
            },
            "policy": {
                "name": document["name"],
                "sha256": digest(at.bytes("policy.toml")),
            },
            **{key: request[key] for key in ("baseline", "created_utc", "optpipe", "since")},
            "criteria": [
                entry | {"name": name, "waived": request.waivers.get(name)}
                for name, entry in expected.items()
            ],
            "groups": [describe_group(group, groups, at) for group in verdict.groups],
            "loosened": loosened,
        },
    )
    return overall


# ---- records that contradict themselves or each other (§2.1)


def break_artifact(build):
    proof = build.info.precision_proof
    share, placed = proof.share, proof.get("placement")
    return {
        "shares": share.total_macs >= 0
        and all(sum(shares.values()) <= 1 + 1e-6 for shares in (share.macs, share.layers)),
        "placement": proof.others_count >= len(proof.others)
        and (not placed or (0 <= placed.share <= 1 and 0 <= placed["count"] <= placed.nodes)),
    }


def break_verification(build):
    info, asked = build.info, build.recipe.get("minimum_snr_db")
    close = all(output.relative <= 2 * info.tolerance_relative for output in info.outputs)
    known = [output.snr_db for output in info.outputs if output.snr_db is not None]
    alike = (
        abs(info.snr_db - min(known)) <= 3
        if known and info.snr_db is not None
        else not known and info.snr_db is None
    )
    return {
        "a verification": min(info.samples, info["values"]) >= 0
        and (not info.passed or (close and all(output.finite for output in info.outputs)))
        and (alike or bool(info.get("trajectory")) or not info.outputs),
        "its tolerance": asked is None
        or isclose(info.tolerance_relative, 10 ** (-asked / 20), rel_tol=1e-6),
    }


def is_of_record(row, build):
    """Whether a row or a subject states what the artifact's record does; null is not stated."""
    device = row.get("device")
    stated = {**row, "device": None if device is None else device.partition(":")[0]}
    names = ("backend", "precision", "device")
    return all(stated.get(name) in (None, build.info[name]) for name in names)


def hold_rounds(tuning):
    """Rates of rounds, and what follows from them."""
    sides = tuning.dataloader, tuning.dali
    repeats = [side.repeats_images_per_s for side in sides]
    rates = [side.images_per_s for side in sides]
    if min(rates, default=0) <= 0 or any(min(values, default=1) <= 0 for values in repeats):
        return False
    if any(side.batches < 0 for side in sides) or not all(
        not values or min(values) * (1 - 1e-9) <= rate <= max(values) * (1 + 1e-9)
        for rate, values in zip(rates, repeats)
    ):
        return False
    ratio, ci = rates[1] / rates[0], None
    if len(repeats[0]) == len(repeats[1]) >= 4:
        logs = [log(ours / theirs) for theirs, ours in zip(*repeats)]
        mean = Mean(fmean(logs), stdev(logs) / sqrt(len(logs)), len(logs) - 1)
        ratio, ci = exp(mean.value), [*map(exp, mean.interval(0.95))]
    stated = [tuning.speedup, *(tuning.speedup_ci or ())]
    return len(stated) == len([ratio, *(ci or ())]) and all(
        isclose(said, computed, rel_tol=1e-6)
        for said, computed in zip(stated, [ratio, *(ci or ())])
    )


def is_checked(measurement):
    """Whether the check of a measurement's outputs is possible."""
    check = measurement.get("output_check")
    if not check:
        return True
    error, word = check.get("relative_error"), (check.get("tolerance") or "").rpartition(" ")[2]
    most = float(word) if re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", word) else inf
    fits = not check.passed or (error or 0.0) <= most * (1 + 1e-5)
    return (
        0 <= check.checked <= measurement.load.output_checks
        and (check.passed or "wrong-output" in [reason.code for reason in measurement.reasons])
        and (error is None or 0 <= error < inf)
        and fits
    )


def break_data(at, run):
    """The data set of an evaluation, by itself and beside its samples."""
    data, budget = run.record.dataset, run.record.accuracy_budget
    path, hashes = at.path(f"{run.place}/predictions.parquet"), ()
    if path.is_file():
        hashes = at.frame(f"{run.place}/predictions.parquet")["sha256"]
    sound = (
        len({*data.unreadable}) == len(data.unreadable)
        and 0 <= data.truncated <= data.count
        and (budget is None or budget >= 0)
        and all(sha256 is not None and re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes)
    )
    return {"a data set": sound}


def break_preprocessing(at, run):
    """The record of a proof beside the rows of its images."""
    record, rows = run.record, at.table(f"{run.place}/images.parquet", "images")
    if not rows:
        return {}
    parity, count, room = record.parity, len(rows["image"]), 1 + 1e-6
    model, trained = run.info.get("model") or record.model, run.info.get("trained")
    sound = (
        model == record.model
        and trained in (None, record.trained)
        and count <= record.images["count"]
        and 0 <= parity.far <= count
        and all(
            0 <= step.mean_levels <= step.max_levels * room
            and 0 <= step.off_share <= 1
            and 0 <= step.images <= record.images["count"]
            for step in parity.steps
        )
    )
    classes = [
        0 <= label < size
        for name in ("reference_class", "dali_class")
        for label, size in zip(rows.get(name, ()), rows["values"])
        if label is not None
    ]
    if {"mean_levels", "max_levels"} <= {*rows}:
        levels = dict(zip(rows["image"], zip(rows["mean_levels"], rows["max_levels"])))
        sound &= all(0 <= mean <= most * room < 510 for mean, most in levels.values())
        sound &= all(
            image.image in levels
            and all(
                isclose(mine, theirs, rel_tol=1e-6, abs_tol=1e-6)
                for mine, theirs in zip((image.mean_levels, image.max_levels), levels[image.image])
            )
            for image in parity.get("worst") or ()
        )
    task = record.get("task") or ""
    if task in ("detection", "segmentation"):
        sound &= find_impossible_answer(task, rows, "truth", 256, ()) is None
    return {"a proof of preprocessing": sound and all(classes)}


def has_one_best(rows, left, right):
    """Whether the largest values of equal outputs lie at one place."""
    if not {left, right} <= {*rows}:
        return True
    columns = (rows[name] for name in (left, right, "difference_square", "finite"))
    return all(
        first == second
        for first, second, apart, finite in zip(*columns)
        if finite and apart == 0 and None not in (first, second)
    )


COMPUTE_CAPABILITIES = {  # §2.1, by a word of the GPU's name
    "7.0": "V100",
    "7.5": "T4",
    "8.0": "A100",
    "8.6": "A10 A40",
    "8.9": "L4 L40 L40S",
    "9.0": "H100 H200 GH200",
    "10.0": "B200 GB200",
}
NOTHING = hashlib.sha256(b"").hexdigest()


def find_other_facts(records):  # §2.1
    """(place, what): machines that are none, and files of one hash with two sizes."""
    named = {
        word: capability
        for capability, words in COMPUTE_CAPABILITIES.items()
        for word in words.split()
    }
    known, sizes = {}, {NOTHING: 0}
    for record in records:
        count = record.environment.get("cpu_count")
        if count is not None and count < 1:
            yield record.place, "a machine"
        for gpu in record.environment.get("gpus") or ():
            words = re.findall(r"[A-Za-z0-9]+", gpu.name)
            expected = {named[word] for word in words if word in named}
            expected |= {known.setdefault(gpu.name, gpu.compute_capability)}
            if expected != {gpu.compute_capability} or gpu.memory_bytes <= 0:
                yield record.place, "a machine"
        for name, file in record.files.items():
            right = sizes.setdefault(file.sha256, file.size_bytes) == file.size_bytes
            if not right or (file.size_bytes == 0 and file.sha256 != NOTHING):
                yield record.place, f"the size of {name}"


def find_other_predictions(at, runs):  # §2.1
    """Pairs of evaluations in which an engine gave the same samples other classes."""
    evaluated = [run for run in runs if run.kind == "evaluate"]
    for earlier, later in combinations(evaluated, 2):
        same = [
            (run.record.dataset.sha256, run.record.model_id, run.record.get("task"))
            for run in (earlier, later)
        ]
        tables = [at.table(f"{run.place}/predictions.parquet", None) for run in (earlier, later)]
        if same[0] != same[1] or not all(tables):
            continue
        files = [
            {row.artifact: row.get("sha256") for row in run.record.results}
            for run in (earlier, later)
        ]
        for artifact in files[0].keys() & files[1].keys():
            name = f"{artifact or 'source'}:best"
            if len({hashes_of[artifact] for hashes_of in files} - {None}) > 1 or any(
                name not in table for table in tables
            ):
                continue
            first, second = (dict(zip(table["path"], table[name])) for table in tables)
            both = first.keys() & second.keys()
            apart = sum(first[path][:1] != second[path][:1] for path in both)
            if apart > 2 + 0.01 * len(both):
                yield later.place, f"predictions of {artifact or 'source'} beside {earlier.place}"


def break_names(record, builds):
    """What a record repeats of those that it was made from."""
    rules = {}
    for parent in (builds[parent] for parent in record.parents if parent in builds):
        mine, theirs = record.info, parent.info
        if (record.kind, parent.kind) == ("graph", "calibration"):
            rules["a set of samples"] = mine.get("set") == theirs["set"]
        if (record.kind, parent.kind) == ("verification", "reference"):
            rules["a set of samples"] = mine.get("data", "") == theirs.get("data", "")
    return rules


def break_rows(at, run):
    """The rows of an evaluation, beside its table and the builds."""
    path, columns = at.path(f"{run.place}/predictions.parquet"), ()
    labeled = run.record.dataset.labeled
    if path.is_file():
        columns = {*polars.read_parquet_schema(path)}
        labeled = bool(columns & {"class", "truth"})
    sound = labeled == run.record.dataset.labeled
    for row in run.record.results:
        name = row.artifact or "source"
        whose = (row.backend, row.precision, row.calibrated_on, row.get("sha256"))
        sound &= row.artifact is not None or whose == ("source", "source", 0, None)
        predicted = {f"{name}:best", f"{name}:prediction"} & {*columns}
        sound &= not (predicted and (row.failed or row.get("why_not")))
    judged = [
        at.builds[row.artifact].info for row in run.record.results if row.artifact in at.builds
    ]
    told = [drop_nulls(row.weights) == drop_nulls(run.record.weights) for row in judged]
    named = run.record.model == run.info.model
    return {"rows of an evaluation": sound and all(told), "names": named}


def drop_nulls(record):
    return {key: value for key, value in record.items() if value is not None}


def break_run(run, builds):
    rules = {}
    if run.kind == "evaluate":
        known = [(row, builds.get(row.artifact)) for row in run.record.results]
        rules["an evaluated build"] = all(
            not build or (is_of_record(row, build) and run.record.model_id in build.parents)
            for row, build in known
        )
        rules["a calibrated build"] = all(
            row.calibrated_on == row.samples
            for row, build in known
            for graph in (builds.get(parent) for parent in (build.parents if build else ()))
            if graph
            and graph.kind == "graph"
            and graph.info.get("set")
            and graph.info["set"].sha256 == run.record.dataset.sha256
        )
    if run.kind == "profile":
        known = [(stage.subject, builds.get(stage.subject.artifact)) for stage in run.record.stages]
        rules["a profiled build"] = all(
            not build or is_of_record(subject, build) for subject, build in known
        )
    if run.kind == "bench":
        rules["an output check"] = all(map(is_checked, run.record.measurements))
    if run.kind == "preprocess" and run.record.throughput:
        rules["rounds of preprocessing"] = hold_rounds(run.record.throughput)
    return rules


def is_earlier(previous, created):
    """Whether an earlier sign-off is possible."""
    return not previous or (
        datetime.fromisoformat(previous.created_utc) <= datetime.fromisoformat(created)
        and all(figure.low <= figure.value <= figure.high for figure in previous.figures.values())
    )


def is_counted(at, run):
    """Whether a run of the build may have chosen it."""
    return run.kind in ("bench", "evaluate") and at.id in run.parents


def check_records(at, runs, wanted):
    """The rules of §2.1, each with the record that breaks it; `wanted` is the policy's [build]."""
    request, names = at.request, {run.name for run in at.runs}
    checked = [
        build
        for build in at.builds.values()
        if build.kind == "verification" and at.id in build.parents
    ]
    gone = [request.removed, request.other_file]
    since = request.since and datetime.fromisoformat(request.since)
    rules = {
        "the request": all(len({*runs}) == len(runs) and not {*runs} & names for runs in gone)
        and not (since and since > datetime.fromisoformat(request.created_utc))
        and len(checked) <= request.verifications <= 10**6
        and is_earlier(request.get("previous"), request.created_utc)
        and re.fullmatch("([0-9a-f]{64})?", request.get("verifier") or "") is not None
        and 0 < request.baselines <= 10**6
        and (request.get("candidates") or {}).keys()
        <= {run.name for run in at.runs if is_counted(at, run)}
        and all(0 < count <= 10**6 for count in (request.get("candidates") or {}).values())
        and (
            request.baseline is not None
            or (
                (request.baseline_artifact, request.get("baseline_network")) == (None, None)
                and not any(run.place.startswith("baseline/") for run in runs)
            )
        ),
        "names": request.model == at.build.info.model,
        "the judged build": all(
            wanted.get(key) in (None, at.build.info[key]) for key in ("backend", "precision")
        ),
    }
    broken = [("request.json", name) for name, holds in rules.items() if not holds]
    known = {"artifact": break_artifact, "verification": break_verification}
    broken += [*find_other_facts([*at.builds.values(), *runs])]
    broken += [*find_other_predictions(at, at.runs)]
    for build in at.builds.values():
        kept = known[build.kind](build) if build.kind in known else {}
        if build.kind == "verification":
            rows = at.table(f"{build.place}/errors.parquet", "errors")
            kept["the largest values"] = has_one_best(rows, "reference_best", "output_best")
        kept |= break_names(build, at.builds)
        broken += [(build.place, name) for name, holds in kept.items() if not holds]
    for run in runs:
        kept = break_run(run, at.builds)
        if run.kind == "evaluate":
            kept |= break_rows(at, run) | break_data(at, run)
        if run.kind == "preprocess":
            rows = at.table(f"{run.place}/images.parquet", "images")
            kept |= break_preprocessing(at, run)
            kept["the largest values"] = has_one_best(rows, "reference_class", "dali_class")
        broken += [(run.place, name) for name, holds in kept.items() if not holds]
    for record in (*at.builds.values(), *runs):
        for name, file in record.files.items():
            path = at.path(f"{record.place}/{name}")
            right = file.size_bytes >= 0 and (
                not path.is_file() or path.lstat().st_size == file.size_bytes
            )
            broken += [] if right else [(record.place, f"the size of {name}")]
    for place, name in broken:
        at.check(False, f"{place}: contradicts itself or another record (§2.1): {name}")


def check_dates(at, runs):
    rows = [("request.json: policy_utc", at.request.policy_utc or at.request.created_utc)]
    rows += [
        (record.place, record.started_utc, record.finished_utc)
        for record in (*at.builds.values(), *runs)
    ]
    rows += [
        (measurement.place, run.started_utc, measurement.started_utc, run.finished_utc)
        for run in runs
        for measurement in run.measured
    ]
    for place, *times in rows:
        every = [*map(datetime.fromisoformat, (*times, at.request.created_utc)), datetime.now(UTC)]
        late = any(a > b + timedelta(minutes=1) for a, b in pairwise(every))
        at.check(not late, f"{place}: its dates are not in order: {', '.join(map(str, every))}")


def read_evidence(at, document):
    """Checks the records one by one, and selects what counts."""
    request = at.request = at.json("request.json")
    at.compare(
        "request.json",
        request | {"keys": sorted({*request, "candidates", "previous"})},
        {"schema_version": 1, "keys": KEYS["request.json"]},
    )
    if request.verifier != digest(Path(__file__).read_bytes()):
        at.stated.append(
            f"the dossier names another version of this program: {request.verifier or 'none'}"
        )
    at.policy, at.id, at.builds = (
        parse(document["confidence"], "fraction"),
        request.artifact,
        read_builds(at),
    )
    at.build, other, sides = (
        at.builds[at.id],
        {name: build for name, build in at.builds.items() if name != at.id},
        [],
    )
    for folder, builds, needed in (
        ("runs", at.builds, at.id),
        ("baseline/runs", other, request.baseline_artifact),
    ):
        places = [f"{folder}/{path.name}" for path in sorted((at.folder / folder).glob("*/"))]
        sides.append([read_run(at, place, builds, {needed}) for place in places])
        check_copies(at, sides[-1], folder)
    at.runs, at.newest = sides[0], sorted(sides[0], key=lambda run: run.started_utc, reverse=True)
    at.baseline = [
        measurement
        for run in sides[1]
        for measurement in run.measured
        if measurement.artifact == request.baseline_artifact
    ]
    about = {
        run.name: len(run.record["measurements" if run.kind == "bench" else "speedups"])
        for run in at.runs
        if run.kind in ("bench", "turns") and at.id in run.parents
    }
    at.check(request.measurements == about, f"request.json: measurements are not {about}")
    check_records(at, [*chain(*sides)], document.get("build", {}))
    check_dates(at, [*chain(*sides)])
    check_stamp(at)
    registered = document.get("evidence", {}).get("preregistered") and (
        request.policy_utc or request.created_utc
    )
    at.early = {
        run.name
        for run in at.runs
        for first in (registered, run.kind == "bench" and request.since)
        if first and datetime.fromisoformat(run.started_utc) < datetime.fromisoformat(first)
    }
    every = [
        measurement
        for run in at.runs
        for measurement in run.measured
        if measurement.artifact == at.id
    ]
    options = as_texts(document.get("build", {}).get("options", {})).items()
    at.left_out = [measurement for measurement in every if measurement.run in at.early]
    at.measured = [
        measurement
        for measurement in every
        if measurement.run not in at.early and options <= measurement.settings.items()
    ]
    runs_of = Counter(
        key for key, _ in {(measurement.key, measurement.run) for measurement in every}
    )
    turns = [run for run in at.runs if run.kind == "turns" and run.record.judged.artifact == at.id]
    turns.sort(key=lambda run: run.name)
    at.turns = [
        run for run in turns if run.name not in at.early and options <= run.settings.items()
    ]
    model = at.builds.get((*at.build.parents, None)[0], {"recipe": {}})["recipe"].get("model", {})
    at.model_sha256 = digest(model | {"batch": None, "shapes": None})
    at.parts = count_looks(at, max(runs_of.values(), default=0), len(turns))
    checks = [
        verification
        for verification in at.builds.values()
        if verification.kind == "verification" and at.id in verification.parents
    ]
    checks.sort(  # §8.3
        key=lambda verification: (
            verification.recipe.get("artifact", {}).get("sha256") != at.build.engine,
            (False, None, True).index(verification.info.passed),
            inf if verification.info.snr_db is None else verification.info.snr_db,
            verification.id,
        )
    )
    at.verification = (*checks, None)[0]


def count_looks(at, benched, turns):  # §9
    """By the kind of evidence, the number by which its looks divide the error."""
    about = {kind: [] for kind in ("evaluate", "preprocess", "profile")}
    for run in at.runs:
        if run.kind in about and (run.kind == "preprocess" or at.id in run.parents):
            about[run.kind].append(run)
    data = [(run.record.dataset.sha256, run.record.get("task")) for run in about["evaluate"]]
    images = {
        (run.record.images.folder, *at.table(f"{run.place}/images.parquet", "images")["image"])
        for run in about["preprocess"]
        if is_of_model(at, run.record)
    }
    judged = next(iter(rank_evaluations(at)), None)
    builds = {
        row.artifact
        for run, drawn in zip(about["evaluate"], data)
        for row in run.record.results
        if judged and row.artifact and drawn == data[about["evaluate"].index(judged)]
    }
    at.check(
        min(at.request.baselines, at.request.verifications) > 0,
        "request.json: fewer than one baseline or verification",
    )
    counts = {
        "bench": benched,
        "turns": turns,
        "evaluate": len({*data}),
        "preprocess": len(images),
        "profile": len(about["profile"]),
        "outputs": at.request.verifications,
    }
    removed = Counter(name.partition("-")[0] for name in at.request.removed)
    looks = {kind: max(1, count + removed[kind]) for kind, count in counts.items()}
    looks["regression"] = looks["bench"] + at.request.baselines - 1
    together = [
        {
            measurement.subject.artifact
            for measurement in run.record.measurements
            if to_key(measurement) == key
        }
        for run in at.runs
        if is_judged_bench(at, run) and not run.comparison
        for key in {to_key(measurement) for measurement in run.record.measurements}
    ]
    candidates = at.request.get("candidates") or {}
    measured = max(
        [1, *(len(artifacts) for artifacts in together if at.id in artifacts)]
        + [candidates.get(run.name, 1) for run in at.runs if is_judged_bench(at, run)]
    )
    evaluated = max(1, len(builds), candidates.get(judged.name, 1) if judged else 1)
    parts = {
        kind: look * (look + 1) * (max(2, look) if kind in OF_SAMPLES else 2) // 2
        for kind, look in looks.items()
    }
    shared = {"evaluate": evaluated, "bench": measured, "regression": measured}
    return parts | {kind: parts[kind] * count for kind, count in shared.items()}


def is_judged_bench(at, run):
    return run.kind == "bench" and run.name not in at.early


OF_SAMPLES = ("evaluate", "preprocess", "outputs")
LOOKS = {  # kinds of looks by section; the others are looks at bench runs
    "regression": "regression",
    "speedup": "turns",
    "accuracy": "evaluate",
    "scores": "evaluate",
    "preprocessing": "preprocess",
    "tensor_cores": "profile",
    "outputs": "outputs",
}


def examine(folder):
    """The findings about a dossier, and its recomputed verdict; None if it is too damaged."""
    at, verdict, document = Dossier(folder), None, {"confidence": "95%", "name": "unnamed policy"}
    try:
        check_seal(at)
        if not at.differs:
            document |= read_toml(at, "policy.toml")
            require_policy(document)
            read_evidence(at, document)
            verdict = judge_dossier(at, document)
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        OSError,
        zlib.error,
        polars.exceptions.PolarsError,
    ) as error:
        at.differs.append(f"not in the format: {type(error).__name__}: {error}")
    return at, verdict


def main():
    if {"-h", "--help"} & {*sys.argv[1:]}:
        return print(__doc__.strip()) or 0
    folder = Path(*sys.argv[1:2])
    if len(sys.argv) != 2:
        return (
            print("usage: python3 verify_dossier.py DOSSIER (--help explains)", file=sys.stderr)
            or 2
        )
    if not (folder / SUMS).is_file():
        return print(f"{folder}: not a dossier (no {SUMS})", file=sys.stderr) or 2
    at, verdict = examine(folder)
    at.stated.append("prose and renderings are not compared, and §11")
    for word, lines in (("differs", at.differs), ("open", at.open), ("stated", at.stated)):
        for line in lines:
            print(
                f"{word}: {''.join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)}"
            )
    state = "DIFFERS" if at.differs else "AGREED in part" if at.open else "AGREED"
    print(f"{state}: {folder.name}, verdict {verdict or 'not recomputed'} (format 1)")
    return 1 if at.differs else 5 if at.open else 0


if __name__ == "__main__":
    sys.exit(main())
