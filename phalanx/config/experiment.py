"""The experiment as a value: frozen dataclasses that say everything a run depends on.

A preset is an Experiment; flags change fields of it; `config.json` in the run directory is it, saved (see `stored`).
Derived values are properties, so that nothing is written down twice. The bounds of a number stand beside it. `validate`
refuses what is outside of them, and what does not fit together (see `checks`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from phalanx.config.bounds import number
from phalanx.errors import require
from phalanx.given import spoken

Clock = Literal["steps", "updates", "episodes"]
Torso = Literal["nips", "nature", "ba3c", "ga3c", "ga3c-large", "pooled", "residual", "mlp", "fitted", "auto"]

STEPS = 10**15
"""More than any run takes; times the frames of a step it still fits 64 bits."""
ROLLOUT = 10**12
"""Steps that fit no memory; numbers up to it are divided into parts in a moment."""
LARGE = 1e38
"""About the largest number that float32 holds."""


@dataclass(frozen=True)
class AtariConfig:
    """An Atari 2600 game on the Arcade Learning Environment."""

    game: str = "pong"
    """ROM name, e.g. pong, breakout, space_invaders."""
    frame: Literal["84x84", "104x80"] = "84x84"
    """84x84: area resize of the whole screen. 104x80: one row off top and bottom, then the mean of each 2x2 pixels."""
    color: Literal["gray", "rgb"] = "gray"
    """Gray luminance, or three colour channels."""
    stack: int = number(4, least=1, most=254)
    """Frames the policy sees at once; frames before the start of an episode count as zeros."""
    skip: int = number(4, least=1, most=1_000)
    """Emulator frames an action is held for."""
    skip_min: int = number(4, least=1, most=1_000)
    """Lower than `skip`: the number of frames is drawn uniformly from skip_min..skip at each step."""
    max_pool: bool = True
    """Show the pixel-wise maximum of the last two frames, so that flickering sprites stay visible."""
    noop_max: int = number(30, least=0, most=10_000)
    """An episode starts after a uniform number of 0..noop_max frames without action."""
    noop_min: int = number(0, least=0, most=10_000)
    """Lower end of the number of frames without action."""
    episodic_life: bool = False
    """End the episode (not the game) when a life is lost."""
    fire_on_reset: bool = False
    """At the start and after each lost life a frame each of NOOP, FIRE and, where it exists, UP."""
    sticky: float = number(0.0, least=0, below=1)
    """Probability that the emulator repeats the last action instead of the new one, per frame."""
    reward: Literal["sign", "clip", "raw"] = "sign"
    """The reward learnt from: its sign, clipped to [-1, 1], or as it is. Scores are always raw."""
    max_steps: int = number(27_000, least=0, most=STEPS)
    """Truncate a game after so many agent steps; 0 means never."""
    full_actions: bool = False
    """All 18 actions instead of the game's minimal set."""

    @property
    def name(self) -> str:
        return self.game


@dataclass(frozen=True)
class GymnasiumConfig:
    """Any Gymnasium environment with discrete actions that shows an image, or what flattens into a vector."""

    id: str = "CartPole-v1"
    """Registered name, as for gymnasium.make; or code of your own that makes one: module:function, file.py:Class."""
    stack: int = number(1, least=1, most=254)
    """Observations the policy sees at once."""
    max_steps: int = number(0, least=0, most=STEPS)
    """Truncate after so many steps; 0 keeps the environment's own limit."""
    reward: Literal["sign", "clip", "raw"] = "raw"
    """The reward learnt from: its sign, clipped to [-1, 1], or as it is."""
    kwargs: str = ""
    """What it is made with, as a JSON object, such as {"map_name": "8x8"}."""
    wrap: str = ""
    """module:function or file.py:function that takes the environment and returns it wrapped; empty: none does."""

    @property
    def name(self) -> str:
        return spoken(self.id)


@dataclass(frozen=True)
class ToyConfig:
    """Tiny environments of phalanx itself, for tests and first steps."""

    name: Literal["catch", "identity", "counter"] = "catch"
    """catch: a ball falls on a 10x5 board. identity: repeat the number shown. counter: counts steps, for checks."""
    stack: int = number(1, least=1, most=254)
    """Frames the policy sees at once."""
    length: int = number(16, least=1, most=1_000_000)
    """Episode length of identity and counter; `counter` truncates every second episode."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    torso: Torso | str = "nature"
    """nips: 16-32 convolutions, 256. nature: 32-64-64, 512. ba3c: 32-32-64-64 with pooling. ga3c: nips with SAME
    padding; ga3c-large: one convolution more. pooled: 16-32 with finer strides and pooling. residual: 32-64
    with residual blocks besides, for a GPU. mlp: two hidden layers. fitted: convolutions that fit the images' size.
    auto: fitted for images, mlp for vectors. Or a function of your own: module:function."""
    hidden: int = number(0, least=0, most=1_000_000)
    """Width of the fully connected layer(s); 0 takes the torso's own (256, 512, 128, 256, 256, 256, 512, 64, and 128 or
    512 fitted to small or large images)."""
    width: int = number(1, least=1, most=1_000)
    """Times the convolutions' filters."""
    padding: bool = False
    """Pad later convolutions by 1, as the 104x80 networks of Stooke & Abbeel do."""
    first_stride: int = number(4, least=1, most=4)
    """Stride of the first convolution of ga3c-large (4 to 1)."""
    init: Literal["orthogonal", "normc", "fan-in", "ba3c"] = "orthogonal"
    """orthogonal: gains sqrt 2, .01, 1. normc: Glorot convolutions and normalised columns (Stooke). fan-in: uniform
    +-1/sqrt(fan-in), biases too (PAAC, GA3C). ba3c: truncated normal .03, uniform unit scaling 1.43."""
    scale: Literal["unit", "centred"] = "unit"
    """Pixels to [0, 1], or to [-1, 1) as GA3C does."""


@dataclass(frozen=True)
class A2CConfig:
    """Advantage actor-critic: one gradient step on each rollout."""

    discount: float = number(0.99, above=0, most=1)
    """Discount factor per agent step."""
    gae_lambda: float = number(1.0, least=0, most=1)
    """1 gives n-step returns."""
    value_coef: float = number(0.25, least=0, most=1e6)
    """Weight of the squared value error."""
    entropy_coef: float = number(0.01, least=0, most=1e6)
    """Weight of the entropy bonus."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the loss is reduced over the batch."""
    loss_scale: float = number(1.0, above=0, most=1e6)
    """Factor on the whole loss (PAAC: 5)."""
    normalize_advantage: bool = False
    """Zero mean and unit deviation of advantages within a rollout."""
    importance: bool = False
    """Weight each step by min(1, pi / pi_collected), for rollouts that are learnt from one rollout late."""
    log_floor: float = number(0.0, least=0, most=1)
    """Added to probabilities inside logarithms (GA3C 1e-6); 0 uses log-softmax."""
    log_guard: Literal["add", "max"] = "add"
    """max: probabilities are raised to `log_floor` instead, as in GA3C's public code; below it no gradient is left."""
    vtrace: bool = False
    """Correct returns and advantages for the lag with the truncated importance weights of V-trace."""
    code: str = ""
    """Class of your own that learns in its place, as module:Class or file.py:Class; empty: none does."""
    settings: str = ""
    """Values of that class's own fields, as a JSON object."""


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation: several epochs of minibatches with a clipped ratio."""

    discount: float = number(0.99, above=0, most=1)
    """Discount factor per agent step."""
    final_discount: float | None = number(None, above=0, most=1)
    """Discount at the end of its schedule, reached linearly: a short sight learns faster, a long one better."""
    discount_length: int = number(0, least=0, most=STEPS)
    """Steps of that schedule; 0 means until run.steps."""
    gae_lambda: float = number(0.95, least=0, most=1)
    """Trade-off of bias and variance of advantages."""
    epochs: int = number(4, least=1, most=10_000)
    """Passes over each rollout."""
    minibatches: int = number(4, least=1, most=ROLLOUT)
    """Parts a rollout is shuffled into."""
    clip: float = number(0.1, above=0, most=1e6)
    """The ratio is clipped to 1 +- clip."""
    final_clip: float | None = number(None, least=0, most=1e6)
    """Clip at the end of the run; None keeps it constant."""
    value_clip: bool = False
    """Clip the value's move in the same way."""
    value_coef: float = number(0.5, least=0, most=1e6)
    """Weight of the squared value error (halved in the loss)."""
    entropy_coef: float = number(0.01, least=0, most=1e6)
    """Weight of the entropy bonus."""
    normalize_advantage: bool = True
    """Zero mean and unit deviation of advantages within a minibatch."""
    code: str = ""
    """Class of your own that learns in its place, as module:Class or file.py:Class; empty: none does."""
    settings: str = ""
    """Values of that class's own fields, as a JSON object."""


@dataclass(frozen=True)
class DQNConfig:
    """Deep Q-learning from a replay memory, with its later improvements as flags."""

    discount: float = number(0.99, above=0, most=1)
    """Discount factor per agent step."""
    n_step: int = number(1, least=1, most=10_000)
    """Steps of reward summed before bootstrapping."""
    double: bool = False
    """Choose the next action by the learnt network, value it by the target network."""
    dueling: bool = False
    """Separate streams for the state's value and the actions' advantages; their gradient is scaled by 1/sqrt 2."""
    batch_size: int = number(32, least=1, most=1_000_000)
    """Transitions per gradient step."""
    intensity: float = number(8.0, above=0, most=1e6)
    """Uses of each collected step on average: fixes the number of updates per rollout."""
    replay_size: int = number(1_000_000, least=1, most=ROLLOUT)
    """Steps remembered over all environments."""
    learning_starts: int = number(50_000, least=0, most=ROLLOUT)
    """Steps collected before the first update."""
    target_every: int = number(10_000, least=1, most=STEPS)
    """Ticks of `target_clock` between two refreshes of the target network."""
    target_clock: Clock = "steps"
    """What `target_every` counts."""
    huber: float = number(1.0, above=0, most=LARGE)
    """Errors beyond this count linearly; DQN only."""
    epsilon_start: float = number(1.0, least=0, most=1)
    """Share of random actions at the start."""
    epsilon_final: float = number(0.1, least=0, most=1)
    """Share of random actions at the end of the schedule."""
    epsilon_length: int = number(1_000_000, least=0, most=STEPS)
    """Ticks of `epsilon_clock` that the epsilon schedule takes."""
    epsilon_clock: Clock = "steps"
    """What `epsilon_length` counts."""
    epsilon_spread: float = number(0.0, least=0, most=1_000)
    """Greater than 0: environment i of n explores with epsilon ** (1 + spread * i / (n - 1)), as in Ape-X."""
    epsilon_eval: float = number(0.05, least=0, most=1)
    """Share of random actions in evaluation."""
    prioritized: bool = False
    """Draw transitions by the size of their last error instead of uniformly."""
    priority_exponent: float = number(0.6, least=0, most=1)
    """0 draws uniformly, 1 in proportion to the error."""
    importance_start: float = number(0.4, least=0, most=1)
    """Exponent of the importance weights at the start; it grows linearly to 1."""
    importance_length: int = number(50_000_000, least=0, most=STEPS)
    """Agent steps until the exponent is 1."""
    new_priority: Literal["max", "one"] = "max"
    """Priority of new transitions: the greatest seen so far, or 1."""
    checkpoint_replay: bool = False
    """Write the memory into checkpoints: resuming is then exact, at the price of disk space."""
    code: str = ""
    """Class of your own that learns in its place, as module:Class or file.py:Class; empty: none does."""
    settings: str = ""
    """Values of that class's own fields, as a JSON object."""

    def updates_per_rollout(self, rollout_steps: int) -> float:
        # rounded, so that an intensity such as 0.333333333 can mean a third
        return round(self.intensity * rollout_steps / self.batch_size, 3)


@dataclass(frozen=True)
class C51Config(DQNConfig):
    """Categorical DQN: the distribution of returns on a fixed grid. With flags it is eps-Rainbow."""

    atoms: int = number(51, least=2, most=4_096)
    """Points of the grid."""
    v_min: float = number(-10.0, least=-1e9, most=1e9)
    """Smallest return on the grid."""
    v_max: float = number(10.0, least=-1e9, most=1e9)
    """Greatest return on the grid."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule of the parameter store."""

    rule: Literal["rmsprop", "rmsprop-inside", "adam", "adam-tf", "adagrad", "sgd"] = "adam"
    """rmsprop: torch's form. rmsprop-inside: epsilon inside the root (TensorFlow, Lasagne). adam: torch's form.
    adam-tf: epsilon added before bias correction. adagrad; sgd with momentum."""
    learning_rate: float = number(2.5e-4, above=0, most=LARGE)
    """Step size at the start."""
    batch_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate follows the steps of a rollout, or of a trainer's batch (ga3c, dba3c), when they differ
    from `reference_batch`."""
    reference_batch: int = number(0, least=0, most=ROLLOUT)
    """Steps of a rollout, or of a trainer's batch, that `learning_rate` is meant for, with `batch_scaling`."""
    final_learning_rate: float | None = number(None, least=0, most=LARGE)
    """Step size at the end of the schedule, reached linearly; None keeps it constant."""
    schedule_length: int = number(0, least=0, most=STEPS)
    """Length of the schedule on its clock; 0 means until run.steps (clock `steps` only)."""
    schedule_clock: Clock = "steps"
    """What the schedule counts: agent steps, updates, or finished games."""
    epsilon: float = number(1e-5, least=0, most=1e6)
    """Guard of the denominator."""
    decay: float = number(0.99, least=0, below=1)
    """RMSProp: decay of the squared gradient."""
    initial_accumulator: float = number(0.0, least=0, most=1e6)
    """RMSProp and AdaGrad: first value of the accumulator (TensorFlow's RMSProp: 1)."""
    beta1: float = number(0.9, least=0, below=1)
    """Adam: decay of the mean gradient."""
    beta2: float = number(0.999, least=0, below=1)
    """Adam: decay of the squared gradient."""
    momentum: float = number(0.0, least=0, below=1)
    """SGD: momentum."""
    clip: Literal["none", "global", "average"] = "global"
    """global: rescale to an L2 norm of at most clip_norm. average: the same per tensor with norm / size (BA3C)."""
    clip_norm: float = number(0.5, above=0, most=math.inf)
    """Threshold of the clip."""


@dataclass(frozen=True)
class SamplerConfig:
    """How experience is collected."""

    environments: int = number(16, least=1, most=1_000_000)
    """Simulators in all."""
    horizon: int = number(5, least=0, most=1_000_000)
    """Steps each environment takes per rollout; 0 means that they follow from `batch`."""
    batch: int = number(0, least=0, most=ROLLOUT)
    """Steps of a rollout over all environments, where `horizon` is 0: it stays while environments are added."""
    groups: int = number(1, least=1, most=1_000_000)
    """1: all environments step together (PAAC). 2: two alternate, one simulates while the other is served."""
    squads: int = number(1, least=0, most=10_000)
    """Workers wait for each other within a squad only. Each squad has groups of its own, and whichever is ready is
    served: good where cores differ in speed and inference is cheap. Where workers or environments do not divide, the
    next smaller number that does is taken. 0: every worker is a squad."""
    decorrelation: int = number(0, least=0, most=1_000_000_000)
    """Each environment takes a random number of random actions, up to this, before learning starts."""
    resets: Literal["swap", "wait"] = "swap"
    """swap: the next episode begins at once, from a start prepared ahead. wait: a finished environment
    idles, masked, until the rollout ends, and prepares its reset while the learner works (Stooke & Abbeel)."""
    overlap: bool = False
    """Learn from the last rollout while the next is collected: the policy lag is exactly one rollout."""
    raw_screens: bool = True
    """With a GPU, Atari workers publish raw screens, and the frames are made on the device."""
    workers: int = number(0, least=0, most=10_000)
    """Worker processes; 0 means as many as fit the cores. Topology `serial` uses none."""
    workers_per_core: int = number(1, least=1, most=100)
    """Where `workers` is 0 and there is a GPU, so many workers fit a core. With 2 the system moves what waits for a
    slow core to a fast one; with 1 environments move (`balance`), which needs more of them."""
    pin: bool = True
    """Pin each worker to a core where there are enough; more workers than that share the cores, all but the owner's. An
    owner with a core of its own keeps to it."""
    balance: float = number(1.0, least=0, most=1e9)
    """Seconds until the first look at how busy the workers are; later ones are up to eight times as rare. Atari
    environments then move from slow cores to fast ones, unless workers share cores. 0 means never."""
    step_timeout: float = number(60.0, above=0, most=math.inf)
    """Seconds without a finished group, and in a worker without a single step of an environment, after which the worker
    is killed and replaced; twice as many at most."""
    max_deaths: int = number(1_000, least=0, most=1_000_000_000)
    """Workers that may die within an hour before the run ends."""
    max_deaths_in_a_row: int = number(10, least=0, most=1_000_000_000)
    """Times a worker may die in a row, without a step between two deaths, before the run ends. If more than 10, so
    many deaths of workers of one and the same exception end it, else 10."""

    @property
    def rollout_steps(self) -> int:
        return self.environments * self.horizon


@dataclass(frozen=True)
class SerialConfig:
    """Everything in one process: the oracle every other topology is tested against."""

    name: Literal["serial"] = "serial"
    """The topology."""


@dataclass(frozen=True)
class SynchronousConfig:
    """Environments in worker processes, lock step: on-policy with lag zero. One replica of the model, or several that
    make every update together, on the mean of their gradients."""

    name: Literal["synchronous"] = "synchronous"
    """The topology."""
    replicas: int = number(1, least=0, most=1_000)
    """Learners, each with its part of the environments, of a rollout, of a batch and of the replay memory; one process
    each. 0: as many as there are GPUs, or 2 on a CPU; under torchrun as many as it starts."""
    exchange: Literal["auto", "gloo", "nccl"] = "auto"
    """What replicas exchange gradients with. auto: NCCL where each replica has a GPU of its own, gloo elsewhere."""


@dataclass(frozen=True)
class AsynchronousConfig:
    """Replicas in processes of their own, each with its part of the environments, around central parameters: nobody
    waits for anybody (A3C, APPO)."""

    name: Literal["asynchronous"] = "asynchronous"
    """The topology."""
    replicas: int = number(2, least=1, most=1_000)
    """Learners. `sampler.environments` and `algorithm.replay_size` are divided among them."""
    chunks: int = number(3, least=1, most=1_000)
    """Parts of the central parameters, with a lock each."""
    poll_every: int = number(0, least=0, most=1_000_000)
    """Steps of a rollout after which newer central parameters are taken within it; 0: only between rollouts."""
    local_steps: int = number(1, least=1, most=1_000)
    """Updates a learner makes by itself before it brings their sum to the central parameters; more than 1 need Adam."""


@dataclass(frozen=True)
class GA3CConfig:
    """Agents without a model, predictors that answer whoever waits, and trainers that learn from short segments: nobody
    waits for anybody but for their own answer (GA3C)."""

    name: Literal["ga3c"] = "ga3c"
    """The topology."""
    agents: int = number(0, least=0, most=4_096)
    """Agent processes to begin with; `sampler.environments` are divided among them. 0: one for each of these."""
    predictors: int = number(2, least=1, most=64)
    """Threads that answer agents, to begin with."""
    trainers: int = number(2, least=1, most=64)
    """Threads that learn, to begin with."""
    prediction_batch: int = number(128, least=1, most=1_000_000)
    """Rows that a predictor answers at once, at most, in whole agents; one agent is answered however many it has."""
    queue: int = number(100, least=1, most=1_000_000)
    """Segments that may wait for a trainer; agents wait while it is full. The fewer, the smaller the policy lag."""
    min_batch: int = number(0, least=0, most=1_000_000)
    """Steps that a trainer learns from at once, at least: it merges whole segments. 0: as many as a rollout has,
    `sampler.environments` x `sampler.horizon`, for as many updates as elsewhere; 1 takes each segment by itself."""
    tuner: Literal["off", "measured", "walk"] = "off"
    """Finds the numbers of agents, predictors and trainers while the run goes on. measured: compares settings beyond
    the noise. walk: the paper's random walk."""
    tuner_window: float = number(10.0, above=0, most=1e9)
    """Seconds for which a setting is measured."""
    max_agents: int = number(0, least=0, most=4_096)
    """Agents that the tuner may come to; 0: four times as many as at the start, and at least 32."""
    max_threads: int = number(4, least=1, most=64)
    """Predictors, and trainers, that the tuner may come to; more if the run begins with more."""
    max_lag: float = number(0.0, least=0, most=1e9)
    """Mean policy lag that the tuner may not exceed; 0: any."""

    @property
    def most_agents(self) -> int:
        return max(self.agents, self.max_agents or max(32, 4 * self.agents))

    @property
    def places(self) -> int:
        """For agents: as many as there may ever be."""
        return self.agents if self.tuner == "off" else self.most_agents

    @property
    def most_trainers(self) -> int:
        return max(self.trainers, self.max_threads)

    @property
    def most_predictors(self) -> int:
        return max(self.predictors, self.max_threads)


@dataclass(frozen=True)
class GorilaConfig:
    """Actors, learners and parameter servers in processes of their own, on one host or many: nobody waits for anybody
    (Gorila). Needs Ray: `pip install 'phalanx[cluster]'`."""

    name: Literal["gorila"] = "gorila"
    """The topology."""
    bundles: int = number(2, least=0, most=10_000)
    """Processes with an actor, a replay memory and a learner each; `sampler.environments`, `algorithm.replay_size` and
    `algorithm.learning_starts` are divided among them. 0: actors, learners and replay shards of their own."""
    actors: int = number(2, least=1, most=10_000)
    """With `bundles` 0: processes that act; `sampler.environments` is divided among them."""
    learners: int = number(1, least=1, most=10_000)
    """With `bundles` 0: processes that learn."""
    replay_shards: int = number(1, least=1, most=1_000)
    """With `bundles` 0: processes that hold the replay memory. Learners draw from each in proportion to what it has."""
    shards: int = number(2, least=1, most=1_000)
    """Parameter servers: processes that hold a slice of the parameters each, with its part of the optimiser's state."""
    poll_every: int = number(1, least=0, most=1_000_000)
    """Acting steps between two pulls of the parameters (the paper: 1); 0: only when a rollout begins."""
    staleness: int = number(0, least=0, most=STEPS)
    """Parameter servers discard a gradient when so many updates came after the parameters it was computed with; 0: no
    gradient is too old."""
    outlier: float = number(0.0, least=0, most=1e6)
    """A learner discards a gradient whose absolute loss is so many deviations above its running mean; 0: none."""
    outlier_warm_up: int = number(1_000, least=0, most=STEPS)
    """Losses a learner sees before it discards any."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """What gradients and pulled parameters are rounded to; bfloat16 halves what crosses between hosts."""
    snapshot_every: int = number(100, least=1, most=STEPS)
    """Updates between two copies of a parameter server to its standby: so many are lost at most when it dies."""
    address: str = ""
    """Of a Ray cluster to join, such as 10.0.0.1:6379, or auto; empty starts one on this machine for the run."""
    cores: int = number(1, least=1, most=1_024)
    """Of each process that acts or learns; with more than one its environments have processes of their own."""

    @property
    def replicas(self) -> int:
        """Processes that environments are divided among."""
        return self.bundles or self.actors


@dataclass(frozen=True)
class DBA3CConfig:
    """Workers on many hosts, each a GA3C node, that make every update together, on the mean of the first gradients that
    arrive (Distributed BA3C). Needs Ray: `pip install 'phalanx[cluster]'`."""

    name: Literal["dba3c"] = "dba3c"
    """The topology."""
    workers: int = number(2, least=1, most=10_000)
    """Nodes that act and learn; `sampler.environments` is divided among them."""
    agents: int = number(0, least=0, most=4_096)
    """Simulator processes of each worker; its environments are divided among them. 0: one for each environment."""
    predictors: int = number(1, least=1, most=64)
    """Threads of each worker that answer its simulators."""
    prediction_batch: int = number(16, least=1, most=1_000_000)
    """Rows that a predictor answers at once, at most, in whole agents; one agent is answered however many it has."""
    batch: int = number(32, least=1, most=ROLLOUT)
    """Steps that a worker's gradient is of, at least: whole segments of `sampler.horizon` steps are merged."""
    queue: int = number(1, least=1, most=10_000)
    """Batches that may wait in a worker while its trainer is busy; its simulators wait while so much is there."""
    shards: int = number(2, least=1, most=1_000)
    """Parameter servers: processes that hold a slice of the parameters each, with its part of the optimiser's state."""
    quorum: float = number(0.9, above=0, most=1)
    """Share of the workers whose gradients make a step, rounded; later ones are dropped (backup workers)."""
    asynchronous: bool = False
    """Apply every gradient as it comes, instead of in steps of a quorum; for comparison."""
    too_few: Literal["lower", "stop"] = "lower"
    """When fewer workers are alive than the quorum needs: lower the quorum to those that are, or stop the run."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """What gradients and pulled parameters are rounded to; bfloat16 halves what crosses between hosts."""
    snapshot_every: int = number(10, least=1, most=STEPS)
    """Updates between two copies of a parameter server to its standby: so many are lost at most when it dies."""
    evaluate_every: int = number(0, least=0, most=STEPS)
    """Updates between two evaluations, which a process of its own plays with frozen parameters (the paper: 1,000); 0:
    none. Each is of `run.eval_games` games, and the run ends when their mean reaches `run.target_score`."""
    address: str = ""
    """Of a Ray cluster to join, such as 10.0.0.1:6379, or auto; empty starts one on this machine for the run."""
    cores: int = number(1, least=1, most=1_024)
    """Of each worker, for its simulators and its threads; a cluster keeps so many free for it."""

    @property
    def replicas(self) -> int:
        """Processes that environments are divided among."""
        return self.workers

    @property
    def quorum_of_workers(self) -> int:
        """Gradients that make a step; 0: each one does."""
        return 0 if self.asynchronous else max(1, round(self.quorum * self.workers))


@dataclass(frozen=True)
class RunConfig:
    """One run: its budget, place, seed and record keeping."""

    name: str = ""
    """Directory under `directory`; empty makes one of preset, environment and seed. An existing one is refused."""
    directory: str = "runs"
    """Where runs live."""
    steps: int = number(10_000_000, least=1, most=STEPS)
    """Stop after so many agent steps."""
    seconds: float = number(0.0, least=0, most=math.inf)
    """Stop after so much time in this session; 0 means no limit."""
    target_score: float | None = number(None, least=-LARGE, most=LARGE)
    """Stop when the mean raw score of the last 100 games reaches this."""
    seed: int = number(0, least=0, most=2**63 - 1)
    """Seed of environments, network and sampling."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes a GPU if there is one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 runs the network under autocast; parameters and losses stay float32. auto: bfloat16 on a GPU, and on a
    CPU with instructions for it where observations are images; float32 otherwise, and always on `serial`."""
    graphs: bool = True
    """On a GPU, capture inference and updates as CUDA graphs; off runs the same work eagerly."""
    tf32: bool = False
    """On a GPU, allow TF32 in float32 matrix products and convolutions."""
    threads: int = number(0, least=0, most=4_096)
    """Torch threads of the owner; 0 means every core the process may use, and one with a GPU."""
    log_every: float = number(5.0, above=0, most=1e9)
    """Seconds between two records in metrics.jsonl."""
    loggers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Experiment trackers that get every record, too, from processes of their own. Packages to be installed."""
    checkpoint_every: float = number(300.0, least=0, most=math.inf)
    """Seconds between two checkpoints; one is always written at the end."""
    checkpoint_updates: int = number(0, least=0, most=STEPS)
    """Also write one after every so many updates; 0 means by time only."""
    keep_checkpoints: int = number(3, least=1, most=1_000_000)
    """Newest checkpoints kept; the one with the best score is kept besides."""
    eval_every: int = number(0, least=0, most=STEPS)
    """Agent steps between two evaluations during training; 0 means none."""
    eval_games: int = number(10, least=1, most=1_000_000)
    """Games per evaluation."""


EnvConfig = AtariConfig | GymnasiumConfig | ToyConfig
AlgorithmConfig = A2CConfig | PPOConfig | DQNConfig | C51Config
TopologyConfig = SerialConfig | SynchronousConfig | AsynchronousConfig | GA3CConfig | GorilaConfig | DBA3CConfig
TOPOLOGIES = {
    "serial": SerialConfig,
    "synchronous": SynchronousConfig,
    "asynchronous": AsynchronousConfig,
    "ga3c": GA3CConfig,
    "gorila": GorilaConfig,
    "dba3c": DBA3CConfig,
}


@dataclass(frozen=True)
class Experiment:
    """An algorithm on a topology, with everything they need."""

    preset: str = "custom"
    """The preset this experiment was made from."""
    env: EnvConfig = field(default_factory=AtariConfig)
    """The environment."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    algorithm: AlgorithmConfig = field(default_factory=A2CConfig)
    """What is learnt."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How gradients are applied."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """How experience is collected."""
    topology: TopologyConfig = field(default_factory=SerialConfig)
    """How the pieces run."""
    run: RunConfig = field(default_factory=RunConfig)
    """Budget, place, seed, records."""

    @property
    def batch_steps(self) -> int:
        """Steps that a learner learns from at once: those of a rollout, or of the whole segments that a trainer merges,
        however many simulators they come from."""
        topology, horizon = self.topology, self.sampler.horizon
        if isinstance(topology, GA3CConfig | DBA3CConfig):
            least = topology.min_batch if isinstance(topology, GA3CConfig) else topology.batch
            return -(-least // horizon) * horizon
        return self.sampler.rollout_steps

    def with_derived_values(self) -> Experiment:
        """The same with values that follow from others filled in: the horizon of a fixed batch, the agents,
        what a trainer learns from at once."""
        sampler, topology = self.sampler, self.topology
        if isinstance(topology, GA3CConfig) and not topology.agents:
            agents = dataclasses.replace(topology, agents=sampler.environments)
            return dataclasses.replace(self, topology=agents).with_derived_values()
        if isinstance(topology, GA3CConfig) and not topology.min_batch and sampler.horizon:
            rows = min(sampler.rollout_steps, topology.queue * sampler.horizon)
            return dataclasses.replace(self, topology=dataclasses.replace(topology, min_batch=rows))
        if isinstance(topology, DBA3CConfig) and not topology.agents:
            each = dataclasses.replace(topology, agents=max(1, sampler.environments // topology.workers))
            return dataclasses.replace(self, topology=each).with_derived_values()
        if sampler.horizon or not sampler.batch:
            return self
        require(
            sampler.batch % sampler.environments == 0,
            f"a batch of {sampler.batch} steps does not divide among {sampler.environments} environments; choose a "
            f"divisor of {sampler.batch}, such as {nearest_divisor(sampler.batch, sampler.environments)}",
        )
        horizon = sampler.batch // sampler.environments
        return dataclasses.replace(self, sampler=dataclasses.replace(sampler, horizon=horizon)).with_derived_values()

    def validate(self, learns: bool = True) -> Experiment:
        """The experiment with its derived values, or a UserError that says which values do not fit together. Of an
        agent that only plays, code of an algorithm is not looked for."""
        from phalanx.config.checks import check, check_bounds

        check_bounds(self)  # first, as numbers without bounds can take hours to divide
        experiment = self.with_derived_values()
        check(experiment, learns)
        return experiment


def nearest_divisor(value: int, wish: int) -> int:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return min((*small, *(value // d for d in reversed(small))), key=lambda d: abs(d - wish))
