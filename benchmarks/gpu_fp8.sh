#!/usr/bin/env bash
# FP8 against FP16 on AOTInductor, ViT-B/16 and BERT-base (128 tokens) at batches 1, 8 and 64, on a GPU of compute capability 8.9 or later.
# Run from the project's root. What matters most comes first; every finished step is a JSON document in OUTPUT_DIRECTORY, the same
# command resumes, and the table is printed at the end, also when time is up: `gpu_pairs_table.py OUTPUT_DIRECTORY` prints it again.
# usage: bash benchmarks/gpu_fp8.sh OUTPUT_DIRECTORY
#        DRY=1 bash benchmarks/gpu_fp8.sh OUTPUT_DIRECTORY   two small transformers on a CPU
# Estimated from reports/h200 (AOTInductor about 75 s a package, 4.4 s a process of a pair): per network 4 min to build (FP16, FP8, and FP16
# once more, which FP8 is timed against: these ratios at each batch size are the first result, with no process of their own) and 1 min
# per pair; 14 min in all, 7 min for ViT alone (MODELS=vit).
out=${1:?usage: bash benchmarks/gpu_fp8.sh OUTPUT_DIRECTORY}
. benchmarks/gpu_steps.sh
work=.optpipe/fp8-pairs # relative, and kept for the next start
mkdir -p "$work"
export OPTPIPE_WORKSPACE=$work/workspace
mkdir -p "$OPTPIPE_WORKSPACE"
trap '"$python" benchmarks/gpu_pairs_table.py "$out"' EXIT
if [ -n "${DRY:-}" ]; then
  "$python" -c "
from pathlib import Path
from tests.fakes.fp8_models import BERT, VIT
Path('$work/vit.py').write_text(VIT), Path('$work/bert.py').write_text(BERT)"
  vit=$work/vit.py:make bert=$work/bert.py:make device=cpu sizes="4 1" rounds=8 quick="--min-time 0.2 --set max-warm-up=1 --percentile 50 --max-cv 900%"
  vit_build="" bert_build=""
else
  "$python" -c "
from pathlib import Path
from gpu_auto import write_bert
write_bert(Path('$work'))"
  vit=vit_b_16 bert=$work/bert.toml device=cuda sizes="64 8 1" rounds=8 quick="--min-time 0.5 --percentile 90 --max-cv 10%"
  vit_build="--weights random --batch 1:8:64 --calibration calibration/samples" bert_build="--calibration $work/tokens.npz"
fi
for name in ${MODELS:-vit bert}; do
  model=${!name} options=${name}_build
  build_step build-$name 420 build "$model" --backend inductor --device $device --precision fp16,fp8 ${!options}
  "$python" - "$out/build-$name.json" <<'EOF'
import json, os, sys
from pathlib import Path

path = Path(sys.argv[1])
for each in json.loads(path.read_text())["artifacts"] if path.is_file() else ():
    manifest = json.loads((Path(each["path"]).parent / "manifest.json").read_text())
    for batch, speed in manifest["info"]["details"].get("against_fp16", {}).items():
        print(f"  built: batch {batch}, {speed['speed']:.3f} ({speed['low']:.3f} to {speed['high']:.3f}) times the speed of fp16")
EOF
done
for name in ${MODELS:-vit bert}; do
  for size in $sizes; do
    step pair-$name-$size 200 bench "${!name}" --backend inductor --precision fp8 --against fp16 --batch $size --rounds $rounds $quick
  done
done
