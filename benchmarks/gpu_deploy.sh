#!/usr/bin/env bash
# What a Triton server adds to ResNet-50 FP16 on an NVIDIA GPU: the bundled server, optpipe's session behind its Python backend,
# latency at three loads and throughput at three concurrencies, with and without dynamic batching. Run from the project's root;
# five to six minutes (DRY: three and a half on two busy cores).
# usage: OPTPIPE_TRITON=DIR bash benchmarks/gpu_deploy.sh OUTPUT_DIRECTORY      DRY=1: digits on a CPU, short
# Writes the JSON of every step: batching-NAME.json has in-process and server latency and throughput.
set -u
out=${1:?usage: benchmarks/gpu_deploy.sh OUTPUT_DIRECTORY}
: "${OPTPIPE_TRITON:?an environment with nvidia-pytriton: .ci/install-triton DIR}"
mkdir -p "$out"
export PYTHONPATH=$PWD/pipeline${PYTHONPATH:+:$PYTHONPATH} OPTPIPE_WORKSPACE=$out/workspace COLUMNS=150
python=${PYTHON:-python3}
step() { # seconds allowed, name, then the arguments of optpipe
  local allowed=$1 name=$2
  shift 2
  timeout -s INT "$allowed" "$python" -m optpipe "$@" --json >"$out/$name.json" 2>"$out/$name.log"
  echo "== $name: exit $?, $SECONDS s so far"
  tail -n 2 "$out/$name.log" | cut -c1-300
}
if [ -n "${DRY:-}" ]; then
  model=digits options="--precision fp32 --backend onnxruntime --device cpu" rates="50 200" seconds=2
else
  model=resnet50 options="--precision fp16 --backend torch --device cuda --weights random --batch 1:8:64" rates="100 400" seconds=8
fi
{
  printf 'schema = 1\nname = "server cost"\n[[latency]]\np99 = "50 ms"\nbatch_size = 1\nscenario = "single-stream"\n'
  for rate in $rates; do printf '[[latency]]\np99 = "50 ms"\nbatch_size = 1\nscenario = "server"\nrate = "%s queries/s"\n' "$rate"; done
} >"$out/policy.toml"
step 240 build build $model $options
step 120 bench bench $model --batch 1,8,64 --processes 3 --min-time 0.5 --max-time 5 --max-cv 25%
step 60 signoff signoff $model --policy "$out/policy.toml" --no-measure --no-figures --output "$out/dossier"
deploy="deploy $out/dossier --no-ensemble --because measuring"
step 180 batching-on $deploy --output "$out/on" --prove --seconds $seconds
step 180 batching-off $deploy --no-batching --output "$out/off" --prove --seconds $seconds
"$python" - "$out" <<'END'
import json, pathlib, sys
print("| batching | load | in-process p50, p99 ms | server p50, p99 ms | added mean ms |\n|---|---|---|---|---|")
for name in ("on", "off"):
    for cost in json.loads(pathlib.Path(sys.argv[1], f"batching-{name}.json").read_text())["proof"]["costs"]:
        def shown(found):
            values = [found["percentiles"].get(p, {}).get("value") for p in ("p50", "p99")]
            return ", ".join("-" if value is None else f"{value / 1e6:.2f}" for value in values)
        print(f"| {name} | {cost['load']} | {shown(cost['in_process'])} | {shown(cost['server'])} | {cost['added_ns'] / 1e6:.2f} |")
print("\n| batching | in flight | in-process, joined: requests/s | server: requests/s | server p50 ms |\n|---|---|---|---|---|")
for name in ("on", "off"):
    for each in json.loads(pathlib.Path(sys.argv[1], f"batching-{name}.json").read_text())["proof"]["throughputs"]:
        rates = [f"{one['value']:,.0f} ({one['low']:,.0f} to {one['high']:,.0f})" for one in (each["in_process"], each["server"])]
        p50 = each["latency"]["percentiles"].get("p50", {}).get("value")
        print(f"| {name} | {each['concurrency']} | {rates[0]} | {rates[1]} | {'-' if p50 is None else f'{p50 / 1e6:.2f}'} |")
END
