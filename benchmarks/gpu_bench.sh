#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, from the project's root: measures ResNet-50 there with `optpipe bench`.
# usage: benchmarks/gpu_bench.sh OUTPUT_DIRECTORY [PART ...]      default: all of
#   build 2 min · smoke 0.5 min · ort 8 min · torch 4 min · inductor 4 min · loops 5 min · scenarios 4 min · energy 1 min · pair 4 min
# The workspace is OUTPUT_DIRECTORY/workspace unless OPTPIPE_WORKSPACE says otherwise; parts may run in separate calls.
set -u
out=${1:?usage: benchmarks/gpu_bench.sh OUTPUT_DIRECTORY [PART ...]}
shift
parts=${*:-build smoke ort torch inductor loops scenarios energy pair}
mkdir -p "$out"
export PYTHONPATH=pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=${OPTPIPE_WORKSPACE:-$out/workspace}
step() { # seconds allowed, name, then the arguments of optpipe; the JSON document goes to NAME.json, the rest to NAME.log
  local allowed=$1 name=$2
  shift 2
  timeout -s INT "$allowed" python3 -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  echo "== $name: optpipe $* (exit $?, ${SECONDS} s so far)"
  tail -n 3 "$out/$name.log" | cut -c1-300
}
sweep() { # seconds allowed, backend, precision: every batch size
  step "$1" "sweep-$2-$3" bench resnet50 --backend "$2" --precision "$3" --device cuda --batch 1:256 $fast
}
fast="--min-time 0.6 --set warm-up=0.3 --percentile 90 --set max-warm-up=3 --max-time 6"
random="resnet50 --weights random --device cuda --batch 1:64:256" # the sweep goes to batch 256, so the profile must hold it
for part in $parts; do
  case $part in
    build)
      step 120 build-ort build $random --precision fp32,tf32,fp16 --backend onnxruntime
      step 150 build-inductor build $random --precision fp16 --backend inductor & # compiling keeps the processor busy and
      step 100 build-torch build $random --precision fp32,fp16 --backend torch &  # the GPU hardly at all
      step 100 build-int8 build $random --precision int8 --backend onnxruntime --calibration calibration/samples &
      wait
      ;;
    smoke) step 60 smoke bench resnet50 --backend onnxruntime --precision fp16 --batch 1,8 $fast ;;
    ort) for precision in fp16 int8 tf32 fp32; do sweep 170 onnxruntime $precision; done ;;
    torch) for precision in fp16 fp32; do sweep 130 torch $precision; done ;;
    inductor) sweep 220 inductor fp16 ;;
    loops)
      timeout 330 python3 benchmarks/gpu_loops.py "$OPTPIPE_WORKSPACE" "$out/loops.json" fp16 1 64 256 >"$out/loops.log" 2>&1
      echo "== loops (exit $?, ${SECONDS} s so far)"
      ;;
    scenarios)
      some="bench resnet50 --backend onnxruntime --precision fp16"
      step 40 end-to-end $some --mode end-to-end --batch 1,64 $fast
      step 40 offline $some --scenario offline --batch 64,256 $fast
      step 40 multi-stream $some --scenario multi-stream --streams 4 --batch 1,8 $fast
      step 150 server $some --scenario server --batch 1 --slo p99=2ms --min-time 1 --max-time 20 --percentile 99
      step 60 slo $some --slo p99=5ms --batch 1:256 --min-time 1 --percentile 99
      ;;
    energy) step 60 energy bench resnet50 --backend onnxruntime,inductor --precision fp16 --batch 64 --energy --percentile 90 ;;
    pair) step 220 pair bench resnet50 --backend inductor --against torch --precision fp16 --batch 64 --rounds 8 --min-time 0.5 --percentile 90 ;;
    *) echo "unknown part $part" ;;
  esac
done
python3 benchmarks/gpu_bench_table.py "$out"
