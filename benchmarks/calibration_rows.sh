#!/usr/bin/env bash
# All parts of calibration_of_intervals.py in parallel, no GPU needed.
# usage: calibration_rows.sh FOLDER [SECONDS] [SCALE]     writes FOLDER/calibration_of_intervals.jsonl and .log
set -u
folder=$1 seconds=${2:-840} scale=${3:-3}
mkdir -p "$folder"
"${PYTHON:-python}" benchmarks/calibration_of_intervals.py --scale "$scale" --processes "$(nproc)" --seconds "$seconds" \
  --rows "$folder/calibration_of_intervals.jsonl" > "$folder/calibration_of_intervals.log" 2>&1
tail -n 30 "$folder/calibration_of_intervals.log"
