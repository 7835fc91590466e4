#!/usr/bin/env bash
# On a machine with two or more NVIDIA GPUs of one kind, from the project's root: what a sweep over them is worth, and whether its
# figures stay true. usage: benchmarks/gpu_sweep.sh OUTPUT_DIRECTORY [cpu]     about 7 minutes on 2 GPUs; 3 files come back
#   build     three networks with random weights in two precisions
#   many      60 jobs on all GPUs
#   one       half of them on one GPU: the wall clock (with what the others took) and the figures taken alone
#   other     some of them on the second GPU alone: A/A
# With `cpu` the same on this machine's processors in two parts, with a tiny model.
set -u
out=${1:?usage: benchmarks/gpu_sweep.sh OUTPUT_DIRECTORY [cpu]}
mkdir -p "$out"
work=$(mktemp -d)
export PYTHONPATH=pipeline${PYTHONPATH:+:$PYTHONPATH}
if [ "${2:-gpu}" = cpu ]; then
  models=digits batches=1,2,4,8 all=fp32,fp16 half=fp32 where="--gpu cpu --set cpu-slots=2" one="--set slots=1" other=(env)
else
  models="resnet50 resnet18 resnext50_32x4d" batches=1,2,4,8,16,24,32,48,64,128 all=fp16,fp32 half=fp16
  where="--profile 1:64:128 --weights random" one="" other=(env CUDA_VISIBLE_DEVICES=1)
fi
pace="--backend onnxruntime --processes 1 --min-time 0.4 --set warm-up=0.3 --set max-warm-up=2 --max-time 4 --set percentile=90"
step() { # seconds allowed, name, workspace, then the arguments of optpipe sweep; the JSON document goes to NAME.json
  local allowed=$1 name=$2 begun=$SECONDS
  timeout -s INT -k 20 "$allowed" "${prefix[@]}" python3 -m optpipe sweep --workspace "$work/$3" "${@:4}" $where $pace \
    --set job-timeout=150 --set lock-timeout=20 --json >"$work/$name.json" 2>"$work/$name.log"
  echo "== $name: exit $?, $((SECONDS - begun)) s, ${SECONDS} s so far"
  grep -v '^sweep of' "$work/$name.log" | tail -n 5 | cut -c1-300
}
prefix=(env)
step 200 build built $models --precision $all --batch 1
for each in many one other; do # what is built; the times of its jobs order the next sweeps, which measure all --again
  mkdir -p "$work/$each"
  for part in store built jobs runs; do [ ! -d "$work/built/$part" ] || cp -r "$work/built/$part" "$work/$each/"; done
done
step 200 many many --again $models --precision $all --batch $batches --set loads-per-process=10
[ -n "$one" ] || prefix=(env CUDA_VISIBLE_DEVICES=0)
step 200 one one --again $models --precision $half --batch $batches --set loads-per-process=10 $one
prefix=("${other[@]}")
step 80 other other --again ${models%% *} --precision $half --batch $batches --set loads-per-process=10 $one
for name in many one other; do cp "$work/$name.json" "$out/sweep-$name.json"; done
python3 benchmarks/gpu_sweep_table.py "$out" | tee "$out/summary.md"
rm -rf "$work"
