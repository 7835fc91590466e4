"""Wrong use of the commands: one or two lines with the option, the reason and the way out, before anything long begins."""

import os
import shlex

import pytest

POLICY = 'schema = 1\nname = "digits"\nmodel = "digits"\n[size]\nmaximum = "1 MiB"\n'
CASES = """
bench nothing | optpipe build nothing
bench digits --precision int8 | optpipe build digits --precision int8
bench digits --backend onnxruntime --batch 100000 | build digits --precision fp32 --backend onnxruntime --batch 1:256:100000
bench digits --batch 0 | --batch
bench digits --slo 15ms | p99=15ms
bench digits --scenario server | --rate
bench digits --scenario nonsense | single-stream
bench digits --streams 4 | multi-stream
bench digits --device cuda | no NVIDIA GPU
build digits --device cuda | no NVIDIA GPU
build digits --backend tensorrt | uv sync
bench digits --backend nonsense | choose from
bench digits --option onnxruntime.threads=some | a whole number
bench digits --option onnxruntime.threads=99999999999999999999 | at most 2147483647
bench digits --set keep-going=perhaps | true or false
bench digits --option onnxruntime.nonsense=1 | nonsense
bench digits --max-cv no | --max-cv
bench digits --percentile 100 | --percentile
bench '' | MODEL is empty
bench deadbeef0000 | `optpipe store ls` lists IDs
profile deadbeef0000 | `optpipe store ls` lists IDs
calibrate artifact-0123 | `optpipe store ls` lists IDs
evaluate 0123456789ab | `optpipe store ls` lists IDs
build deadbeef0000 | `optpipe store ls` lists IDs
run deadbeef0000 --policy size.toml | `optpipe store ls` lists IDs
signoff deadbeef0000 --policy size.toml | `optpipe store ls` lists IDs
sweep deadbeef0000 | `optpipe store ls` lists IDs
preprocess deadbeef0000 | `optpipe store ls` lists IDs
build . | .: is a folder
bench ./ | ./: is a folder
bench nobody/nothing | give hf:nobody/nothing
build ./nothing | ./nothing: no such file
build some.pt | FILE.py:FACTORY --weights some.pt
bench some.pt | FILE.py:FACTORY --weights some.pt
bench digit | which has builds of digits
bench digits --max-cv -5% | --max-cv -5%: is not a valid limit
bench digits --max-cv '' | --max-cv '': is not a share
bench digits --from-images . | no images in this folder
compare nosuch | no measurements in
build digits --precision fp32 --backend onnxruntime --option tensorrt.nosuch=1 | tensorrt has no option 'nosuch'
build digits --precision fp32 --backend onnxruntime --option inductor.static_batches=many | static_batches
build digits --precision fp32 --backend onnxruntime --option torch.threads=some | a whole number
build digits --precision fp32 --backend onnxruntime --option tensorrt.optimization_level=9 | 0 to 5
build digits --precision fp32 --backend onnxruntime --option tensorrt-rtx.timing_cache=file | it times no kernels
build digits --precision auto --backend onnxruntime --option torch-tensorrt.plugins=a.so | torch-tensorrt has no option 'plugins'
build digits --backend tensorrt-rtx --option tensorrt-rtx.cuda_graph=false | bench --option tensorrt-rtx.cuda_graph=false
bench digits --backend onnxruntime --option tensorrt.nosuch=1 | tensorrt has no option 'nosuch'
bench digits --backend onnxruntime --option inductor.threads=-1 | at least 0
bench digits --from-images . --option torch.nosuch=1 | torch has no option 'nosuch'
profile digits --option inductor.nosuch=1 | inductor has no option 'nosuch'
run digits --policy size.toml --option tensorrt.nosuch=1 | tensorrt has no option 'nosuch'
sweep digits --precision fp32 --backend onnxruntime --option inductor.nosuch=1 | inductor has no option 'nosuch'
sweep digits --precision fp32 --backend onnxruntime --build-option torch.threads=some | a whole number
profile --against '' -- true | --against: is empty
profile digits --against '' | --against: is empty
profile --trace '' | the path is empty
profile --range '' -- true | --range: is empty
profile --output '' -- true | the path is empty
build digits --calibration '' | the path is empty
build digits --images '' | the path is empty
build digits --init '' | the path is empty
build digits --budget '' | --budget
build digits --option '' | BACKEND.KEY=VALUE
build digits --shape '' | --shape
build digits --weights '' | --weights
calibrate digits --data '' | the path is empty
calibrate digits --method '' | choose from
calibrate digits --output '' | the path is empty
evaluate digits --data '' | the path is empty
evaluate digits --task '' | --task: is empty
evaluate digits --layers '' | --layers: is empty
evaluate digits --accuracy-budget '' | --accuracy-budget
preprocess digits --images '' | the path is empty
preprocess digits --against '' | --against: is empty
bench digits --against '' | --against: is empty
bench digits --resume '' | the path is empty
bench digits --images '' | the path is empty
bench digits --from-images '' | the path is empty
bench digits --affinity '' | --affinity
bench digits --set '' | NAME=VALUE
compare '' | it is empty
compare --model '' | --model: is empty
compare --baseline '' | --baseline: is empty
compare --output '' | the path is empty
compare --slo '' | p99=15ms
signoff digits --policy '' | the path is empty
signoff digits --policy size.toml --artifact '' | --artifact: is empty
signoff digits --policy size.toml --since '' | --since: is empty
signoff digits --policy size.toml --output '' | the path is empty
signoff digits --policy size.toml --sign '' | the path is empty
signoff digits --policy size.toml --timestamp '' | --timestamp: is empty
signoff digits --policy size.toml --waive '' --because 'a reason' | cannot waive unknown criterion ''
signoff '' --policy size.toml | it is empty
signoff approve '' | the path is empty
signoff approve there --by '' --role r --sign k | --by: is empty
signoff approve there --because '' | --because: is empty
signoff recheck there --python '' | the path is empty
signoff stamp there --timestamp '' | --timestamp
signoff attest there --key k --output '' | the path is empty
run digits --policy '' | the path is empty
run digits --policy size.toml --data '' | the path is empty
verify '' | the path is empty
verify there --badge '' | the path is empty
verify there --audit '' | expected COUNT
deploy '' --output there | the path is empty
deploy there --output '' | the path is empty
deploy --check '' | --check: is empty
deploy there --output out --because '' | --because: is empty
deploy there --output out --to kserve --storage-uri '' | --storage-uri: is empty
deploy there --output out --prove --server '' | --server: is empty
sweep '' | empty
sweep digits --matrix '' | the path is empty
sweep digits --store '' | --store: is empty
sweep digits --calibration '' | --calibration: is empty
sweep digits --shard '' | --shard
store merge '' | it is empty
store show '' | it is empty
store rm '' | it is empty
store ls --workspace '' | the path is empty
store ls --workspace= | the path is empty
bench digits --processes 99999999999 | 1000
build digits --option torch.threads=1 --option torch.threads=2 | torch.threads is given twice
build digits --shape images=1x1x28x28 --shape images=2x1x28x28 | --shape: each input may be given once
bench digits --set seed=1 --set seed=2 | seed is given twice
bench digits --slo '' | p99=15ms
bench digits --batch '' | 1:256
bench digits --precision '' | fp32
bench digits --backend '' | choose from
bench digits --set warm-up=nan | warm-up
bench digits --set warm-up=inf --set max-warm-up=inf | warm-up
bench digits --min-time inf --max-time inf | --min-time
bench digits --scenario server --rate nan | --rate
bench digits --scenario server --rate inf | --rate
bench digits --scenario server --rate 5 --slo p99=5ms | mutually exclusive
bench digits --scenario server --slo p99=5ms --batch 1,4 | --batch 4
bench digits --set seed=-1 | seed=-1
bench digits --affinity 0-99999999999 | --affinity
bench digits --affinity 0- | --affinity
bench digits --from-images . --slo p99=1s | --from-images cannot be combined with --slo p99=1s
bench digits --from-images . --min-time nan | greater than 0
bench digits --from-images . --option onnxruntime.streams=2 | no option 'streams'
preprocess digits --set decode=gpu | expected one of auto, cpu, mixed
preprocess digits --batch-size 0 | must be between 1 and
preprocess digits --batch-size 1000000000 | must be between 1 and
preprocess digits --set threads=100000 | must be between 1 and
preprocess digits --set seconds=nan | greater than 0
preprocess digits --set seconds=-1 | greater than 0
preprocess digits --limit 0 | at least 1
preprocess digits --against none.py:transform | no such Python file; give FILE.py:NAME
preprocess digits --output there | --output requires --against
signoff digits | signoff requires MODEL and --policy FILE
signoff digits --policy none.toml | cannot read policy none.toml
signoff digits --policy size.toml --waive size.maximum | --waive requires a one-line --because TEXT
signoff digits --policy size.toml --waive size.maximum --because "---" | --waive requires a one-line --because TEXT
calibrate digits --method median | choose from max, percentile
calibrate digits --set target=tpu | tpu
calibrate digits --set seed=-1 | seed
evaluate digits --data none | none
sweep nothing-of-this-name --precision fp32 | unknown model
sweep digits --precision fp9 | fp9
sweep digits --shard 3/2 | --shard 3/2
sweep digits --matrix /no/such.toml | /no/such.toml
sweep digits --on slurm | slurm
sweep digits --scenario fast | --scenario fast: choose from
sweep digits --scenario server --rate x | --rate x: expected positive numbers
sweep digits --gpu cpu --set cpu-slots=10000 | cpu-slots=10000: only
sweep | no model to sweep
sweep --dry-run nothing.onnx | nothing.onnx: no such file
signoff --init --output there | --output is for the dossier; signoff --init --policy there writes the template there
profile --trace before.json | before.json: no such file
compare | no measurements
compare --slo p99=15 | has no unit
compare --for glory | is not one of 'latency', 'throughput', 'efficiency'
verify nowhere | does not exist
verify . | create a dossier with optpipe signoff
run digits --policy none.toml | cannot read policy
build digits --precision auto --budget 5 | the number has no unit; write 5pt or 5dB
build digits --precision auto --compare-at 999 | outside the profile
build digits --precision auto,fp32 | give it alone
build digits --backend inductor --precision fp32 --option inductor.static_batches=2,9999 | 9999 is outside the profile
build digits --precision auto --backend tensorrt | cannot be a candidate on this machine
build digits --precision fp32 --budget 0.5points | --budget applies to fp16, int8, fp8; add one
"""
MISSING = ("no NVIDIA GPU", "uv sync", "--set cpu-slots=2", "cannot be a candidate on this machine")
"""What ends with status 3: something is missing on this machine."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, exported):
    return exported(tmp_path_factory.mktemp("bad") / "workspace")


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_wrong_use_is_one_or_two_lines_with_its_status(
    workspace, inside, tmp_path, monkeypatch, case
):
    command, said = case.split(" | ")
    if "cuda" in command and os.path.exists("/dev/nvidia0"):  # noqa: PTH110
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("OPTPIPE_WORKSPACE", str(workspace))
    (tmp_path / "size.toml").write_text(POLICY)
    (tmp_path / "some.pt").write_bytes(b"PK")
    ran = inside(*shlex.split(command), cwd=tmp_path)
    assert ran.status == (3 if said in MISSING else 2), ran.stderr
    assert said in " ".join(
        (ran.stderr + ran.stdout).split()
    )  # a failed build of one precision is a row of the result
    assert len(ran.stderr.splitlines()) <= 3, "what is refused warns of nothing"
