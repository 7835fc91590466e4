#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root, in five minutes: what `optpipe profile` records there, and what it costs. Counters of ten
# kernels, each source alone on ResNet-50 FP16 and on a training loop, the difference of two profiles, performance per watt, 2:4 products.
# usage: bash benchmarks/gpu_sources.sh OUTPUT_DIRECTORY [SECONDS]      default 300: no step starts that may end later
# MODEL, DEVICE, PRECISION, BACKEND, BATCH, STEPS, SOURCES, and SPARSE change it, for a dry run on a CPU.
out=$(mkdir -p "${1:?usage: benchmarks/gpu_sources.sh OUTPUT_DIRECTORY [SECONDS]}" && cd "$1" && pwd)
total=${2:-300}
. benchmarks/gpu_steps.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OPTPIPE_WORKSPACE=$scratch/workspace COLUMNS=120 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
model=${MODEL:-resnet50} device=${DEVICE:-cuda} backend=${BACKEND:-torch} batch=${BATCH:-8} steps=${STEPS:-40}
sources=${SOURCES:-none all gpu-metrics os-calls cpu python}
build="$model --weights ${WEIGHTS:-random} --device $device --precision ${PRECISION:-fp16} --backend $backend --batch 1:8:64"
inference="$build --stage inference --batch-size $batch"
[ "$device" = cuda ] && inference="$inference --option torch.cuda_graph=false"

left() { echo $(($1 < total - SECONDS ? $1 : total - SECONDS)); } # seconds: at most what is left of all
limited() { # seconds, then a step: left out if it might not end in time
  if ((SECONDS + $1 > total)); then echo "left out, $SECONDS s are over: ${*:2:2}" | tee -a "$out/times.txt"; return; fi
  "${@:2}"
}
run_dir() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["run_dir"])' "$out/$1.json" 2>/dev/null; }

limited 15 run_step "$out/devices.txt" "$(left 25)" "$python" benchmarks/gpu_devices.py "$out/devices.json"
limited 20 step build "$(left 60)" build $build
limited 40 step counters "$(left 100)" profile $inference --iterations 20 --kernels 10
limited 30 run_step "$out/sources-model.txt" "$(left 110)" "$python" benchmarks/gpu_sources.py "$out/model" --steps 30 --seconds "$(left 60)" --sources $sources -- $inference
limited 25 run_step "$out/sources-loop.txt" "$(left 110)" "$python" benchmarks/gpu_sources.py "$out/loop" --steps "$steps" --seconds "$(left 60)" --sources "no profiler" $sources
for type in fp16 int8; do # apart, because no process goes on after an illegal instruction
  limited 8 run_step "$out/sparse-$type.txt" "$(left 30)" "$python" benchmarks/gpu_sparse.py "$out/sparse-$type.json" --types $type --seconds 10 ${SPARSE:-}
done
limited 12 step plain "$(left 40)" profile $inference --iterations 20
limited 4 step against "$(left 30)" profile $inference --iterations 20 --against "$(run_dir plain)"
limited 14 step energy "$(left 45)" bench $model --backend $backend --precision "${PRECISION:-fp16}" --device $device --batch "$batch" --energy --processes 1 --percentile 50 --max-time 15
for name in "$out"/*.json; do sed -i "s#$scratch#…#g" "$name"; done

echo; cat "$out/times.txt"; echo
cat "$out/devices.txt" "$out/sources-model.txt" "$out/sources-loop.txt" "$out"/sparse-*.txt 2>/dev/null
"$python" benchmarks/profile_table.py "$out"
