"""The model card of an exported run: a README.md whose head is the metadata that the Hugging Face Hub reads.

The Hub shows a model's result from `model-index`; for reinforcement learning that is the mean return of whole games
with its standard deviation. `phalanx export` writes the card.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

TASK = "reinforcement-learning"


@dataclass(frozen=True)
class Facts:
    """What a card tells."""

    algorithm: str
    topology: str
    preset: str
    environment: str
    scores: list[float]  # raw, of whole games
    greedy: bool
    seed: int  # of those games
    steps: int  # of training
    parameters: int
    weights: str  # the file, by its path within the export
    video: str | None  # the same
    versions: dict[str, Any]

    @property
    def result(self) -> str:
        """The mean of the scores with their deviation, as the Hub's boards read it."""
        deviation = statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0
        return f"{statistics.mean(self.scores):.2f} +/- {deviation:.2f}"


def card(facts: Facts) -> str:
    """The text of README.md."""
    return f"---\n{metadata(facts)}---\n\n{body(facts)}"


def metadata(facts: Facts) -> str:
    """YAML, without a package for it: every text is in JSON's quotes, which are YAML's, too."""
    environment, algorithm = json.dumps(facts.environment), json.dumps(facts.algorithm)
    return f"""library_name: phalanx
tags:
- {environment}
- deep-reinforcement-learning
- {TASK}
- phalanx
model-index:
- name: {algorithm}
  results:
  - task:
      type: {TASK}
      name: {TASK}
    dataset:
      name: {environment}
      type: {environment}
    metrics:
    - type: mean_reward
      value: {json.dumps(facts.result)}
      name: mean_reward
      verified: false
"""


def body(facts: Facts) -> str:
    """For people."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    actions = "greedy" if facts.greedy else "drawn from the policy"
    shown = f"One game is shown in [{facts.video}]({facts.video}).\n\n" if facts.video else ""
    return f"""# {facts.algorithm} on {facts.environment}

An agent that phalanx trained: the preset `{facts.preset}` on the topology `{facts.topology}`, {facts.steps:,} agent
steps.

| | |
|---|---|
| mean score | {facts.result} |
| games | {len(facts.scores)}, whole, raw scores, actions {actions}, seed {facts.seed} |
| lowest, highest | {min(facts.scores):g}, {max(facts.scores):g} |
| parameters | {facts.parameters:,} |

{shown}## Use it

In the directory of this file:

```
phalanx eval . --games {len(facts.scores)} --seed {facts.seed}{" --greedy" if facts.greedy else ""}
phalanx play . --video again.mp4
```

```python
import phalanx

agent = phalanx.load(".")
action = agent.act(observation)
```

`{facts.weights}` holds the weights, name -> tensor, for any reader of safetensors;
`config.json` holds every value of the experiment.

## Made with

{versions or "unknown versions"}
"""
