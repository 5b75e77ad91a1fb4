"""From an experiment to a replica: the one place where the pieces are put together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.algorithms import ALONE, Peers
from phalanx.algorithms.schedules import epsilon_schedule, learning_rate_schedule
from phalanx.config import AtariConfig, DQNConfig, Experiment
from phalanx.learning.learner import Learner
from phalanx.models.torsos import large_layers, layers_in_bfloat16
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.registry import make_algorithm, make_experience, make_network, make_policy, memory_of
from phalanx.replay.memory import Replay, WarmUp
from phalanx.replica.overlap import ActingCopy, Overlap
from phalanx.replica.replica import CollectThenLearn, Cycle, Replica
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute
from phalanx.runtime.seeds import Role, number
from phalanx.runtime.share import WHOLE, Share
from phalanx.runtime.timing import Timing
from phalanx.sampling.answers import Answers, Decoder, EagerAnswers, RolloutBuffer, make_buffer
from phalanx.sampling.collector import Collector
from phalanx.seams import Experience, ParameterStore, Policy, VectorEnvs
from phalanx.types import EnvSpec

Tell = Callable[[str], None]
"""Takes a sentence the user should read."""
MakeStore = Callable[[Experiment, FlatParameters], ParameterStore]


def local_store(experiment: Experiment, parameters: FlatParameters) -> LocalStore:
    clip = make_clip(experiment.optimizer, parameters.slices.values())
    return LocalStore(parameters, make_rule(experiment.optimizer), clip)


def make_replica(
    experiment: Experiment,
    envs: VectorEnvs,
    compute: Compute,
    tell: Tell,
    make_store: MakeStore = local_store,
    clocks: Clocks | None = None,
    share: Share = WHOLE,
) -> Replica:
    """The replica an experiment asks for, on these environments; it tells what the user should know. Its store says
    who its peers are, if there are any."""
    clocks, timing, spec = clocks or Clocks(), Timing(), envs.spec.seen
    model = make_model(experiment, spec).to(compute.device)
    parameters = flatten(model, compute)
    store = make_store(experiment, parameters)
    overlap = experiment.sampler.overlap
    learning = torch.cuda.Stream() if overlap and compute.device.type == "cuda" else None
    environments = envs.groups[-1].stop
    policies: list[Policy] = [make_policy(experiment, model, compute, environments)]
    if overlap:
        policies = [acting_copy(experiment, model, compute, store, learning, environments) for _ in range(2)]
    experience = make_experience(experiment, spec, environments, compute.device)
    refresh = partial(store.pull, parameters)
    collector = make_collector(experiment, envs, policies, compute, clocks, timing, tell, share, refresh)
    learner = make_learner(experiment, model, parameters, store, compute, clocks, timing, tell, share)
    cycle: Cycle = CollectThenLearn(collector=collector, experience=experience, learner=learner, compute=compute)
    if overlap:
        cycle = Overlap(
            collector=collector,
            experience=experience,
            learner=learner,
            learning=learning,
            last_step=experiment.run.steps,
        )
    return Replica(
        envs=envs,
        parameters=parameters,
        store=store,
        experience=experience,
        collector=collector,
        learner=learner,
        cycle=cycle,
        clocks=clocks,
        timing=timing,
        warm_up=make_warm_up(experiment, envs, experience),
        epsilon=epsilon_schedule(experiment.algorithm) if isinstance(experiment.algorithm, DQNConfig) else None,
    )


def make_model(experiment: Experiment, spec: EnvSpec) -> nn.Module:
    """The network with the weights that a run begins with."""
    torch.manual_seed(number(experiment.run.seed, Role.NETWORK))
    return make_network(experiment, spec)


def flatten(model: nn.Module, compute: Compute) -> FlatParameters:
    """On a GPU the rounding is part of the graphs and costs nothing that matters."""
    rounds = compute.bfloat16 and compute.device.type == "cpu"
    return FlatParameters(model, rounded=large_layers(model) if rounds else ())


def acting_copy(
    experiment: Experiment,
    model: nn.Module,
    compute: Compute,
    store: ParameterStore,
    learning: torch.cuda.Stream | None,
    environments: int,
) -> ActingCopy:
    """A policy on a copy of the model, whose layers are rounded once a rollout, not at every step."""
    model = copy.deepcopy(model)
    choose = layers_in_bfloat16 if compute.device.type == "cuda" else large_layers
    parameters = FlatParameters(model, rounded=choose(model) if compute.bfloat16 else ())
    policy = make_policy(experiment, model, compute, environments)
    return ActingCopy(policy=policy, parameters=parameters, store=store, learning=learning)


def make_collector(
    experiment: Experiment,
    envs: VectorEnvs,
    policies: list[Policy],
    compute: Compute,
    clocks: Clocks,
    timing: Timing,
    tell: Tell,
    share: Share,
    refresh: Callable[[], int],
) -> Collector:
    """A collector with a rollout buffer for each policy."""
    stack, horizon, environments = experiment.env.stack, experiment.sampler.horizon, envs.groups[-1].stop
    buffers = [make_buffer(policy, envs.spec.seen, environments, stack, horizon, compute.device) for policy in policies]
    decode = make_decoder(experiment, envs.spec, compute)
    answers = make_answers(envs, buffers, stack, decode, compute, timing, tell)
    return Collector(
        envs=envs,
        buffers=buffers,
        answers=answers,
        stack=stack,
        decode=decode,
        clocks=clocks,
        timing=timing,
        generator=torch.Generator(compute.device).manual_seed(number(experiment.run.seed, Role.ACTIONS)),
        run_environments=environments * share.count,
        columns=share.rows(environments),
        poll_every=getattr(experiment.topology, "poll_every", 0),
        refresh=refresh,
    )


def make_decoder(experiment: Experiment, spec: EnvSpec, compute: Compute) -> Decoder:
    """What makes frames of raw screens, where workers publish those."""
    if spec.decoded is None:
        return lambda frames: frames
    from phalanx.sampling.decode import ScreenDecoder

    assert isinstance(experiment.env, AtariConfig)
    return ScreenDecoder(experiment.env, spec.frame_shape[1], compute.device)


def make_answers(
    envs: VectorEnvs,
    buffers: list[RolloutBuffer],
    stack: int,
    decode: Decoder,
    compute: Compute,
    timing: Timing,
    tell: Tell,
) -> Answers:
    """CUDA graphs where they are asked for and a device can read the environments' memory in place; eager ones
    elsewhere."""
    if compute.graphs and envs.shared_memory:
        from phalanx.sampling.graph_answers import GraphAnswers
        from phalanx.sampling.processes import ProcessEnvs

        assert isinstance(envs, ProcessEnvs)
        return GraphAnswers(envs=envs, buffers=buffers, stack=stack, decode=decode, timing=timing, report=tell)
    return EagerAnswers(envs=envs, buffers=buffers, stack=stack, decode=decode, timing=timing)


def make_learner(
    experiment: Experiment,
    model: nn.Module,
    parameters: FlatParameters,
    store: ParameterStore,
    compute: Compute,
    clocks: Clocks,
    timing: Timing,
    tell: Tell,
    share: Share,
) -> Learner:
    peers: Peers = getattr(store, "peers", ALONE)
    algorithm = make_algorithm(experiment, model)
    algorithm.peers = peers
    parts: dict[str, Any] = {
        "model": model,
        "parameters": parameters,
        "store": store,
        "algorithm": algorithm,
        "learning_rate": learning_rate_schedule(experiment, peers.count),
        "compute": compute,
        "clocks": clocks,
        "timing": timing,
        "seed": number(experiment.run.seed, Role.LEARNING, share.rank),
    }
    if compute.graphs:
        from phalanx.learning.graph_learner import GraphLearner

        return GraphLearner(report=tell, **parts)
    return Learner(**parts)


def make_warm_up(experiment: Experiment, envs: VectorEnvs, experience: Experience) -> WarmUp | None:
    memory = memory_of(experiment)
    if memory is None or not isinstance(experience, Replay):
        return None
    return WarmUp(memory, envs.spec.seen, experience)
