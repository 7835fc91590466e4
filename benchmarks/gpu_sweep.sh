#!/usr/bin/env bash
# On a host with several NVIDIA GPUs of one kind: what a sweep over them is worth, and whether its figures stay true.
# usage: benchmarks/gpu_sweep.sh OUTPUT_DIRECTORY [cpu]     about 8 minutes on four GPUs, at most BUDGET (520) seconds; 3 files come back
#   build     two networks with random weights in two precisions, each once, copied to the workspaces of all others
#   all       40 jobs on all GPUs            one    the same on one GPU: the wall clock, and every figure taken alone
#   kill      the same, with one GPU's worker killed in the middle; `rest` continues it
#   other     some of them on the last GPU alone: A/A
#   ray       the same on a Ray cluster of this host     half   the same on half of the GPUs (skipped on two, or if time is up)
#   merge     all rows in one workspace, then `compare`
# A failed step does not stop the next. With `cpu` the same on parts of this machine's processors, with a tiny model.
set -u
mkdir -p "${1:?usage: benchmarks/gpu_sweep.sh OUTPUT_DIRECTORY [cpu]}"
out=$(realpath "$1") here=$(realpath "$(dirname "$0")/..") work=$(mktemp -d)
exec > >(tee "$out/sweep-fleet.log") 2>&1
# Ray's workers start in another folder: every path is absolute. They also see Ray's own copies of packages: metadata with the
# names that decide an environment make it the same for them.
PYTHONPATH=$here/pipeline:$(python3 -c 'import os; print(":".join(os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each))')
if ! python3 -c 'import importlib.metadata; importlib.metadata.requires("optpipe")' 2>/dev/null; then
  mkdir -p "$work/path/optpipe-0.dist-info"
  { printf 'Metadata-Version: 2.1\nName: optpipe\nVersion: 0\n'
    for name in ray torch torchvision onnx onnxruntime-gpu nvidia-modelopt onnxslim numpy polars nvidia-ml-py; do echo "Requires-Dist: $name"; done
  } >"$work/path/optpipe-0.dist-info/METADATA"
  PYTHONPATH=$work/path:$PYTHONPATH
fi
export PYTHONPATH RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_worker_niceness=0 RAY_memory_monitor_refresh_ms=0
if [ "${2:-gpu}" = cpu ]; then
  count=$(python3 -c 'import os; print(min(4, len(os.sched_getaffinity(0))))') gpus=0 loads=2
  models=digits batches=1,2,3,4,6,8 all=fp32 some="digits --precision fp32" where="--gpu cpu --set cpu-slots=$count"
else
  count=$(python3 -c 'import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())') gpus=$count loads=5
  models="resnet50 resnext50_32x4d" batches=1,2,4,8,16,24,32,48,64,128 all=fp16,fp32 some="resnet50 --precision fp16"
  where="--profile 1:64:128 --set weights=random"
fi
pace="--backend onnxruntime --processes 1 --min-time 0.6 --set warm-up=0.3 --set max-warm-up=2 --max-time 4 --set percentile=90"
limits="--set loads-per-process=$loads --set job-timeout=150 --set lock-timeout=20 --set pending-timeout=60"
matrix="$models --precision $all --batch $batches"
reserve=45 # seconds kept for the last two steps
left() { echo $((${BUDGET:-520} - reserve - SECONDS)); }
run() { # seconds allowed, name, then the arguments of optpipe; the JSON document goes to NAME.json
  local allowed=$1 name=$2 begun=$SECONDS
  [ "$(left)" -gt "$allowed" ] || allowed=$(left)
  [ "$allowed" -gt 8 ] || { echo "== $name: left out, ${SECONDS} s so far"; return; }
  timeout -s INT -k 20 "$allowed" python3 -m optpipe "${@:3}" --json >"$work/$name.json" 2>"$work/$name.log"
  echo "== $name: exit $?, $((SECONDS - begun)) s, ${SECONDS} s so far"
  grep -v '^sweep of' "$work/$name.log" | tail -n 6 | cut -c1-400
}
sweep() { run "$1" "$2" sweep --workspace "$work/$3" "${@:4}" $where $pace $limits; }
prepare() { # a workspace with all builds; the times of their jobs order the next sweep
  mkdir -p "$work/$1"
  for part in store runs notes; do [ ! -d "$work/built/$part" ] || cp -r "$work/built/$part" "$work/$1/"; done
}
echo "$count slots, $(nproc) cores, $(date -u +%FT%TZ)"
nvidia-smi --query-gpu=index,uuid,name,driver_version,power.limit,pci.bus_id --format=csv,noheader 2>/dev/null
for bus in /sys/bus/pci/devices/*/numa_node; do
  [ "$(cat "${bus%numa_node}vendor" 2>/dev/null)" != 0x10de ] || echo "$bus $(cat "$bus")"
done
sweep 180 build built $models --precision $all --batch 1
for each in all one half ray kill other; do prepare $each; done
sweep 120 all all --again $matrix
sweep 230 one one --again $matrix --set slots=1
sweep 110 kill kill --again $matrix &
sweeping=$!
timeout -k 5 90 python3 "$here/benchmarks/gpu_sweep_table.py" kill "$work/kill" >"$work/killed.json" 2>"$work/killed.log" &
killing=$!
wait $sweeping
kill $killing 2>/dev/null
echo "== killed: $(cat "$work/killed.json")"
sweep 60 rest kill $matrix
[ "$gpus" = 0 ] && last="--set slots=1" || last=""
[ "$gpus" = 0 ] || export CUDA_VISIBLE_DEVICES=$((gpus - 1))
sweep 60 other other --again $some --batch $batches $last
unset CUDA_VISIBLE_DEVICES
python3 -m ray.scripts.scripts start --head --block --port 6391 --node-ip-address 127.0.0.1 --include-dashboard=false --disable-usage-stats \
  --num-cpus $((count + 4)) --num-gpus "$gpus" --object-store-memory 2000000000 </dev/null >"$work/start.log" 2>&1 &
cluster=$!
for _ in {1..60}; do grep -q 'Ray runtime started' "$work/start.log" || ! kill -0 $cluster 2>/dev/null || sleep 1; done
echo "== ray start: $(grep -c 'Ray runtime started' "$work/start.log") node, ${SECONDS} s so far"
RAY_ADDRESS=127.0.0.1:6391 sweep 130 ray ray --again $matrix --on ray
kill $cluster && wait $cluster
[ "$count" -lt 4 ] || sweep 130 half half --again $matrix --set slots=$((count / 2))
for each in all one half ray kill other; do [ -s "$work/$each.json" ] && sources="${sources:-} $work/$each"; done
reserve=0
run 60 merge store merge ${sources:-} --workspace "$work/merged"
run 40 compare compare --across --slo p90=20ms --workspace "$work/merged"
timeout -k 5 60 python3 "$here/benchmarks/gpu_sweep_table.py" table "$work" "$out" | tee "$out/sweep-fleet.md"
[ -s "$out/sweep-fleet.md" ] || tail -n 5 "$work"/*.log
rm -rf "$work"
