"""The experiment as a value: presets are valid, config.json is exact, and nonsense is refused in one sentence."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
import phalanx.config.experiment as config
from phalanx.config import (
    A2CConfig,
    AtariConfig,
    C51Config,
    DQNConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RunConfig,
    SamplerConfig,
    SynchronousConfig,
    ToyConfig,
)
from phalanx.config.code import with_code
from phalanx.config.flags import parse_experiment
from phalanx.config.overrides import with_overrides
from phalanx.config.presets import PRESETS, preset
from phalanx.config.stored import difference, load, save
from phalanx.errors import RunError, UserError

PACKAGE = Path(phalanx.__file__).parent
KINDS = {name: kind for name, kind in vars(config).items() if dataclasses.is_dataclass(kind)}


def test_a_configuration_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    save(preset("a2c-catch"), path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left"):
        save(preset("ppo-catch"), path)
    assert load(path) == preset("a2c-catch")
    assert list(tmp_path.iterdir()) == [path]


def class_bodies() -> dict[str, list[ast.stmt]]:
    tree = ast.parse(Path(config.__file__).read_text())
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_validates_and_knows_its_name(name):
    experiment = preset(name)
    assert experiment.validate() == experiment.with_derived_values()
    assert experiment.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_config_json_reproduces_the_experiment(name, tmp_path):
    experiment = preset(name)
    save(experiment, tmp_path / "config.json")
    loaded = load(tmp_path / "config.json")
    assert loaded == experiment
    assert type(loaded.algorithm) is type(experiment.algorithm)  # a C51Config is a DQNConfig, but not equal to it
    assert type(loaded.topology) is type(experiment.topology)


def test_config_json_keeps_changed_and_empty_values(tmp_path):
    experiment = dataclasses.replace(
        preset("a2c"),
        topology=SynchronousConfig(),
        sampler=SamplerConfig(overlap=True, raw_screens=False),
        optimizer=OptimizerConfig(learning_rate=1 / 3, final_learning_rate=None),
        run=RunConfig(target_score=18.0, name="a run"),
    )
    save(experiment, tmp_path / "config.json")
    assert load(tmp_path / "config.json") == experiment


def test_the_difference_names_what_changed():
    base = preset("ppo")
    changed = dataclasses.replace(base, run=dataclasses.replace(base.run, seed=7))
    assert difference(changed, base) == {"run.seed": (0, 7)}


def saved(tmp_path: Path, change: dict) -> Path:
    """The config.json of a preset with dotted keys changed or added."""
    values = dataclasses.asdict(preset("ppo"))
    for dotted, value in change.items():
        *parents, last = dotted.split(".")
        inner = values
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("earlier", "overlap", "raw_screens"),
    [
        ({"overlap": True, "raw_screens": False}, True, False),
        ({"overlap": False, "raw_screens": True}, False, True),
        ({"overlap": True}, True, True),
        ({}, False, True),
    ],
)
def test_what_the_topology_said_of_sampling_is_the_samplers_now(tmp_path, earlier, overlap, raw_screens):
    """In the config.json of earlier versions; what is not there had the value that is the default now."""
    values = dataclasses.asdict(preset("ppo"))
    values["topology"] |= earlier
    del values["sampler"]["overlap"], values["sampler"]["raw_screens"]
    path, told = tmp_path / "config.json", []
    path.write_text(json.dumps(values))
    sampler = dataclasses.replace(preset("ppo").sampler, overlap=overlap, raw_screens=raw_screens)
    assert load(path, told.append) == dataclasses.replace(preset("ppo"), topology=SynchronousConfig(), sampler=sampler)
    assert told == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm.minibatch": 4}, "unknown configuration key 'algorithm.minibatch'; did you mean algorithm.minibat"),
        ({"sampler.enviroments": 4}, "did you mean sampler.environments"),
        ({"runn": {}}, "unknown configuration key 'runn'; did you mean run"),
        ({"env.frame": "90x90"}, "unknown value of env.frame '90x90'; did you mean 104x80"),
        ({"topology.name": "ring"}, "the values of topology belong to no one kind"),
        ({"sampler": 5}, "sampler must be an object"),
        ({"run.keep_checkpoints": "3"}, "run.keep_checkpoints must be of type int, not '3'"),
        ({"env.stack": True}, "env.stack must be of type int, not True"),
        ({"run.target_score": "x"}, "run.target_score must be of type float or null"),
    ],
)
def test_a_config_json_that_does_not_fit_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        load(saved(tmp_path, change))


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("[]", "must be an object"), (None, "does not exist")]
)
def test_a_config_json_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        load(path)


def refused(experiment: Experiment) -> str:
    with pytest.raises(UserError) as caught:
        experiment.validate()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampler": SamplerConfig(environments=8, groups=3)}, "8 environments do not divide into 3 groups; .* 9"),
        ({"sampler": SamplerConfig(environments=0)}, "sampler.environments is 0, but must be at least 1"),
        ({"sampler": SamplerConfig(horizon=0)}, "sampler.horizon is 0"),
        ({"sampler": SamplerConfig(workers=-1)}, "sampler.workers is -1, but must be at least 0 and at most 10,000"),
        ({"sampler": SamplerConfig(decorrelation=-1)}, "sampler.decorrelation"),
        ({"env": AtariConfig(sticky=1.0)}, "env.sticky is 1.0, but must be at least 0 and less than 1"),
        ({"env": AtariConfig(sticky=-0.1)}, "env.sticky is -0.1"),
        ({"env": AtariConfig(skip=4, skip_min=5)}, "env.skip_min is 5: choose 1..env.skip"),
        ({"env": AtariConfig(noop_min=31)}, "env.noop_min must lie in 0..env.noop_max"),
        ({"env": AtariConfig(color="rgb", frame="104x80")}, "env.color rgb needs env.frame 84x84"),
        ({"env": AtariConfig(stack=0)}, "env.stack is 0"),
        ({"env": AtariConfig(stack=255)}, "at most 254"),
        ({"env": ToyConfig(length=0)}, "env.length is 0"),
        ({"model": ModelConfig(torso="mlp")}, "model.torso mlp takes vectors, but Atari gives images"),
        ({"model": ModelConfig(hidden=-1)}, "model.hidden is -1"),
        (
            {"algorithm": A2CConfig(discount=0.0)},
            "algorithm.discount is 0.0, but must be greater than 0 and at most 1$",
        ),
        ({"algorithm": A2CConfig(discount=1.01)}, "algorithm.discount is 1.01, but must be"),
        ({"algorithm": PPOConfig(final_discount=0.0)}, "algorithm.final_discount is 0.0, but must be"),
        ({"algorithm": PPOConfig(discount_length=-1)}, "algorithm.discount_length is -1, but must be at least 0"),
        ({"algorithm": A2CConfig(gae_lambda=1.5)}, "algorithm.gae_lambda is 1.5, but must be"),
        (
            {"algorithm": PPOConfig(minibatches=3)},
            "does not divide into 3 minibatches; choose a divisor of 80",
        ),
        ({"algorithm": PPOConfig(minibatches=0)}, "algorithm.minibatches is 0"),
        ({"algorithm": PPOConfig(epochs=0)}, "algorithm.epochs is 0"),
        ({"algorithm": DQNConfig(batch_size=0)}, "algorithm.batch_size is 0"),
        ({"algorithm": DQNConfig(replay_size=100, learning_starts=10)}, "too little history for each of 16"),
        ({"algorithm": DQNConfig(replay_size=1000, learning_starts=2000)}, "learning_starts must not exceed"),
        ({"algorithm": DQNConfig(intensity=0.0)}, "algorithm.intensity is 0"),
        ({"algorithm": C51Config(atoms=1)}, "algorithm.atoms is 1"),
        ({"algorithm": C51Config(v_min=1.0, v_max=1.0)}, "algorithm.v_min must be less than"),
        ({"sampler": SamplerConfig(overlap=True)}, "sampler.overlap .* add --algorithm.importance True"),
        ({"optimizer": OptimizerConfig(learning_rate=0.0)}, "optimizer.learning_rate is 0"),
        ({"optimizer": OptimizerConfig(learning_rate=float("nan"))}, "optimizer.learning_rate is nan"),
        ({"optimizer": OptimizerConfig(clip_norm=0.0)}, "optimizer.clip_norm is 0"),
        (
            {"optimizer": OptimizerConfig(final_learning_rate=0.0, schedule_clock="updates")},
            "optimizer.schedule_clock updates needs optimizer.schedule_length",
        ),
        ({"run": RunConfig(steps=0)}, "run.steps is 0"),
        ({"run": RunConfig(precision="bf16")}, "unknown value of run.precision 'bf16'; did you mean bfloat16"),
        ({"run": RunConfig(seed=-1)}, "run.seed is -1"),
        ({"run": RunConfig(threads=-1)}, "run.threads is -1"),
        ({"run": RunConfig(keep_checkpoints=0)}, "run.keep_checkpoints is 0"),
        ({"run": RunConfig(eval_every=5, eval_games=0)}, "run.eval_games is 0"),
        ({"run": RunConfig(seed=2**63)}, "run.seed is .*, but must be at least 0 and at most 9,223"),
        ({"run": RunConfig(threads=10**6)}, "run.threads is 1000000, but must be .* at most 4,096"),
        ({"run": RunConfig(target_score=float("nan"))}, "run.target_score is nan, but must be"),
        ({"env": AtariConfig(noop_max=10**6)}, "env.noop_max is 1000000, but must be .* at most 10,000"),
        (
            {"optimizer": OptimizerConfig(learning_rate=float("inf"))},
            "optimizer.learning_rate is inf, but must be greater than 0 and at most 1e.38",
        ),
        ({"optimizer": OptimizerConfig(beta1=float("nan"))}, "optimizer.beta1 is nan"),
        ({"sampler": SamplerConfig(horizon=0, batch=-5)}, "sampler.batch is -5"),
        ({"algorithm": DQNConfig(huber=-1.0)}, "algorithm.huber is -1"),
        ({"algorithm": DQNConfig(intensity=float("inf"))}, "algorithm.intensity is inf"),
        ({"algorithm": DQNConfig(epsilon_start=7.0)}, "algorithm.epsilon_start is 7.0, but must be"),
        ({"algorithm": PPOConfig(clip=-1.0)}, "algorithm.clip is -1"),
    ],
)
def test_values_that_make_no_sense_are_refused(change, words):
    assert re.search(words, refused(dataclasses.replace(preset("a2c"), **change)))


def test_fewer_environments_than_bundles_are_refused():
    gorila = preset("gorila")
    sampler = dataclasses.replace(gorila.sampler, environments=16)
    assert "16 environments do not divide among 100 replicas" in refused(dataclasses.replace(gorila, sampler=sampler))


def test_gorila_has_the_numbers_of_the_paper():
    experiment = preset("gorila")
    algorithm, topology = experiment.algorithm, experiment.topology
    assert (topology.bundles, topology.shards, topology.poll_every) == (100, 31, 1)
    assert (algorithm.target_every, algorithm.target_clock) == (60_000, "updates")
    assert (algorithm.epsilon_start, algorithm.epsilon_final) == (1.0, 0.1)
    assert (algorithm.epsilon_length, algorithm.epsilon_clock) == (1_000_000, "updates")
    assert algorithm.replay_size == 100 * 1_000_000 and experiment.sampler.environments == 100
    assert experiment.optimizer.rule == "adagrad" and topology.staleness > 0 and topology.outlier > 0


@pytest.mark.parametrize(("name", "words"), [("dba3c", "--topology.evaluate-every"), ("gorila", "phalanx eval")])
def test_who_looks_after_a_fleet_plays_no_games(name, words):
    run = dataclasses.replace(preset(name).run, eval_every=1_000)
    assert words in refused(dataclasses.replace(preset(name), run=run))


def test_a_schedule_by_updates_with_a_length_is_fine():
    optimizer = OptimizerConfig(final_learning_rate=0.0, schedule_clock="updates", schedule_length=10)
    dataclasses.replace(preset("a2c"), optimizer=optimizer).validate()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 64))
def test_the_advice_about_minibatches_works(environments, horizon, minibatches):
    experiment = dataclasses.replace(
        preset("ppo"),
        sampler=SamplerConfig(environments=environments, horizon=horizon),
        algorithm=PPOConfig(minibatches=minibatches),
    )
    if environments * horizon % minibatches == 0:
        experiment.validate()
        return
    advice = int(re.search(r"such as (\d+)$", refused(experiment)).group(1))
    dataclasses.replace(experiment, algorithm=PPOConfig(minibatches=advice)).validate()


@given(st.integers(1, 40), st.integers(1, 8))
def test_the_advice_about_groups_works(environments, groups):
    experiment = dataclasses.replace(preset("a2c"), sampler=SamplerConfig(environments=environments, groups=groups))
    if environments % groups == 0:
        experiment.validate()
        return
    advice = int(re.search(r"use sampler.environments (\d+)$", refused(experiment)).group(1))
    dataclasses.replace(experiment, sampler=SamplerConfig(environments=advice, groups=groups)).validate()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 600), st.floats(0.01, 64, allow_nan=False))
def test_the_intensities_named_really_work(environments, horizon, batch_size, intensity):
    def experiment(value: float) -> Experiment:
        return dataclasses.replace(
            preset("dqn"),
            sampler=SamplerConfig(environments=environments, horizon=horizon),
            algorithm=DQNConfig(batch_size=batch_size, intensity=value),
        )

    updates = experiment(intensity).algorithm.updates_per_rollout(environments * horizon)
    if updates >= 1 and updates == int(updates):
        experiment(intensity).validate()
        return
    named = refused(experiment(intensity)).split("that work: ")[1].split(" and ")
    assert 1 <= len(named) <= 2
    for value in named:
        working = experiment(float(value)).validate()
        assert working.algorithm.updates_per_rollout(environments * horizon) >= 1


def attributes_read() -> set[str]:
    """Names read as attributes anywhere outside of experiment.py and presets.py, and what experiment.py's methods of
    those names read in turn."""
    names = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("experiment.py", "presets.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    methods = [node for body in class_bodies().values() for node in body if isinstance(node, ast.FunctionDef)]
    for method in methods:
        if method.name in names:
            names |= {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return names


def test_every_field_is_read_by_the_code():
    read = attributes_read()
    dead = [f"{kind}.{f.name}" for kind in KINDS for f in dataclasses.fields(KINDS[kind]) if f.name not in read]
    assert not dead, f"nobody reads {', '.join(dead)}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_explained(kind):
    body = class_bodies()[kind]
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            explained = (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
                and following.value.value.strip()
            )
            assert explained, f"{kind}.{ast.unparse(statement.target)} has no docstring"


@pytest.mark.parametrize(
    ("name", "flag", "sentence"),
    [
        ("ppo", "id=CartPole-v1", "ppo plays Atari games; for Gymnasium: phalanx train ppo-gym --env.id CartPole-v1"),
        ("ppo", "game=CartPole-v1", "for Gymnasium: phalanx train ppo-gym --env.id CartPole-v1"),
        ("appo", "game=BreakoutNoFrameskip-v4", "is the Atari game breakout: phalanx train appo --env.game breakout"),
        ("dqn-gym", "game=pong", "plays Gymnasium environments; for Atari: phalanx train dqn --env.game pong"),
        (
            "ga3c",
            "id=tiny:Tiny",
            "ga3c plays Atari games; .* phalanx train a2c-gym --env.id tiny:Tiny --topology ga3c, or",
        ),
        ("a3c", "id=CartPole-v1", r'"a2c-gym", env="CartPole-v1", overrides={"topology": "asynchronous"}\)$'),
        ("a2c-catch", "id=CartPole-v1", "plays catch, a toy; for Gymnasium: phalanx train a2c-gym --env.id CartPole"),
    ],
)
def test_an_environment_of_the_other_kind_is_refused_with_the_preset_that_plays_it(name, flag, sentence):
    field, value = flag.split("=")
    for words in ([f"--env.{flag}"], [f"--env.{field}", value]):
        with pytest.raises(UserError, match=sentence):
            parse_experiment("train", [name, *words])
    with pytest.raises(UserError, match=sentence):
        with_overrides(preset(name), {f"env.{field}": value})
    if value == "tiny:Tiny":  # code may be of any kind
        return
    with pytest.raises(UserError, match=sentence.partition(" ")[2]):
        with_code(preset(name), env=value) if field == "id" else with_overrides(preset(name), {"env.game": value})


def test_an_environment_without_a_name_is_refused_without_one():
    with pytest.raises(UserError, match=r'for Gymnasium: phalanx.train\("ppo-gym", env=...\)$'):
        with_overrides(preset("ppo"), {"env.id": lambda: None})


def test_whole_numbers_may_be_written_with_a_power_of_ten():
    flags = ["--run.steps", "1e5", "--sampler.environments=1.6e1", "--optimizer.learning-rate", "1e-3"]
    found = parse_experiment("train", ["a2c-gym", *flags])
    assert (found.run.steps, found.sampler.environments, found.optimizer.learning_rate) == (100_000, 16, 1e-3)
    with pytest.raises(SystemExit):
        parse_experiment("train", ["a2c-gym", "--run.steps", "1.5e0"])


def test_a_name_is_found_whatever_its_letters_and_a_list_that_is_cut_says_so():
    with pytest.raises(UserError, match="unknown preset 'PPO'; did you mean ppo or"):
        preset("PPO")
    with pytest.raises(UserError, match=r"known are: a2c, .*, \.\.\.$"):
        preset("0123456789")
