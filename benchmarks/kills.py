"""Kills commands, most of them after they stored their first entry, and runs each again: it has to succeed, and nothing may be lost.

usage: kills.py FOLDER [KILLS [FIRST]]     200 by default; a run that was stopped goes on where it was, and FIRST numbers its first case

Every third kill hits `build`, `calibrate`, `preprocess`, or `evaluate` within 0.6 s of the first entry or run that they store, every
eighth `run` or `sweep` at any moment of their first ten seconds, the others any command that writes, in its first three seconds.
After each kill the workspace is whole; after each second run what was there before still is. FOLDER/kills.jsonl has a line for each.
Commands are forked from a process that has imported the libraries, so that kills hit work and not imports, which
tests/integration/test_kills.py kills too.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import onnx
from tests.fakes.graphs import onnx_model
from tests.integration import test_kills
from tests.integration.conftest import optpipe
from tests.integration.fork_server import ForkedCommand

SIGNALS = (signal.SIGKILL,) * 8 + (signal.SIGTERM, signal.SIGINT)
STORING = ("build", "calibrate", "preprocess", "evaluate")
DONE = (0, 1, 5)
LONGEST_S = 90


def list_more_commands(case):
    """What starts from two artifacts, a dossier, or another workspace."""
    quick = ("--min-time", "0.2", "--max-cv", "90%")
    return [
        (
            "profile",
            "digits",
            "--stage",
            "inference",
            "--precision",
            "fp32",
            "--backend",
            "onnxruntime",
            "--iterations",
            "5",
        ),
        (
            "bench",
            "digits",
            "--precision",
            "fp32",
            "--against",
            "int8",
            "--batch",
            "1",
            "--rounds",
            "8",
            "--set",
            "keep-going=true",
            *quick,
        ),
        (
            "bench",
            "digits",
            "--from-images",
            test_kills.IMAGES,
            "--precision",
            "fp32",
            "--min-time",
            "1",
        ),
        (
            "sweep",
            "digits",
            "--precision",
            "fp32",
            "--backend",
            "onnxruntime",
            "--batch",
            "1,2",
            "--processes",
            "1",
            "--again",
            *quick,
        ),
        ("store", "merge", "other"),
        ("signoff", "approve", "signed", "--because", "kills"),
        ("signoff", "attest", "signed", "--key", "key.pem", "--output", f"attested/{case}"),
        ("deploy", "signed", "--to", "folder", "--because", "kills", "--output", f"served/{case}"),
    ]


def prepare_more(folder):
    """INT8 beside FP32, a dossier, a key and another workspace."""
    where = ("--backend", "onnxruntime", "--device", "cpu")
    optpipe("build", "digits", "--precision", "int8", *where, cwd=folder).expect(0)
    pace = ("--no-profile", "--max-cv", "90%", "--output", "signed")
    signed = optpipe(
        "run", "digits", "--policy", "policy.toml", "--backend", "onnxruntime", *pace, cwd=folder
    )
    assert signed.status in (0, 5), signed.stderr
    write_key(folder / "key.pem")
    shutil.copytree(folder / ".optpipe", folder / "other")


def write_key(path):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    path.write_bytes(pem)


def list_stored(folder):
    """The names of all entries and runs, finished or not."""
    return {
        path.name for kind in ("store", "runs") for path in (folder / ".optpipe" / kind).glob("*-*")
    }


def write_network(path, seed):
    """A network of its own name, so that `digits` remains the only one that is called so."""
    draw = np.random.default_rng(seed)
    weights = {
        name: draw.standard_normal(shape).astype(np.float32)
        for name, shape in {"w": (16, 3, 3, 3), "v": (4, 16)}.items()
    }
    steps = (
        ("Conv", "x w", "c", {"pads": [1, 1, 1, 1]}),
        ("GlobalAveragePool", "c", "p"),
        ("Flatten", "p", "f"),
        ("Gemm", "f v", "y", {"transB": 1}),
    )
    onnx.save(onnx_model(steps, {"x": ["n", 3, 8, 8]}, {"y": ["n", 4]}, **weights), path)


def choose(folder, case, rng):
    """A command, and the kind of its kill."""
    write_network(folder / f"net{case}.onnx", case)
    build = ("build", f"net{case}.onnx", "--precision", "fp32", "--backend", "onnxruntime")
    others = [*test_kills.list_commands(case), *list_more_commands(case)]
    commands = [build, *(each for each in others if each[0] != "build")]
    if case % 8 == 0:
        return next(
            each for each in commands if each[0] == ("run", "sweep")[case // 8 % 2]
        ), "whole"
    if case % 3 == 0 or case % 8 == 1:
        kind = STORING[case // 3 % len(STORING)]
        return next(each for each in commands if each[0] == kind), "stored"
    return rng.choice(commands), "any"


def kill_once(folder, case, rng):
    """What was killed, when, and whether something had been stored by then."""
    command, kind = choose(folder, case, rng)
    number, before = rng.choice(SIGNALS), list_stored(folder)
    delay_s = rng.uniform(*{"whole": (0.05, 10.0), "stored": (0.0, 0.6), "any": (0.05, 3.0)}[kind])
    (folder / "stderr.txt").write_bytes(b"")
    process = ForkedCommand([*command], folder, folder / "stderr.txt")
    began = time.monotonic()
    while kind == "stored" and process.poll() is None and list_stored(folder) <= before:
        if time.monotonic() > began + LONGEST_S:
            break
        time.sleep(0.01)
    try:
        process.wait(delay_s)
        stored, begun = False, True
    except subprocess.TimeoutExpired:
        stored = not list_stored(folder) <= before
        begun = test_kills.handles_signals(process.pid)
        process.send_signal(number)
    status = test_kills.wait_for_all(process, command, number)
    told = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
    return {
        "case": case,
        "command": " ".join(command),
        "kind": kind,
        "signal": number.name,
        "status": status,
        "stored": stored,
        "killed": status in (130, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT),
        "traceback": begun and "Traceback" in told,
        "after_s": round(time.monotonic() - began, 2),
    }, command


def main():
    folder, kills = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if sys.argv[2:] else 200
    first = int(sys.argv[3]) if sys.argv[3:] else 0
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "kills.jsonl"
    if not log.exists():
        (folder / "policy.toml").write_text(test_kills.POLICY)
        where = ("--backend", "onnxruntime", "--device", "cpu")
        optpipe("build", "digits", "--precision", "fp32", *where, cwd=folder).expect(0)
        prepare_more(folder)
        log.touch()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for case in range(first + len(rows), first + kills):
        rng = random.Random(case)
        known = test_kills.list_finished(folder)
        row, command = kill_once(folder, case, rng)
        after = test_kills.list_finished(folder, known)
        again = optpipe(*command, cwd=folder)
        whole = test_kills.list_finished(folder, known)
        row["lost"] = [] if "gc" in command else sorted((known - after) | (known - whole))
        row |= {"again": again.status, "said": "" if again.status in DONE else again.stderr[-600:]}
        rows.append(row)
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if row["lost"] or row["traceback"] or again.status not in DONE:
            print(json.dumps(row), flush=True)
    require_last_outputs(folder, first + kills)
    report(rows)


def require_last_outputs(folder, kills):
    """What killed commands wrote elsewhere has the files that the same command writes when it is not killed."""
    for command in (*test_kills.list_commands(kills), *list_more_commands(kills)):
        if command[-1].startswith(("attested/", "served/", "compared/")):
            ran = optpipe(*command, cwd=folder)
            assert ran.status in DONE or "exists" in ran.stderr, ran.stderr
    test_kills.require_whole_outputs(folder, str(kills))


def report(rows):
    killed = [row for row in rows if row["killed"]]
    of = Counter(row["command"].split()[0] for row in killed)
    print(f"{len(killed)} of {len(rows)} commands were killed at work: {dict(of)}")
    print(f"after the first stored entry or run: {sum(row['stored'] for row in killed)}")
    print(f"run again with success: {sum(row['again'] in DONE for row in killed)}")
    print(f"lost something: {sum(bool(row['lost']) for row in rows)}")
    print(f"tracebacks: {sum(row['traceback'] for row in rows)}")


if __name__ == "__main__":
    main()
