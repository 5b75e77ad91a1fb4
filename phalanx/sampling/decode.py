"""Raw emulator screens to frames, on the device, for a whole group at once: bit for bit what `envs/frames.py` does.

Workers that feed a GPU only emulate: they publish the last two screens as palette indices. The grey table, the
maximum of both and the resize happen here.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from phalanx.config import AtariConfig
from phalanx.envs.frames import area_resize
from phalanx.envs.screen import palette


class ScreenDecoder:
    """Palette indices [B, depth, rows, 160] -> grey frames [B, 1, height, width]."""

    def __init__(self, config: AtariConfig, rows: int, device: torch.device) -> None:
        self.half = config.frame == "104x80"
        self.grey = torch.from_numpy(palette(rows).grey.copy()).to(device)
        resize = area_resize(rows)
        self.blocks, self.scale = resize.blocks, float(resize.scale)
        self.row_weights = torch.from_numpy(resize.row_weights.copy()).to(device)  # [out, in] of one block
        self.column_weights = torch.from_numpy(resize.column_weights.copy()).to(device)  # [in, out] of one block

    def __call__(self, screens: Tensor) -> Tensor:
        if self.half:
            # Quarters of whole numbers below 2^10 are exact, and cutting off what is left of them rounds halves up.
            means = avg_pool2d(self._shade(screens[:, :, 1:209]).float(), 2)
            return (means + 0.5).to(torch.uint8)[:, None]
        pixels = self._shade(screens).float().unflatten(1, (self.blocks, -1))  # [B, blocks, in, 160]
        rows = self.row_weights @ pixels  # every sum is a whole number below 2^24: exact in any order
        sums = rows.unflatten(3, (-1, len(self.column_weights))) @ self.column_weights
        return torch.round(sums.flatten(3).flatten(1, 2) / self.scale).to(torch.uint8)[:, None]

    def _shade(self, screens: Tensor) -> Tensor:
        """Grey values, the greater of the screens."""
        shades = self.grey.index_select(0, screens.int().flatten()).view(screens.shape)
        return functools.reduce(torch.maximum, shades.unbind(1))
