#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: what limits ResNet-50 there, by runtime, batch size and CUDA
# graph, and the DALI stage; about four minutes. Writes redacted results only: JSON documents and tables as text.
# usage: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_profile.sh OUTPUT_DIRECTORY
set -u
out=${1:?usage: benchmarks/gpu_profile.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$work/workspace COLUMNS=140
nsys --version
step() { # name, then the arguments of optpipe: one JSON document, and what it printed to stderr
  local name=$1 begin=$SECONDS
  shift
  timeout 150 python3 -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  echo "== $name: exit $?, $((SECONDS - begin)) s, $SECONDS s so far"
  grep -iE "warning|error|optpipe:" "$out/$name.log" | head -n 5
}
resnet="profile resnet50 --weights random --device cuda --precision fp16 --batch 1:8:256 --iterations 30"
ort="--stage inference --backend onnxruntime --option onnxruntime.nhwc=true"
step ort-launches $resnet $ort --option onnxruntime.cuda_graph=false --batch-size 1,64
step ort-graph $resnet $ort --option onnxruntime.cuda_graph=true --batch-size 1,64
step torch-eager $resnet --stage inference --backend torch --option torch.cuda_graph=false --batch-size 1,64
step torch-graph $resnet --stage inference --backend torch --option torch.cuda_graph=true --batch-size 1,64
timeout 60 python3 benchmarks/photographs.py "$work/photographs" 1024 >/dev/null 2>&1
step dali $resnet --stage preprocess --backend onnxruntime --images "$work/photographs" --batch-size 64
step build $resnet --stage export,quantize,build --backend onnxruntime
step ort-torch-profiler $resnet $ort --option onnxruntime.cuda_graph=false --batch-size 64 --tracer torch
step ort-ncu $resnet $ort --option onnxruntime.cuda_graph=false --batch-size 64 --iterations 5 --ncu
run_dir() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["run_dir"])' "$out/$1.json"; }
step diff-graph profile --diff "$(run_dir ort-launches)/onnxruntime-fp16-batch-1" "$(run_dir ort-graph)/onnxruntime-fp16-batch-1"
python3 benchmarks/profile_table.py "$out" | tee "$out/table.md"
