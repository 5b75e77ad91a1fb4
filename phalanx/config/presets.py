"""Presets: a paper's or a task's name -> a whole Experiment. `phalanx presets` lists them."""

from __future__ import annotations

import dataclasses
from typing import Any

from phalanx.config.experiment import (
    A2CConfig,
    AsynchronousConfig,
    AtariConfig,
    C51Config,
    DBA3CConfig,
    DQNConfig,
    Experiment,
    GA3CConfig,
    GorilaConfig,
    GymnasiumConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RunConfig,
    SamplerConfig,
    SerialConfig,
    SynchronousConfig,
    ToyConfig,
)
from phalanx.errors import unknown

PAPER_SETTINGS: dict[str, AtariConfig] = {
    "stooke": AtariConfig(frame="104x80", noop_max=30, episodic_life=True, fire_on_reset=True, max_steps=27_000),
    # 12 frames: three steps without action fill the stack. Space Invaders takes skip 3.
    "ga3c": AtariConfig(max_pool=False, sticky=0.25, noop_min=12, noop_max=12, reward="clip", max_steps=100_000),
    "paac": AtariConfig(noop_min=16, noop_max=46, reward="clip", max_steps=0),
    "ba3c": AtariConfig(
        color="rgb", skip_min=2, max_pool=False, noop_max=0, sticky=0.25, reward="clip", max_steps=40_000
    ),
    "gorila": AtariConfig(noop_max=30, reward="clip", max_steps=4_500),
}
"""The Atari environment of each paper."""

A2C_ATARI = Experiment(
    env=PAPER_SETTINGS["stooke"],
    model=ModelConfig(torso="nips", padding=True, init="normc"),
    algorithm=A2CConfig(),
    optimizer=OptimizerConfig(
        rule="rmsprop-inside",
        learning_rate=7e-4,
        batch_scaling="sqrt",
        reference_batch=80,
        decay=0.9,
        epsilon=1e-6,
        clip_norm=0.5,
    ),
    sampler=SamplerConfig(environments=16, horizon=5, decorrelation=1000),
    topology=SynchronousConfig(),
)

PPO_ATARI = Experiment(
    env=PAPER_SETTINGS["stooke"],
    model=ModelConfig(torso="nips", padding=True, init="normc"),
    algorithm=PPOConfig(clip=0.2, value_coef=2.0),
    optimizer=OptimizerConfig(rule="adam-tf", learning_rate=1e-3, epsilon=1e-5, clip="none"),
    sampler=SamplerConfig(environments=8, horizon=0, batch=2048, decorrelation=1000),
    topology=SynchronousConfig(),
)


A3C = dataclasses.replace(
    A2C_ATARI,
    sampler=dataclasses.replace(A2C_ATARI.sampler, environments=64),
    topology=AsynchronousConfig(replicas=4),
)

APPO = dataclasses.replace(
    PPO_ATARI,
    optimizer=dataclasses.replace(PPO_ATARI.optimizer, learning_rate=2.5e-4, clip="global", clip_norm=0.5),
    sampler=dataclasses.replace(PPO_ATARI.sampler, environments=32, batch=8192),
    topology=AsynchronousConfig(replicas=4, poll_every=64, local_steps=2),
)

A2C_SYNC = dataclasses.replace(
    A2C_ATARI,
    sampler=dataclasses.replace(A2C_ATARI.sampler, environments=32),
    topology=SynchronousConfig(replicas=0),
)

PPO_SYNC = dataclasses.replace(PPO_ATARI, topology=SynchronousConfig(replicas=0))


def _paac(torso: str) -> Experiment:
    """PAAC with the paper's values; the learning rate is .0007 for each environment."""
    return Experiment(
        env=PAPER_SETTINGS["paac"],
        model=ModelConfig(torso=torso, init="fan-in"),
        algorithm=A2CConfig(value_coef=0.25, entropy_coef=0.01, loss_scale=5.0, log_floor=1e-30),
        optimizer=OptimizerConfig(
            rule="rmsprop-inside",
            learning_rate=0.0224,
            final_learning_rate=0.0,
            batch_scaling="linear",
            reference_batch=160,
            decay=0.99,
            epsilon=0.1,
            initial_accumulator=1.0,
            clip_norm=40.0,
        ),
        sampler=SamplerConfig(environments=32, horizon=5),
        topology=SynchronousConfig(),
        run=RunConfig(steps=115_000_000),
    )


def _ga3c(torso: str, first_stride: int = 4, tuner: str = "measured") -> Experiment:
    """GA3C; the loss is a sum over the batch, and the accumulator starts at 1 as in TensorFlow."""
    return Experiment(
        env=PAPER_SETTINGS["ga3c"],
        model=ModelConfig(torso=torso, first_stride=first_stride, init="fan-in", scale="centred"),
        algorithm=A2CConfig(value_coef=0.5, entropy_coef=0.01, reduction="sum", log_floor=1e-6),
        optimizer=OptimizerConfig(
            rule="rmsprop-inside",
            learning_rate=3e-4,
            decay=0.99,
            epsilon=0.1,
            initial_accumulator=1.0,
            clip="none",
        ),
        sampler=SamplerConfig(environments=32, horizon=5),
        topology=GA3CConfig(min_batch=20, tuner=tuner),  # type: ignore[arg-type]
        run=RunConfig(steps=25_000_000),
    )


PONG = Experiment(
    env=AtariConfig("pong"),
    model=ModelConfig(torso="pooled"),
    algorithm=PPOConfig(discount=0.98, epochs=4, minibatches=16, clip=0.1),
    optimizer=OptimizerConfig(rule="adam", learning_rate=6e-4, final_learning_rate=5e-5, schedule_length=1_400_000),
    sampler=SamplerConfig(environments=16, horizon=128, decorrelation=500),
    topology=SynchronousConfig(),
    run=RunConfig(steps=4_000_000, target_score=18.0),
)
"""Tuned for the time until the score is reached, on two cores."""

A2C_PONG = dataclasses.replace(
    PONG,
    model=ModelConfig(torso="nips"),
    algorithm=A2CConfig(discount=0.95, gae_lambda=0.95, value_coef=0.5, entropy_coef=0.002),
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-3, clip="none"),
    sampler=SamplerConfig(environments=8, horizon=16, decorrelation=500),
    topology=SerialConfig(),
    run=RunConfig(steps=1_000_000),
)
"""A score that rises within a million steps. With a discount of .99 none was found that does so in as few; the preset
`a2c`, which has it, learns Pong within 7 million."""

PONG_FAST = dataclasses.replace(
    PONG,
    env=AtariConfig("pong", frame="104x80"),
    algorithm=PPOConfig(
        discount=0.96, final_discount=0.99, discount_length=500_000, epochs=4, minibatches=16, clip=0.1
    ),
    optimizer=OptimizerConfig(rule="adam", learning_rate=6e-4, final_learning_rate=5e-5, schedule_length=1_300_000),
    sampler=SamplerConfig(
        environments=60, horizon=32, groups=2, squads=10, workers_per_core=2, decorrelation=300, overlap=True
    ),
)

BREAKOUT_FAST = dataclasses.replace(
    PONG_FAST,
    env=AtariConfig("breakout", frame="104x80", episodic_life=True, fire_on_reset=True),
    model=ModelConfig(torso="residual"),
    algorithm=PPOConfig(epochs=4, minibatches=32, clip=0.1, entropy_coef=0.003),
    optimizer=OptimizerConfig(rule="adam", learning_rate=4e-4, final_learning_rate=3e-5, schedule_length=3_000_000),
    sampler=SamplerConfig(
        environments=120, horizon=64, groups=1, squads=15, workers_per_core=2, decorrelation=300, overlap=True
    ),
    run=RunConfig(steps=20_000_000, target_score=300.0),
)

ATARI_FAST = dataclasses.replace(
    BREAKOUT_FAST,
    algorithm=PPOConfig(epochs=4, minibatches=32, clip=0.1, entropy_coef=0.01),
    optimizer=dataclasses.replace(BREAKOUT_FAST.optimizer, learning_rate=2.5e-4, schedule_length=10_000_000),
    run=RunConfig(steps=10_000_000),
)

Q_ATARI = Experiment(
    env=PAPER_SETTINGS["stooke"],
    model=ModelConfig(torso="nature", padding=True, init="normc"),
    sampler=SamplerConfig(environments=16, horizon=4, decorrelation=1000),
    topology=SynchronousConfig(),
    run=RunConfig(steps=50_000_000),
)

RAINBOW = C51Config(
    double=True,
    dueling=True,
    n_step=3,
    prioritized=True,
    priority_exponent=0.5,
    learning_starts=20_000,
    target_every=8_000,
    epsilon_final=0.01,
    epsilon_length=62_500,
    epsilon_eval=0.001,
)


def _dqn(batch: int, learning_rate: float, environments: int, **flags: Any) -> Experiment:
    """DQN on Atari; the learning rate grows with the batch as in A.3 of Stooke & Abbeel."""
    return dataclasses.replace(
        Q_ATARI,
        algorithm=DQNConfig(batch_size=batch, **flags),
        optimizer=OptimizerConfig(
            rule="rmsprop-inside", learning_rate=learning_rate, decay=0.95, epsilon=1e-6, clip="none"
        ),
        sampler=dataclasses.replace(Q_ATARI.sampler, environments=environments),
    )


def _c51(algorithm: C51Config, learning_rate: float, epsilon: float, clip: float, environments: int) -> Experiment:
    """Categorical DQN on Atari; Adam's epsilon is divided by the batch size."""
    return dataclasses.replace(
        Q_ATARI,
        algorithm=algorithm,
        optimizer=OptimizerConfig(
            rule="adam-tf",
            learning_rate=learning_rate,
            epsilon=epsilon / algorithm.batch_size,
            clip="global" if clip else "none",
            clip_norm=clip or 10.0,
        ),
        sampler=dataclasses.replace(Q_ATARI.sampler, environments=environments),
    )


C51 = C51Config(epsilon_final=0.01, epsilon_eval=0.001)

DQN_SMALL = DQNConfig(
    double=True,
    n_step=3,
    batch_size=32,
    intensity=8,
    replay_size=200_000,
    learning_starts=10_000,
    target_every=2_000,
    epsilon_final=0.02,
    epsilon_length=100_000,
    epsilon_eval=0.01,
)

DQN_FAST = Experiment(
    env=AtariConfig("pong"),
    model=ModelConfig(torso="nips"),
    algorithm=DQN_SMALL,
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-4, clip_norm=10.0),
    sampler=SamplerConfig(environments=8, horizon=4, decorrelation=500),
    topology=SynchronousConfig(),
    run=RunConfig(steps=2_000_000, target_score=18.0),
)
"""Double, 3-step, a smaller network and memory, and a quick end of exploration: learns Pong on two cores."""

GYM = Experiment(env=GymnasiumConfig(), model=ModelConfig(torso="auto"), run=RunConfig(steps=500_000, threads=1))

A2C_VECTOR = A2CConfig(gae_lambda=0.95, value_coef=0.5, entropy_coef=0.0)

A2C_GYM = dataclasses.replace(
    GYM,
    algorithm=A2C_VECTOR,
    optimizer=OptimizerConfig(rule="adam", learning_rate=2e-3),
    sampler=SamplerConfig(environments=8, horizon=16),
)

PPO_GYM = dataclasses.replace(
    GYM,
    algorithm=PPOConfig(clip=0.2, epochs=10, minibatches=8, entropy_coef=0.0),
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-3, final_learning_rate=0.0),
    sampler=SamplerConfig(environments=8, horizon=128),
    run=RunConfig(steps=200_000, threads=1),
)

DQN_VECTOR = DQNConfig(
    batch_size=128,
    intensity=16,
    replay_size=20_000,
    learning_starts=1_000,
    target_every=1_000,
    double=True,
    epsilon_final=0.02,
    epsilon_length=10_000,
    epsilon_eval=0.0,
)

C51_VECTOR = C51Config(**vars(DQN_VECTOR))

Q_VECTOR = dataclasses.replace(
    GYM,
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-3, clip_norm=10.0),
    sampler=SamplerConfig(environments=8, horizon=4),
)

Q_GYM = dataclasses.replace(
    Q_VECTOR,
    model=ModelConfig(torso="auto", hidden=128),
    optimizer=dataclasses.replace(Q_VECTOR.optimizer, final_learning_rate=1e-4, schedule_length=100_000),
    run=RunConfig(steps=250_000, threads=1),
)
"""The falling learning rate keeps what was learnt; a memory of the whole run lets nothing be forgotten."""

Q_GYM_CHANGES: dict[str, Any] = {"replay_size": 250_000, "target_every": 500, "epsilon_final": 0.01}

DQN_GYM = dataclasses.replace(Q_GYM, algorithm=dataclasses.replace(DQN_VECTOR, **Q_GYM_CHANGES))

C51_GYM = dataclasses.replace(
    Q_GYM,
    algorithm=dataclasses.replace(
        C51_VECTOR, **Q_GYM_CHANGES, n_step=3, batch_size=64, intensity=8, v_min=0.0, v_max=100.0
    ),
)

PPO_CATCH = PPOConfig(clip=0.2, entropy_coef=0.0)


FOR_BOARDS = ModelConfig(torso="mlp")


def _catch_q(base: DQNConfig, **flags: Any) -> Experiment:
    algorithm = dataclasses.replace(base, learning_starts=500, epsilon_length=4_000, target_every=200, **flags)
    run = RunConfig(steps=30_000, threads=1)
    return dataclasses.replace(Q_VECTOR, env=ToyConfig(), model=FOR_BOARDS, algorithm=algorithm, run=run)


def _catch(algorithm: A2CConfig | PPOConfig, learning_rate: float, horizon: int) -> Experiment:
    return dataclasses.replace(
        GYM,
        env=ToyConfig(),
        model=FOR_BOARDS,
        algorithm=algorithm,
        optimizer=OptimizerConfig(rule="adam", learning_rate=learning_rate),
        sampler=SamplerConfig(environments=8, horizon=horizon),
        run=RunConfig(steps=40_000, threads=1),
    )


GORILA = Experiment(
    env=PAPER_SETTINGS["gorila"],
    model=ModelConfig(torso="nature"),
    algorithm=DQNConfig(
        replay_size=100_000_000,
        learning_starts=5_000_000,
        target_every=60_000,
        target_clock="updates",
        epsilon_length=1_000_000,
        epsilon_clock="updates",
    ),
    optimizer=OptimizerConfig(rule="adagrad", learning_rate=0.01, epsilon=1e-3, initial_accumulator=0.01, clip="none"),
    sampler=SamplerConfig(environments=100, horizon=4),
    topology=GorilaConfig(bundles=100, shards=31, staleness=1_000, outlier=6.0),
    run=RunConfig(steps=1_000_000_000),
)
"""What the paper leaves open (learning rate, both thresholds, the batch) is this project's choice."""

GORILA_LOCAL = dataclasses.replace(
    DQN_FAST,
    algorithm=dataclasses.replace(
        DQN_SMALL,
        learning_starts=5_000,
        target_every=500,
        target_clock="updates",
        epsilon_length=25_000,
        epsilon_clock="updates",
    ),
    sampler=dataclasses.replace(DQN_FAST.sampler, environments=16),
    topology=GorilaConfig(bundles=2, shards=2, poll_every=0, staleness=100, outlier=6.0),
    run=RunConfig(steps=2_000_000, target_score=18.0),
)
"""With Adam on the servers, whose steps do not shrink as those of AdaGrad do."""

DBA3C = Experiment(
    env=dataclasses.replace(PAPER_SETTINGS["ba3c"], game="breakout"),
    model=ModelConfig(torso="ba3c", init="ba3c"),
    algorithm=A2CConfig(value_coef=0.5, entropy_coef=0.01, log_floor=1e-6),
    optimizer=OptimizerConfig(
        rule="adam-tf", learning_rate=0.001, beta1=0.8, beta2=0.75, epsilon=1e-8, clip="average", clip_norm=0.1
    ),
    sampler=SamplerConfig(environments=640, horizon=5),
    topology=DBA3CConfig(
        workers=64, predictors=3, prediction_batch=16, batch=32, shards=4, quorum=0.94, evaluate_every=1_000, cores=12
    ),
    run=RunConfig(steps=100_000_000, eval_games=50, target_score=300.0),
)
"""64 workers with 10 simulators and batches of 32 each; 60 of 64 gradients make a step, as in the paper's best run."""

DBA3C_LOCAL = dataclasses.replace(
    PONG,
    topology=DBA3CConfig(
        workers=2, agents=1, prediction_batch=8, batch=1024, shards=2, quorum=1.0, evaluate_every=10_000
    ),
    run=RunConfig(steps=4_000_000, eval_games=10, target_score=18.0),
)
"""The topology of the paper with PPO as in `pong`; A2C, the paper's algorithm, needs more steps than two cores make in
a short time."""

DBA3C_CATCH = dataclasses.replace(
    _catch(A2C_VECTOR, 3e-3, 8),
    optimizer=OptimizerConfig(
        rule="adam-tf", learning_rate=3e-3, beta1=0.8, beta2=0.75, epsilon=1e-8, clip="average", clip_norm=0.1
    ),
    topology=DBA3CConfig(workers=2, agents=1, batch=32, shards=2, quorum=1.0, evaluate_every=500),
    run=RunConfig(steps=80_000, threads=1, eval_games=20),
)

GORILA_CATCH = dataclasses.replace(
    _catch_q(DQN_VECTOR),
    optimizer=OptimizerConfig(rule="adagrad", learning_rate=0.02, epsilon=1e-3, initial_accumulator=0.01, clip="none"),
    topology=GorilaConfig(bundles=2, shards=2, staleness=50, outlier=8.0),
)


PRESETS: dict[str, tuple[str, Experiment]] = {
    "pong": ("PPO tuned to bring Pong to a score of 18 soon on two cores", PONG),
    "pong-fast": ("PPO tuned to bring Pong to a score of 18 soon on a GPU and many cores", PONG_FAST),
    "breakout-fast": ("PPO tuned to bring Breakout to a score of 300 soon on a GPU and many cores", BREAKOUT_FAST),
    "atari-fast": ("PPO for any Atari game within 10M steps on a GPU and many cores (--env.game)", ATARI_FAST),
    "paac-nips": ("PAAC with the small network: 32 environments x 5 steps, RMSProp", _paac("nips")),
    "paac-nature": ("PAAC with the large network", _paac("nature")),
    "ga3c": ("GA3C: 32 agents, 2 predictors, 2 trainers, numbers tuned while it runs", _ga3c("ga3c")),
    "ga3c-static": ("GA3C with fixed numbers of agents, predictors and trainers", _ga3c("ga3c", tuner="off")),
    **{
        f"ga3c-large-stride{stride}": (
            f"GA3C with the large network, whose first convolution has stride {stride}",
            _ga3c("ga3c-large", stride),
        )
        for stride in (4, 3, 2, 1)
    },
    "a2c": ("A2C on Atari as in Stooke & Abbeel: 16 environments x 5 steps, RMSProp", A2C_ATARI),
    "a3c": ("A3C on Atari as in Stooke & Abbeel: 4 asynchronous replicas of 16 environments x 5 steps", A3C),
    "appo": ("APPO on Atari as in Stooke & Abbeel: 4 asynchronous replicas of 8 environments x 256 steps", APPO),
    "a2c-sync": ("A2C in replicas in lock step, one for each GPU, or 2 on a CPU; 32 environments", A2C_SYNC),
    "ppo-sync": ("PPO in replicas in lock step, one for each GPU, or 2 on a CPU", PPO_SYNC),
    "a2c-pong": ("A2C with the small network in one process, for Pong on two cores", A2C_PONG),
    "ppo": ("PPO on Atari as in Stooke & Abbeel: 8 environments x 256 steps, 4 epochs of 4 minibatches", PPO_ATARI),
    "dqn": ("DQN on Atari as in Stooke & Abbeel, batches of 32", _dqn(32, 2.5e-4, 16)),
    "async-dqn": (
        "DQN in 4 asynchronous replicas of 16 environments, batches of 32",
        dataclasses.replace(_dqn(32, 2.5e-4, 64), topology=AsynchronousConfig(replicas=4)),
    ),
    "dqn-512": ("DQN with batches of 512, 64 environments", _dqn(512, 7.5e-4, 64)),
    "dqn-sync": (
        "DQN with batches of 512 in replicas in lock step, one for each GPU, or 2 on a CPU",
        dataclasses.replace(_dqn(512, 7.5e-4, 64), topology=SynchronousConfig(replicas=0)),
    ),
    "double-dqn": ("Double DQN, otherwise as dqn", _dqn(32, 2.5e-4, 16, double=True)),
    "dqn-fast": ("Double 3-step DQN with a small network and memory, for Pong on two cores", DQN_FAST),
    "c51": ("Categorical DQN, batches of 32", _c51(C51, 2.5e-4, 0.01, 0, 16)),
    "c51-2048": (
        "Categorical DQN with batches of 2,048, 256 environments",
        _c51(dataclasses.replace(C51, batch_size=2048), 4.2e-4, 0.01, 0, 256),
    ),
    "eps-rainbow": (
        "C51 + double + dueling + prioritised + 3-step, epsilon-greedy, batches of 32",
        _c51(RAINBOW, 6.25e-5, 0.005, 10.0, 16),
    ),
    "eps-rainbow-512": (
        "eps-Rainbow with batches of 512, 64 environments",
        _c51(dataclasses.replace(RAINBOW, batch_size=512), 6.25e-5, 0.005, 10.0, 64),
    ),
    "a2c-gym": ("A2C on a Gymnasium environment (CartPole-v1; change --env.id)", A2C_GYM),
    "ppo-gym": ("PPO on a Gymnasium environment (CartPole-v1; change --env.id)", PPO_GYM),
    "dqn-gym": ("Double DQN on a Gymnasium environment (CartPole-v1; change --env.id)", DQN_GYM),
    "c51-gym": ("Categorical DQN on a Gymnasium environment (CartPole-v1; change --env.id)", C51_GYM),
    "dba3c": ("Distributed BA3C on Breakout with the paper's numbers: 64 workers, 4 servers, a quorum of 60", DBA3C),
    "dba3c-local": ("Distributed BA3C in small, PPO on Pong: 2 workers of 8 environments on this machine", DBA3C_LOCAL),
    "dba3c-catch": ("Distributed BA3C on Catch: 2 workers around 2 parameter servers", DBA3C_CATCH),
    "gorila": ("Gorila with the paper's numbers: 100 bundles around 31 parameter servers, on a Ray cluster", GORILA),
    "gorila-local": ("Gorila in small: 2 bundles of 8 environments around 2 servers, on this machine", GORILA_LOCAL),
    "gorila-catch": ("Gorila on Catch: 2 bundles around 2 parameter servers", GORILA_CATCH),
    "a2c-catch": ("A2C on Catch, a toy that is learnt in seconds", _catch(A2C_VECTOR, 5e-3, 16)),
    "ppo-catch": ("PPO on Catch, a toy that is learnt in seconds", _catch(PPO_CATCH, 3e-3, 64)),
    "dqn-catch": ("Double DQN on Catch, a toy that is learnt in seconds", _catch_q(DQN_VECTOR)),
    "c51-catch": ("Categorical DQN on Catch", _catch_q(C51_VECTOR, v_min=-2.0, v_max=2.0)),
    "eps-rainbow-catch": (
        "eps-Rainbow on Catch",
        _catch_q(C51_VECTOR, v_min=-2.0, v_max=2.0, dueling=True, n_step=3, prioritized=True),
    ),
}


def preset(name: str) -> Experiment:
    """The experiment of that name; an unknown one is refused with the nearest names."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return dataclasses.replace(PRESETS[name][1], preset=name)


def default_preset() -> str:
    """The name of the preset for this kind of machine."""
    import torch

    return "pong-fast" if torch.cuda.is_available() else "pong"
