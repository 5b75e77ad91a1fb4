"""A network of your own: a function from what the network sees to a module of torch.

    python examples/own_network.py

or, on the command line:

    phalanx train ppo-catch --model.torso examples/own_network.py:torso
"""

from torch import nn

import phalanx


def torso(spec: phalanx.EnvSpec) -> nn.Module:
    """From float32 inputs [N, *spec.frame_shape] to features [N, F]. Policy and value are made of the features.

    For images `frame_shape` is (stack x channels, height, width) and pixels come scaled to 0..1; for vectors it is
    (stack x size,).
    """
    channels, height, width = spec.frame_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * height * width, 64),
        nn.ReLU(),
    )


def main(steps: int = 40_000) -> phalanx.Run:
    overrides = {"run.steps": steps, "optimizer.final_learning_rate": 0.0}  # a rate that falls to 0 ends at its best
    run = phalanx.train("ppo-catch", model=torso, overrides=overrides)
    print(f"mean score of the last 100 games: {run.score:.2f} (1 catches every ball)")
    return run


if __name__ == "__main__":
    main()
