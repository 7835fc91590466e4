"""The networks of `gpu_compiled.py` and `gpu_families.py`, with random weights, and what they read.

A name is torchvision's, timm's after `timm/`, or one of OWN. `python benchmarks/gpu_networks.py` draws FAMILIES again: one network of
each of 40 families (a family is a source file of torchvision's or timm's models), seed 56, of 2 to 90 million parameters and at most
299 pixels a side, so that a list of our choice proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import nn


@dataclass(frozen=True)
class Drawn:
    family: str
    name: str
    pixels: int


FAMILIES = (
    Drawn("timm.rexnet", "timm/rexnet_130", 224),
    Drawn("timm.byoanet", "timm/lambda_resnet26rpt_256", 256),
    Drawn("timm.tnt", "timm/tnt_s_patch16_224", 224),
    Drawn("timm.repvit", "timm/repvit_m1", 224),
    Drawn("timm.iformer", "timm/iformer_m_distilled", 224),
    Drawn("torchvision.alexnet", "alexnet", 224),
    Drawn("timm.resnet", "timm/seresnext26d_32x4d", 224),
    Drawn("timm.mvitv2", "timm/mvitv2_base_cls", 224),
    Drawn("timm.vision_transformer_relpos", "timm/vit_relpos_base_patch16_rpn_224", 224),
    Drawn("timm.focalnet", "timm/focalnet_small_lrf", 224),
    Drawn("timm.cspnext", "timm/cspnext_s", 224),
    Drawn("timm.maxxvit", "timm/coatnet_rmlp_2_rw_224", 224),
    Drawn("timm.swin_transformer", "timm/swin_base_patch4_window7_224", 224),
    Drawn("timm.cpubone", "timm/cpubone_b0_bfrobust", 224),
    Drawn("timm.lcnetv2", "timm/lcnetv2_base", 224),
    Drawn("timm.tiny_vit", "timm/tiny_vit_21m_224", 224),
    Drawn("timm.ghostnet", "timm/ghostnet_050", 224),
    Drawn("timm.senet", "timm/legacy_seresnext101_32x4d", 224),
    Drawn("timm.eva", "timm/vit_base_patch16_rope_224", 224),
    Drawn("timm.byobnet", "timm/gernet_m", 224),
    Drawn("timm.xception", "timm/legacy_xception", 299),
    Drawn("timm.vovnet", "timm/ese_vovnet57b", 256),
    Drawn("timm.convmixer", "timm/convmixer_1024_20_ks9_p14", 224),
    Drawn("timm.sequencer", "timm/sequencer2d_m", 224),
    Drawn("timm.dla", "timm/dla60x", 224),
    Drawn("timm.mlp_mixer", "timm/resmlp_36_224", 224),
    Drawn("timm.cait", "timm/cait_xxs36_224", 224),
    Drawn("timm.edgenext", "timm/edgenext_x_small", 256),
    Drawn("timm.efficientvim", "timm/efficientvim_m3_dist", 224),
    Drawn("torchvision.googlenet", "googlenet", 224),
    Drawn("timm.swiftformer", "timm/swiftformer_xs", 224),
    Drawn("timm.efficientvit_msra", "timm/efficientvit_m2", 224),
    Drawn("timm.vision_transformer", "timm/vit_pwee_patch16_reg1_gap_256", 256),
    Drawn("timm.fasternet", "timm/fasternet_t1", 224),
    Drawn("timm.nest", "timm/nest_tiny_jx", 224),
    Drawn("timm.swin_transformer_v2_cr", "timm/swinv2_cr_small_ns_256", 256),
    Drawn("torchvision.shufflenetv2", "shufflenet_v2_x2_0", 224),
    Drawn("timm.densenet", "timm/densenetblur121d", 224),
    Drawn("torchvision.convnext", "convnext_tiny", 224),
    Drawn("timm.sknet", "timm/skresnet50d", 224),
)


def initialize(module):
    """Random weights whose activations neither vanish nor leave FP16's range, so that the outputs can be compared."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
        elif isinstance(layer, nn.Linear) and not layer.weight.any():
            nn.init.normal_(layer.weight, std=0.02)
    return module


class Double(nn.Sequential):
    def __init__(self, channels, width):
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Ronneberger et al. 2015 with padding and batch normalization: 64 to 1,024 channels, two classes."""

    def __init__(self):
        super().__init__()
        widths = [64 * 2**step for step in range(5)]
        self.down = nn.ModuleList(Double(*each) for each in zip([3, *widths], widths, strict=False))
        pairs = list(pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, wide, 2, 2) for wide, deep in pairs)
        self.joined = nn.ModuleList(Double(2 * wide, wide) for wide, _ in pairs)
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, value):
        skips = []
        for step, down in enumerate(self.down):
            value = down(nn.functional.max_pool2d(value, 2) if step else value)
            skips.append(value)
        skips.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            value = joined(torch.cat([skips.pop(), up(value)], 1))
        return self.head(value)


class Only(nn.Module):
    """One output of a transformers model."""

    def __init__(self, model, output, given="pixel_values"):
        super().__init__()
        self.model, self.output, self.given = model, output, given

    def forward(self, value):
        return getattr(self.model(**{self.given: value}), self.output)


class Encoder(nn.Module):
    """BERT on token numbers (texts, tokens), without padding."""

    def __init__(self, **sizes):
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(attn_implementation="sdpa", **sizes)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids):
        mask = torch.ones_like(input_ids)
        return self.bert(input_ids=input_ids, attention_mask=mask).last_hidden_state


def make_segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[3, 4, 6, 3],
        hidden_sizes=[64, 128, 320, 512],
        decoder_hidden_size=768,
        num_labels=150,
    )
    return Only(SegformerForSemanticSegmentation(config), "logits")


def make_dpt():
    from transformers import DPTConfig, DPTForDepthEstimation

    return Only(DPTForDepthEstimation(DPTConfig(image_size=384)), "predicted_depth")


def make_whisper():
    """The encoder of Whisper-small: 80 mel bands of 3,000 frames to 1,500 tokens."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072
    )
    return Only(WhisperEncoder(config), "last_hidden_state", "input_features")


def make_detector():
    """RetinaNet's backbone, FPN, and heads, without decoding."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            model = retinanet_resnet50_fpn(weights=None, weights_backbone=None)
            self.backbone, self.head = model.backbone, model.head

        def forward(self, value):
            return self.head(list(self.backbone(value).values()))["cls_logits"]

    return Raw()


@dataclass(frozen=True)
class Own:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one input; of `kind` int64, token numbers below WORDS."""
    kind: str = "float32"


WORDS = 30522
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
OWN = {
    "bert_base": Own(Encoder, (128,), "int64"),
    "bert_large_384": Own(lambda: Encoder(**LARGE), (384,), "int64"),
    "unet": Own(UNet, (3, 256, 256)),
    "segformer_b2": Own(make_segformer, (3, 512, 512)),
    "dpt": Own(make_dpt, (3, 384, 384)),
    "hrnet": Own(lambda: make_timm("hrnet_w18"), (3, 224, 224)),
    "fpn_detector": Own(make_detector, (3, 640, 640)),
    "whisper_small": Own(make_whisper, (80, 3000)),
}


def make_timm(name):
    import timm

    return timm.create_model(name, pretrained=False, scriptable=False, exportable=True)


def make_network(name):
    import torchvision

    torch.manual_seed(0)
    if name in OWN:
        return initialize(OWN[name].make().eval())
    if name.startswith("timm/"):
        return initialize(make_timm(name.removeprefix("timm/")).eval())
    more = (
        {"aux_logits": False, "init_weights": False}
        if name in ("googlenet", "inception_v3")
        else {}
    )
    return initialize(torchvision.models.get_model(name, weights=None, **more).eval())


def get_input(name):
    """Shape of one input without the batch, and its type."""
    if name in OWN:
        return OWN[name].shape, OWN[name].kind
    pixels = next((each.pixels for each in FAMILIES if each.name == name), 224)
    return (3, pixels, pixels), "float32"


def draw(name, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    shape, kind = get_input(name)
    if kind == "int64":
        return torch.randint(WORDS, (batch, *shape), generator=generator)
    return torch.randn(batch, *shape, generator=generator)


def draw_families(count=40, seed=56):
    """Prints FAMILIES for the installed torchvision and timm."""
    from collections import defaultdict

    import timm
    import torchvision

    families = defaultdict(list)
    for name in torchvision.models.list_models(module=torchvision.models):
        source = torchvision.models.get_model_builder(name).__module__.rsplit(".", 1)[1]
        families[f"torchvision.{source}"].append(name)
    for name in timm.list_models():
        families[f"timm.{timm.models._registry._model_to_module[name]}"].append(f"timm/{name}")
    random, drawn = Random(seed), 0
    for family in random.sample(sorted(families), len(families)):
        for name in random.sample(sorted(families[family]), len(families[family])):
            if drawn < count and (pixels := measure_pixels(name)):
                print(f'    Drawn("{family}", "{name}", {pixels}),')
                drawn += 1
                break


def measure_pixels(name):
    """Pixels a side that a network takes, or None if it is too small, too large, or cannot be made without memory."""
    import timm
    import torchvision

    try:
        with torch.device("meta"):
            if name.startswith("timm/"):
                module = timm.create_model(name.removeprefix("timm/"))
                channels, height, width = module.pretrained_cfg.get("input_size", (3, 224, 224))
            else:
                module = torchvision.models.get_model(name, weights=None)
                channels, height, width = (3, 299, 299) if "inception" in name else (3, 224, 224)
    except Exception:  # noqa: BLE001 - whatever cannot be made is not drawn
        return None
    millions = sum(each.numel() for each in module.parameters()) / 1e6
    fits = 2 <= millions <= 90 and channels == 3 and height == width <= 299
    return height if fits else None


if __name__ == "__main__":
    draw_families()
