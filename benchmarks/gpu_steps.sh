# Sourced by scripts that measure on a lent GPU, which may go at any moment. Needs $out; sets $python.
# A step's JSON document is whole or absent, and a step whose document is there is not run again, so the same command resumes.
set -u
mkdir -p "$out"
export PYTHONPATH=$PWD/pipeline:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} COLUMNS=150
python=${PYTHON:-python3}
run_step() { # document, seconds, then a command whose standard output is the document
  local file=$1 limit=$2 begin=$SECONDS status
  shift 2
  [ -s "$file" ] && { echo "$(basename "$file" .json): done before" && return; }
  timeout -s INT -k 10 "$limit" "$@" >"$file.part" 2>"${file%.json}.log"
  status=$?
  echo "$(basename "$file" .json): exit $status, $((SECONDS - begin)) s, $SECONDS s so far" | tee -a "$out/times.txt"
  if [[ " 0 1 5 " == *" $status "* ]]; then mv "$file.part" "$file"; else grep -hE -m 3 'optpipe:|"message"|Error|failed' "${file%.json}.log" "$file.part"; fi
  return $status
}
step() { # name, seconds, then the arguments of optpipe
  local name=$1 limit=$2
  shift 2
  run_step "$out/$name.json" "$limit" "$python" -m optpipe "$@" --json
}
build_step() { # as `step`, done again where the workspace has gone with its machine
  [ -f "$OPTPIPE_WORKSPACE/$1.built" ] || rm -f "$out/$1.json"
  step "$@" && touch "$OPTPIPE_WORKSPACE/$1.built"
}
