"""Every number of the configuration has bounds beside it, and one outside of them is refused at once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import pytest

import phalanx.config as config
from phalanx.cli.main import main
from phalanx.config import AtariConfig, C51Config, Experiment, OptimizerConfig
from phalanx.config.bounds import Bounds, bounds_of
from phalanx.config.checks import check_bounds
from phalanx.config.flags import parse_flags
from phalanx.config.presets import preset
from phalanx.errors import UserError

KINDS = [kind for kind in vars(config).values() if dataclasses.is_dataclass(kind) and kind is not Experiment]
NUMBERS = [
    (kind, field.name)
    for kind in KINDS
    for field in dataclasses.fields(kind)
    if {int, float} & set(get_args(get_type_hints(kind)[field.name]) or (get_type_hints(kind)[field.name],))
]
OTHERS = [
    preset(name) for name in ("a2c", "ppo", "dqn", "c51", "a2c-gym", "a2c-catch", "a3c", "ga3c", "gorila", "dba3c")
]


def bounds(kind: Any, name: str) -> Bounds | None:
    return bounds_of(next(field for field in dataclasses.fields(kind) if field.name == name))


def with_value(kind: Any, name: str, value: Any) -> tuple[Experiment, str]:
    """A valid experiment but for one value, and the dotted name of that."""
    for experiment in OTHERS:
        for section in ("env", "model", "algorithm", "optimizer", "sampler", "topology", "run"):
            part = getattr(experiment, section)
            if type(part) is kind:
                changed = dataclasses.replace(part, **{name: value})
                return dataclasses.replace(experiment, **{section: changed}), f"{section}.{name}"
    raise AssertionError(f"no experiment here has a {kind.__name__}")


def refusal(experiment: Experiment) -> str:
    with pytest.raises(UserError) as caught:
        experiment.validate()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def outside(kind: Any, name: str) -> list[float]:
    """The values next to each end of the bounds that are not within."""
    ends, whole = bounds(kind, name), get_type_hints(kind)[name] is int
    assert ends is not None
    values: list[float] = [] if whole else [math.nan, -math.inf]
    if ends.least is not None:
        values.append(int(ends.least) - 1 if whole else math.nextafter(ends.least, -math.inf))
    if ends.most is not None and ends.most < math.inf:
        values += [int(ends.most) + 1, 10**30] if whole else [math.nextafter(ends.most, math.inf), math.inf]
    return values + [end for end in (ends.above, ends.below) if end is not None]


def test_every_number_has_a_lower_and_an_upper_bound_that_its_default_keeps():
    assert len(NUMBERS) > 80, "the scan sees the fields"
    without = [f"{kind.__name__}.{name}" for kind, name in NUMBERS if bounds(kind, name) is None]
    assert not without, f"no bounds stand beside {', '.join(without)}"
    for kind, name in NUMBERS:
        ends, default = bounds(kind, name), getattr(kind(), name)
        assert (ends.least is None) != (ends.above is None), f"{kind.__name__}.{name}"
        assert (ends.most is None) != (ends.below is None), f"{kind.__name__}.{name}"
        assert default is None or ends.admit(default), f"{kind.__name__}.{name}"


def test_only_numbers_have_bounds():
    having = [(kind, field.name) for kind in KINDS for field in dataclasses.fields(kind) if bounds_of(field)]
    assert having == NUMBERS


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_value_just_outside_is_refused_in_one_sentence_that_names_it(kind, name):
    for value in outside(kind, name):
        experiment, dotted = with_value(kind, name, value)
        assert refusal(experiment) == f"{dotted} is {value}, but must be {bounds(kind, name)}"


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_the_ends_that_belong_to_the_bounds_are_within(kind, name):
    ends = bounds(kind, name)
    for end in (ends.least, ends.most):
        if end is not None:
            check_bounds(with_value(kind, name, end)[0])


def test_bounds_are_said_in_words():
    assert str(Bounds(least=1, most=1_000_000)) == "at least 1 and at most 1,000,000"
    assert str(Bounds(above=0, below=1)) == "greater than 0 and less than 1"
    assert str(Bounds(above=0, most=math.inf)) == "greater than 0 and at most inf"
    assert str(Bounds(least=-1e9, most=1e9)) == "at least -1e+09 and at most 1e+09"


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("a2c", "optimizer.final_learning_rate", -1),
        ("ppo", "optimizer.epsilon", -1),
        ("ppo", "optimizer.epsilon", 0),
        ("ppo", "optimizer.epsilon", 1e-300),
        ("a2c", "optimizer.epsilon", 0),
        ("a2c", "optimizer.initial_accumulator", -1),
        ("ppo", "optimizer.beta1", 1),
        ("ppo", "optimizer.beta2", 1),
        ("ppo", "algorithm.final_clip", -5),
        ("ppo", "algorithm.value_coef", -1),
        ("a2c", "algorithm.entropy_coef", -100),
        ("a2c", "algorithm.loss_scale", 0),
        ("a2c", "algorithm.loss_scale", -1),
        ("a2c", "algorithm.log_floor", -1),
        ("a2c", "algorithm.log_floor", 1e-300),
        ("dqn", "algorithm.epsilon_spread", -1),
        ("dqn", "algorithm.epsilon_eval", 5),
        ("c51", "algorithm.v_min", -1e38),
        ("c51", "algorithm.v_max", 1e38),
        ("a2c", "sampler.environments", 99999999999999999999),
        ("a2c", "sampler.horizon", 10**18),
        ("ppo", "sampler.batch", 10**20 + 39),
        ("a2c", "sampler.groups", 10**20),
        ("a2c", "sampler.workers", 10**20),
        ("a2c", "sampler.squads", 10**20),
        ("a2c", "env.stack", 10**20),
        ("a2c", "model.hidden", 10**12),
        ("a2c", "model.width", 10**12),
        ("dqn", "algorithm.batch_size", 10**20),
        ("dqn", "algorithm.replay_size", 10**20),
        ("c51", "algorithm.atoms", 10**12),
        ("a2c", "run.threads", 10**12),
        ("a2c", "run.steps", 10**30),
    ],
)
def test_nonsense_on_the_command_line_is_refused_by_its_name(capsys, tmp_path, monkeypatch, name, flag, value):
    monkeypatch.chdir(tmp_path)
    assert main(["train", name, f"--{flag.replace('_', '-')}", str(value)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"phalanx: {flag} is ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rule", "accumulator", "accepted"),
    [
        ("sgd", 0.0, True),
        ("adagrad", 0.1, True),
        ("adagrad", 0.0, False),
        ("rmsprop", 1.0, False),
        ("rmsprop-inside", 0.0, False),
        ("adam-tf", 1.0, False),
    ],
)
def test_epsilon_may_be_zero_only_where_nothing_else_would_be_divided_by(rule, accumulator, accepted):
    optimizer = OptimizerConfig(rule=rule, epsilon=0.0, initial_accumulator=accumulator)
    experiment = dataclasses.replace(preset("a2c"), optimizer=optimizer)
    if accepted:
        experiment.validate()
    else:
        assert f"optimizer.epsilon is 0.0, but {rule} divides by it" in refusal(experiment)


def test_points_of_a_grid_that_float32_cannot_tell_apart_are_refused():
    def experiment(**grid: Any) -> Experiment:
        return dataclasses.replace(preset("c51"), algorithm=C51Config(**grid))

    assert "too close for float32" in refusal(experiment(v_min=1e9 - 1, v_max=1e9))
    experiment(v_min=-1e9, v_max=1e9, atoms=4096).validate()


@pytest.mark.parametrize("flag", ["run.seconds", "run.checkpoint_every", "sampler.step_timeout", "optimizer.clip_norm"])
def test_what_has_no_limit_may_be_infinite(flag):
    experiment = parse_flags("phalanx train a2c", preset("a2c"), [f"--{flag}", "inf"]).validate()
    section, _, name = flag.partition(".")
    assert getattr(getattr(experiment, section), name) == math.inf


def test_a_field_with_bounds_is_a_field_like_any_other(capsys):
    """Its flag is explained by its docstring and shows its default; it can be given by position."""
    assert main(["plan", "a2c", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--env.stack INT Frames the policy sees at once;" in shown
    assert "(default: 4)" in shown
    assert AtariConfig("pong", "84x84", "gray", 3).stack == 3 and AtariConfig.stack == 4
