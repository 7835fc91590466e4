#!/usr/bin/env bash
# What each DALI setting does to pixels and speed on a GPU; not needed for the record. About 4 minutes.
# usage, from the project's root: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_dali_settings.sh OUTPUT
set -u
out=${1:?output directory}; mkdir -p "$out"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
timeout 60 python3 benchmarks/photographs.py "$work/photographs" 4096
timeout 240 python3 benchmarks/dali_settings.py "$work/photographs" "$out" 2> "$out/stderr.txt" | tee "$out/table.txt"
tail -c 2000 "$out/stderr.txt" >&2
