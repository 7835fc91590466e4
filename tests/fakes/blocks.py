"""Small seeded blocks of generative models, with the signatures of `transformers` and `diffusers`."""

import math

import torch
from torch import nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu

WIDTH = 32


def whisper_encoder() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    return WhisperEncoder(
        WhisperConfig(
            d_model=WIDTH,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=20,
        )
    )


def text_encoder() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=100,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=12,
            bos_token_id=98,
            eos_token_id=99,
        )
    )


class Residual(nn.Module):
    def __init__(self, width: int, out: int, time: int | None = None):
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.into, self.out = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()
        self.time = nn.Linear(time, out) if time else None

    def forward(self, x, time=None):
        h = self.into(silu(self.first(x)))
        if self.time is not None:
            h = h + self.time(silu(time))[:, :, None, None]
        return self.skip(x) + self.out(silu(self.second(h)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(WIDTH, width) for _ in range(2))

    def forward(self, x, context=None):
        own = self.norm(x).flatten(2).transpose(1, 2)
        context = own if context is None else context
        projected = (self.q(own), self.k(context), self.v(context))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        found = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + found.transpose(1, 2).unflatten(-1, x.shape[2:])


class Denoiser(nn.Module):
    """A U-Net of two levels with the inputs of `UNet2DConditionModel`."""

    def __init__(self, time: int = 4 * WIDTH):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, time), nn.SiLU(), nn.Linear(time, time))
        self.into = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.up = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.left, self.low = Residual(WIDTH, WIDTH, time), Residual(2 * WIDTH, 2 * WIDTH, time)
        self.right = Residual(2 * WIDTH, WIDTH, time)
        self.left_attention, self.low_attention = Attention(WIDTH), Attention(2 * WIDTH)
        self.norm, self.out = nn.GroupNorm(8, WIDTH), nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, sample, timestep, encoder_hidden_states):
        timestep = timestep.reshape(-1).expand(sample.shape[0])
        rates = torch.exp(
            -math.log(10000) * torch.arange(WIDTH // 2, device=sample.device) / (WIDTH // 2)
        )
        angles = timestep[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(sample.dtype))
        high = self.left_attention(self.left(self.into(sample), time), encoder_hidden_states)
        low = self.low_attention(self.low(self.down(high), time), encoder_hidden_states)
        low = self.up(interpolate(low, scale_factor=2.0, mode="nearest"))
        return self.out(silu(self.norm(self.right(torch.cat([low, high], 1), time))))


def denoiser() -> nn.Module:
    torch.manual_seed(0)
    return Denoiser()


class Decoder(nn.Module):
    """The decoder of `AutoencoderKL`: latents to an image of twice the size."""

    def __init__(self):
        super().__init__()
        self.latents, self.into = nn.Conv2d(4, 4, 1), nn.Conv2d(4, WIDTH, 3, padding=1)
        self.first, self.attention, self.second = (
            Residual(WIDTH, WIDTH),
            Attention(WIDTH, 1),
            Residual(WIDTH, 16),
        )
        self.norm, self.out = nn.GroupNorm(8, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, sample):
        h = self.attention(self.first(self.into(self.latents(sample))))
        return self.out(
            silu(self.norm(self.second(interpolate(h, scale_factor=2.0, mode="nearest"))))
        )


def vae_decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()
