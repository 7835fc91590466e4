"""Damaged and forged files through the commands as users run them: no traceback, no hang, a status as documented, and every
forged figure found or named. Seeds are fixed; all in this process, for most of a command's time would be imports.
"""

import faulthandler
import itertools
import json
import os
import random
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from optpipe.cli.app import app
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.image_set import ImageSet, read_boxes
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.seal import seal_folder
from tests.fakes import mutations
from tests.integration.conftest import Ran, Signed

LIMIT_S = 60
CHUNKS = range(5)
"""Workers share the cases."""
ROOT = Path(__file__).parents[2]


class HangError(BaseException):
    """A case that ran past the limit."""


@contextmanager
def limit_time() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    faulthandler.dump_traceback_later(
        6 * LIMIT_S, exit=True
    )  # inside a library, where no handler runs
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def fuzz(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs a command here; a traceback or a hang is its standard error, with status -1."""
    os.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        status, crash = -1, ""
        try:
            with limit_time():
                app([*map(str, arguments)])
        except SystemExit as ended:
            status = int(ended.code or 0)
        except HangError:
            crash = f"HANG: no end within {LIMIT_S} s\n{traceback.format_exc()}"
        except BaseException:  # noqa: BLE001 - whatever comes this far is a finding
            crash = traceback.format_exc()
        out, err = capfd.readouterr()
        return Ran(status, out, crash or err)

    yield run
    os.chdir(ROOT)


def is_bad(ran: Ran, allowed: frozenset[int]) -> bool:
    text = ran.stdout + ran.stderr
    return ran.status not in allowed or "Traceback" in text or "\x1b" in text


def describe(case: object, ran: Ran) -> str:
    return f"case {case}: status {ran.status}\n{ran.stderr[-1500:]}"


CARD = """name = "net"
source = "source.onnx"
task = "classification"
labels = ["a", "b", "c", "d"]
description = "A small network."

[[inputs]]
name = "x"
dtype = "float32"
min = [1, 3, 8, 8]
opt = [2, 3, 8, 8]
max = [4, 3, 8, 8]

[[outputs]]
name = "y"
"""


POLICY = """schema = 1
model = "digits"
[build]
precision = "fp32"
[[latency]]
p50 = "900 ms"
batch_size = 1
[accuracy]
maximum_drop = "1 points"
[preprocessing]
minimum_agreement = "99 %"
[precision]
fp32 = "100 %"
[size]
maximum = "1 MiB"
"""
BUILD = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu")


def fuzz_onnx(fuzz, folder, rng, case) -> tuple[Ran, bool]:
    networks = mutations.list_networks()
    (folder / "net.onnx").write_bytes(mutations.mutate_onnx(networks[case % len(networks)], rng))
    return fuzz("build", "net.onnx", *BUILD, "--batch", "1:2:4"), is_valid(folder / "net.onnx")


def fuzz_card(fuzz, folder, rng, case) -> tuple[Ran, bool]:
    text = (find_shipped_folder("models") / "digits.toml").read_text()
    steps = text[text.index("[[preprocessing.steps]]") : text.index("[data]")]
    onnx.save(mutations.list_networks()[0], folder / "source.onnx")
    (folder / "net.toml").write_bytes(
        mutations.mutate_toml(CARD + re.sub(r"\b32\b", "8", steps), rng)
    )
    return fuzz("build", "./net.toml", *BUILD), True


def fuzz_policy(fuzz, folder, rng, case, walked) -> tuple[Ran, bool]:
    example = (ROOT / "reports" / "examples" / "digits.toml").read_text()
    texts = [example.replace('"int8"', '"fp32"').replace("int8 =", "fp32 ="), POLICY]
    (folder / "policy.toml").write_bytes(mutations.mutate_toml(texts[case % 2], rng))
    return fuzz(
        "signoff",
        "digits",
        "--policy",
        "policy.toml",
        "--no-measure",
        "--no-figures",
        "--output",
        f"dossier{case}",
        "--workspace",
        walked.workspace,
    ), True


def fuzz_npz(fuzz, folder, rng, case) -> tuple[Ran, bool]:
    onnx.save(mutations.list_networks()[0], folder / "net.onnx")
    arrays: dict[str, np.ndarray] = {"x": np.ones((8, 3, 8, 8), np.float32), "labels": np.arange(8)}
    (folder / "data.npz").write_bytes(mutations.mutate_npz(arrays, rng))
    return fuzz("build", "net.onnx", *BUILD, "--batch", "1:2:4", "--data", "data.npz"), True


def fuzz_coco(fuzz, folder, rng, case) -> tuple[Ran, bool]:
    """Read as `evaluate` reads it: no detector of four images is worth building 200 times."""
    (folder / "images").mkdir(exist_ok=True)
    for index in range(2):
        Image.new("RGB", (40, 20)).save(folder / "images" / f"{index}.png")
    document = {
        "images": [
            {"id": index, "file_name": f"{index}.png", "width": 40, "height": 20}
            for index in range(2)
        ],
        "categories": [
            {"id": index + 5, "name": name} for index, name in enumerate(("cat", "dog"))
        ],
        "annotations": [
            {
                "id": 1,
                "image_id": 0,
                "category_id": 6,
                "bbox": [1, 2, 9, 9],
                "area": 81,
                "iscrowd": 0,
            }
        ],
    }
    path = folder / "annotations.json"
    path.write_bytes(mutations.mutate_json(json.dumps(document), rng))
    transform = Transform((Decode(), Resize((8, 8), fit="exact"), Rescale(), Pack()))
    inputs = (InputSpec("x", "float32", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8)),)
    card = ModelCard(
        "net", "net.onnx", Task.DETECTION, inputs, transform=transform, labels=("cat", "dog")
    )
    try:
        samples, _ = load_sample_set(None, card, path, None, 0, SilentListener())
        assert isinstance(samples, ImageSet)
        read_boxes(samples, transform, card.labels, 2)
    except BadInputError as error:
        return Ran(2, "", str(error)), True
    return Ran(0, "", ""), True


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("damage", [fuzz_onnx, fuzz_card, fuzz_policy, fuzz_npz, fuzz_coco])
def test_mutated_files(fuzz, tmp_path, request, damage, chunk) -> None:
    """200 damaged files of each kind: refused with the file and the reason in one or two lines, or taken."""
    more = (request.getfixturevalue("walked"),) if damage is fuzz_policy else ()
    allowed, wrong, taken = frozenset((0, 1, 2, 3, 4, 5)), [], 0
    for case in range(chunk, 200, len(CHUNKS)):
        ran, valid = damage(fuzz, tmp_path, random.Random(case), case, *more)
        refusal = "\n".join(
            line for line in ran.stderr.splitlines() if line.startswith(("optpipe: ", "/"))
        )
        taken += ran.status in (0, 1, 5)
        if is_bad(ran, allowed if valid else frozenset((2,))) or len(refusal) > 1500:
            wrong.append(describe(case, ran))
        shutil.rmtree(tmp_path / ".optpipe", ignore_errors=True)
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong)
    assert taken or damage is fuzz_onnx  # not all end where they are read


def is_valid(path: Path) -> bool:
    """Whether ONNX's own checker takes the file."""
    try:
        onnx.checker.check_model(onnx.load(path), full_check=True)
    except Exception:  # noqa: BLE001 - of onnx and protobuf
        return False
    return True


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory, signed: Callable[[Path], Signed]) -> Signed:
    return signed(tmp_path_factory.mktemp("walked") / "signed")


def list_figures(value: Any, place: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Where the numbers of a JSON document are."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_figures(inner, (*place, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def forge_figure(
    document: Any, place: tuple[object, ...], rng: random.Random
) -> tuple[object, object]:
    """Changes one number in place by a tenth to a half; returns what it was and is."""
    for key in place[:-1]:
        document = document[key]
    was = document[place[-1]]
    now = was * rng.choice((0.5, 0.9, 1.1, 1.5)) if was else rng.choice((1, 0.01))
    document[place[-1]] = (
        int(now)
        if isinstance(was, int) and int(now) != was
        else was + 1
        if isinstance(was, int)
        else now
    )
    return was, document[place[-1]]


def test_forged_figures(fuzz, tmp_path, walked) -> None:
    whole = fuzz("verify", walked.dossier, "--json")
    assert whole.status in (0, 5), whole.stderr
    sources = [
        path.relative_to(walked.dossier)
        for path in sorted((walked.dossier).rglob("*"))
        if path.suffix in (".json", ".jsonl") and list(iterate_figures(path))
    ]
    wrong = []
    for case in range(100):
        rng = random.Random(case)
        folder = Path(shutil.copytree(walked.dossier, tmp_path / f"forged{case}"))
        path = folder / sources[case % len(sources)]
        line, place = rng.choice(list(iterate_figures(path)))
        documents = read_documents(path)
        was, now = forge_figure(documents[line], place, rng)
        text = "".join(json.dumps(each) + "\n" for each in documents)
        path.write_text(text)
        seal_folder(folder)
        ran = fuzz("verify", folder, "--json")
        told = json.loads(ran.stdout) if ran.stdout else {}
        name = str(path.relative_to(folder))
        what = f"case {case}: {name} {place}: {was} -> {now}"
        if is_bad(ran, frozenset((0, 1, 2, 5))):
            wrong.append(f"{what}\n{describe(case, ran)}")
        elif not told.get("problems") and not any(
            names_record(each, name) for each in told.get("unbacked", ())
        ):
            wrong.append(f"{what}: neither found nor named")
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong)


def names_record(line: str, name: str) -> bool:
    """Whether a line about what no raw file shows says that the record `name` states it."""
    return any(fnmatch(name, pattern) for pattern in line.rpartition(": stated by ")[2].split(", "))


def read_documents(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else [json.loads(text)]
    )


def iterate_figures(path: Path) -> Iterator[tuple[int, tuple[object, ...]]]:
    return itertools.chain.from_iterable(
        ((number, place) for place in list_figures(each))
        for number, each in enumerate(read_documents(path))
    )
