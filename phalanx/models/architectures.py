"""Which convolutions a torso has: those of the papers by name, and those that fit images of any size.

`torsos` builds what stands here, and `phalanx plan` describes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config import ModelConfig
from phalanx.errors import unknown
from phalanx.given import is_code, spoken
from phalanx.types import EnvSpec


@dataclass(frozen=True)
class Convolution:
    """One convolution, followed by a 2x2 max-pool if `pool`, then by residual blocks and a ReLU."""

    filters: int
    kernel: int
    stride: int = 1
    pool: bool = False
    blocks: int = 0

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.filters} of {self.kernel}x{self.kernel}{stride}{', pooled' if self.pool else ''}"


CONVOLUTIONS: dict[str, tuple[Convolution, ...]] = {
    "nips": (Convolution(16, 8, 4), Convolution(32, 4, 2)),
    "nature": (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)),
    "ba3c": (
        Convolution(32, 5, pool=True),
        Convolution(32, 5, pool=True),
        Convolution(64, 5, pool=True),
        Convolution(64, 3),
    ),
    "ga3c": (Convolution(16, 8, 4), Convolution(32, 4, 2)),
    "ga3c-large": (Convolution(32, 8, 4), Convolution(32, 4, 2), Convolution(64, 4, 2)),
    "pooled": (Convolution(16, 4, 2, pool=True), Convolution(32, 3, pool=True)),
    "residual": (Convolution(32, 4, 2, pool=True, blocks=1), Convolution(64, 3, pool=True, blocks=2)),
}
HIDDEN = {
    "nips": 256,
    "nature": 512,
    "ba3c": 128,
    "ga3c": 256,
    "ga3c-large": 256,
    "pooled": 256,
    "residual": 512,
    "mlp": 64,
}
TORSOS = ("auto", "fitted", *HIDDEN)

LARGE = 36  # pixels of the longer side from which on the first convolution takes steps of 4
COARSE = 12  # places of the longer side that are few enough for the last convolution


def chosen_torso(config: ModelConfig, spec: EnvSpec) -> str:
    """The torso a configuration names; what `auto` means for these frames."""
    if config.torso not in TORSOS:
        raise unknown("torso", config.torso, TORSOS)
    if config.torso != "auto":
        return config.torso
    return "fitted" if spec.is_image else "mlp"


def fitted_convolutions(height: int, width: int) -> tuple[Convolution, ...]:
    """Convolutions for images of any size.

    Large images begin as in the Nature network (32 of 8x8 with stride 4, then 64 of 4x4 with stride 2), and halve as
    long as more than 12 places of the longer side are left; 64 of 3x3 come last. 84x84 and 64x64 get just the Nature
    network. Images of less than 36 pixels get 16 and 32 filters, and go from pixel to pixel while they have 12 or less:
    16 of 3x3 and 32 of 3x3 for 7x7 and 10x10. A side that is shorter than a kernel is padded with zeros up to it.
    """
    places = max(height, width)
    layers: list[Convolution] = []
    if is_large := places >= LARGE:
        layers.append(Convolution(32, 8, 4))
        places = (places - 8) // 4 + 1
    filters = (32, 64) if is_large else (16, 32)
    while places > COARSE:
        layers.append(Convolution(filters[bool(layers)], 4, 2))
        places = (places - 4) // 2 + 1
    if not layers:
        layers.append(Convolution(filters[0], 3))
    return (*layers, Convolution(filters[1], 3))


def convolutions(config: ModelConfig, spec: EnvSpec) -> tuple[Convolution, ...]:
    """The convolutions of the torso for these images, as wide as configured."""
    torso = chosen_torso(config, spec)
    layers = fitted_convolutions(*spec.frame_shape[1:]) if torso == "fitted" else CONVOLUTIONS[torso]
    if torso == "ga3c-large":
        layers = (replace(layers[0], stride=config.first_stride), *layers[1:])
    return tuple(replace(layer, filters=layer.filters * config.width) for layer in layers)


def hidden_width(config: ModelConfig, spec: EnvSpec) -> int:
    """Width of the fully connected layers: as configured, or the torso's own. Fitted to images it is 512 for large
    ones, as in the Nature network, and 128 for small ones."""
    torso = chosen_torso(config, spec)
    if torso == "fitted":
        return config.hidden or (512 if max(spec.frame_shape[1:]) >= LARGE else 128)
    return config.hidden or HIDDEN[torso]


def describe(config: ModelConfig, spec: EnvSpec) -> str:
    """The torso in words, and why it is this one where that was left open."""
    if is_code(config.torso):
        return f"{spoken(config.torso)}, code of your own"
    torso, hidden = chosen_torso(config, spec), hidden_width(config, spec)
    if torso == "mlp":
        why = " (auto: frames are vectors)" if config.torso == "auto" else ""
        return f"mlp{why}, two layers of {hidden}"
    channels, height, width = spec.frame_shape
    why = f" (auto: frames are images of {height}x{width} with {channels} channel(s))" if config.torso == "auto" else ""
    layers = " then ".join(str(layer) for layer in convolutions(config, spec))
    return f"{torso}{why}, convolutions {layers}, one layer of {hidden}"
