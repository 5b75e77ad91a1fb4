"""An algorithm of your own: A2C whose entropy bonus fades over the run.

    python examples/own_algorithm.py

or, on the command line, where its own setting is a flag like any other:

    phalanx train a2c-catch --algorithm examples/own_algorithm.py:AnnealedA2C --algorithm.final-entropy-coef 0.001
"""

from dataclasses import dataclass

import torch

import phalanx
from phalanx.algorithms.a2c import A2C
from phalanx.algorithms.schedules import Schedule
from phalanx.config import A2CConfig
from phalanx.types import Loss


class AnnealedA2C(A2C):
    """`batches` is A2C's own: one batch of all rows of the newest rollout. The loss is written out here."""

    @dataclass(frozen=True)
    class Config(A2CConfig):
        final_entropy_coef: float = 0.0
        """Weight of the entropy bonus at the end of the run."""

    def __init__(self, config, model, experiment):
        super().__init__(config, model)
        self.entropy_coef = Schedule(config.entropy_coef, config.final_entropy_coef, experiment.run.steps)

    def scalars(self, progress):
        """Numbers that move during a run. They reach the loss as tensors."""
        return {"entropy_coef": self.entropy_coef(progress)}

    def loss(self, model, batch, scalars):
        logits, value = model(batch.stacks, batch.history)
        log_probs = torch.log_softmax(logits, dim=1)
        chosen = log_probs.gather(1, batch.action[:, None]).squeeze(1)
        # Rows are weighted, not averaged: some may not be learnt from, and the weights of a batch sum to 1.
        policy_loss = -(chosen * batch.advantage * batch.weight).sum()
        value_loss = ((batch.returns - value).square() * batch.weight).sum()
        entropy = -((log_probs.exp() * log_probs).sum(1) * batch.weight).sum()
        total = policy_loss + self.config.value_coef * value_loss - scalars["entropy_coef"] * entropy
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy}
        return Loss(total, {name: metric.detach() for name, metric in metrics.items()})


def main(steps: int = 50_000) -> phalanx.Run:
    run = phalanx.train(
        "a2c-gym",
        env="CartPole-v1",
        algorithm=AnnealedA2C,
        overrides={"run.steps": steps, "algorithm.entropy_coef": 0.02, "algorithm.final_entropy_coef": 0.0},
    )
    print(f"mean score of the last 100 games: {run.score:.1f}")
    return run


if __name__ == "__main__":
    main()
