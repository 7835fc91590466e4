#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: the dossier of record for ResNet-50, from build to verdict;
# about four minutes. Writes OUTPUT_DIRECTORY/dossier (under 5 MB, for reports/), compare/, and the JSON of every step.
# usage: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY
# The report's figures need altair, vl-convert-python, jinja2, narwhals, jsonschema, jsonschema-specifications, referencing,
# rpds-py, attrs, packaging and typing-extensions; where they are missing the dossier is made without figures, and says so.
set -u
out=${1:?usage: benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
work=.optpipe/signoff-on-a-gpu # relative: no path of the machine ends up in the dossier
rm -rf "$work" && mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$work/workspace COLUMNS=150
step() { # name, seconds, then the arguments of optpipe: one JSON document, and what it printed to stderr
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  timeout "$limit" python3 -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  status=$?
  echo "== $name: optpipe $* (exit $status, $((SECONDS - begin)) s, $SECONDS s so far)"
  grep -iE "warning|error|optpipe:" "$out/$name.log" | head -n 5
  return $status
}
options="--option onnxruntime.nhwc=true --option onnxruntime.cuda_graph=true"
build="resnet50 --weights random --device cuda --batch 1:8:256"
step build 90 build $build --precision fp32,fp16 --backend onnxruntime $options
timeout 30 python3 benchmarks/photographs.py "$work/photographs" 256 >"$out/photographs.log" 2>&1
short="--min-time 2 --max-time 12 --max-cv 10%"
step bench 70 bench resnet50 --backend onnxruntime --batch 1,8,64,256 --mode compute $short
step bench-energy 40 bench resnet50 --backend onnxruntime --precision fp16 --batch 64 --mode compute --energy --max-cv 10%
step bench-end-to-end 40 bench resnet50 --backend onnxruntime --precision fp16 --batch 1,64 --mode end-to-end $short
step preprocess 60 preprocess resnet50 --weights random --images "$work/photographs" --no-throughput
step profile 60 profile $build --precision fp16 --stage inference --backend onnxruntime $options --batch-size 64 --iterations 10
policy=reports/examples/resnet50-h200.toml
rm -rf "$out/dossier"
step signoff 60 signoff resnet50 --policy $policy --output "$out/dossier"
if [ ! -d "$out/dossier" ]; then
  step signoff-plain 60 signoff resnet50 --policy $policy --output "$out/dossier" --no-figures
fi
step compare 60 compare --model resnet50 --output "$out/compare" || step compare-plain 60 compare --model resnet50
step verify 60 verify "$out/dossier"
python3 -m optpipe verify "$out/dossier" 2>&1 | tail -n 40
du -sh "$out/dossier"
