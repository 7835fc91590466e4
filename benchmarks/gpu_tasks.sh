#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: detectors and BERT-base in FP16, random weights, by `optpipe build` and `bench`.
# usage: benchmarks/gpu_tasks.sh OUTPUT_DIRECTORY [PART ...]      default: all of
#   bert: one build at 32, 128 and 512 tokens, 6 min; bert-128: a build of that length alone, 3 min · detr, retinanet (its raw
#   heads, NMS outside), each at batch 1: 5 min; detr-8 and so on: at a fixed batch of 8 · compile 5 min
# Not RT-DETR: with random weights the anchors at the border have equal scores, torch and ONNX Runtime choose others of them, and builds are refused.
# Each part has a workspace of its own; parts may run in separate calls. A short table comes last. STEPS=build only builds, which parts may
# do side by side, since nothing is timed; STEPS=bench measures what was built.
# DRY=1: in FP32 on the CPU with images of 128 pixels, to see that it works; the figures mean nothing.
set -u
out=${1:?usage: benchmarks/gpu_tasks.sh OUTPUT_DIRECTORY [PART ...]}
shift
parts=${*:-bert detr detr-8 retinanet retinanet-8 compile}
mkdir -p "$out"
device=cuda precision=fp16
if [[ -n ${DRY:-} ]]; then
  device=cpu precision=fp32
  export SIDE=${SIDE:-128}
fi
export PYTHONPATH=pipeline${PYTHONPATH:+:$PYTHONPATH}
fast="--processes 3 --min-time 0.5 --set warm-up=0.3 --percentile 90 --set max-warm-up=3 --max-time 6"
step() { # seconds allowed, name, then the arguments of optpipe; the JSON document goes to NAME.json, the rest to NAME.log
  local allowed=$1 name=$2
  shift 2
  timeout -s INT "$allowed" python3 -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  echo "== $name: optpipe $* (exit $?, ${SECONDS} s so far)"
  tail -n 3 "$out/$name.log" | cut -c1-300
}
lengths= allowed= # of sequences, and seconds, for bench
measure() { # part, model, batch sizes, then options of build
  local part=$1 model=$2 batches=$3
  shift 3
  local name=${model##*/}
  name=${name/.py:/.}
  export OPTPIPE_WORKSPACE="$out/workspace-$part"
  if [[ ${STEPS:-build} == *build* ]]; then
    step 300 "build-$part-ort" build "$model" --weights random --device $device --precision $precision --backend onnxruntime "$@"
    step 300 "build-$part-torch" build "$model" --weights random --device $device --precision $precision --backend torch,inductor "$@"
  fi
  [[ ${STEPS:-bench} == *bench* ]] && step "${allowed:-150}" "bench-$part" bench "$name" --device $device --precision $precision --batch "$batches" ${lengths:+--length "$lengths"} $fast
}
for part in $parts; do
  lengths= allowed=
  case $part in
    bert)
      python3 benchmarks/task_models.py bert "$out/bert-base"
      shapes=1x8:8x128:8x512 lengths=32,128,512 allowed=300
      measure bert "hf:$out/bert-base" 1,8 --shape "input_ids=$shapes" --shape "attention_mask=$shapes"
      ;;
    bert-*)
      length=${part#bert-}
      python3 benchmarks/task_models.py bert "$out/bert-base"
      shapes="1x$length:8x$length:8x$length"
      measure "$part" "hf:$out/bert-base" 1,8 --shape "input_ids=$shapes" --shape "attention_mask=$shapes"
      ;;
    # a build for one batch size each: torch.export of torch 2.11 limits DETR's batch to 3
    detr | retinanet) measure "$part" "benchmarks/task_models.py:$part" 1 --batch 1 ;;
    detr-8 | retinanet-8) measure "$part" "benchmarks/task_models.py:${part%-8}" 8 --batch 8 ;;
    compile) timeout 400 python3 benchmarks/task_models.py compile "$out/compiled.json" bert-128 detr bert-32 bert-512 retinanet >"$out/compile.log" 2>&1 ;;
    *) echo "unknown part $part" ;;
  esac
done
python3 - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
print(f"{'part':<12} {'backend':<12} {'batch':>5} {'length':>6} {'p50 ms':>9} {'tokens/s':>10}")
for path in sorted(out.glob("bench-*.json")):
    try:
        rows = json.loads(path.read_text())["measurements"]
    except (ValueError, KeyError) as error:
        print(f"{path.stem.removeprefix('bench-'):<12} no figures ({type(error).__name__})")
        continue
    for row in rows:
        quantiles = (row.get("latency_ns") or {}).get("percentiles") or {}
        p50 = quantiles.get("p50")
        value = p50.get("value") if isinstance(p50, dict) else p50
        shown = f"{value / 1e6:9.3f}" if value else "        –"
        length, tokens = row["load"].get("length"), row.get("throughput_tokens_per_s")
        shown += f" {tokens['value']:10,.0f}" if tokens else ""
        print(f"{path.stem.removeprefix('bench-'):<12} {row['subject']['backend']:<12} {row['load']['batch_size']:>5} {length or '–':>6} {shown}")
if (out / "compiled.json").is_file():
    for name, found in json.loads((out / "compiled.json").read_text()).items():
        print(f"{'torch.compile':<12} {name:<18} {found if isinstance(found, str) else f'{found:9.3f} ms'}")
PYTHON
