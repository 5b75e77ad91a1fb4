"""`phalanx.train` and `phalanx.resume` wherever a user may call them, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx.cli.main import main
from phalanx.config import Experiment
from phalanx.config.presets import preset

ROOT = Path(phalanx.__file__).parents[1]
STEPS = 512
SMALL = {"run.steps": STEPS, "sampler.environments": 4, "sampler.horizon": 8, "run.precision": "float32"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def small(**more: Any) -> dict[str, Any]:
    return {**SMALL, **{name.replace("__", "."): value for name, value in more.items()}}


SCRIPT = """
import gymnasium, numpy, phalanx

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        self.left -= 1
        return numpy.zeros(2, numpy.float32), float(action), self.left == 0, False, {}

records = []
run = phalanx.train(
    "a2c-gym",
    env=Mine,
    overrides={"run.steps": 512, "topology": "synchronous", "sampler.workers": 2},
    on_record=records.append,
)
again = phalanx.train("a2c-gym", env=lambda: Mine(), overrides={"run.steps": 256}, quiet=True)
agent = phalanx.load(run.directory)
agent.evaluate(games=1)
assert Mine.step.__globals__ is Mine.reset.__globals__ is globals()  # its classes stay what they are
print(run.end, again.end, len(records) > 0, records == run.records, agent.act(numpy.zeros(2)) in (0, 1))
"""
TOLD = "512 steps done 256 steps done True True True"


def test_a_script_without_a_main_guard_trains_on_its_own_environment_twice(tmp_path):
    """In worker processes, which import nothing of the script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == TOLD
    assert "steps=512" in done.stdout and "steps=256" not in done.stdout  # the second one is quiet


def test_a_notebook_trains_on_an_environment_of_its_cells(capsys):
    exec(SCRIPT, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-1] == TOLD


BLOCK = """
run = phalanx.train("ppo-gym", env="CartPole-v1", overrides={"run.steps": 500}, on_record=lambda record: ...)
run.directory, run.score, run.records
agent = phalanx.load(run.directory, best=True)
action = agent.act(observation)
actions = agent.act(observations)
scores = agent.evaluate(games=2)
"""
BEFORE = """
import gymnasium, phalanx
environments = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
observations, _ = environments.reset(seed=0)
observation = observations[0]
"""
AFTER = """
assert run.end == "500 steps done" and run.records[-1]["steps"] >= 500
assert action in (0, 1) and actions.shape == (3,) and len(scores) == 2 and run.score > 0
"""


@pytest.mark.parametrize("where", ["script", "exec", "pytest"])
def test_the_whole_interface_as_people_write_it(tmp_path, where):
    if where == "exec":  # as in a notebook
        exec(BEFORE + BLOCK + AFTER, {"__name__": "__main__"})
        return
    inner = "".join(f"    {line}\n" for line in (BEFORE + BLOCK + AFTER).splitlines())
    (tmp_path / "test_it.py").write_text(f"def test_it():\n{inner}" if where == "pytest" else BEFORE + BLOCK + AFTER)
    command = [sys.executable, *(("-m", "pytest") if where == "pytest" else ()), "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_says_what_came_of_it(capsys):
    seen = []
    run = phalanx.train("ppo-gym", env="CartPole-v1", overrides=small(), on_record=seen.append)
    assert run.directory.parent == Path("runs") and (run.directory / "config.json").is_file()
    assert (run.end, run.interrupted) == (f"{STEPS} steps done", False)
    assert run.records == seen and seen[-1]["steps"] == STEPS
    assert run.score == seen[-1]["score"] > 0
    later = phalanx.Run(run.directory)
    assert (later.records, later.end, later.interrupted) == (seen, run.end, False)
    with (run.directory / "events.log").open("a") as log:
        log.write("2026-11-19T21:54:05+0000 resumed\n")
    assert phalanx.Run(run.directory).end == ""
    assert "steps=512" in capsys.readouterr().out


def test_two_runs_in_a_second_have_directories_of_their_own_and_the_same_course():
    runs = [phalanx.train("a2c-catch", overrides=small(), quiet=True) for _ in range(2)]
    assert runs[0].directory != runs[1].directory
    weights = [next(run.directory.glob("checkpoints/*/model.safetensors")).read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_torch_is_left_as_it_was():
    """In the process of whoever calls: its random numbers, and how many threads it has."""
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run = phalanx.train("a2c-catch", overrides=small(run__threads=threads + 1), quiet=True)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    phalanx.resume(run.directory, overrides={"run.steps": 2 * STEPS}, quiet=True)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


@pytest.mark.parametrize("from_python", [True, False])
def test_the_screen_says_what_a_resumed_run_waits_for(monkeypatch, from_python):
    run = phalanx.train("a2c-catch", overrides=small(), quiet=True)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "phalanx.runs.screen.PlainLines.doing", lambda self, text: told.append((text, self.goal.device))
    )
    if from_python:
        phalanx.resume(run.directory, overrides={"run.steps": 2 * STEPS})
    else:
        assert main(["resume", str(run.directory), "--run.steps", str(2 * STEPS)]) == 0
    assert [text for text, _ in told] == ["loading torch", "reading the checkpoint", "making the environments", ""]
    assert told[2][1] == "cpu, float32"


def test_the_course_is_that_of_the_command_line(capsys):
    run = phalanx.train("a2c-catch", overrides=small(), quiet=True)
    assert capsys.readouterr().out == ""
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "a2c-catch", *flags, "--run.name", "flags"]) == 0
    files = [path.glob("checkpoints/*/model.safetensors") for path in (run.directory, Path("runs/flags"))]
    assert len({next(file).read_bytes() for file in files}) == 1


def test_an_experiment_stands_for_a_preset():
    experiment = preset("a2c-catch")
    assert isinstance(experiment, Experiment) and phalanx.Experiment is Experiment
    assert phalanx.train(experiment, overrides=small(), quiet=True).end == f"{STEPS} steps done"


def test_a_thread_that_is_not_the_main_one_leaves_signals_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    runs, during = [], []

    def look(record: dict[str, Any]) -> None:
        during.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)])

    def work() -> None:
        runs.append(phalanx.train("a2c-catch", overrides=small(topology="synchronous"), on_record=look, quiet=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert runs[0].end == f"{STEPS} steps done"
    assert (
        during == [before] and [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    )


def test_on_record_stops_a_run_that_can_be_resumed_from_python():
    overrides = small(run__steps=10_000_000, run__log_every=0.05)
    run = phalanx.train("a2c-catch", overrides=overrides, on_record=lambda record: record["steps"] < 64, quiet=True)
    assert (run.end, run.interrupted) == ("stopped by on_record", False)
    steps = run.records[-1]["steps"]
    assert 64 <= steps < 10_000_000
    more = phalanx.resume(run.directory, overrides={"run.steps": steps + 64}, quiet=True)
    assert more.directory == run.directory and more.records[-1]["steps"] == steps + 64
    with pytest.raises(phalanx.UserError, match=r"a resumed run keeps its run.seed \(0\); start a new run"):
        phalanx.resume(run.directory, overrides={"run.seed": 1})


def test_on_record_may_change_its_record_and_say_no_as_numpy_does(monkeypatch):
    shown = []
    monkeypatch.setattr("phalanx.runs.screen.Silence.show", lambda self, values: shown.append(values))

    def spoil(record: dict[str, Any]) -> np.bool_:
        record.clear()
        return np.mean([1.0]) < 0.5

    overrides = small(run__steps=10_000_000, run__log_every=0.05, run__seconds=10.0)
    run = phalanx.train("a2c-catch", overrides=overrides, on_record=spoil, quiet=True)
    assert run.end == "stopped by on_record" and shown == run.records and shown[0]["steps"] > 0


def test_what_on_record_raises_comes_out_and_the_run_is_kept():
    def prune(record: dict[str, Any]) -> None:
        raise LookupError("pruned")

    with pytest.raises(LookupError, match="pruned"):
        phalanx.train(
            "a2c-catch", overrides=small(run__log_every=0.01, run__name="pruned"), on_record=prune, quiet=True
        )
    assert list(Path("runs/pruned/checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_from_outside_says_so(number):
    def stop(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    overrides = small(run__steps=10_000_000, run__log_every=0.2)
    run = phalanx.train("a2c-catch", overrides=overrides, on_record=stop, quiet=True)
    assert (run.end, run.interrupted) == (f"stopped by {number.name}", True)
    assert (phalanx.Run(run.directory).end, phalanx.Run(run.directory).interrupted) == (run.end, True)
    assert signal.getsignal(number) is before
    assert list(run.directory.glob("checkpoints/step-*"))


def test_a_script_that_is_stopped_leaves_no_process(tmp_path):
    program = (
        "import phalanx; overrides = {'topology': 'synchronous', 'sampler.workers': 2, 'run.log_every': 0.1}\n"
        "run = phalanx.train('a2c-catch', overrides=overrides, on_record=lambda record: print('record', flush=True))\n"
        "print(run.end, run.interrupted)"
    )
    mark = {"PHALANX_TEST_SCRIPT": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **mark}
    ) as script:
        assert script.stdout is not None
        assert any(line == "record\n" for line in script.stdout)
        script.send_signal(signal.SIGTERM)
        assert script.stdout.read().splitlines()[-1] == "stopped by SIGTERM True"
        assert script.wait(60) == 0
    deadline = time.monotonic() + 10
    while living(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(tmp_path)


def living(mark: Path) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"PHALANX_TEST_SCRIPT={mark}".encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.steps", -1),
        ("sampler.groups", 3),
        ("optimizer.epsilon", 0.0),
        ("env.kwargs", "[1]"),
        ("env.wrap", "nothing"),
        ("run.device", "mps"),
        ("topology", "cereal"),
        ("model.torso", "nature_"),
        ("algorithm", "nowhere_at_all:Mine"),
    ],
)
def test_a_bad_override_gives_the_sentence_of_the_command_line(capsys, name, value):
    assert main(["train", "a2c-gym", f"--{name.replace('_', '-')}", str(value)]) == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("phalanx: ")
    with pytest.raises(phalanx.UserError) as caught:
        phalanx.train("a2c-gym", overrides={name: value}, quiet=True)
    assert str(caught.value) == sentence
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"overrides": {"run.stepz": 1}}, r"unknown configuration key 'run.stepz'; did you mean run.steps"),
        ({"overrides": {"steps": 1}}, r"unknown configuration key 'steps'; did you mean run.steps"),
        ({"overrides": {"run.steps": "many"}}, r"^run.steps must be of type int, not 'many'$"),
        ({"overrides": {"run.steps": 1.5}}, r"^run.steps must be of type int, not 1.5$"),
        ({"overrides": {"run.steps": np.arange(3)}}, r"^run.steps is an array of 3 numbers; give one number"),
        ({"overrides": {"env.kwargs": {"a": object()}}}, r"env.kwargs holds what JSON cannot"),
        ({"env": 7}, r"env= is an int; give a name or a function that makes an environment"),
        ({"env": "CartPoll-v1"}, r"unknown Gymnasium environment 'CartPoll-v1'; did you mean"),
        ({"model": 7}, r"model= is an int; give a name or"),
        ({"algorithm": "A2C"}, r"algorithm 'A2C' names no class"),
        (
            {"env": "CartPole-v1", "overrides": {"env.id": "Acrobot-v1"}},
            r"^env= and overrides\['env.id'\] say the same; ",
        ),
        (
            {"model": torch.nn.Flatten, "overrides": {"--model.torso": "mlp"}},
            r"^model= and overrides\['--model.torso'\]",
        ),
        ({"algorithm": "os:A", "overrides": {"algorithm": "os:B"}}, r"^algorithm= and overrides\['algorithm'\] say"),
        ({"model": torch.nn.Linear(4, 3)}, r"model.torso Linear is a torch module; give the function that makes it"),
        (
            {"env": lambda: __import__("gymnasium").make_vec("CartPole-v1", 2)},
            r"gave CartPoleVectorEnv, a vector environment; .* sampler.environments",
        ),
        ({"on_record": 3}, r"^on_record= is int; give a function that takes a record$"),
        ({"overrides": {"run": {"steps": 3}}}, r"^overrides\['run'\] is an object; write dotted names, such as"),
        ({"algorithm": dict}, r"algorithm builtins:dict must be a class with the methods batches and loss"),
    ],
)
def test_a_bad_argument_is_one_sentence(arguments, sentence):
    with pytest.raises(phalanx.UserError, match=sentence):
        phalanx.train("a2c-gym", **arguments, quiet=True)
    assert not Path("runs").exists()


def test_numbers_of_numpy_and_flags_with_dashes_will_do():
    """Whole ones that are written as floats, too, and paths."""
    overrides = {**SMALL, "run.steps": 6.4e1, "run.log-every": np.float32(0.5), "sampler.environments": np.int64(4)}
    run = phalanx.train("a2c-catch", overrides={**overrides, "run.directory": Path("there")}, quiet=True)
    assert run.end == "64 steps done" and run.directory.parent == Path("there")


def test_a_directory_that_is_none_is_refused(tmp_path):
    for command in (phalanx.load, phalanx.resume, phalanx.Run):
        with pytest.raises(phalanx.UserError, match=r"is not a run directory: it has no config.json"):
            command(tmp_path)


def test_records_of_a_run_that_goes_on_may_end_in_half_a_line(tmp_path):
    (tmp_path / "config.json").touch()
    assert phalanx.Run(tmp_path).score is None  # it did not come to a first record
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"steps": 1, "score": 2.0}) + '\n{"steps"')
    assert phalanx.Run(tmp_path).records == [{"steps": 1, "score": 2.0}]
    assert phalanx.Run(str(tmp_path)).directory == tmp_path


def test_importing_phalanx_imports_nothing():
    code = "import os, sys; before = set(sys.modules); import phalanx; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) <= {"phalanx", "__future__"}
    assert {"train", "load", "resume", "Agent", "Run"} <= set(dir(phalanx))
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        getattr(phalanx, "tra" + "ne")
