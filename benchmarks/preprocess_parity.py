"""Parity of the derived pipelines of three libraries, on photographs and on edge-case files, as Markdown (and JSON).

usage: python benchmarks/preprocess_parity.py [--mixed] [--exact] [--images FOLDER] [--output FILE.json]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.records import plain_from_record
from optpipe.core.transform import Transform
from optpipe.models.sources.transform import transform_from_processor, transform_from_timm, transform_from_torchvision
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.parity import PixelDifferences, check_edge_cases, compare_images, measure_steps_alone
from optpipe.preprocess.proof import EdgeCaseFile

if TYPE_CHECKING:
    from optpipe.preprocess.dali_graph import Arithmetic

SAMPLES = Path(__file__).resolve().parent.parent / "calibration" / "samples"
HEAD = "| preset | resize | decoder | decode | resized | final | levels off | adds most | edge-case files that match |"


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


def plans(mixed: bool, exact: bool) -> Iterator[tuple[str, DaliPlan]]:
    """What to compare: every arithmetic; on a GPU the exact one by the hardware decoder and by the SMs."""
    kinds: tuple[Arithmetic, ...] = ("exact",) if exact else ("exact", "two-pass", "fused")
    if not mixed:
        yield from (("CPU", DaliPlan(batch_size=4, resize=resize)) for resize in kinds)
        return
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=16)
    yield from (("hardware", replace(plan, resize=resize)) for resize in kinds)
    yield "SMs", replace(plan, hw_decoder_load=0.0)
    yield "hardware, half by the CPU", replace(plan, cpu_share=0.5)


def said(each: EdgeCaseFile) -> str:
    """One edge-case file that does not match."""
    return f"{each.name} {each.outcome} {each.max_levels or 0:.1f}"


def main(arguments: argparse.Namespace) -> None:
    """Prints one row per preset and plan: mean/max difference in levels after each step."""
    files = [(path.name, path.read_bytes()) for path in sorted(arguments.images.glob("*.jpg"))[:96]]
    print(f"mean / max |Δ| in 8-bit levels, {len(files)} photographs\n\n{HEAD}\n|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name, preset in PRESETS.items():
        try:
            transform = preset()
        except ImportError as error:
            print(f"| {name} | not measured: {error} |")
            continue
        for decoder, plan in plans(arguments.mixed, arguments.exact):
            pixels = PixelDifferences(transform, plan)
            for _ in compare_images(files, pixels):
                pass
            measure_steps_alone(files, pixels)
            odd = check_edge_cases(transform, plan)
            other = [each for each in odd if not each.matches]
            rows.append(
                {
                    "preset": name,
                    "decoder": decoder,
                    "plan": plain_from_record(plan),
                    "photographs": len(files),
                    "steps": plain_from_record(pixels.list_steps()),
                    "edge_cases": len(odd),
                    "not_matching": [said(each) for each in other],
                }
            )
            if arguments.output:
                arguments.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            decode, resized, final = pixels.cumulative[0], pixels.cumulative[1], pixels.cumulative[-1]
            cells = [f"{each.mean_levels:.4f} / {each.max_levels:.1f}" for each in (decode, resized, final)]
            alike = "; ".join([f"{len(odd) - len(other)} of {len(odd)}", *(said(each) for each in other)])
            row = (name, plan.resize, decoder, *cells, f"{final.off_share:.2%}", pixels.find_largest_step(), alike)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--images", type=Path, default=SAMPLES)
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
