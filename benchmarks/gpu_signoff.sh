#!/usr/bin/env bash
# The dossier of record: a ResNet-50 with trained weights from nothing to a verdict on a machine with an NVIDIA GPU, offline,
# in about twelve minutes, five fresh processes for each load. Run from the project's root. Writes OUTPUT_DIRECTORY/dossier (6 MB, to go whole to
# reports/resnet50-h200), compare/, the JSON and the log of every step, times.txt, and prints the verdict last.
# usage: PYTHONPATH=pipeline:$PYTHONPATH bash benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY
#        DRY=1 bash benchmarks/gpu_signoff.sh OUTPUT_DIRECTORY   the same steps on a CPU, small and short, by a looser policy
# INT8 of the same network: gpu_int8_torch.sh.
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
policy=reports/examples/resnet50-h200.toml
validation=$work/model/validation
if [ -n "${DRY:-}" ]; then
  side=64 epochs=${EPOCHS:-3} device=cpu backend=${BACKEND:-onnxruntime} judged=${JUDGED:-int8} sizes=1,8 few=1 large=8 rate=40 limit=600
  options="--calibration $work/model/train"
  energy="" # no counter without a GPU
  policy=$work/policy.toml
  sed -e '/^\[environment\]/,$d' -e '/^\[\[energy\]\]/,/^$/d' -e '/^\[tensor_cores\]/,/^$/d' -e "s/fp16/$judged/; s/backend = .*/backend = \"$backend\"/" -e 's/batch_size = 64/batch_size = 8/' \
    -e 's/"[0-9.]* ms"/"900 ms"/; s/"1000 queries/"40 queries/; s/"[0-9]* images/"5 images/' reports/examples/resnet50-h200.toml >$policy
else
  side=224 epochs=${EPOCHS:-40} device=cuda backend=${BACKEND:-torch} judged=fp16 sizes=1,64 few=1,8,256 large=64 rate=1000 limit=500
  options=""
  energy=--energy
fi
timeout $limit "$python" benchmarks/trained_resnet50.py "$work/model" --side $side --epochs $epochs >"$out/train.log" 2>&1
echo "train: exit $?, $SECONDS s so far, $(tail -n 1 "$out/train.log")" | tee -a "$out/times.txt"
build="$model --device $device --backend $backend $options"
short="--min-time 2 --max-time 15 --max-cv 10%"
step build $limit build $build --precision fp32,$judged --images "$validation"

# Nothing here is timed, so it runs side by side.
step evaluate $limit evaluate "$model" --data "$validation" &
step preprocess $limit preprocess "$model" --images "$validation" --no-throughput &
wait

step bench-energy $limit bench $name --backend $backend --precision $judged --batch $large --mode compute $energy $short
step bench-judged $limit bench $name --backend $backend --precision $judged --batch $few --mode compute $short
step bench-baseline $limit bench $name --backend $backend --precision fp32 --batch $sizes --mode compute --percentile 90 $short
step bench-end-to-end $limit bench $name --backend $backend --precision $judged --batch 1 --mode end-to-end --min-time 2 --max-time 60 --max-cv 10%
step bench-server $limit bench $name --backend $backend --precision $judged --batch 1 --mode compute --scenario server --rate $rate --processes 8 --min-time 4 --max-time 30 --max-cv 25%
step profile $limit profile $build --precision $judged --stage inference --batch-size $large --iterations 10 --images "$validation"

rm -rf "$out/dossier"
step signoff $limit signoff $name --no-measure --policy "$policy" --output "$out/dossier"
[ -d "$out/dossier" ] || step signoff-plain $limit signoff $name --no-measure --policy "$policy" --output "$out/dossier" --no-figures
step compare $limit compare --model $name --output "$out/compare" &
step verify $limit verify "$out/dossier" &
wait
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
