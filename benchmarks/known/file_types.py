"""File types: Magika's network says what files are that are made here, of twenty types.

Each file is written by the library or tool that owns its type, or follows its grammar; their contents are drawn.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import sqlite3
import tarfile
import wave
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from benchmarks.known.lettering import WORDS
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off
from PIL import Image

import optpipe as op

NAME = "file-types"
PACKAGE = "magika==1.0.3"
FILE = "standard_v3_3/model.onnx"
SHA256 = "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c"
CONFIG = "standard_v3_3/config.min.json"
CONFIG_SHA256 = "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db"
HALF, BLOCK, PADDING = 1024, 4096, 256
"""Bytes of each end that the network sees, of how many that are read; and the token of a place without a byte."""
Draw = random.Random


def write_prose(draw: Draw, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count)).capitalize() + "."


def write_table(draw: Draw) -> list[list[str]]:
    heads = draw.sample(WORDS, 5)
    rows = [[str(draw.randrange(10**6)) for _ in heads] for _ in range(draw.randrange(8, 60))]
    return [heads, *rows]


def make_csv(draw: Draw) -> bytes:
    target = io.StringIO()
    csv.writer(target).writerows(write_table(draw))
    return target.getvalue().encode()


def make_json(draw: Draw) -> bytes:
    heads, *rows = write_table(draw)
    return json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=1).encode()


def make_xml(draw: Draw) -> bytes:
    items = "".join(
        f'  <{word} id="{draw.randrange(999)}">{write_prose(draw, 6)}</{word}>\n'
        for word in draw.choices(WORDS, k=20)
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<records>\n{items}</records>\n'.encode()


def make_html(draw: Draw) -> bytes:
    body = "".join(
        f"<h2>{draw.choice(WORDS)}</h2>\n<p>{write_prose(draw, 20)}</p>\n" for _ in range(8)
    )
    title = draw.choice(WORDS)
    return f"<!doctype html>\n<html><head><title>{title}</title></head>\n<body>\n{body}</body></html>\n".encode()


def make_python(draw: Draw) -> bytes:
    functions = "".join(
        f"def {a}_{b}({c}, limit={draw.randrange(99)}):\n    if {c} > limit:\n        raise ValueError(f'{{{c}}} exceeds {{limit}}')\n"
        f"    return [each for each in range({c})]\n\n\n"
        for a, b, c in (draw.sample(WORDS, 3) for _ in range(8))
    )
    return f"import os\nimport sys\n\n\n{functions}if __name__ == '__main__':\n    sys.exit(0)\n".encode()


def make_c(draw: Draw) -> bytes:
    functions = "".join(
        f"static int {a}_{b}(const char *{c}, size_t n)\n{{\n\tfor (size_t i = 0; i < n; i++)\n\t\tif ({c}[i] == '\\0')\n"
        f"\t\t\treturn {draw.randrange(99)};\n\treturn -1;\n}}\n\n"
        for a, b, c in (draw.sample(WORDS, 3) for _ in range(8))
    )
    return (
        f'#include <stdio.h>\n#include <string.h>\n\n{functions}int main(void)\n{{\n\tputs("{draw.choice(WORDS)}");\n'
        "\treturn 0;\n}\n"
    ).encode()


def make_shell(draw: Draw) -> bytes:
    loops = "".join(
        f'for {word} in "$@"; do\n  if [ ! -f "${word}" ]; then\n    echo "missing ${word}" >&2\n'
        f"    exit {draw.randrange(1, 9)}\n  fi\ndone\n\n"
        for word in draw.sample(WORDS, 6)
    )
    return f"#!/bin/bash\nset -euo pipefail\n\n{loops}".encode()


def make_sql(draw: Draw) -> bytes:
    name, (heads, *rows) = draw.choice(WORDS), write_table(draw)
    columns = ",\n".join(f"  {head} INTEGER NOT NULL" for head in heads)
    inserts = "".join(f"INSERT INTO {name} VALUES ({', '.join(row)});\n" for row in rows)
    return f"CREATE TABLE {name} (\n{columns}\n);\n\n{inserts}".encode()


def make_markdown(draw: Draw) -> bytes:
    parts = "".join(
        f"## {draw.choice(WORDS).capitalize()}\n\n{write_prose(draw, 20)}\n\n- **{draw.choice(WORDS)}**: `{draw.choice(WORDS)}`\n"
        f"- [{draw.choice(WORDS)}](https://example.com/{draw.choice(WORDS)})\n\n"
        for _ in range(6)
    )
    return f"# {draw.choice(WORDS).capitalize()}\n\n{parts}".encode()


def draw_picture(draw: Draw) -> Any:
    side = draw.randrange(32, 120)
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)


def make_picture(kind: str) -> Callable[[Draw], bytes]:
    def make(draw: Draw) -> bytes:
        target = io.BytesIO()
        draw_picture(draw).save(target, kind)
        return target.getvalue()

    return make


def make_wav(draw: Draw) -> bytes:
    target = io.BytesIO()
    tone = np.sin(np.arange(draw.randrange(2000, 9000)) * draw.uniform(0.01, 0.3)) * 20000
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(draw.choice((8000, 16000, 44100)))
        file.writeframes(tone.astype(np.int16).tobytes())
    return target.getvalue()


def make_zip(draw: Draw) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for word in draw.sample(WORDS, 4):
            about = zipfile.ZipInfo(f"{word}.txt", (2026, 11, 30, 0, 0, 0))
            file.writestr(about, write_prose(draw, 60), zipfile.ZIP_DEFLATED)
    return target.getvalue()


def make_tar(draw: Draw) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as file:
        for word in draw.sample(WORDS, 3):
            content = write_prose(draw, 60).encode()
            about = tarfile.TarInfo(f"{word}.txt")
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return target.getvalue()


def make_sqlite(draw: Draw) -> bytes:
    name, (heads, *rows) = draw.choice(WORDS), write_table(draw)
    with sqlite3.connect(":memory:") as base:
        base.execute(
            f'CREATE TABLE "{name}" ({", ".join(f""""{head}" INTEGER""" for head in heads)})'
        )
        base.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(heads))})', rows)
        base.commit()
        return base.serialize()


def compress(kind: Callable[[bytes], bytes]) -> Callable[[Draw], bytes]:
    return lambda draw: kind(write_prose(draw, 300).encode())


KINDS: Mapping[str, Callable[[Draw], bytes]] = {
    "c": make_c, "csv": make_csv, "html": make_html, "json": make_json, "markdown": make_markdown, "python": make_python,
    "shell": make_shell, "sql": make_sql, "xml": make_xml, "bmp": make_picture("BMP"), "gif": make_picture("GIF"),
    "jpeg": make_picture("JPEG"), "png": make_picture("PNG"), "wav": make_wav, "zip": make_zip, "tar": make_tar,
    "sqlite": make_sqlite, "gzip": compress(partial(gzip.compress, mtime=0)), "bzip": compress(bz2.compress), "xz": compress(lzma.compress),
}  # fmt: skip


def read_ends(content: bytes) -> Any:
    """The 2,048 tokens of a file: its first and last bytes without the white space around them, as Magika 1.0 reads them."""
    head = content[:BLOCK].lstrip()[:HALF]
    tail = content[-BLOCK:].rstrip()[-HALF:]
    tokens = np.full(2 * HALF, PADDING, np.int32)
    tokens[: len(head)] = [*head]
    tokens[2 * HALF - len(tail) :] = [*tail]
    return tokens


def make_data(names: list[str], each: int, seed: int) -> Tensors:
    """`each` files of every kind, and the class of each."""
    draw = Draw(seed)
    kinds = [kind for _ in range(each) for kind in KINDS]
    return {
        "bytes": np.stack([read_ends(KINDS[kind](draw)) for kind in kinds]),
        "labels": np.array([names.index(kind) for kind in kinds]),
    }


def is_right(outputs: Any, truth: Any) -> float:
    """Whether the most probable of the 214 types is the file's."""
    return float(np.argmax(outputs) == truth)


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    path = fetch_file(PACKAGE, FILE, SHA256, "magika.onnx")
    names = json.loads(fetch_file(PACKAGE, CONFIG, CONFIG_SHA256).read_text())[
        "target_labels_space"
    ]
    calibration = make_data(names, each=3, seed=9)
    return Candidate(
        name=NAME,
        source=path,
        model=op.Model(path, batch=(1, 1, 8)),
        calibration=calibration,
        held_out=make_data(names, each=40, seed=10),
        metric=op.Metric(is_right, range=(0, 1), name="top1"),
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
