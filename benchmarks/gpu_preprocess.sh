#!/usr/bin/env bash
# DALI on a GPU: parity of mixed decoding and throughput, by setting. About 4 minutes.
# usage, from the project's root: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_preprocess.sh OUTPUT
set -u
out=${1:?output directory}; mkdir -p "$out"
photographs=$(mktemp -d)/photographs
trap 'rm -rf "$(dirname "$photographs")"' EXIT
echo "== photographs"; timeout 60 python3 benchmarks/photographs.py "$photographs" 4096
echo "== settings"; timeout 240 python3 benchmarks/gpu_preprocess.py "$photographs" "$out" 2> "$out/stderr.txt" | tee "$out/table.txt"
tail -c 2000 "$out/stderr.txt" >&2
