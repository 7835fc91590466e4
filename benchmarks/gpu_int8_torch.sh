#!/usr/bin/env bash
# INT8 in torch against FP16 on a trained ResNet-50: proof, pairs, torch.compile in one run, kernels by nsys, energy. From the project's root.
# What matters most comes first; every finished step is a JSON document in OUTPUT_DIRECTORY, the same command resumes, and a short
# table ends it, also when time is up.
# usage: bash benchmarks/gpu_int8_torch.sh OUTPUT_DIRECTORY
#        DRY=1 bash benchmarks/gpu_int8_torch.sh OUTPUT_DIRECTORY   the same steps with `digits` in ONNX Runtime on a CPU
# Estimated from reports/h200 (a training of 40 epochs 0.5 to 1 min, a build of both 1.8 min, 4.4 s a process of a pair, 7 s at batch 256):
# train and build 3 min; torch.compile beside both 3 min; pairs at 1 and 8 2.3 min, at 64 and 256 3.2 min; profile 1 min; energy 1.5 min;
# evaluate 0.5 min: 14 min in all. STEPS="build pairs" (of build, compile, pairs, profile, energy, evaluate) makes a part.
out=${1:?usage: bash benchmarks/gpu_int8_torch.sh OUTPUT_DIRECTORY}
. benchmarks/gpu_steps.sh
work=.optpipe/int8-torch # relative, and kept for the next start
export OPTPIPE_WORKSPACE=$work/workspace
mkdir -p "$OPTPIPE_WORKSPACE"
trap '"$python" benchmarks/gpu_pairs_table.py "$out"' EXIT
short="--min-time 2 --max-time 15 --max-cv 10%"
if [ -n "${DRY:-}" ]; then
  model=digits name=digits backend=onnxruntime device=cpu wider=fp32 data="" verified="" sizes="1 8" large=8 compiled=1,8 pair="--min-time 0.2 --set max-warm-up=1 --percentile 50 --max-cv 900%"
  energy="" short="--min-time 0.3 --set max-warm-up=1 --percentile 50 --max-cv 900%"
else
  model=$work/model/resnet50-digits.toml name=resnet50-digits backend=inductor device=cuda wider=fp16 sizes="1 8 64 256" large=64 compiled=64,256,1,8
  data="--calibration $work/model/train" verified="--images $work/model/validation" pair="--min-time 0.5 --percentile 90 --max-cv 10%" energy=--energy
  [ -f "$model" ] || timeout 200 "$python" benchmarks/trained_resnet50.py "$work/model" --side 224 --epochs 40 >"$out/train.log" 2>&1 || tail -n 2 "$out/train.log"
fi
build="$model --device $device --backend $backend $data"
[ $backend = inductor ] && build="$build --option inductor.static_batches=${sizes// /,}"
for part in ${STEPS:-build compile pairs profile energy evaluate}; do
  case $part in
    build) build_step build 300 build $build --precision $wider,int8 $verified ;;
    compile) run_step "$out/compile.json" 300 "$python" benchmarks/gpu_against_compile.py "$model" "$OPTPIPE_WORKSPACE" --device $device --batch $compiled --rows "$out/compile-rows.json" ;;
    pairs)
      for size in $sizes; do
        step pair-$size 200 bench "$name" --backend $backend --precision int8 --against $wider --batch $size --rounds 8 $pair
      done ;;
    profile) step profile 200 profile $build --precision int8 --stage inference --batch-size $large --iterations 10 $verified ;;
    energy) step energy 200 bench "$name" --backend $backend --precision $wider,int8 --batch $large --mode compute $energy $short --processes 3 ;;
    evaluate) step evaluate 200 evaluate "$model" ${verified:+--data $work/model/validation} ;;
  esac
done
