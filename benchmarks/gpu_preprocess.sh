#!/usr/bin/env bash
# The preprocessing record on a GPU host, all in one run: parity of mixed decoding for three libraries' presets and of
# edge-case files (about 2 minutes); DALI tuned against the best DataLoader, files to predictions overlapped (about 3).
# usage, from the project's root: bash benchmarks/gpu_preprocess.sh OUTPUT [parity|record]
set -u
out=${1:?output directory}; part=${2:-all}; mkdir -p "$out"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/pipeline:${PYTHONPATH:-} OPTPIPE_WORKSPACE=$work/workspace
failed=0
step() {  # NAME LIMIT_S COMMAND…: logs, goes on after a failure
  local name=$1 limit=$2 status began=$SECONDS; shift 2
  timeout "$limit" "$@" > "$out/$name.out" 2> "$out/$name.log"; status=$?
  echo "$name: exit $status, $((SECONDS - began)) s, $SECONDS s so far"
  case $status in 0|5) ;; *) failed=1; tail -n 5 "$out/$name.log" ;; esac
}
count=4096; [ "$part" = parity ] && count=128
step photographs 60 python3 benchmarks/photographs.py "$work/photographs" "$count"
if [ "$part" != parity ]; then
  step build 120 python3 -m optpipe build resnet50 --weights random --precision fp16 --backend onnxruntime --batch 1:64:256
  step preprocess 200 python3 -m optpipe preprocess resnet50 --weights random --images "$work/photographs" --json
  for batch in 256 64; do
    step "end-to-end-$batch" 60 python3 -m optpipe bench resnet50 --from-images "$work/photographs" --device cuda \
      --batch "$batch" --seconds 4 --json
  done
fi
if [ "$part" != record ]; then
  step parity-presets 120 python3 benchmarks/preprocess_parity.py --mixed --images "$work/photographs" \
    --output "$out/parity-presets.json"
  step gpu-tests 60 python3 -m pytest -q -m gpu tests/gpu/test_preprocess_mixed.py
  cat "$out/parity-presets.out"; tail -n 3 "$out/gpu-tests.out"
fi
for name in preprocess end-to-end-256 end-to-end-64; do mv "$out/$name.out" "$out/$name.json" 2>/dev/null; done
find "$work/workspace/runs" -name 'worst-1.png' -exec cp {} "$out/worst.png" \; 2>/dev/null
[ "$part" = parity ] || python3 benchmarks/preprocess_table.py "$out"
exit $failed
