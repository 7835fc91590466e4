"""Parity of the derived pipelines of three libraries, on the shipped photographs and on odd files, as Markdown.

usage: python benchmarks/preprocess_parity.py [--mixed]
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from optpipe.core.transform import Transform
from optpipe.sources.transform import transform_from_processor, transform_from_timm, transform_from_torchvision
from optpipe.stages.preprocess.dali_pipeline import DaliPlan
from optpipe.stages.preprocess.parity import odd_parity
from optpipe.stages.preprocess.pixels import Pixels, compared, measure_alone

SAMPLES = Path(__file__).resolve().parent.parent / "calibration" / "samples"


def presets() -> Iterator[tuple[str, Transform]]:
    """A bilinear one, a bicubic one, and one whose library resizes with torch to an exact size."""
    from torchvision.models import ResNet50_Weights

    yield "torchvision ResNet-50 (bilinear)", transform_from_torchvision(ResNet50_Weights.DEFAULT.transforms())
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg("convnext_tiny.fb_in22k_ft_in1k")
    yield "timm convnext_tiny (bicubic)", transform_from_timm(resolve_data_config(pretrained_cfg=config.to_dict()))
    from transformers import ViTImageProcessor

    yield "transformers ViT (bilinear, exact)", transform_from_processor(ViTImageProcessor())


def main(mixed: bool) -> None:
    """Prints one row per preset and arithmetic: mean/max difference in levels after each step."""
    files = [(path.name, path.read_bytes()) for path in sorted(SAMPLES.glob("*.jpg"))]
    print(f"mean / max |Δ| in 8-bit levels, {len(files)} photographs, decoding {'mixed' if mixed else 'on the CPU'}\n")
    print("| preset | resize | decode | resized | final | levels off | adds most | odd files alike |")
    print("|---|---|---|---|---|---|---|---|")
    for name, transform in presets():
        for resize in ("exact", "two-pass", "fused"):
            plan = DaliPlan(
                decode="mixed" if mixed else "cpu", device="gpu" if mixed else "cpu", batch_size=4, resize=resize
            )
            pixels = Pixels(transform, plan)
            for _ in compared(files, pixels):
                pass
            measure_alone(files, pixels)
            odd = odd_parity(transform, plan)
            alike = sum(each.outcome in ("equal", "refused by both") for each in odd)
            other = ", ".join(
                f"{each.name} {each.outcome} {each.max_levels or 0:.1f}"
                for each in odd
                if each.outcome not in ("equal", "refused by both")
            )
            decode, resized, final = pixels.together[0], pixels.together[1], pixels.together[-1]
            cells = [f"{each.mean:.4f} / {each.max:.1f}" for each in (decode, resized, final)]
            alike_text = f"{alike} of {len(odd)}" + (f"; {other}" if other else "")
            row = (name, resize, *cells, f"{final.off_share:.2%}", pixels.largest(), alike_text)
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main("--mixed" in sys.argv)
