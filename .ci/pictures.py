"""Draws the README's pictures from checked-in measurements and a report, in light and dark.

usage: pictures.py [--check]   with --check it exits 1 if a picture is older than its data or this script
"""

import hashlib
import json
import shutil
import sys
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA, IMAGES = ROOT / "reports" / "h200" / "compiled.json", ROOT / "reports" / "images"
REPORT = ROOT / "reports" / "digits-cpu" / "report.html"
BATCH = 64
NAMES = {
    "resnet50": "ResNet-50", "resnext50_32x4d": "ResNeXt-50", "regnet_y_3_2gf": "RegNetY-3.2GF", "mobilenet_v2": "MobileNetV2",
    "efficientnet_b0": "EfficientNet-B0", "mobilenet_v3_large": "MobileNetV3-L", "densenet121": "DenseNet-121",
    "vit_b_16": "ViT-B/16", "convnext_tiny": "ConvNeXt-T", "swin_t": "Swin-T", "bert_base": "BERT-base",
}  # fmt: skip
COLORS = {"light": ("#1f2328", "#9a9fa6", "#2463d8"), "dark": ("#e6e8eb", "#767c85", "#6ea0ff")}
"""Ink, the FP16 bars, and the INT8 bars."""


def draw_speed(theme: str, path: Path, mark: str) -> None:
    """The speed of FP16 and INT8 builds relative to the faster of torch.compile's modes at BATCH."""
    import vl_convert

    ink, gray, blue = COLORS[theme]
    bars = []
    for row in json.loads(DATA.read_text(encoding="utf-8"))["rows"]:
        if row["batch"] == BATCH and "fused" in row:
            theirs = min(row[each]["ms"] for each in ("compile", "max") if each in row)
            for kind, label in (("fused", "FP16"), ("int8", "INT8")):
                speed = round(theirs / row[kind]["ms"], 2)
                bars.append(
                    {
                        "network": NAMES[row["network"]],
                        "build": label,
                        "speed": speed,
                        "text": f"{speed:.2f}×",
                    }
                )
    order = [
        each["network"]
        for each in sorted(bars, key=lambda each: -each["speed"])
        if each["build"] == "INT8"
    ]
    base = {
        "y": {
            "field": "network",
            "sort": order,
            "title": None,
            "axis": {"ticks": False, "domain": False, "labelPadding": 8},
        },
        "yOffset": {"field": "build", "sort": ["INT8", "FP16"]},
        "x": {"field": "speed", "type": "quantitative", "title": None, "axis": None},
    }
    color = {
        "field": "build",
        "scale": {"domain": ["INT8", "FP16"], "range": [blue, gray]},
        "title": None,
        "legend": {"orient": "top-left", "direction": "horizontal", "offset": -22},
    }
    text = {"type": "text", "align": "left", "dx": 4, "color": ink, "fontSize": 11}
    level = {"x": {"datum": 1, "type": "quantitative"}}
    layers = [
        {"mark": {"type": "bar", "height": {"band": 0.92}}, "encoding": {**base, "color": color}},
        {"mark": text, "encoding": {**base, "text": {"field": "text"}}},
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "color": ink, "strokeDash": [3, 3]},
            "encoding": level,
        },
    ]
    least, most = (pick(each["speed"] for each in bars) for pick in (min, max))
    title = f"{least:.2f} to {most:.2f} times the speed of torch.compile in FP16 (dashed line)"
    labels = {"labelColor": ink, "labelFontSize": 12}
    spec = {
        "data": {"values": bars},
        "width": 560,
        "height": 330,
        "background": None,
        "layer": layers,
        "padding": 8,
        "title": {"text": title, "anchor": "start", "color": ink, "fontSize": 14, "offset": 26},
        "config": {
            "view": {"stroke": None},
            "font": "system-ui, sans-serif",
            "axis": labels,
            "legend": labels,
        },
    }
    path.write_text(f"{vl_convert.vegalite_to_svg(spec)}\n<!-- {mark} -->\n", encoding="utf-8")


def draw_report(theme: str, path: Path, mark: str) -> None:
    """The first screen of REPORT in Chromium."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": 1120, "height": 760},
            device_scale_factor=1.5,
            color_scheme="dark" if theme == "dark" else "light",
        )
        page.goto(REPORT.as_uri())
        picture = Image.open(BytesIO(page.screenshot()))
        browser.close()
    info = PngInfo()
    info.add_text("drawn-from", mark)
    picture.convert("RGB").quantize(128).save(path, optimize=True, pnginfo=info)


PICTURES = {"speed-{}.svg": (DATA, draw_speed), "report-{}.png": (REPORT, draw_report)}


def main() -> int:
    """A picture holds the hash of what it was drawn from: another version of the renderer may draw other bytes."""
    stale = []
    for name, (source, draw) in PICTURES.items():
        mark = hashlib.sha256(source.read_bytes() + Path(__file__).read_bytes()).hexdigest()
        for theme in COLORS:
            path = IMAGES / name.format(theme)
            if not path.exists() or mark.encode() not in path.read_bytes():
                stale.append(path.name)
                if "--check" not in sys.argv:
                    draw(theme, path, mark)
    if stale and "--check" in sys.argv:
        print(
            f"{', '.join(stale)}: older than the data or the script; run `uv run python .ci/pictures.py`"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
