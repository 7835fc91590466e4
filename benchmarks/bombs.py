"""Bombs through the commands, as a stranger sends them: how long each takes, and how much memory more than the honest case.

usage: bombs.py FOLDER [WORD]     prints a row for each bomb whose name has WORD, into FOLDER/bombs.jsonl too; FOLDER is new

Peak memory is the largest sum of the resident memory of a command and all that it started, read every 50 ms.
"""

import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MOST_MORE_MIB, LONGEST_S = 2048, 60.0
KILL_S = 120
ALLOWED = (0, 1, 2, 3, 4, 5)


def measure(command, folder):
    """Seconds, peak MiB of the process and all below it, the exit status, and what it said."""
    begun, peak = time.monotonic(), 0
    environment = dict(os.environ, COLUMNS="200")
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
    said = []
    reader = threading.Thread(target=lambda: said.append(process.stdout.read(1 << 22)))
    reader.start()
    while process.poll() is None:
        peak = max(peak, sum_memory(process.pid))
        if time.monotonic() - begun > KILL_S:
            os.killpg(process.pid, 9)
        time.sleep(0.05)
    reader.join(5)
    return (
        time.monotonic() - begun,
        peak / 2**20,
        process.returncode,
        (said or [b""])[0].decode(errors="replace"),
    )


def sum_memory(root):
    """Resident bytes of a process and its descendants."""
    children, memory = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            memory[int(entry.name)] = int(fields[21]) * 4096
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        total += memory.get(one, 0)
        waiting += children.get(one, [])
    return total


# ---- images


def make_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_png(width, height, data, more=b"", head=b"\x08\0\0\0\0"):
    return (
        b"\x89PNG\r\n\x1a\n"
        + make_chunk(b"IHDR", struct.pack(">II", width, height) + head)
        + more
        + make_chunk(b"IDAT", data)
        + make_chunk(b"IEND", b"")
    )


def deflate_zeros(size):
    packer, block = zlib.compressobj(9), bytes(1 << 20)
    parts = [packer.compress(block) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def save(image, kind, **options):
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def declare_sides(tiff):
    """Width and length (tags 256 and 257, of 8 pixels) as 65535."""
    for tag in (256, 257):
        for kind, form in ((3, "<HHIHH"), (4, "<HHII")):
            known = struct.pack(form, tag, kind, 1, 8, *([0] if kind == 3 else []))
            tiff = tiff.replace(known, struct.pack("<HHII", tag, 4, 1, 65535))
    return tiff


def make_pictures():
    from PIL import Image

    small = Image.new("RGB", (8, 8))
    jpeg = save(small, "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    big = save(Image.new("L", (2048, 2048)), "JPEG", progressive=True)
    at = big.rindex(b"\xff\xda")
    sized = bytearray(save(small, "JPEG"))
    place = sized.index(b"\xff\xc0") + 5
    sized[place : place + 4] = struct.pack(">HH", 65500, 65500)
    tiff = save(small.convert("L"), "TIFF")
    frames = [Image.new("P", (64, 64), at % 256) for at in range(3000)]
    return {
        "PNG of 65535x65535, declared": ("a.png", write_png(65535, 65535, zlib.compress(bytes(9)))),
        "PNG of 2^31-1, declared": ("a.png", write_png(2**31 - 1, 2**31 - 1, b"x")),
        "PNG of 30000x30000 zeros": (
            "a.png",
            write_png(30000, 30000, deflate_zeros(30001 * 30000)),
        ),
        "PNG of 8000x8000 zeros": ("a.png", write_png(8000, 8000, deflate_zeros(8001 * 8000))),
        "PNG with a text of 1 GB": (
            "a.png",
            write_png(
                8,
                8,
                zlib.compress(bytes(72)),
                make_chunk(b"zTXt", b"k\0\0" + deflate_zeros(1 << 30)),
            ),
        ),
        "PNG with a profile of 1 GB": (
            "a.png",
            write_png(
                8,
                8,
                zlib.compress(bytes(72)),
                make_chunk(b"iCCP", b"k\0\0" + deflate_zeros(1 << 30)),
            ),
        ),
        "JPEG with 20,000 scans": ("a.jpg", jpeg[:-2] + scan * 20_000 + jpeg[-2:]),
        "JPEG of 4 megapixels with 3,000 scans": ("a.jpg", big[:-2] + big[at:-2] * 3000 + big[-2:]),
        "JPEG of 65500x65500, declared": ("a.jpg", bytes(sized)),
        "TIFF of 65535x65535, declared": ("a.tiff", declare_sides(tiff)),
        "WebP of 16383x16383": ("a.webp", save(Image.new("RGB", (16383, 4000)), "WEBP", quality=1)),
        "GIF of 3,000 frames": (
            "a.gif",
            save(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        ),
        "APNG of 3,000 frames": (
            "a.png",
            save(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        ),
        "BMP of 65535x65535, declared": (
            "a.bmp",
            save(small, "BMP")[:18] + struct.pack("<ii", 65535, 65535) + save(small, "BMP")[26:],
        ),
        "PNG of nothing": ("a.png", b"\x89PNG\r\n\x1a\n"),
    }


# ---- arrays


def write_npy(path, shape, data=b"", kind="<f4"):
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + data)


def make_arrays(folder):
    import numpy as np

    write_npy(folder / "declared.npy", "(1000000000000, 3, 32, 32)")
    write_npy(folder / "objects.npy", "(4,)", b"cos\nsystem\n(S'touch ESCAPED'\ntR.", "|O")
    with (
        zipfile.ZipFile(folder / "zeros.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("image.npy", "w", force_zip64=True) as entry,
    ):
        head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (400000, 3, 32, 32), }"
        head += b" " * (-(len(head) + 11) % 64) + b"\n"
        entry.write(b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head)
        for _ in range(4915):
            entry.write(bytes(1 << 20))
    with zipfile.ZipFile(folder / "many.npz", "w") as archive:
        for at in range(60_000):
            archive.writestr(f"{at}.npy", b"")
    (folder / "sparse.npy").write_bytes(b"")
    write_npy(folder / "sparse.npy", "(3000000, 3, 32, 32)")
    os.truncate(folder / "sparse.npy", 36_864_000_128)
    np.savez(folder / "fine.npz", image=np.zeros((4, 3, 32, 32), np.float32))
    return ["declared.npy", "objects.npy", "zeros.npz", "many.npz", "sparse.npy"]


# ---- graphs


def make_graphs(folder):
    import numpy as np
    from onnx import TensorProto, numpy_helper
    from onnx import helper as h

    def model(nodes, initializers=(), name="g", functions=(), inputs=None, outputs=None):
        inputs = inputs or [h.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
        outputs = outputs or [h.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = h.make_graph(nodes, name, inputs, outputs, initializers)
        imports = [h.make_opsetid("", 17), *([h.make_opsetid("d", 1)] if functions else [])]
        made = h.make_model(graph, opset_imports=imports, functions=list(functions))
        made.ir_version = 9
        return made

    def ints(name, *values):
        return numpy_helper.from_array(np.array(values, np.int64), name)

    found = {}
    node = h.make_node
    found["zeros.onnx"] = model(
        [
            node("ConstantOfShape", ["s"], ["c"]),
            node("ReduceSum", ["c"], ["r"], keepdims=0),
            node("Add", ["x", "r"], ["y"]),
        ],
        [ints("s", 200_000, 200_000)],
    )
    steps, last = [], "x"
    for at in range(30):
        steps.append(node("Concat", [last, last], [f"c{at}"], axis=0))
        last = f"c{at}"
    found["doubling.onnx"] = model([*steps, node("Identity", [last], ["y"])])
    steps, last = [], "x"
    for at in range(12):
        steps.append(node("Tile", [last, "t"], [f"c{at}"]))
        last = f"c{at}"
    found["tiles.onnx"] = model([*steps, node("Identity", [last], ["y"])], [ints("t", 10, 1)])
    found["range.onnx"] = model(
        [
            node("Range", ["a", "b", "d"], ["r"]),
            node("Cast", ["r"], ["f"], to=1),
            node("ReduceSum", ["f"], ["q"], keepdims=0),
            node("Add", ["x", "q"], ["y"]),
        ],
        [
            numpy_helper.from_array(np.array(each, np.int64), name)
            for name, each in (("a", 0), ("b", 2**40), ("d", 1))
        ],
    )
    found["expand.onnx"] = model([node("Expand", ["x", "s"], ["y"])], [ints("s", 10**9, 4)])
    body = h.make_graph(
        [node("Concat", ["v", "v"], ["w"], axis=0), node("Identity", ["k"], ["l"])],
        "b",
        [
            h.make_tensor_value_info("i", TensorProto.INT64, []),
            h.make_tensor_value_info("k", TensorProto.BOOL, []),
            h.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            h.make_tensor_value_info("l", TensorProto.BOOL, []),
            h.make_tensor_value_info("w", TensorProto.FLOAT, None),
        ],
    )
    for name, trips in (("loop.onnx", 60), ("endless.onnx", 2**62)):
        found[name] = model(
            [node("Loop", ["n", "t", "x"], ["y"], body=body)],
            [
                numpy_helper.from_array(np.array(trips, np.int64), "n"),
                numpy_helper.from_array(np.array(True), "t"),
            ],
        )
    inner = h.make_graph(
        [node("Identity", ["x"], ["z"])],
        "i",
        [],
        [h.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    for at in range(20):
        inner = h.make_graph(
            [
                node(
                    "If",
                    ["t"],
                    [f"z{at}"],
                    then_branch=inner,
                    else_branch=inner
                    if at < 14
                    else h.make_graph(
                        [node("Identity", ["x"], [f"e{at}"])],
                        "e",
                        [],
                        [h.make_tensor_value_info(f"e{at}", TensorProto.FLOAT, None)],
                    ),
                )
            ],
            f"i{at}",
            [],
            [h.make_tensor_value_info(f"z{at}", TensorProto.FLOAT, None)],
        )
    found["nested.onnx"] = model(
        [node("If", ["t"], ["y"], then_branch=inner, else_branch=inner)],
        [numpy_helper.from_array(np.array(True), "t")],
    )
    cycle = [
        h.make_function(
            "d",
            f"F{at}",
            ["a"],
            ["b"],
            [h.make_node(f"F{1 - at}", ["a"], ["b"], domain="d")],
            [h.make_opsetid("d", 1)],
        )
        for at in (0, 1)
    ]
    found["cycle.onnx"] = model([h.make_node("F0", ["x"], ["y"], domain="d")], functions=cycle)
    powers = [
        h.make_function(
            "d",
            f"P{at}",
            ["a"],
            ["b"],
            [
                h.make_node(
                    f"P{at - 1}" if at else "Identity", ["a"], ["m"], domain="d" if at else ""
                ),
                h.make_node(
                    f"P{at - 1}" if at else "Identity", ["m"], ["b"], domain="d" if at else ""
                ),
            ],
            [h.make_opsetid("d", 1), h.make_opsetid("", 17)],
        )
        for at in range(40)
    ]
    found["powers.onnx"] = model([h.make_node("P39", ["x"], ["y"], domain="d")], functions=powers)
    found["nodes.onnx"] = model(
        [
            node("Relu", [f"n{at}" if at else "x"], [f"n{at + 1}" if at < 99_999 else "y"])
            for at in range(100_000)
        ]
    )
    for name, where in {
        "outside": "../../../../../../etc/passwd",
        "zero": "/dev/zero",
        "pipe": "pipe",
        "link": "link",
    }.items():
        weight = h.make_tensor("w", TensorProto.FLOAT, [1, 4], [0.0] * 4)
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", where), ("offset", "0"), ("length", "16")):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value
        found[f"external-{name}.onnx"] = model([node("Add", ["x", "w"], ["y"])], [weight])
    huge = h.make_tensor("w", TensorProto.FLOAT, [1, 4], [0.0] * 4)
    del huge.dims[:]
    huge.dims.extend([2**31, 2**31])
    found["dims.onnx"] = model([node("Add", ["x", "w"], ["y"])], [huge])
    for name, made in found.items():
        (folder / name).write_bytes(made.SerializeToString())
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "deep.onnx").write_bytes(b"\x3a\x05" * 200_000)
    (folder / "sparse.onnx").write_bytes(b"\x08\x09")
    os.truncate(folder / "sparse.onnx", 5 << 30)
    return [*found, "deep.onnx", "sparse.onnx"]


# ---- texts of users


def make_texts(folder):
    card = 'name = "digits"\nsource = "{}"\n'
    texts = {
        "name.toml": 'name = "../../../ESCAPED"\nsource = "digits/digits.py:digits"\n',
        "deep.toml": "a = " + "[" * 100_000 + "]" * 100_000,
        "wide.toml": card.format("digits") + "".join(f"k{at} = 1\n" for at in range(400_000)),
        "dotted.toml": ".".join(["a"] * 30_000) + " = 1",
        "zero.toml": "/dev/zero",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "zero.toml").unlink()
    (folder / "zero.toml").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.toml")
    policy = 'schema = 1\n[build]\nprecision = "fp32"\n'
    (folder / "limits-policy.toml").write_text(
        policy
        + "".join(
            f'[[latency]]\np50 = "{at + 1} ms"\nbatch_size = {at + 1}\n' for at in range(20_000)
        )
    )
    (folder / "deep-policy.toml").write_text(policy + "x = " + "[" * 100_000 + "]" * 100_000)
    (folder / "exponent-policy.toml").write_text(policy + '[size]\nmaximum = "1e999999999 B"\n')
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with (folder / "long.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(700):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n')
    (folder / "sparse.jsonl").write_bytes(b"{}\n")
    os.truncate(folder / "sparse.jsonl", 20 << 30)
    with gzip.open(folder / "zeros.jsonl.gz", "wb") as file:
        for _ in range(3000):
            file.write(bytes(1 << 20))
    return texts


def make_weights(folder):
    (folder / "long.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    head = ('{"' + "a" * 99 + '": ' * 1 + "[" * 90_000 + "]" * 90_000 + "}").encode()
    (folder / "deep.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    head = json.dumps(
        {"w": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
    ).encode()
    (folder / "declared.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    head = json.dumps(
        {f"w{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for at in range(400_000)}
    ).encode()
    (folder / "many.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    (folder / "code.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x0d\0\0\0touch ESCAPED\x85R.")
    return [
        "long.safetensors",
        "deep.safetensors",
        "declared.safetensors",
        "many.safetensors",
        "code.pt",
    ]


# ---- workspaces and dossiers


def make_workspaces(folder, source):
    made = []
    for name in ("symlinks", "pipes", "devices", "hard-links", "bombs", "sparse"):
        target = folder / name
        shutil.copytree(source, target, symlinks=True)
        entries = sorted((target / "store").glob("artifact-*"))
        entry = entries[0]
        file = next(each for each in sorted(entry.iterdir()) if each.suffix in (".onnx", ".pt2"))
        if name == "symlinks":
            file.unlink()
            file.symlink_to("/etc/passwd")
            shutil.rmtree(target / "tmp", ignore_errors=True)
            (target / "tmp").symlink_to(folder / "outside")
        if name == "pipes":
            file.unlink()
            os.mkfifo(file)
            os.mkfifo(entry / "more")
        if name == "devices":
            file.unlink()
            file.symlink_to("/dev/zero")
        if name == "hard-links":
            file.unlink()
            os.link(folder / "precious", file)
        if name == "bombs":
            (entry / "manifest.json").write_text("[" * 300_000)
        if name == "sparse":
            os.truncate(file, 200 << 30)
        made.append(name)
    return made


def make_dossiers(folder, source):
    from optpipe.workspace.seal import seal_folder

    made = []

    def forge(name, change, sealed=True):
        target = folder / name
        shutil.copytree(source, target)
        change(target)
        if sealed:
            seal_folder(target)
        made.append(name)

    def replace_by(name, make):
        def change(target):
            (target / name).unlink()
            make(target / name)

        return change

    def first(target, pattern):
        return sorted(target.glob(pattern))[0]

    forge("pipe", replace_by("request.json", os.mkfifo), sealed=False)
    forge(
        "zero", replace_by("request.json", lambda path: path.symlink_to("/dev/zero")), sealed=False
    )
    forge("sparse", lambda target: os.truncate(target / "report.html", 100 << 30), sealed=False)
    forge("sparse-sums", lambda target: os.truncate(target / "SHA256SUMS", 100 << 30), sealed=False)
    forge("deep", lambda target: (target / "verdict.json").write_text('{"a":' * 200_000))
    forge("many", make_many_folders)

    forge(
        "rows",
        lambda target: write_equal_rows(first(target, "runs/bench-*/samples/*.parquet"), 5_000_000),
    )
    forge(
        "class", lambda target: number_class(first(target, "runs/evaluate-*/predictions.parquet"))
    )
    forge(
        "policy",
        lambda target: (target / "policy.toml").write_text("schema = 1\nx = " + "[" * 100_000),
    )
    return made


def make_many_folders(target):
    for at in range(12_000):
        (target / "runs" / f"{at}").mkdir()


def write_equal_rows(path, count):
    """So many equal rows, of a few bytes."""
    import polars as pl

    row = pl.read_parquet(path)[:1]
    pl.select(
        pl.repeat(row[name][0], count, dtype=row[name].dtype).alias(name) for name in row.columns
    ).write_parquet(path, compression="zstd")


def number_class(path):
    import polars as pl

    table = pl.read_parquet(path)
    table.with_columns(pl.lit(10**9, pl.Int64).alias("class")).write_parquet(path)


# ---- all of them


WHERE = ("--backend", "onnxruntime", "--device", "cpu")
HONEST_IMAGES = ROOT / "calibration" / "digits" / "calibration"
SIGNED = ROOT / "reports" / "digits-cpu"


def word_command(verb, path):
    """A command of a verb that takes data."""
    return {
        "evaluate": ("evaluate", "digits", "--data", path),
        "calibrate": ("calibrate", "digits", "--data", path, "--method", "max", "--count", "24"),
        "preprocess": ("preprocess", "digits", "--images", path, "--no-throughput"),
        "bench": (
            "bench",
            "digits",
            "--from-images",
            path,
            "--precision",
            "fp32",
            "--min-time",
            "0.1",
        ),
    }[verb]


def word_build(*words):
    return ("build", *words, "--precision", "fp32", *WHERE)


def make_folder(folder, name):
    (folder / name).mkdir()
    return folder / name


def list_pictures(folder):
    """(name, kind of the honest command, arguments); each bomb lies among 24 pictures."""
    for at, (name, (file, data)) in enumerate(make_pictures().items()):
        target = folder / str(at)
        for label in "01":
            (target / label).mkdir(parents=True)
            for each in sorted((HONEST_IMAGES / label).iterdir())[:12]:
                shutil.copy(each, target / label)
        (target / "0" / file).write_bytes(data)
        more = () if at % 4 else ("calibrate", "bench")
        for verb in ("evaluate", "preprocess", *more):
            yield f"{verb}: {name}", verb, word_command(verb, target)


def list_cases(folder):
    yield from list_pictures(make_folder(folder, "pictures"))
    arrays = make_folder(folder, "arrays")
    for name in make_arrays(arrays):
        for verb in ("evaluate", "calibrate"):
            yield f"{verb}: {name}", verb, word_command(verb, arrays / name)
    graphs = make_folder(folder, "graphs")
    for name in make_graphs(graphs):
        yield f"build: {name}", "build", word_build(graphs / name)
    texts = make_folder(folder, "texts")
    make_texts(texts)
    for path in sorted(texts.iterdir()):
        if path.name.endswith(("policy.toml", "zero.toml", "pipe.toml")):
            words = ("signoff", "digits", "--policy", path, "--output", "signed")
            yield f"signoff: {path.name}", "build", words
        if path.suffix == ".toml" and "policy" not in path.name:
            yield f"build: card {path.name}", "build", word_build(path)
        for verb in ("evaluate", "calibrate") if ".jsonl" in path.name else ():
            yield f"{verb}: {path.name}", verb, word_command(verb, path)
    weights = make_folder(folder, "weights")
    for name in make_weights(weights):
        command = word_build("digits", "--weights", weights / name)
        yield f"build: weights {name}", "build", command
    workspaces = make_folder(folder, "workspaces")
    make_folder(workspaces, "outside")
    for path in (workspaces / "outside" / "kept", workspaces / "precious"):
        path.write_text("kept")
    for name in make_workspaces(workspaces, folder / ".optpipe"):
        inside = ("--workspace", workspaces / name)
        measured = word_command("bench", HONEST_IMAGES / "0")
        yield f"store merge: {name}", "store", ("store", "merge", workspaces / name)
        yield f"bench inside: {name}", "bench", (*measured, *inside)
        yield f"store gc inside: {name}", "store", ("store", "gc", "--yes", *inside)
    dossiers = make_folder(folder, "dossiers")
    for name in make_dossiers(dossiers, SIGNED):
        output = ("--to", "folder", "--because", "x", "--output", f"served-{name}")
        yield f"verify: {name}", "verify", ("verify", dossiers / name)
        yield f"deploy: {name}", "verify", ("deploy", dossiers / name, *output)


def find_escapes(folder):
    """What a bomb wrote or deleted outside of its place."""
    kept = folder / "workspaces" / "outside" / "kept", folder / "workspaces" / "precious"
    escaped = [*folder.rglob("ESCAPED*"), *folder.parent.glob("ESCAPED*")]
    gone = [path for path in kept if not path.exists() or path.read_text() != "kept"]
    return [*map(str, (*escaped, *gone))]


def judge(ran, honest):
    seconds, peak, status, said = ran
    slow = seconds > LONGEST_S and seconds > 2 * honest[0]
    return [
        *(["memory"] if peak - honest[1] > MOST_MORE_MIB else []),
        *(["time"] if slow else []),
        *(["a traceback"] if "Traceback (most" in said else []),
        *([f"status {status}"] if status not in ALLOWED else []),
    ]


def main():
    folder, word = Path(sys.argv[1]).resolve(), sys.argv[2] if sys.argv[2:] else ""
    folder.mkdir(parents=True)

    def run(*arguments):
        command = (sys.executable, "-P", "-m", "optpipe", *map(str, arguments))
        return measure(command, folder)

    honest = {"build": run(*word_build("digits"))}
    usual = folder / "usual"
    for label in "01":
        shutil.copytree(HONEST_IMAGES / label, usual / label)
    for verb in ("evaluate", "calibrate", "preprocess", "bench"):
        honest[verb] = run(*word_command(verb, usual))
    honest |= {"store": run("store", "gc"), "verify": run("verify", SIGNED)}
    for kind, (seconds, peak, status, _) in honest.items():
        print(f"honest {kind}: {seconds:.1f} s, {peak:.0f} MiB, status {status}", flush=True)
    cases, wrong = [case for case in list_cases(folder) if word in case[0]], []
    for name, kind, arguments in cases:
        ran = run(*arguments)
        bad = [*judge(ran, honest[kind]), *find_escapes(folder)]
        seconds, peak, status, said = ran
        last = (said.strip().splitlines() or [""])[-1]
        row = {
            "name": name,
            "seconds": seconds,
            "more_mib": peak - honest[kind][1],
            "status": status,
            "bad": bad,
        }
        with (folder / "bombs.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        more = f"{peak:6.0f} MiB ({row['more_mib']:+5.0f})"
        print(
            f"{', '.join(bad) or 'bounded'}: {name}: {seconds:.1f} s {more} {status} {last[:120]!r}",
            flush=True,
        )
        wrong += [name] if bad else []
    print(f"{len(cases)} bombs, {len(wrong)} not bounded: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
