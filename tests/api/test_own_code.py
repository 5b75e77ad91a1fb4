"""A user's own environment, network and algorithm: by name and by value, from the command line and from Python, on
every topology, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.config import A2CConfig
from phalanx.config.stored import load
from phalanx.given import Given

FILE = Path(__file__).with_name("own_code.py")
ENVS = Path(__file__).with_name("own_environments.py")
SMALL = {"run.steps": 256, "sampler.environments": 4, "sampler.horizon": 8, "run.precision": "float32"}
SMALL_DQN = {**SMALL, "algorithm.learning_starts": 64, "algorithm.intensity": 4}


def imported(file: Path) -> Any:
    """A file as a module that nobody else can import: what it holds travels by value."""
    spec = importlib.util.spec_from_file_location(f"made_up_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own, envs = imported(FILE), imported(ENVS)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(run: phalanx.Run) -> bytes:
    return next(Path(run.directory).glob("checkpoints/*/model.safetensors")).read_bytes()


@pytest.mark.parametrize(
    "topology",
    [
        {"topology": "serial"},
        {"topology": "synchronous", "sampler.workers": 2},
        {"topology": "synchronous", "topology.replicas": 2},
        {"topology": "asynchronous"},
        {"topology": "ga3c", "topology.agents": 2},
    ],
    ids=["serial", "synchronous", "replicas", "asynchronous", "ga3c"],
)
@pytest.mark.parametrize("by", ["name", "value"])
def test_own_code_runs_on_every_topology(topology, by):
    """Also in replica processes, which get the experiment over a socket and know nothing of the user's file."""
    if by == "value":
        given = {"env": envs.make, "model": own.torso, "algorithm": own.Plain}
    else:
        given = {"env": f"{ENVS}:make", "model": f"{FILE}:torso", "algorithm": f"{FILE}:Plain"}
    overrides = {**SMALL, **topology, "algorithm.weight_of_values": 0.25, "algorithm.discount": 0.8}
    run = phalanx.train("a2c-gym", **given, overrides=overrides, quiet=True)
    assert run.records[-1]["loss/values"] >= 0 and run.score is not None
    assert "Plain on" in (run.directory / "events.log").read_text()
    config = json.loads((run.directory / "config.json").read_text())
    assert json.loads(config["algorithm"]["settings"]) == {"weight_of_values": 0.25}
    assert config["algorithm"]["discount"] == 0.8
    assert config["env"]["id"] == (f"{ENVS}:make" if by == "name" else "given:make")


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "algorithm"), [("gorila-catch", "SameDQN"), ("dba3c-catch", "Plain")])
@pytest.mark.parametrize("by", ["name", "value"])
def test_own_code_runs_on_ray(preset, algorithm, by):
    pytest.importorskip("ray")
    given = {"env": f"{ENVS}:make", "model": f"{FILE}:torso", "algorithm": f"{FILE}:{algorithm}"}
    if by == "value":
        given = {"env": envs.make, "model": own.torso, "algorithm": getattr(own, algorithm)}
    run = phalanx.train(preset, **given, overrides={"run.steps": 2_000, "run.precision": "float32"}, quiet=True)
    assert run.end == "2,000 steps done"


@pytest.mark.parametrize(("preset", "name"), [("a2c-catch", "SameA2C"), ("dqn-catch", "SameDQN")])
def test_ours_by_another_name_learns_the_same(preset, name):
    overrides = SMALL_DQN if "dqn" in preset else SMALL
    runs = [
        phalanx.train(preset, algorithm=which, overrides=overrides, quiet=True) for which in (None, getattr(own, name))
    ]
    assert weights(runs[0]) == weights(runs[1])


def test_the_command_line_takes_the_same_code(capsys):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--env.id", f"{ENVS}:make", "--env.kwargs", '{"length": 4}', "--env.wrap", f"{ENVS}:doubled"]
    flags += ["--model.torso", f"{FILE}:torso", "--algorithm", f"{FILE}:Plain", "--algorithm.weight-of-values=0.25"]
    assert main(["train", "a2c-gym", *flags, "--run.name", "flags"]) == 0
    run = phalanx.train(
        "a2c-gym",
        env=envs.make,
        model=own.torso,
        algorithm=own.Plain,
        overrides={
            **SMALL,
            "env.kwargs": {"length": 4},
            "env.wrap": envs.doubled,
            "algorithm.weight_of_values": 0.25,
        },
        quiet=True,
    )
    assert weights(run) == weights(phalanx.Run(Path("runs/flags")))
    assert 4 <= run.score <= 8  # twice what four steps pay, of which half are right by chance
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["plan", "a2c-gym", "--algorithm", f"{FILE}:Plain", "--algorithm.weight-of-valuez", "1"])
    assert "Unrecognized options: --algorithm.weight-of-valuez" in capsys.readouterr().err
    assert main(["eval", "runs/flags", "--games", "2"]) == 0
    assert "2 games of make" in capsys.readouterr().out


def test_a_module_of_the_current_directory_is_found(tmp_path):
    (tmp_path / "cellar.py").write_text(ENVS.read_text())
    run = phalanx.train("a2c-gym", env="cellar:Line", overrides={**SMALL, "topology": "synchronous"}, quiet=True)
    assert run.directory.name.startswith("a2c-gym-Line-0-")


def test_a_file_imports_those_beside_it(tmp_path):
    (tmp_path / "shed").mkdir()
    (tmp_path / "shed/lines_of_the_shed.py").write_text(ENVS.read_text())
    (tmp_path / "shed/door.py").write_text(
        "from lines_of_the_shed import make as make_line\ndef make():\n  return make_line()"
    )
    overrides = {**SMALL, "topology": "synchronous", "sampler.workers": 2}
    assert phalanx.train("a2c-gym", env="shed/door.py:make", overrides=overrides, quiet=True).end == "256 steps done"


def test_a_name_that_a_module_registers_is_made_by_gymnasium(tmp_path):
    registers = "import gymnasium\nfrom given_line import Line\ngymnasium.register('Cellar/Line-v0', entry_point=Line)"
    (tmp_path / "given_line.py").write_text(ENVS.read_text())
    (tmp_path / "registers.py").write_text(registers)
    overrides = {**SMALL, "topology": "synchronous", "env.kwargs": {"length": 3}}
    run = phalanx.train("a2c-gym", env="registers:Cellar/Line-v0", overrides=overrides, quiet=True)
    assert 0 < run.score <= 3


def test_a_run_remembers_its_code_within_the_process_and_asks_for_it_in_another(monkeypatch):
    overrides = {**SMALL, "algorithm.weight_of_values": 0.25}
    run = phalanx.train("a2c-gym", env=envs.make, model=own.torso, algorithm=own.Plain, overrides=overrides, quiet=True)
    scores = phalanx.load(run.directory).evaluate(games=2)
    monkeypatch.setattr("phalanx.config.code._remembered", {})
    with pytest.raises(
        phalanx.UserError, match=r"env.id was given to this run as a Python object, make, .* give it ag"
    ):
        phalanx.load(run.directory)
    with pytest.raises(phalanx.UserError, match=r"model.torso was given to this run as a Python object, torso"):
        phalanx.load(run.directory, env=envs.make)
    assert main(["eval", str(run.directory)]) == 2
    agent = phalanx.load(run.directory, env=envs.make, model=f"{FILE}:torso")
    assert agent.evaluate(games=2) == scores
    more = {"overrides": {"run.steps": 512}, "quiet": True}
    with pytest.raises(phalanx.UserError, match=r"algorithm.code was given to this run as a Python object, Plain"):
        phalanx.resume(run.directory, env=envs.make, model=own.torso, **more)
    again = phalanx.resume(run.directory, env=envs.make, model=own.torso, algorithm=own.Plain, **more)
    assert again.records[-1]["steps"] == 512
    kept = load(run.directory / "config.json").algorithm
    assert json.loads(kept.settings) == {"weight_of_values": 0.25}


def test_what_is_to_be_given_again_is_said_at_the_end(capsys):
    given = {"env": envs.make, "algorithm": own.Plain}
    run = phalanx.train("a2c-gym", **given, overrides={**SMALL, "env.wrap": envs.doubled})
    assert capsys.readouterr().out.endswith(f"\nnext: phalanx.load('{run.directory}', env=..., wrap=...)\n")
    endless = {**SMALL, "run.steps": 10_000_000, "run.log_every": 0.05}
    run = phalanx.train("a2c-gym", **given, overrides=endless, on_record=lambda record: False)
    again = f"phalanx.resume('{run.directory}', env=..., algorithm=...)"
    assert capsys.readouterr().out.endswith(f"\nnext: phalanx.load('{run.directory}', env=...)\n      {again}\n")


def test_a_wrapper_is_given_again_and_nothing_is_given_in_vain(monkeypatch):
    run = phalanx.train("a2c-gym", env=envs.make, overrides={**SMALL, "env.wrap": envs.doubled}, quiet=True)
    monkeypatch.setattr("phalanx.config.code._remembered", {})
    with pytest.raises(phalanx.UserError, match=r"env.wrap was given to this run as a Python object, doubled"):
        phalanx.load(run.directory, env=envs.make)
    assert phalanx.load(run.directory, env=envs.make, wrap=envs.doubled).evaluate(games=1)[0] % 2 == 0
    more = {"overrides": {"run.steps": 512}, "quiet": True}
    assert phalanx.resume(run.directory, env=envs.make, wrap=envs.doubled, **more).records[-1]["steps"] == 512
    named = phalanx.train("a2c-gym", env="CartPole-v1", overrides=SMALL, quiet=True)
    for given in ({"env": envs.make}, {"wrap": envs.doubled}, {"model": own.torso}):
        with pytest.raises(phalanx.UserError, match=r"but its \S+ is \S+, which is found by its name; leave \w+= out"):
            phalanx.load(named.directory, **given)
    phalanx.load(named.directory, env="CartPole-v1").close()


def test_code_in_a_run_directory_is_not_executed(capsys):
    run = phalanx.train("a2c-gym", overrides=SMALL, quiet=True)
    (run.directory / "evil.py").write_text("open('harm', 'w')")
    config = run.directory / "config.json"
    config.write_text(config.read_text().replace("CartPole-v1", f"{run.directory}/evil.py:make"))
    for command in (phalanx.load, phalanx.resume):
        with pytest.raises(
            phalanx.UserError, match=r"env.id names .*evil.py, a file in the run directory, of which not"
        ):
            command(run.directory)
    assert [main([command, str(run.directory)]) for command in ("eval", "resume", "play")] == [2, 2, 2]
    assert not Path("harm").exists()


def test_an_agent_is_found_from_another_directory_and_needs_no_algorithm(tmp_path, capsys, monkeypatch):
    """Files are kept with their whole path; code of the algorithm is asked for, and executed, by a resume only."""
    Path("mine.py").write_text(ENVS.read_text())
    Path("learns.py").write_text(FILE.read_text())
    given = {"env": "mine.py:make", "model": "learns.py:torso", "algorithm": "learns.py:Plain"}
    run = phalanx.train("ppo-gym", **given, overrides={**SMALL, "sampler.horizon": 3, "run.steps": 60}, quiet=True)
    again = phalanx.resume(run.directory, **given, overrides={"run.steps": 120}, quiet=True)
    phalanx.load(run.directory, env="mine.py:make", model="learns.py:torso").close()
    directory, config = run.directory.resolve(), run.directory.resolve() / "config.json"
    kept = json.loads(config.read_text())
    assert kept["env"]["id"] == f"{tmp_path}/mine.py:make" and again.records[-1]["steps"] >= 120
    harm = tmp_path / "harm.py"
    harm.write_text(f"open({str(tmp_path / 'harm')!r}, 'w')")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("nowhere.py:Plain", f"{harm}:Plain", "given:Plain"):
        kept["algorithm"]["code"] = name
        config.write_text(json.dumps(kept))
        assert main(["eval", str(directory), "--games", "1"]) == 0
    assert main(["export", str(directory), "out", "--games", "1"]) == 0
    given_away = json.loads(Path("out/config.json").read_text())
    assert (given_away["env"]["id"], given_away["algorithm"]["code"]) == ("mine.py:make", "given:Plain")
    phalanx.load(directory).close()
    own_file = directory / "harm.py"
    own_file.write_text(harm.read_text())
    kept["algorithm"]["code"] = f"{own_file}:Plain"
    config.write_text(json.dumps(kept))
    assert [main([*words, str(directory)]) for words in (["eval"], ["resume"])] == [2, 2]
    assert main(["export", str(directory), "more"]) == 2
    assert not (tmp_path / "harm").exists()


def test_modules_of_a_run_directory_are_not_executed(capsys, monkeypatch):
    """Neither as parts of a namespace package nor from within the directory, by the name of a package that is missing,
    say; but names from elsewhere are found there, too."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    overrides = {**SMALL, "run.name": "two", "env.wrap": "gymnasium.wrappers:FlattenObservation"}
    run = phalanx.train("a2c-gym", overrides=overrides, quiet=True)
    config = (run.directory / "config.json").resolve()
    whole = config.read_text()
    evil = "import pathlib; pathlib.Path(__file__).with_name('harm').touch()"
    (run.directory / "evil.py").write_text(evil)
    (run.directory / "procgen.py").write_text(evil)
    (run.directory / "bad").mkdir()
    (run.directory / "bad" / "__init__.py").write_text(evil)
    for name in ("runs.two.evil:make", "runs.two.bad.worse:make", "runs.two.evil:Mine-v0"):
        config.write_text(whole.replace("CartPole-v1", name))
        assert main(["eval", str(run.directory)]) == 2
        assert "a file in the run directory, of which nothing is executed" in capsys.readouterr().err
    monkeypatch.chdir(run.directory)
    for name in ("evil:make", "bad.worse:make", "procgen-v0"):
        config.write_text(whole.replace("CartPole-v1", name))
        assert main(["eval", "."]) == 2
    assert not list(Path().rglob("harm"))
    config.write_text(whole)
    assert main(["eval", ".", "--games", "1"]) == 0


def test_code_given_by_value_is_asked_for_within_the_run_directory_too(capsys, monkeypatch):
    run = phalanx.train("a2c-gym", env=envs.make, overrides=SMALL, quiet=True)
    monkeypatch.setattr("phalanx.config.code._remembered", {})
    monkeypatch.chdir(run.directory)
    assert main(["eval", "."]) == 2
    assert "env.id was given to this run as a Python object, make" in capsys.readouterr().err


def test_what_was_given_by_name_cannot_be_changed_when_resumed():
    run = phalanx.train("a2c-gym", env=f"{ENVS}:make", overrides=SMALL, quiet=True)
    with pytest.raises(phalanx.UserError, match=r"a resumed run keeps its env.id \(.*own_environments.py:make\)"):
        phalanx.resume(run.directory, env="CartPole-v1")


class Variant(own.SameA2C):
    """A variant of ours with a configuration that is one."""

    @dataclass(frozen=True)
    class Config(A2CConfig):
        entropy_coef: float = 0.5
        patience: int = 3

    made: list[Any] = []

    def __init__(self, config: Any, model: Any, experiment: Any) -> None:
        super().__init__(config, model)
        assert (config.patience, config.value_coef, experiment.run.steps) == (4, 0.125, 64)
        assert config.entropy_coef == 0.5  # its own default, not the preset's


def test_a_variant_of_our_configuration_keeps_the_preset_values_and_its_own_defaults():
    overrides = {**SMALL, "run.steps": 64, "algorithm.patience": 4, "algorithm.value_coef": 0.125}
    phalanx.train("a2c-gym", algorithm=Variant, overrides=overrides, quiet=True)
    sentences = {
        "algorithm.patience": "algorithm.patience must be of type int, not 'long'",
        "algorithm.patients": "did you mean algorithm.patience",
    }
    for name, sentence in sentences.items():
        with pytest.raises(phalanx.UserError, match=sentence):
            phalanx.train("ppo-gym", algorithm=Variant, overrides={name: "long"}, quiet=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"env": lambda: "nothing"}, "gave str, which is not a Gymnasium environment"),
        ({"env": lambda: 1 / 0}, "env.id given:<lambda> cannot make the environment: ZeroDivisionError"),
        ({"env": lambda length: None, "overrides": {"env.kwargs": {"size": 3}}}, "cannot make the environment: TypeEr"),
        ({"env": gymnasium.make("CartPole-v1")}, "give a name or a function that makes an environment, such as lambda"),
        ({"env": f"{ENVS}:no_environment"}, "no_environment gave str, which is not a Gymnasium environment"),
        ({"env": f"{FILE}:Plain"}, "is neither a class of Gymnasium environments nor a plain function that makes one"),
        ({"env": f"{ENVS}:Lime"}, "unknown name in .*own_environments.py 'Lime'; did you mean Line"),
        ({"env": "os:system", "overrides": {"env.kwargs": {"command": "touch harm"}}}, "is neither a class of Gymn"),
        ({"env": "torch:load", "overrides": {"env.kwargs": {"f": "harm"}}}, "is a function of an installed package"),
        ({"model": own.with_running_means}, "with_running_means does not fit: it keeps running means"),
        ({"model": own.with_dropout}, "with_dropout does not fit: it has Dropout, and those who act and those who"),
        (
            {
                "model": lambda spec: own.nn.Sequential(
                    own.nn.Linear(4, 8), own.nn.MultiheadAttention(8, 2, dropout=0.1)
                )
            },
            "lambda does not fit: it has Dropout",
        ),
        ({"model": own.without_features}, r"without_features does not fit inputs of shape \(4,\): RuntimeError"),
        (
            {"model": own.flat},
            r"flat does not fit: it must give features \[N, F\] .* but gave \(8,\) of inputs \(2, 4\)",
        ),
        ({"model": lambda spec: 3}, "lambda does not fit: it gave int, which is not a torch.nn.Module"),
        ({"algorithm": envs.Line}, "must be a class with the methods batches and loss"),
    ],
)
def test_code_that_does_not_fit_is_one_sentence_and_leaves_nothing(tmp_path, given, sentence):
    with pytest.raises(phalanx.UserError, match=sentence):
        phalanx.train("a2c-gym", **given, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["A2C", "SameA2C"])
@pytest.mark.parametrize("preset", ["ppo-gym", "dqn-gym"])
def test_ours_learns_by_its_own_settings_only(tmp_path, preset, name):
    theirs = preset.partition("-")[0].upper()
    with pytest.raises(
        phalanx.UserError, match=rf"{name} learns by the settings of A2C, but {preset} has those of {theirs}; "
    ):
        phalanx.train(preset, algorithm=getattr(own, name), quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("topology", ["serial", "asynchronous"])
def test_a_loss_that_is_a_tensor_is_one_sentence(topology):
    sentence = r"Bare.loss must return phalanx.types.Loss\(total, metrics\), not Tensor"
    with pytest.raises((phalanx.UserError, phalanx.RunError), match=sentence):
        phalanx.train("a2c-gym", algorithm=own.Bare, overrides={**SMALL, "topology": topology}, quiet=True)


def test_an_environment_that_fails_later_is_named_with_its_traceback():
    def fails() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: {}["nobody home"])

    with pytest.raises(phalanx.RunError, match="nobody home"):
        phalanx.train("a2c-gym", env=fails, overrides=SMALL, quiet=True)
    with pytest.raises(phalanx.RunError, match=r"failed before its first step:(.|\n)*Traceback(.|\n)*nobody home"):
        phalanx.train("a2c-gym", env=fails, overrides={**SMALL, "topology": "synchronous"}, quiet=True)


@pytest.mark.parametrize("topology", ["synchronous", "asynchronous"])
def test_an_environment_that_only_the_parent_can_make_ends_the_run_at_once(topology):
    """The replicas are not asked for states that they cannot tell."""
    process = os.getpid()

    def make() -> gymnasium.Env:
        return gymnasium.make("CartPole-v1" if os.getpid() == process else "Nobody-v0")

    overrides = {**SMALL, "topology": topology, "topology.replicas": 2}
    with pytest.raises(
        phalanx.RunError, match=r"replica \d: env.id given:.*make cannot make the environment: NameNotFo"
    ):
        phalanx.train("a2c-gym", env=make, overrides=overrides, quiet=True)


def test_an_atari_preset_takes_a_game_and_own_environments_take_its_stack():
    with pytest.raises(phalanx.UserError, match="unknown game 'pongg'; did you mean pong"):
        phalanx.train("ppo", env="pongg")
    from phalanx.config.code import with_code
    from phalanx.config.presets import preset

    env = with_code(preset("ppo"), env=envs.make).env
    assert isinstance(env.id, Given) and env.stack == 4


def test_fields_that_an_own_configuration_lacks_are_neither_offered_nor_accepted(capsys, monkeypatch):
    """Of ours, such as PPO's epochs; what the class says itself, and what is around it, is."""
    monkeypatch.setenv("COLUMNS", "120")
    words = ["plan", "ppo-gym", "--algorithm", f"{FILE}:Plain"]
    for flags in (["--algorithm.entropy-coef", "2"], ["--algorithm.epochs=7"], ["--algorithm.minibatches", "3"]):
        assert main([*words, *flags]) == 2
        assert "algorithm.discount, algorithm.weight_of_values" in capsys.readouterr().err
    with pytest.raises(phalanx.UserError, match=r"Plain does not read algorithm\.epochs"):
        phalanx.train("ppo-gym", algorithm=own.Plain, overrides={"algorithm.epochs": 7}, quiet=True)
    assert main([*words, "--algorithm.discount", "0.5", "--sampler.horizon", "3"]) == 0  # 3 x 8 is no 8 minibatches
    plan = capsys.readouterr().out
    assert "what Plain.batches yields per rollout" in plan and "minibatches" not in plan
    assert main(["train", *words[1:], "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "--algorithm.weight-of-values" in text and "--algorithm.epochs" not in text
    assert main(["plan", "a2c-catch", "--algorithm", f"{FILE}:SameA2C", "--algorithm.entropy-coef", "2"]) == 0
    assert "1 update of" in capsys.readouterr().out


def test_what_cannot_be_drawn_is_not_offered_to_be_watched(tmp_path, capsys):
    """`Line` has no render()."""
    flags = ["--run.steps", "600", "--topology", "serial", "--run.name", "line"]
    assert main(["train", "ppo-gym", "--env.id", f"{ENVS}:Line", *flags]) == 0
    assert "phalanx eval" in (shown := capsys.readouterr().out) and "phalanx play" not in shown
    assert main(["play", "runs/line", "--video", "play.gif"]) == 2
    assert capsys.readouterr().err.startswith("phalanx: Line cannot be drawn: it has no render() for rgb_array; ")
    assert list(tmp_path.glob("*play*")) == []
    assert main(["export", "runs/line", "out", "--games", "1"]) == 0
    shown = capsys.readouterr()
    assert "the export has no video: Line cannot be drawn" in shown.err and "Traceback" not in shown.err
    assert shown.out.splitlines()[-1] == "next: phalanx eval out"


def test_a_class_that_can_draw_is_made_to(capsys):
    """One that a function made without is not offered."""
    flags = ["--run.steps", "64", "--topology", "serial"]
    for name, offered in (("Drawn", True), ("undrawn", False)):
        assert main(["train", "a2c-gym", "--env.id", f"{ENVS}:{name}", *flags, "--run.name", name]) == 0
        assert ("phalanx play" in capsys.readouterr().out) == offered
    assert main(["play", "runs/Drawn", "--video", "play.gif"]) == 0
    assert "7 pictures at 50 per second" in capsys.readouterr().out  # which browsers show
    assert main(["play", "runs/Drawn", "--video", "play.mp4"]) == 0
    assert "7 pictures at 60 per second" in capsys.readouterr().out


def test_an_id_that_a_script_registered_reaches_worker_processes(capsys):
    gymnasium.register("Lab/Mine-v0", entry_point=envs.Line, max_episode_steps=3)
    try:
        overrides = {**SMALL, "topology": "synchronous", "sampler.workers": 2, "env.kwargs": {"length": 9}}
        run = phalanx.train("a2c-gym", env="Lab/Mine-v0", overrides=overrides, quiet=True)
        assert run.end == "256 steps done" and 0 <= run.score <= 3
        assert json.loads((run.directory / "config.json").read_text())["env"]["id"] == "given:Lab/Mine-v0"
        assert phalanx.load(run.directory).evaluate(games=1)[0] <= 3
    finally:
        del gymnasium.registry["Lab/Mine-v0"]


def test_deaths_of_workers_are_told_once_each_and_counted_at_the_end(tmp_path, capsys):
    overrides = {**SMALL, "topology": "synchronous", "sampler.workers": 2, "sampler.decorrelation": 0}
    run = phalanx.train("ppo-gym", env=f"{ENVS}:Breaks", overrides=overrides)
    assert run.end == "256 steps done" and run.deaths == {"KeyError: 'broken env' (own_environments.py:55)": 2}
    shown = capsys.readouterr()
    shown = shown.out + shown.err
    assert shown.count("Traceback (most recent call last)") == 2  # of the environment, and of the worker around it
    assert (
        len(
            [
                line
                for line in shown.splitlines()
                if line.endswith("died: KeyError: 'broken env' (own_environments.py:55)")
            ]
        )
        == 1
    )
    assert "\n2 workers died (2 x KeyError: 'broken env' (own_environments.py:55))\n" in shown
