"""The command line: what it promises to show, and that every mistake is one sentence without a traceback."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx
from phalanx.bench import machine as bench
from phalanx.cli.main import main
from phalanx.config.presets import PRESETS, preset
from phalanx.config.stored import save
from phalanx.errors import UserError
from phalanx.probe import resolve_replicas
from phalanx.registry import memory_of

ROOT = Path(phalanx.__file__).parent.parent
TINY = ("--run.steps", "500", "--topology", "serial")


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m phalanx ...` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with two tiny trained runs."""
    directory = tmp_path_factory.mktemp("runs")
    for name in ("a2c-catch", "dqn-catch"):
        assert main(["train", name, *TINY, "--run.directory", str(directory), "--run.name", name]) == 0
    return directory


@pytest.fixture
def complaint(capsys):
    """Run a command that must fail with exit code 2; its one line on stderr."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert error.startswith("phalanx: ")
        assert error.count("\n") == 1
        return error

    return run


def test_without_a_command_it_explains_itself(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "resume", "eval", "play", "bench", "plan", "presets"))


def test_presets_lists_each_with_its_text(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["default", *PRESETS]
    assert all(text in line for line, (text, _) in zip(lines[1:], PRESETS.values(), strict=True))


def test_plan_shows_what_would_run_and_what_was_changed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--env.game", "breakout", "--algorithm.epochs", "3", "--sampler.workers", "2", "--sampler.groups", "2"]
    assert main(["plan", "ppo", *flags]) == 0
    lines: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        lines.setdefault(line.split()[0], []).append(line)
    assert "ppo: PPO on synchronous, breakout" in lines["preset"][0]
    assert "2 env workers x 4 environments" in lines["processes"][0]
    assert "8 environments x 256 steps = 2048 steps" in lines["rollout"][0]
    assert "inference batches of 4" in lines["rollout"][0]
    assert "3 epochs x 4 minibatches of 512" in lines["learning"][0]
    assert "MiB" in lines["memory"][0]
    assert any("env.game: pong -> breakout" in line for line in lines["changed"])
    assert any("algorithm.epochs: 4 -> 3" in line for line in lines["changed"])
    assert not list(tmp_path.iterdir())  # nothing was run


def plan_of(capsys, *arguments):
    """Its lines, by name."""
    assert main(["plan", *arguments]) == 0
    lines: dict[str, list[str]] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines():
        name = line[:14].strip() or name
        lines.setdefault(name, []).append(line[15:])
    return lines


def test_plan_draws_replicas_in_lock_step(capsys, monkeypatch):
    """The learning rate is that of the batch of all, and the budget is used up by all."""
    monkeypatch.setattr("phalanx.topologies.asynchronous.cores_by_node", lambda: [0, 1, 2, 3])
    flags = ("--optimizer.batch-scaling", "linear", "--optimizer.reference-batch", "20", "--sampler.horizon", "5")
    flags += ("--optimizer.learning-rate", "1e-3", "--optimizer.final-learning-rate", "1e-3", "--run.steps", "8000")
    lines = plan_of(capsys, "a2c-catch", *flags, *("--topology", "synchronous", "--topology.replicas", "2"))
    assert lines["replicas"] == [
        "parent: records, evaluates, writes checkpoints, replaces the dead",
        "|-- replica 0: cores [0, 1], cpu, environments 0 to 3",
        "|-- replica 1: cores [2, 3], cpu, environments 4 to 7",
        "`-- every gradient is the mean of all, over gloo",
        "the lines below are of one replica",
    ]
    assert "learning rate 0.002 -> 0.002" in lines["learning"][0]  # 40 rows in all, 20 in each
    assert lines["budget"] == ["8,000 steps = 200 rollouts of each replica"]


def test_plan_draws_replicas_around_central_parameters(capsys):
    lines = plan_of(capsys, "a2c-catch", "--topology", "asynchronous", "--topology.replicas", "4")
    assert "|-- replica 3: cores [" in lines["replicas"][4] and "environments 6 to 7" in lines["replicas"][4]
    assert lines["replicas"][5].endswith("in memory that all share: 3 chunks with a lock each")


@pytest.mark.parametrize("gpus", [3, 5, 6, 7])
@pytest.mark.parametrize("name", ["a2c-sync", "ppo-sync", "dqn-sync"])
def test_presets_in_lock_step_fit_any_number_of_gpus(name, gpus, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.probe.choose_compute", lambda run: SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr("phalanx.probe.torch.cuda.device_count", lambda: gpus)
    experiment = resolve_replicas(preset(name))
    assert experiment.topology.replicas == gpus
    assert experiment.sampler.environments % gpus == 0
    changed = experiment.sampler.environments != preset(name).sampler.environments
    assert changed or name == "dqn-sync"
    assert f"so that they divide among {gpus} replicas" in capsys.readouterr().err


@pytest.mark.parametrize("compiler", [True, False])
def test_plan_says_how_frames_are_made(compiler, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.cli.plan.compiled", lambda: object() if compiler else None)
    assert main(["plan", "a2c"]) == 0
    assert ("made by compiled code" if compiler else "made by numpy") in capsys.readouterr().out
    assert main(["plan", "a2c-catch"]) == 0
    assert "frames  " not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith(("-catch", "-gym")) or name == "dqn"])
def test_plan_of_an_unchanged_preset(name, capsys):
    assert main(["plan", name]) == 0
    shown = capsys.readouterr().out
    assert "changed        nothing" in shown
    assert ("replay" in shown.split("memory  ")[1]) == (memory_of(preset(name)) is not None)


def test_the_topology_is_swapped_by_its_name(capsys):
    assert main(["plan", "a2c-catch", "--topology", "synchronous", "--sampler.workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "A2C on synchronous" in shown
    assert "1 env workers x 8" in shown
    assert "topology.name: serial -> synchronous" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "unknown command 'trian'; did you mean train"),
        (["train"], "name a preset"),
        (["resume"], "name a run directory"),
        (["plan", "pppo"], "unknown preset 'pppo'; did you mean ppo"),
        (["train", "a2c", "--env.game", "breakot"], "unknown game 'breakot'; did you mean breakout"),
        (["train", "a2c-catch", "--topology", "synchron"], "unknown topology 'synchron'; did you mean synchronous"),
        (["train", "a2c-gym", "--env.id", "CartPol-v1"], "unknown Gymnasium environment 'CartPol-v1'; did you mean"),
        (["train", "a2c-gym", "--env.id", "Pendulum-v1"], "only discrete actions are supported"),
        (["train", "a2c-gym", "--env.id", "MiniWorld-Maze-v0"], "MiniWorld-Maze-v0 needs miniworld; pip install"),
        (["train", "ppo-catch", "--algorithm.minibatches", "7"], "does not divide into 7 minibatches"),
        (["train", "a2c-catch", "--sampler.groups", "3"], "8 environments do not divide into 3 groups"),
        (["train", "a2c-catch", "--run.device", "gpu"], "is not a device"),
        (["train", "a2c-catch", "--run.seed", "-1"], "run.seed is -1"),
        (["train", "a2c-gym", "--model.torso", "nature"], "nature"),
        (
            ["train", "a2c-catch", "--topology", "synchronous", "--sampler.workers", "3"],
            "8 environments do not divide among 3 workers; use --sampler.workers 2 or --sampler.environments 9",
        ),
        (["train", "dqn-catch", "--algorithm.replay-size", "100000000000"], "algorithm.replay_size"),
        (["plan", "dqn-catch", "--algorithm.replay-size", "100000000000"], "algorithm.replay_size"),
        (
            ["train", "dqn-catch", "--algorithm.replay-size", "600", "--env.stack", "100"],
            "algorithm.replay_size 600 leaves too little history",
        ),
        (["train", "a2c-catch", "--run.device", "mps"], "is not a device that phalanx knows; use cpu"),
        (["train", "a2c-catch", "--run.seed", "99999999999999999999999"], "run.seed is"),
        (["train", "a2c-gym", "--env.id", "a:b:c"], "there is no module a:b"),
        (["bench", "sampling", "--game", "foo", "--run.precision", "float32"], "unknown game 'foo'"),
        (["bench", "sampling", "--seconds", "inf"], "--seconds is inf, but must be greater than 0, and finite"),
        (["bench", "training", "a2c-catch", "--game", "pong"], "--game needs an Atari preset"),
        (["bench", "sampling", "a2c-pong"], "worker processes, and serial has none; add --topology synchronous"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(complaint, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in complaint(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--env.idd", "x"), "--env.id"),
        (("--sampler.horizon", "many"), "--sampler.horizon"),
        (("--optimizer.rule", "lamb"), "--optimizer.rule"),
    ],
)
def test_an_unknown_flag_or_value_names_the_right_one(capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "a2c-gym", *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "sampling", "--repeats", "0"],
        ["bench", "training", "--seconds", "-1"],
        ["bench", "gpu", "--seconds", "0"],
        ["eval", "nowhere", "--seed", "-1"],
    ],
)
def test_numbers_that_are_too_small_are_refused(complaint, arguments):
    assert f"{arguments[-2]} is {arguments[-1]}, but must" in complaint(*arguments)


@pytest.mark.parametrize(
    ("flags", "game"), [([], "breakout"), (["--env.game", "pong"], "pong"), (["--game", "freeway"], "freeway")]
)
def test_bench_measures_the_game_it_is_told(monkeypatch, capsys, flags, game):
    monkeypatch.setattr(bench, "training", lambda experiment, seconds, repeats: {"env": experiment.env.name})
    assert main(["bench", "training", "a2c", "--run.precision", "float32", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == {"env": game}


def test_a_run_that_is_done_says_so_when_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a2c-catch", *TINY, "--run.name", "done"]) == 0
    capsys.readouterr()
    assert main(["resume", "runs/done"]) == 0
    assert "of 500 steps; --run.steps 1000 goes on" in capsys.readouterr().out
    assert main(["resume", "runs/done", "--run.steps", "6e2"]) == 0
    assert "already done" not in capsys.readouterr().out


def test_an_existing_run_is_refused_and_left_alone(complaint, runs):
    before = (runs / "a2c-catch/metrics.jsonl").read_bytes()
    words = complaint("train", "ppo-catch", *TINY, "--run.directory", str(runs), "--run.name", "a2c-catch")
    assert "exists already; choose another --run.name" in words
    assert f"phalanx resume {runs}/a2c-catch" in words
    assert (runs / "a2c-catch/metrics.jsonl").read_bytes() == before
    assert json.loads((runs / "a2c-catch/config.json").read_text())["preset"] == "a2c-catch"


@pytest.mark.parametrize("directory", ["/proc/x", "/dev/null/x"])
def test_a_run_directory_that_cannot_be_made_is_one_sentence(complaint, directory):
    words = complaint("train", "a2c-catch", *TINY, "--run.directory", directory)
    assert f"cannot make the run directory {directory}" in words


@pytest.mark.parametrize(("kilobytes", "words"), [(0, "cannot write"), (8, "cannot write the checkpoint")])
def test_a_full_disk_is_one_sentence(tmp_path, kilobytes, words):
    """A limit on the size of files stands for the disk: the first takes nothing, the second no checkpoint."""
    limit = kilobytes * 1024
    result = command(
        *("train", "a2c-catch", *TINY, "--run.directory", str(tmp_path), "--run.name", "a"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"phalanx: {words}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [["resume"], ["eval"], ["play", "--video", "x.gif"]])
def test_a_missing_run_directory_is_named(complaint, tmp_path, verb):
    words = complaint(verb[0], str(tmp_path / "nowhere"), *verb[1:])
    assert f"{tmp_path}/nowhere is not a run directory" in words


def test_a_run_without_a_checkpoint_is_named(complaint, runs, tmp_path):
    (tmp_path / "config.json").write_bytes((runs / "a2c-catch/config.json").read_bytes())
    for verb in ("resume", "eval"):
        assert "holds no checkpoint" in complaint(verb, str(tmp_path))


@pytest.mark.parametrize("name", ["a2c-catch", "dqn-catch"])
@pytest.mark.parametrize("flags", [[], ["--greedy"], ["--best"]])
def test_eval_reports_raw_scores(capsys, runs, name, flags):
    assert main(["eval", str(runs / name), "--games", "7", *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("7 games of catch: mean ")
    assert "512 steps of training" in shown


def test_a_run_of_a_gpu_is_played_without_one(complaint, runs, tmp_path, capsys):
    shutil.copytree(runs / "a2c-catch", tmp_path / "run")
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace('"device": "auto"', '"device": "cuda"'))
    if not torch.cuda.is_available():
        assert "torch sees none; use --device cpu" in complaint("eval", str(tmp_path / "run"), "--games", "2")
    assert main(["eval", str(tmp_path / "run"), "--games", "2", "--device", "cpu"]) == 0
    assert "2 games of catch" in capsys.readouterr().out


def test_training_is_measured_once_it_learns(capsys):
    flags = ["--run.precision", "float32", "--algorithm.learning-starts", "3000", "--topology", "serial"]
    assert main(["bench", "training", "dqn-catch", "--seconds", "0.05", "--repeats", "1", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["learn_share"] > 0.1


def test_measurements_are_a_table_for_people(capsys):
    flags = ["--run.precision", "float32", "--topology", "serial", "--seconds", "0.05", "--repeats", "1"]
    assert main(["bench", "training", "a2c-catch", *flags]) == 0
    lines = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert (lines["preset"], lines["precision"]) == ("a2c-catch", "float32")
    assert int(lines["training, steps/s"].replace(",", "")) > 0 and lines["learn share"].endswith("%")


def test_measurements_of_several_things_are_a_line_each(capsys):
    pong = {"sampling_sps": 1200.5, "sampling_ratio": 0.96, "samples": [1200]}
    bench.show({"device": "cuda", "pong": pong, "a2c": {"training_sps": 1e5, "gpu_share": 0.5}}, as_json=False)
    device, head, *rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert device == ["device", "cuda"] and head[0] == "sampling, steps/s"
    assert rows == [["pong", "1,200", "0.960", "-", "-"], ["a2c", "-", "-", "100,000", "50%"]]


def test_training_that_never_begins_to_learn_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "LEARNING_LIMIT", 0.1)
    assert main(["bench", "training", "dqn-catch", "--algorithm.learning-starts", "10000", "--topology", "serial"]) == 1
    assert "did not begin to learn within 0.1 s; lower --algorithm.learning-starts" in capsys.readouterr().err


def test_eval_is_reproducible_and_depends_on_the_seed(capsys, runs):
    shown = []
    for seed in ("1", "1", "2", "3", "4"):
        assert main(["eval", str(runs / "a2c-catch"), "--games", "20", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert len(set(shown)) > 1


@pytest.mark.parametrize(("suffix", "magic", "at"), [("gif", b"GIF8", 0), ("mp4", b"ftyp", 4)])
def test_play_writes_a_video(capsys, runs, tmp_path, suffix, magic, at):
    video = tmp_path / f"play.{suffix}"
    assert main(["play", str(runs / "a2c-catch"), "--video", str(video), "--games", "2"]) == 0
    assert video.read_bytes()[at : at + 4] == magic
    shown = capsys.readouterr().out
    assert "20 pictures at 15 per second, scores " in shown  # two games: the first board, then nine steps
    assert shown.count(",") == 2


def test_what_the_last_line_of_a_run_suggests_works(capsys, train, tmp_path, monkeypatch):
    """Drawing CartPole needs a package of its own, which a plain installation brings."""
    assert train("ppo-gym", "--topology", "serial", steps=300) == 0
    monkeypatch.chdir(tmp_path)
    shown = capsys.readouterr().out
    _, evaluate, play, resume = shown.split("checkpoint: ")[1].splitlines()
    assert main([*play.split()[1:], "--max-frames", "20"]) == 0
    played = capsys.readouterr()
    assert re.match(r"play.mp4: \d+ pictures at 50 per second", played.out)  # as the environment tells
    assert played.err == ""
    assert main([*evaluate.removeprefix("next:").split()[1:], "--games", "2"]) == 0
    assert resume.split()[:2] == ["phalanx", "resume"]


def test_play_stops_after_so_many_pictures(capsys, runs, tmp_path):
    video = tmp_path / "play.gif"
    flags = ["--games", "9", "--max-frames", "14"]
    assert main(["play", str(runs / "a2c-catch"), "--video", str(video), *flags]) == 0
    shown = capsys.readouterr().out
    assert "14 pictures" in shown
    assert "stopped by --max-frames in game 2 at step 3, score 0" in shown


def test_eval_prints_json_when_asked(capsys, runs):
    assert main(["eval", str(runs / "dqn-catch"), "--games", "7", "--json", "--greedy"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["environment"], result["games"], result["actions"], result["steps"]) == ("catch", 7, "greedy", 512)
    assert len(result["scores"]) == 7 and result["mean"] == sum(result["scores"]) / 7
    assert result["min"] == min(result["scores"]) and result["max"] == max(result["scores"])


def test_play_refuses_what_it_cannot_do(complaint, runs, tmp_path):
    run = str(runs / "a2c-catch")
    assert "ends in .mp4 or .gif" in complaint("play", run, "--video", str(tmp_path / "x.avi"))
    assert "--games is 0" in complaint("play", run, "--video", str(tmp_path / "x.gif"), "--games", "0")
    assert "--games is -1" in complaint("eval", run, "--games", "-1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 252 + ".gif", "taken.gif", "file/x.gif"])
def test_a_video_that_cannot_be_written_is_refused_before_a_game_is_played(
    complaint, runs, tmp_path, monkeypatch, name
):
    (tmp_path / "taken.gif").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("phalanx.sampling.player.Player", pytest.fail)
    assert "choose another --video" in complaint("play", str(runs / "a2c-catch"), "--video", str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.gif"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--sampler.environments", "4"),
        ("--env.name", "identity"),
        ("--model.hidden", "32"),
        ("--optimizer.rule", "sgd"),
        ("--run.seed", "5"),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused(complaint, runs, flags):
    config = runs / "a2c-catch/config.json"
    before = config.read_bytes()
    words = complaint("resume", str(runs / "a2c-catch"), *flags)
    assert f"a resumed run keeps its {flags[0].removeprefix('--')}" in words
    assert config.read_bytes() == before


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(UserError):
        main(["plan", "pppo", "--debug"])
    assert capsys.readouterr().err == ""


def test_as_a_process_an_error_has_an_exit_code_and_no_traceback():
    plain = command("plan", "pppo")
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert plain.stdout == ""
    debug = command("--debug", "plan", "pppo")
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "UserError" in debug.stderr


def test_a_whole_run_as_a_process_in_the_present_directory(tmp_path):
    trained = command("train", "ppo-catch", *TINY, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("ppo-catch-catch-0-")
    assert {path.name for path in run.iterdir()} >= {"config.json", "metrics.jsonl", "events.log", "checkpoints"}
    assert f"phalanx resume runs/{run.name} --run.steps 1000" in trained.stdout


def test_a_reader_that_is_gone_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    code = [sys.executable, "-m", "phalanx", "presets"]
    try:
        result = subprocess.run(code, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.parametrize("verb", ["plan", "train", "resume"])
@pytest.mark.parametrize("name", ["gorila-catch", "dba3c-catch"])
def test_a_missing_ray_is_told_before_anything_is_made(complaint, tmp_path, monkeypatch, verb, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phalanx.probe.find_spec", lambda module: None if module == "ray" else object())
    what = name
    if verb == "resume":
        (tmp_path / "old").mkdir()
        save(preset(name).validate(), tmp_path / "old/config.json")
        what = "old"
    before = sorted(tmp_path.rglob("*"))
    said = complaint(verb, what)
    assert said.startswith(
        f"phalanx: topology {name.partition('-')[0]} needs Ray, on one machine, too; install it with"
    )
    assert sorted(tmp_path.rglob("*")) == before
