#!/usr/bin/env bash
# The preprocessing record on a GPU host: parity of mixed decoding, DALI tuned against the best DataLoader, decoding
# alone, and files to answers overlapped. About 5 minutes.
# usage, from the project's root: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_preprocess.sh OUTPUT
set -u
out=${1:?output directory}; mkdir -p "$out"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export OPTPIPE_WORKSPACE=$work/workspace
failed=0
step() {  # NAME LIMIT_S COMMAND…: logs, goes on after a failure
  local name=$1 limit=$2 status began=$SECONDS; shift 2
  timeout "$limit" "$@" > "$out/$name.out" 2> "$out/$name.log"; status=$?
  echo "$name: exit $status, $((SECONDS - began)) s"
  case $status in 0|5) ;; *) failed=1; tail -n 5 "$out/$name.log" ;; esac
}
step photographs 60 python3 benchmarks/photographs.py "$work/photographs" 4096
step preprocess 300 python3 -m optpipe preprocess resnet50 --weights random --images "$work/photographs" --limit 1024 \
  --seconds 1.5 --json
step build 120 python3 -m optpipe build resnet50 --weights random --precision fp16 --backend onnxruntime --batch 1:64:256
step from-images 90 python3 -m optpipe bench resnet50 --from-images "$work/photographs" --device cuda --min-time 4 --json
step parity-presets 60 python3 benchmarks/preprocess_parity.py --mixed
for name in preprocess from-images; do mv "$out/$name.out" "$out/$name.json" 2>/dev/null; done
find "$work/workspace/runs" -name 'worst-1.png' -exec cp {} "$out/worst.png" \; 2>/dev/null
python3 benchmarks/preprocess_table.py "$out"
exit $failed
