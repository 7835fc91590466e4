#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: what limits ResNet-50 there, by runtime, batch size and CUDA
# graph, its layers and their Tensor Cores, and the DALI stage; five and a half minutes. Writes redacted results
# only: JSON documents (whole, and cut to what is worth keeping in `compact/`), one profile's tables, a table as text.
# usage: bash benchmarks/gpu_profile.sh OUTPUT_DIRECTORY
set -u
mkdir -p "${1:?usage: benchmarks/gpu_profile.sh OUTPUT_DIRECTORY}"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$work/workspace COLUMNS=140
nsys --version
step() { # name, then the arguments of optpipe: one JSON document, and what it printed to stderr
  local name=$1 begin=$SECONDS
  shift
  if ((SECONDS > 330)); then echo "== $name: left out, $SECONDS s are over"; return; fi
  timeout 90 python3 -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  echo "== $name: exit $?, $((SECONDS - begin)) s, $SECONDS s so far"
  grep -iE "warning|error|optpipe:" "$out/$name.log" | cut -c1-300 | head -n 5
}
run_dir() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["run_dir"])' "$out/$1.json"; }
resnet="profile resnet50 --weights random --device cuda --precision fp16 --batch 1:8:256 --iterations 30"
ort="--stage inference --backend onnxruntime --option onnxruntime.nhwc=true"
step ort-launches $resnet $ort --option onnxruntime.cuda_graph=false --batch-size 1,64
step ort-graph $resnet $ort --option onnxruntime.cuda_graph=true --batch-size 1,64
timeout 60 python3 benchmarks/photographs.py "$work/photographs" 1024 >/dev/null 2>&1
step dali $resnet --stage preprocess --backend onnxruntime --images "$work/photographs" --batch-size 64
step torch-graph $resnet --stage inference --backend torch --option torch.cuda_graph=true --batch-size 1,64
step torch-eager $resnet --stage inference --backend torch --option torch.cuda_graph=false --batch-size 1
step digits profile digits --device cuda --precision fp16 --backend onnxruntime --batch-size 64
step diff-graph profile --trace "$(run_dir ort-graph)/onnxruntime-fp16-batch-1" --against "$(run_dir ort-launches)/onnxruntime-fp16-batch-1"
cp -r "$(run_dir ort-launches)/onnxruntime-fp16-batch-1/tables" "$out/tables-ort-launches-batch-1"
python3 benchmarks/profile_table.py "$out" --compact "$out/compact" | tee "$out/table.md"
