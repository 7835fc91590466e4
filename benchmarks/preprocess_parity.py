"""Parity of the derived pipelines of three libraries, on photographs, as Markdown (and JSON).

usage: python benchmarks/preprocess_parity.py [--mixed] [--images FOLDER] [--output FILE.json]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from optpipe.core.records import plain_from_record
from optpipe.core.transform import Transform
from optpipe.models.sources.transform import (
    transform_from_processor,
    transform_from_timm,
    transform_from_torchvision,
)
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.parity import PixelDifferences, compare_images

SAMPLES = Path(__file__).resolve().parent.parent / "calibration" / "samples"
HEAD = "| preset | decoder | decode | resized | final | levels off |"


def torchvision_preset() -> Transform:
    """Bilinear, with a crop."""
    from torchvision.models import ResNet50_Weights

    return transform_from_torchvision(ResNet50_Weights.DEFAULT.transforms())


def timm_preset() -> Transform:
    """Bicubic, with a crop."""
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg("convnext_tiny.fb_in22k_ft_in1k")
    return transform_from_timm(resolve_data_config(pretrained_cfg=config.to_dict()))


def transformers_preset() -> Transform:
    """Bilinear, to an exact size, by torch."""
    from transformers import ViTImageProcessor

    return transform_from_processor(ViTImageProcessor())


PRESETS = {
    "torchvision ResNet-50 (bilinear)": torchvision_preset,
    "timm convnext_tiny (bicubic)": timm_preset,
    "transformers ViT (bilinear, exact)": transformers_preset,
}


def plans(mixed: bool) -> Iterator[tuple[str, DaliPlan]]:
    """What to compare: the CPU; or on a GPU the hardware decoder and the SMs."""
    if not mixed:
        yield "CPU", DaliPlan(batch_size=4)
        return
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=16)
    yield "hardware", plan
    yield "SMs", replace(plan, hw_decoder_load=0.0)


def main(arguments: argparse.Namespace) -> None:
    """Prints one row per preset and plan: mean/max difference in levels after each step."""
    files = [(path.name, path) for path in sorted(arguments.images.glob("*.jpg"))[:96]]
    print(
        f"mean / max |Δ| in 8-bit levels, {len(files)} photographs\n\n{HEAD}\n|---|---|---|---|---|---|"
    )
    rows = []
    for name, preset in PRESETS.items():
        try:
            transform = preset()
        except ImportError as error:
            print(f"| {name} | not measured: {error} |")
            continue
        for decoder, plan in plans(arguments.mixed):
            pixels = PixelDifferences(transform, plan)
            for _ in compare_images(files, pixels):
                pass
            rows.append(
                {
                    "preset": name,
                    "decoder": decoder,
                    "plan": plain_from_record(plan),
                    "photographs": len(files),
                    "steps": plain_from_record(pixels.steps),
                }
            )
            if arguments.output:
                arguments.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            decode, resized, final = pixels.steps[0], pixels.steps[1], pixels.steps[-1]
            cells = [
                f"{each.mean_levels:.4f} / {each.max_levels:.1f}"
                for each in (decode, resized, final)
            ]
            row = (name, decoder, *cells, f"{final.off_share:.2%}")
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--images", type=Path, default=SAMPLES)
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
