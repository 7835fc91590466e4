#!/usr/bin/env bash
# recheck's rates on digits: 20 comparisons with calls held back by 5 % and 20 of an environment with itself, in turn, from nothing.
# usage: bash benchmarks/recheck_rates.sh DIRECTORY [COMPARISONS]      half a minute for each
# Called again, it appends to what DIRECTORY has.
set -eu
out=${1:?usage: benchmarks/recheck_rates.sh DIRECTORY [COMPARISONS]} count=${2:-20}
mkdir -p "$out"
export PYTHONPATH=$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$out/workspace
python=${PYTHON:-python3}
if [ ! -d "$out/dossier" ]; then
  printf 'schema = 1\n[build]\nbackend = "onnxruntime"\n[build.options]\nthreads = 1\n[size]\nmaximum = "2 MiB"\n' >"$out/policy.toml"
  "$python" -m optpipe build digits --precision fp32 --backend onnxruntime --device cpu
  "$python" -m optpipe bench digits --batch 8 --processes 3 --min-time 0.3 --max-time 2 --percentile 50 --max-cv 400% --option onnxruntime.threads=1
  "$python" -m optpipe signoff digits --policy "$out/policy.toml" --no-measure --no-figures --output "$out/dossier"
fi
"$python" benchmarks/recheck_rates.py "$out/dossier" "$out/workspace" "$count" --output "$out"
