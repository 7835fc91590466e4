#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: builds and verifies ResNet-50 and digits there.
# usage: benchmarks/gpu_build.sh OUTPUT_DIRECTORY        (about four minutes; writes JSON documents, prints the tables)
set -u
out=${1:?usage: benchmarks/gpu_build.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
export PYTHONPATH=pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=${OPTPIPE_WORKSPACE:-$out/workspace}
step() { # name, then the arguments of optpipe
  local name=$1
  shift
  timeout 240 python3 -m optpipe "$@" >"$out/$name.log" 2>&1
  echo "== $name: optpipe $* (exit $?, ${SECONDS} s so far)"
}
three="onnxruntime,inductor,torch"
step doctor doctor
step resnet50 build resnet50 --precision fp32,fp16 --backend $three --device cuda
step resnet50-int8 build resnet50 --precision int8 --backend onnxruntime --device cuda --calibration calibration/samples
step digits build digits --precision fp32,tf32,fp16,bf16,int8 --backend onnxruntime,torch --device cuda
timeout 60 python3 -m optpipe build resnet50 --precision fp32,fp16 --backend $three --device cuda --json >"$out/resnet50.json" 2>/dev/null
for name in doctor resnet50 resnet50-int8 digits; do echo "== $name"; tail -n 40 "$out/$name.log"; done
