#!/usr/bin/env bash
# Makes reports/gallery again: a FAIL, a comparison, and a profile. Needs no GPU; about four minutes on two cores.
# `python -m benchmarks.known.NAME` makes each of the others; the dossiers of record are reports/digits-cpu and reports/resnet50-h200.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OPTPIPE_WORKSPACE=$scratch/workspace
gallery=reports/gallery
mkdir -p "$gallery"
rm -rf "$gallery"/{fail,comparison,profile.txt} # profile-*-h200.txt are of a GPU: benchmarks/gpu_sources.sh

# Calibrated to the maximum, more predictions of pairs change than the policy allows. It has no limit on a time, so that any machine decides it.
optpipe calibrate pairs --method max --output "$scratch/tables"
optpipe build pairs --backend onnxruntime --precision int8 --calibration "$scratch"/tables/*max*.json
optpipe evaluate pairs
optpipe signoff pairs --policy reports/examples/pairs.toml --no-measure --output "$gallery/fail" || [ $? = 1 ]

# From the raw samples of the dossier, so the figures are those of the H200.
optpipe compare reports/resnet50-h200/runs/bench-* --output "$gallery/comparison"
rm "$gallery"/comparison/*.parquet "$gallery"/comparison/*.csv

optpipe build digits --backend onnxruntime --precision fp32
COLUMNS=120 optpipe profile digits --stage inference --backend onnxruntime --precision fp32 | grep -v "^run " > "$gallery/profile.txt"
