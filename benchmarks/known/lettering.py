"""Printed lines in twenty typefaces, with the text that they show."""

import random
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FAMILIES = (
    "Cabin", "Caladea", "Cantarell", "Carlito", "Comic Neue", "Courier Prime", "DejaVu Sans",
    "DejaVu Sans Mono", "DejaVu Serif", "EB Garamond", "Fira Code", "FreeSans", "FreeSerif", "Inconsolata",
    "Lato", "Liberation Mono", "Liberation Serif", "Linux Libertine O", "Open Sans", "Roboto",
)  # fmt: skip
DEBIAN = (
    "fonts-cabin fonts-crosextra-caladea fonts-cantarell fonts-crosextra-carlito fonts-comic-neue fonts-courier-prime fonts-dejavu "
    "fonts-ebgaramond fonts-firacode fonts-freefont-ttf fonts-inconsolata fonts-lato fonts-liberation fonts-linuxlibertine fonts- "
    "open-sans fonts-roboto-unhinted"
)
WORDS = (
    "account", "address", "amount", "balance", "before", "branch", "budget", "calendar", "carriage", "center", "change", "closing",
    "copper", "corner", "country", "credit", "daily", "december", "delivery", "depot", "district", "eastern", "eleven", "engine",
    "evening", "exchange", "factory", "february", "figure", "finance", "forward", "freight", "garden", "general", "ground", "harbor",
    "heavy", "invoice", "island", "january", "journey", "kitchen", "ledger", "letter", "limited", "machine", "market", "master",
    "medium", "metal", "middle", "minute", "morning", "motor", "number", "office", "orange", "order", "packet", "paper", "payment",
    "people", "picture", "platform", "please", "police", "postal", "pressure", "printer", "project", "public", "quarter", "railway",
    "receipt", "record", "return", "river", "safety", "sample", "school", "second", "service", "seven", "shipment", "signal", "silver",
    "special", "station", "street", "summer", "supply", "system", "table", "ticket", "timber", "today", "total", "tower", "traffic",
    "transfer", "tuesday", "twelve", "union", "upper", "valley", "vessel", "village", "volume", "water", "weather", "wednesday",
    "weekly", "western", "window", "winter", "yellow",
)  # fmt: skip


@cache
def find_font(family: str, size: int) -> Any:
    """The upright face of a family. Raises SystemExit if fontconfig does not have it."""
    asked = ["fc-match", "--format=%{family}|%{file}", f"{family}:style=Regular:slant=0"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    names, _, path = found.partition("|")
    if family not in names.split(","):
        sys.exit(f"the font {family!r} is not installed\non Debian: apt-get install {DEBIAN}")
    return ImageFont.truetype(path, size)


def write_line(seed: random.Random) -> str:
    """Words, a number, or an amount, of at most 20 characters."""
    words = seed.sample(WORDS, 2)
    number = str(seed.randrange(10, 100000))
    amount = f"{seed.randrange(1, 1000)}.{seed.randrange(100):02d}"
    forms = (
        " ".join(words),
        f"{words[0].capitalize()} {number}",
        f"{words[0].upper()} {amount}",
        f"{words[0]}, {words[1]}",
        f"No. {number}-{words[0][:2].upper()}",
    )
    return seed.choice(forms)[:20].rstrip()


def draw_line(text: str, family: str, height: int, seed: random.Random) -> Any:
    """The line in gray, (height, width), uint8, as tight as a detector of lines cuts it, on paper that is not quite even."""
    font = find_font(family, round(height * 0.66))
    left, top, right, bottom = font.getbbox(text)
    width = int(right - left) + 8
    page = Image.new("L", (width, height), seed.randrange(200, 256))
    at = (4 - left, (height - (bottom - top)) / 2 - top)
    ImageDraw.Draw(page).text(at, text, fill=seed.randrange(0, 90), font=font)
    noise = np.random.default_rng(seed.randrange(2**32)).normal(0, 6, (height, width))
    return np.clip(np.asarray(page, np.float64) + noise, 0, 255).astype(np.uint8)


def fit_line(line: Any, width: int) -> Any:
    """The line as PaddleOCR's networks take it, (3, height, width) in [-1, 1]: narrowed if it is too wide, zeros to its right."""
    height, own = line.shape
    if own > width:
        line = np.asarray(Image.fromarray(line).resize((width, height), Image.Resampling.BILINEAR))
    row = np.zeros((height, width), np.float32)
    row[:, : line.shape[1]] = line.astype(np.float32) / 127.5 - 1
    return np.repeat(row[None], 3, axis=0)


def draw_lines(count: int, height: int, seed: int) -> list[tuple[str, Any]]:
    """`count` texts and their pictures, in all typefaces by turns."""
    source = random.Random(seed)
    texts = [write_line(source) for _ in range(count)]
    return [
        (text, draw_line(text, FAMILIES[place % len(FAMILIES)], height, source))
        for place, text in enumerate(texts)
    ]
