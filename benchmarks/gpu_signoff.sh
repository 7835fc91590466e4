#!/usr/bin/env bash
# The dossier of record: a ResNet-50 with trained weights from nothing to a verdict on its INT8 build, on a machine with an NVIDIA GPU,
# offline, within ten minutes, with the validity limits as they are. Run from the project's root; CUDA_VISIBLE_DEVICES and `taskset`
# choose the GPU and the cores. Writes OUTPUT_DIRECTORY/dossier (to go whole to reports/), the JSON document and the log of every step,
# times.txt, and prints the verdict last. The build is tuned for the judged batch sizes alone, and measuring ends END_S seconds after the
# start: of a load whose time is up the processes that ended count.
# usage: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY
#        DRY=1 bash benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY   the same steps on a CPU, small and short, by a looser policy
# The report's figures need altair, vl-convert-python, jinja2, narwhals, jsonschema, jsonschema-specifications, referencing,
# rpds-py, attrs, packaging and typing-extensions; where they are missing the dossier is made without figures, and says so.
set -u
out=${1:?usage: benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
work=.optpipe/signoff-of-record # relative: no path of the machine ends up in the dossier
rm -rf "$work" && mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$work/workspace COLUMNS=150
python=${PYTHON:-python3}
: >"$out/times.txt"
step() { # name, seconds, then the arguments of optpipe: one JSON document, and what it printed to stderr
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  timeout "$limit" "$python" -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s, $SECONDS s so far" | tee -a "$out/times.txt"
  if [ $status -ne 0 ]; then
    grep -m 1 '"message"' "$out/$name.json"
    grep -iE "warning|error|optpipe:" "$out/$name.log" | head -n 3
  fi
  return $status
}
name=resnet50-digits
model=$work/model/$name.toml
policy=$work/policy.toml
validation=$work/model/validation
if [ -n "${DRY:-}" ]; then
  side=64 epochs=${EPOCHS:-3} device=cpu backend=onnxruntime tray=4 large=8 rate=20 energy="" # no counter without a GPU
  sed -e '/^\[environment\]/,$d' -e '/^\[\[energy\]\]/,/^$/d' -e "s/backend = .*/backend = \"$backend\"/" -e 's/batch_size = 64/batch_size = 8/; s/batch_size = 16/batch_size = 4/' \
    -e 's/"[0-9]* ms"/"900 ms"/; s/"500 queries/"20 queries/; s/"[0-9]* images/"5 images/; s/maximum_drop = "1 /maximum_drop = "9 /; s/"90%"/"20%"/' \
    reports/examples/resnet50-int8.toml >"$policy"
  cv="--max-cv 900%" # a busy machine, where only the steps are tried
else
  side=224 epochs=${EPOCHS:-40} device=cuda backend=inductor tray=16 large=64 rate=500 energy=--energy cv=""
  sed "s/^gpu = .*/gpu = \"$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)\"/" reports/examples/resnet50-int8.toml >"$policy"
fi
range="--batch $tray:$tray:$large"
build="$model --device $device --backend $backend --precision int8 $range --calibration $work/model/train"
bench="bench $name --backend $backend --precision int8 --set keep-going=true $cv"

timeout 200 "$python" benchmarks/trained_resnet50.py "$work/model" --side $side --epochs $epochs >"$out/train.log" 2>&1
echo "train: exit $?, $SECONDS s so far, $(tail -n 1 "$out/train.log")" | tee -a "$out/times.txt"
step build 300 build $build --images "$validation"
step evaluate 100 evaluate "$model" $range --data "$validation"
measure() { # like step, until END_S
  local left=$((${END_S:-530} - SECONDS))
  [ $left -gt 10 ] && step "$1" $left $bench "${@:2}" || echo "$1: not complete" | tee -a "$out/times.txt"
}
measure bench-energy --batch $large --mode compute $energy --processes 4 --min-time 2 --max-time 15 --percentile 50
measure bench-server --batch $tray --mode compute --scenario server --rate $rate --processes 4 --min-time ${SERVER_S:-24} --max-time 30

rm -rf "$out/dossier"
step signoff 60 signoff $name --no-measure --policy "$policy" --output "$out/dossier"
[ -d "$out/dossier" ] || step signoff-plain 30 signoff $name --no-measure --policy "$policy" --output "$out/dossier" --no-figures
step verify 30 verify "$out/dossier"
grep -rlE "$PWD|/tmp/|/root/|$HOME" "$out/dossier" | head -n 5 | sed 's/^/names a path of this machine: /'
"$python" - "$out/signoff.json" "$out/signoff-plain.json" <<'EOF'
import json, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    document = json.loads(path.read_text()) if path.is_file() and path.stat().st_size else {}
    if "criteria" in document:
        print("\n".join(f"{one['verdict']:<13} {one['name']:<40} {one['limit']:<28} {one['reason'][:100]}" for one in document["criteria"]))
        print(document["verdict"], document["dossier"])
EOF
du -sh "$out/dossier"
