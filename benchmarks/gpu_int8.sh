#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: INT8 beside FP16 and FP32, calibrated on the GPU.
# usage: benchmarks/gpu_int8.sh OUTPUT_DIRECTORY        (about four minutes; writes JSON documents, prints the tables)
set -u
out=${1:?usage: benchmarks/gpu_int8.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
export PYTHONPATH=pipeline:benchmarks${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=${OPTPIPE_WORKSPACE:-$out/workspace}
step() { # name, seconds, then a command
  local name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" >"$out/$name.out" 2>"$out/$name.err"
  echo "== $name (exit $?, ${SECONDS} s so far)"
}
step gpu-tests 90 python3 -m pytest -q -m gpu tests/gpu/calibrators -p no:cacheprovider
step digits-build 90 python3 -m optpipe build digits --precision fp32,fp16,int8 --backend onnxruntime --device cuda
step digits-evaluate 60 python3 -m optpipe evaluate digits --accuracy-budget 1.0%
timeout 60 python3 -m optpipe evaluate digits --json >"$out/digits-evaluate.json" 2>/dev/null
step resnet50-build 150 python3 -m optpipe build resnet50 --weights random --precision fp32,fp16,int8 --backend onnxruntime --device cuda --calibration calibration/samples
step calibration 120 python3 benchmarks/gpu_calibration.py "$out"
step times 90 python3 benchmarks/gpu_int8_times.py "$out"
for name in gpu-tests digits-build digits-evaluate resnet50-build calibration times; do
  echo "== $name"
  tail -n 25 "$out/$name.out"
  tail -n 4 "$out/$name.err"
done
