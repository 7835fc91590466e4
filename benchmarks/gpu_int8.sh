#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: INT8 beside FP16 and FP32, calibrated on the GPU.
# usage: bash benchmarks/gpu_int8.sh OUTPUT_DIRECTORY
#   about four minutes, at most five; every step has a time limit and a failing one does not stop the others. Writes
#   STEP.out, STEP.err and JSON documents, and prints the tables last. The workspace is OUTPUT_DIRECTORY/workspace unless
#   OPTPIPE_WORKSPACE names another (of which only what is missing is built).
set -u
out=${1:?usage: bash benchmarks/gpu_int8.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
export PYTHONPATH=pipeline:benchmarks${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=${OPTPIPE_WORKSPACE:-$out/workspace} COLUMNS=160
limit=300
step() { # name, seconds, then a command; no step goes beyond the limit of the whole
  local name=$1 allowed=$2 left=$((limit - SECONDS))
  shift 2
  [ "$left" -lt 5 ] && { echo "== $name: not started, no time left" | tee "$out/$name.out"; return; }
  timeout -s INT -k 5 $((allowed < left ? allowed : left)) "$@" >"$out/$name.out" 2>"$out/$name.err"
  echo "== $name (exit $?, ${SECONDS} s so far)"
}
optpipe="python3 -m optpipe"
on_gpu="--backend onnxruntime --device cuda"
# The trained network: as built by default (options that a graph does not run with are switched off), then INT8 with NHWC
# insisted on (refused where ONNX Runtime cannot run it) and insisted off, and all that were built evaluated together
step digits-build 45 $optpipe build digits --precision fp32,fp16,int8 $on_gpu
step digits-nhwc-build 30 $optpipe build digits --precision int8 $on_gpu --option onnxruntime.nhwc=true
step digits-nchw-build 30 $optpipe build digits --precision int8 $on_gpu --option onnxruntime.nhwc=false
step digits-evaluate-json 30 $optpipe evaluate digits --accuracy-budget 1.0% --json
step digits-table 10 python3 - "$out/digits-evaluate-json.out" <<'PYTHON'
import os, sys
from pathlib import Path

from optpipe.core.entries import ArtifactInfo
from optpipe.core.records import read_record
from optpipe.evaluate.result import Evaluation
from optpipe.workspace.store import Store

store = Store(Path(os.environ["OPTPIPE_WORKSPACE"]))
print("digits, trained, 800 validation images, ONNX Runtime CUDA")
print("precision layout   top-1   drop (95 %)            agreement  SNR to source  INT8 share  verdict for 1.0 points")
for row in read_record(Path(sys.argv[1]), Evaluation).results:
    accuracy = row.accuracy
    if row.artifact is None:
        print(f"source            {accuracy.top1:.2%}")
        continue
    info = store.find(row.artifact, ArtifactInfo).info
    head = f"{row.precision:9} {'NHWC' if info.options['nhwc'] else 'NCHW':6}"
    if row.why_not:
        print(f"{head}  cannot run: {row.why_not[:150]}")
        continue
    low, high = accuracy.drop_ci
    snr = "equal" if row.snr_db is None else f"{row.snr_db:.1f} dB"
    share = info.precision_proof.share.macs.get("int8", 0.0)
    print(
        f"{head}  {accuracy.top1:7.2%}  {100 * accuracy.drop:+6.2f} ({100 * low:+.2f} … {100 * high:+.2f})"
        f"  {row.agreement.share:9.2%}  {snr:>13}  {share:10.0%}  {row.verdict}"
    )
PYTHON
# ResNet-50: random weights, the profile holds batch 256. INT8 ends with status 1: nothing is computed in INT8 there, and it says so.
step resnet50-build 80 $optpipe build resnet50 --weights random --precision fp32,fp16,int8 $on_gpu --batch 1:64:256 --calibration calibration/samples
step times 75 python3 benchmarks/gpu_int8_times.py "$out"
step calibration 60 python3 benchmarks/gpu_calibration.py "$out"
step gpu-tests 40 python3 -m pytest -q -m gpu tests/gpu/calibrators -p no:cacheprovider
for name in resnet50-build times digits-build digits-nhwc-build digits-nchw-build digits-evaluate-json digits-table calibration gpu-tests; do
  echo "== $name"
  [ "$name" = digits-evaluate-json ] || tail -n 25 "$out/$name.out" | cut -c1-200
  [ -f "$out/$name.err" ] && grep -v ': [0-9.]* m\?s$\|from the store$' "$out/$name.err" | tail -n 4 | cut -c1-300
done
