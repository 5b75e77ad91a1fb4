"""Load a trained agent, and let it play where you ask for the actions yourself.

python examples/serve.py runs/NAME
"""

import sys

import gymnasium
import numpy as np

import phalanx


def one_environment(agent: phalanx.Agent, id: str, seed: int = 0) -> float:
    """The score of a single game."""
    env = gymnasium.make(id)
    observation, _ = env.reset(seed=seed)
    agent.reset()  # a new episode begins; matters where the agent sees several frames
    score, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(agent.act(observation, greedy=True))
        score, done = score + reward, terminated or truncated
    return score


def many_environments(agent: phalanx.Agent, id: str, count: int = 8, steps: int = 500) -> float:
    """Reward per step in several environments, whose observations the agent answers at once."""
    envs = gymnasium.make_vec(id, count)
    observations, _ = envs.reset(seed=0)
    agent.reset()
    total, first, ended = 0.0, np.ones(count, bool), np.zeros(count, bool)
    for _ in range(steps):
        actions = agent.act(observations, first=first)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        total += rewards.sum()
        first, ended = ended, terminated | truncated  # Gymnasium begins the next episode one step after an end
    envs.close()
    return total / (count * steps)


def main(directory: str) -> None:
    with phalanx.load(directory, best=True) as agent:
        id = agent.experiment.env.name
        print(f"the agent has learnt for {agent.steps:,} steps")
        print(f"one game: {one_environment(agent, id):g}")
        print(f"reward per step: {many_environments(agent, id):.2f}")
        scores = agent.evaluate(games=10)
        print(f"10 games as `phalanx eval` plays them: {sum(scores) / len(scores):.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the directory of a run: python examples/serve.py runs/NAME")
    main(sys.argv[1])
