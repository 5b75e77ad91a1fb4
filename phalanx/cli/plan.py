"""What a run would be, in words and numbers, without running it: `phalanx plan`."""

from __future__ import annotations

from phalanx.algorithms.schedules import learning_rate_schedule
from phalanx.config import (
    AsynchronousConfig,
    AtariConfig,
    DBA3CConfig,
    Experiment,
    GA3CConfig,
    PPOConfig,
    SynchronousConfig,
)
from phalanx.config.flags import parse_experiment
from phalanx.config.own import own_batches
from phalanx.config.presets import PRESETS
from phalanx.config.stored import difference
from phalanx.envs.frames import compiled
from phalanx.models.architectures import describe as torso_in_words
from phalanx.probe import COPIES, check_pieces, parameter_count, resolve_precision, resolve_replicas, rollouts_bytes
from phalanx.registry import MakeEnv, algorithm_name, in_lockstep, memory_of, replicas, topology
from phalanx.replay.memory import replay_bytes
from phalanx.runtime.affinity import cgroup_quota, core_list, free_memory, usable_cores
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.share import Share
from phalanx.sampling.graph_answers import rows_of_a_launch
from phalanx.sampling.placement import Placement, place, sends_raw_screens
from phalanx.topologies.asynchronous import shares_of
from phalanx.topologies.dba3c_roles import as_node
from phalanx.topologies.lockstep import over_nccl
from phalanx.types import EnvSpec


def command(arguments: list[str]) -> int:
    """Print the plan of a preset with flags."""
    experiment = parse_experiment("plan", arguments)
    check_pieces(experiment)
    print(describe(experiment))
    return 0


def describe(experiment: Experiment) -> str:
    """Every line of the plan."""
    asked, experiment = experiment, resolve_precision(resolve_replicas(experiment))
    spec = MakeEnv(experiment.env, experiment.run.seed)(0).spec
    shares = shares_of(choose_compute(experiment.run), replicas(experiment))
    part = Share(0, len(shares)).part(experiment)  # what one replica has
    lines = [
        (
            "preset",
            f"{experiment.preset}: {algorithm_name(experiment)} on {experiment.topology.name}, {experiment.env.name}",
        ),
        *_machine(part, shares),
        *_batches(part, len(shares)),
        *_memory(part, spec),
        *_changes(asked),
    ]
    return "\n".join(f"{name:<14} {text}" for name, text in lines)


def _machine(experiment: Experiment, shares: list[Share]) -> list[tuple[str, str]]:
    """`experiment` is that of one replica."""
    compute, quota = choose_compute(experiment.run), cgroup_quota()
    single = len(shares) == 1
    placement = place(experiment, compute.device.type, None if single else shares[0].cores)
    free = f"{free_memory() / 2**30:.1f} GiB memory free"
    anywhere = single or isinstance(experiment.topology, DBA3CConfig)  # whose workers keep to no cores
    return [
        ("machine", f"{usable_cores()} usable cores (affinity {core_list()}, quota {quota or 'none'}), {free}"),
        ("device", f"{compute.device}, {'bfloat16 autocast' if compute.bfloat16 else 'float32'}"),
        *([] if anywhere else _replicas(experiment, shares, compute)),
        ("processes", _processes(experiment, placement, compute, single)),
        *([("frames", _frames(experiment, compute.device.type))] if isinstance(experiment.env, AtariConfig) else []),
    ]


def _processes(experiment: Experiment, placement: Placement, compute: Compute, single: bool) -> str:
    """Of one replica; one of many on a single core has its environments in its own process."""
    if isinstance(experiment.topology, GA3CConfig):
        return _node(experiment.topology, placement)
    if isinstance(experiment.topology, DBA3CConfig):
        return _workers(experiment, experiment.topology, compute)
    if single or compute.device.type != "cpu" or placement.workers > 1:
        return placement.describe()
    return f"1 (the replica and its {placement.envs_per_worker} environments), {placement.owner_threads} torch threads"


def _node(topology: GA3CConfig, placement: Placement) -> str:
    """Who works in a GA3C run."""
    counts = f"{topology.predictors} predictor threads, {topology.trainers} trainer threads"
    agents = f"{topology.agents} agent processes x {placement.envs_per_worker} environments"
    if topology.tuner == "off":
        return f"{agents}, {counts}, {placement.owner_threads} torch threads each"
    most = f"{topology.most_agents} agents, {topology.most_predictors} predictors and {topology.most_trainers} trainers"
    return f"{agents}, {counts}, {placement.owner_threads} torch threads each; the tuner may come to {most}"


def _workers(experiment: Experiment, topology: DBA3CConfig, compute: Compute) -> str:
    """Who works in a run of Distributed BA3C."""
    node = as_node(experiment, experiment.run.threads)
    assert isinstance(node.topology, GA3CConfig)
    evaluator = ", an evaluator" if topology.evaluate_every else ""
    quorum = topology.quorum_of_workers
    step = f"a step takes the gradients of {quorum}" if quorum else "each gradient is a step"
    servers = f"{topology.shards} parameter servers with a standby{evaluator}; {step}"
    return f"{topology.workers} workers, each {_node(node.topology, place(node, compute.device.type))}; {servers}"


def _replicas(experiment: Experiment, shares: list[Share], compute: Compute) -> list[tuple[str, str]]:
    """Who runs where, and what joins them; the other lines are of one of them."""
    topology, each = experiment.topology, experiment.sampler.environments
    joined = "gradients go to parameter servers"
    if isinstance(topology, AsynchronousConfig):
        joined = (
            f"central parameters and rule state, in memory that all share: {topology.chunks} chunks with a lock each"
        )
    elif isinstance(topology, SynchronousConfig):
        joined = f"every gradient is the mean of all, over {'NCCL' if over_nccl(experiment, compute) else 'gloo'}"
    lines = ["parent: records, evaluates, writes checkpoints, replaces the dead"]
    for share in shares:
        rows = share.rows(each)
        games = f"environments {rows.start} to {rows.stop - 1}" if each > 1 else f"environment {rows.start}"
        where = f"cores {list(share.cores or ())}, {share.device or compute.device}"
        lines.append(f"|-- replica {share.rank}: {where}, {games}")
    lines += [f"`-- {joined}", "the lines below are of one replica"]
    return [("" if number else "replicas", line) for number, line in enumerate(lines)]


def _frames(experiment: Experiment, device: str) -> str:
    if sends_raw_screens(experiment, device):
        return "made on the device"
    if compiled():
        return "made by compiled code"
    return "made by numpy; with a C compiler and Python's headers, reinstall phalanx for faster frames"


def _batches(experiment: Experiment, count: int) -> list[tuple[str, str]]:
    """Of one of `count` replicas."""
    sampler, algorithm = experiment.sampler, experiment.algorithm
    rows, compute = sampler.rollout_steps, choose_compute(experiment.run)
    groups = sampler.groups * place(experiment, compute.device.type).squads
    together = sampler.environments // groups
    if compute.graphs and topology(experiment).worker_processes:
        together = rows_of_a_launch([together] * groups)
    if (own := own_batches(algorithm)) is not None:
        learning = f"what {own}.batches yields"
    elif isinstance(algorithm, PPOConfig):
        learning = f"{algorithm.epochs} epochs x {algorithm.minibatches} minibatches of {rows // algorithm.minibatches}"
    elif (memory := memory_of(experiment)) is not None:
        learning = f"{memory.updates_per_rollout(rows):g} updates of {memory.batch_size} from replay"
    else:
        learning = f"1 update of {rows}"
    rate = learning_rate_schedule(experiment, count if in_lockstep(experiment) else 1)
    rollouts = f"{-(-experiment.run.steps // (rows * count)):,} rollouts{' of each replica' if count > 1 else ''}"
    if isinstance(experiment.topology, GA3CConfig):
        return _node_batches(experiment, experiment.topology)
    if isinstance(experiment.topology, DBA3CConfig):
        node = as_node(experiment, experiment.run.threads)
        assert isinstance(node.topology, GA3CConfig)
        return _node_batches(node, node.topology)
    return [
        (
            "rollout",
            f"{sampler.environments} environments x {sampler.horizon} steps = {rows} steps, "
            f"{groups} group(s), inference batches of {together}",
        ),
        (
            "learning",
            f"{learning} per rollout; {experiment.optimizer.rule}, learning rate {rate.start:g} -> {rate.final:g}",
        ),
        ("budget", f"{experiment.run.steps:,} steps = {rollouts}"),
    ]


def _node_batches(experiment: Experiment, topology: GA3CConfig) -> list[tuple[str, str]]:
    rate, sampler, algorithm = learning_rate_schedule(experiment), experiment.sampler, experiment.algorithm
    passes = ""
    if isinstance(algorithm, PPOConfig) and not algorithm.code:
        passes = f"{algorithm.epochs} epochs x {algorithm.minibatches} minibatches "
    whole = f", a rollout of {sampler.environments} x {sampler.horizon}"
    return [
        (
            "segments",
            f"up to {sampler.horizon} steps of one environment, up to {topology.queue} in the queue; inference batches "
            f"of whoever waits, up to {topology.prediction_batch}",
        ),
        (
            "learning",
            f"{passes}from segments of at least {topology.min_batch} steps together"
            f"{whole if topology.min_batch == sampler.rollout_steps else ''}; {experiment.optimizer.rule}, learning "
            f"rate {rate.start:g} -> {rate.final:g}",
        ),
        ("budget", f"{experiment.run.steps:,} steps"),
    ]


def _memory(experiment: Experiment, spec: EnvSpec) -> list[tuple[str, str]]:
    parameters, rollouts = parameter_count(experiment, spec), rollouts_bytes(experiment, spec)
    replay = 0
    if (memory := memory_of(experiment)) is not None:
        replay = replay_bytes(memory, spec, experiment.sampler.environments)
    return [
        *([("observation", spec.meaning)] if spec.meaning else []),
        ("model", f"{torso_in_words(experiment.model, spec.seen)}; {parameters:,} parameters"),
        (
            "memory",
            f"rollouts {rollouts / 2**20:.1f} MiB, parameters, gradient and optimiser about "
            f"{COPIES * 4 * parameters / 2**20:.1f} MiB" + (f", replay {replay / 2**20:,.1f} MiB" if replay else ""),
        ),
    ]


def _changes(experiment: Experiment) -> list[tuple[str, str]]:
    if experiment.preset not in PRESETS:
        return []
    changes = difference(experiment, PRESETS[experiment.preset][1].with_derived_values())
    changes.pop("preset", None)
    return [("changed", f"{name}: {old} -> {new}") for name, (old, new) in changes.items()] or [("changed", "nothing")]
