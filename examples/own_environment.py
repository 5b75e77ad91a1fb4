"""An environment of your own: any Gymnasium environment with discrete actions will do.

    python examples/own_environment.py

or, on the command line, which imports this file:

    phalanx train ppo-gym --env.id examples/own_environment.py:Corridor --env.kwargs '{"length": 9}'
"""

import gymnasium
import numpy as np

import phalanx


class Corridor(gymnasium.Env):
    """Walk to the end of a corridor where the cheese is: on the left or on the right, and you are told which."""

    def __init__(self, length: int = 7) -> None:
        self.length = length
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)  # left, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.length // 2
        self.cheese = int(self.np_random.choice([0, self.length - 1]))
        return self.observe(), {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        done = self.place in (0, self.length - 1)
        reward = float(done and self.place == self.cheese) - 0.01
        return self.observe(), reward, done, False, {}

    def observe(self):
        return np.array([2 * self.place / (self.length - 1) - 1, 1.0 if self.cheese else -1.0], np.float32)


def main(steps: int = 20_000) -> phalanx.Run:
    # A class, a function or a lambda: whatever returns a new environment when it is called.
    run = phalanx.train("ppo-gym", env=lambda: Corridor(length=9), overrides={"run.steps": steps})
    print(f"mean score of the last 100 games: {run.score:.2f} (the best possible is 0.96)")
    return run


if __name__ == "__main__":
    main()
