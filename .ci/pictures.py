"""Draws the README's pictures from checked-in measurements, in light and dark.

usage: pictures.py [--check]   with --check it exits 1 if a picture is older than its data or this script
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA, IMAGES = ROOT / "reports" / "h200" / "compiled.json", ROOT / "reports" / "images"
BATCH = 64
NAMES = {
    "resnet50": "ResNet-50", "resnext50_32x4d": "ResNeXt-50", "regnet_y_3_2gf": "RegNetY-3.2GF", "mobilenet_v2": "MobileNetV2",
    "efficientnet_b0": "EfficientNet-B0", "mobilenet_v3_large": "MobileNetV3-L", "densenet121": "DenseNet-121",
    "vit_b_16": "ViT-B/16", "convnext_tiny": "ConvNeXt-T", "swin_t": "Swin-T",
}  # fmt: skip
COLORS = {"light": ("#1f2328", "#9a9fa6", "#2463d8"), "dark": ("#e6e8eb", "#767c85", "#6ea0ff")}
"""Ink, the FP16 bars, and the INT8 bars."""


def draw(theme: str) -> str:
    """An SVG of the speed of FP16 and INT8 builds relative to the faster of torch.compile's modes at BATCH."""
    import vl_convert

    ink, gray, blue = COLORS[theme]
    bars = []
    for row in json.loads(DATA.read_text(encoding="utf-8"))["rows"]:
        if row["batch"] == BATCH:
            theirs = min(row[each]["ms"] for each in ("compile", "max") if each in row)
            for kind, label in (("fused", "FP16"), ("int8", "INT8")):
                speed = round(theirs / row[kind]["ms"], 2)
                bars.append({"network": NAMES[row["network"]], "build": label, "speed": speed, "text": f"{speed:.2f}×"})
    order = [each["network"] for each in sorted(bars, key=lambda each: -each["speed"]) if each["build"] == "INT8"]
    base = {
        "y": {"field": "network", "sort": order, "title": None, "axis": {"ticks": False, "domain": False, "labelPadding": 8}},
        "yOffset": {"field": "build", "sort": ["INT8", "FP16"]},
        "x": {"field": "speed", "type": "quantitative", "title": None, "axis": None},
    }  # fmt: skip
    color = {
        "field": "build", "scale": {"domain": ["INT8", "FP16"], "range": [blue, gray]}, "title": None,
        "legend": {"orient": "top-left", "direction": "horizontal", "offset": -22},
    }  # fmt: skip
    text = {"type": "text", "align": "left", "dx": 4, "color": ink, "fontSize": 11}
    level = {"x": {"datum": 1, "type": "quantitative"}}
    layers = [
        {"mark": {"type": "bar", "height": {"band": 0.92}}, "encoding": {**base, "color": color}},
        {"mark": text, "encoding": {**base, "text": {"field": "text"}}},
        {"data": {"values": [{}]}, "mark": {"type": "rule", "color": ink, "strokeDash": [3, 3]}, "encoding": level},
    ]
    least, most = (pick(each["speed"] for each in bars) for pick in (min, max))
    title = f"{least:.2f} to {most:.2f} times the speed of torch.compile in FP16 (dashed line)"
    labels = {"labelColor": ink, "labelFontSize": 12}
    spec = {
        "data": {"values": bars}, "width": 560, "height": 330, "background": None, "layer": layers, "padding": 8,
        "title": {"text": title, "anchor": "start", "color": ink, "fontSize": 14, "offset": 26},
        "config": {"view": {"stroke": None}, "font": "system-ui, sans-serif", "axis": labels, "legend": labels},
    }  # fmt: skip
    return str(vl_convert.vegalite_to_svg(spec))


def main() -> int:
    """A picture ends in the hash of what it was drawn from: another version of the renderer may draw other bytes."""
    mark = f"<!-- {hashlib.sha256(DATA.read_bytes() + Path(__file__).read_bytes()).hexdigest()} -->\n"
    paths = {theme: IMAGES / f"speed-{theme}.svg" for theme in COLORS}
    stale = {theme: path for theme, path in paths.items() if not path.exists() or not path.read_text().endswith(mark)}
    if stale and "--check" in sys.argv:
        names = ", ".join(path.name for path in stale.values())
        print(f"{names}: older than the data or the script; run `uv run python .ci/pictures.py`")
        return 1
    for theme, path in stale.items():
        path.write_text(f"{draw(theme)}\n{mark}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
