"""Wrappers for `--env.wrap`, around environments that show more than phalanx learns from."""

from __future__ import annotations

from typing import Any

from phalanx.envs.layout import is_image, leaves, parts
from phalanx.errors import UserError


def image_only(env: Any) -> Any:
    """A wrapper for environments that show one image beside other things: the image alone."""
    from gymnasium import ObservationWrapper

    space, keys = env.observation_space, []
    while not is_image(space):
        inner = [(key, part) for key, part in parts(space) if any(is_image(leaf) for _, leaf in leaves(part))]
        if len(inner) != 1:
            count = "no image" if not inner else "several images"
            raise UserError(f"image_only needs an environment that shows one image, but this one shows {count}")
        key, space = inner[0]
        keys.append(key)

    class ImageOnly(ObservationWrapper):
        observation_space = space

        def observation(self, observation: Any) -> Any:
            for key in keys:
                observation = observation[key]
            return observation

    return ImageOnly(env)
