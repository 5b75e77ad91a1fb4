"""An algorithm of a user's own: a class with `batches` and `loss`; what else a learner asks for may be left out.

It is made as `Class(config, model, steps)`: its `Config` or the configuration of ours in whose place it learns, the
network, and the steps of the run, which schedules go by.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.algorithms import ALONE, Algorithm
from phalanx.config import Experiment
from phalanx.config.own import learner_class, own_config

LEFT_OUT: dict[str, Any] = {
    "peers": ALONE,
    "scalars": lambda progress: {},
    "state": dict,
    "restore": lambda state: None,
}
"""What stands in for parts of `Algorithm` that a class does not have."""


def make(experiment: Experiment, model: nn.Module) -> Algorithm:
    config = experiment.algorithm
    algorithm = learner_class(config.code)(own_config(config), model, experiment.run.steps)
    for name, stand_in in LEFT_OUT.items():
        if not hasattr(algorithm, name):
            setattr(algorithm, name, stand_in)
    return algorithm
