"""The command line. Each command is one function; heavy packages are imported by the command that needs them."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import EnvironmentFailed, RunError, UserError, require, unknown
from phalanx.runtime import streams
from phalanx.runtime.signals import Interrupted, interrupt_once

if TYPE_CHECKING:
    from phalanx.config import Experiment
    from phalanx.types import EnvSpec

USAGE = """usage: phalanx COMMAND ...

  train PRESET [--flags]    train an agent                  phalanx train ppo --env.game breakout --algorithm.epochs 3
  resume RUN_DIR            continue a run where it stopped  phalanx resume runs/NAME --run.steps 20000000
  eval RUN_DIR              play whole games, report scores  phalanx eval runs/NAME --games 30
  play RUN_DIR --video F    record games as .mp4 or .gif     phalanx play runs/NAME --video out.mp4
  bench WHAT --json         measure this machine: sampling, training PRESET, or gpu (all of it, with a GPU)
  plan PRESET [--flags]     what would run, without running
  presets                   the presets, one line each

  --debug                   show the whole traceback of an error
  train PRESET --help       every flag of a preset"""

KEPT = ("env.", "model.", "sampler.environments", "optimizer.rule", "run.seed", "run.name", "run.directory")
"""Values that a resumed run cannot change."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code. Errors that are the user's to fix are one line, without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(USAGE)
            return 0
        find_environments_here()
        if arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        return COMMANDS[arguments[0]](arguments[1:])
    except (UserError, RunError, OSError) as error:
        sentence = explained(error)
        if debug or sentence is None:
            raise
        if isinstance(error, EnvironmentFailed):
            show_traceback(error.__cause__)
        warn(sentence)
        return 2 if isinstance(error, UserError) else 1
    except (KeyboardInterrupt, Interrupted):
        return 130


def explained(error: Exception) -> str | None:
    """What an error tells the user; None if nobody foresaw it."""
    if came_of(error, errno.EMFILE) or came_of(error, errno.ENFILE):
        return "too many files are open; allow more of them with `ulimit -n 4096`, or use fewer --sampler.workers"
    if isinstance(error, UserError | RunError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and streams.output_fails_with(error):
        return f"cannot write to the standard output ({error.strerror}); send it elsewhere"
    return None


def came_of(error: BaseException | None, number: int) -> bool:
    """Is the system's error with this number behind it?"""
    while error is not None and not (isinstance(error, OSError) and error.errno == number):
        error = error.__cause__ or error.__context__
    return error is not None


def show_traceback(error: BaseException | None) -> None:
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exception(error)


def train(arguments: list[str]) -> int:
    experiment = parse_experiment("train", arguments)
    from phalanx.sampling.placement import start_early

    early = start_early(experiment, warn)
    try:
        from phalanx.logs.directory import locked, new_directory, run_checkpoints
        from phalanx.probe import resolve_precision
        from phalanx.registry import topology
        from phalanx.runtime.device import choose_compute
        from phalanx.session import Session

        check_pieces(experiment, None if early is None else early.spec.seen)
        if early is not None and choose_compute(experiment.run).device.type != "cuda":
            early.close()  # torch cannot use the GPU: they would only be in the way
            early = None
        experiment = resolve_precision(experiment)
        directory = new_directory(experiment)
        checkpoints = run_checkpoints(experiment, directory, warn)
        with locked(directory):
            return Session(experiment, directory, checkpoints, early=early).run(topology(experiment))
    finally:
        if early is not None:
            early.close()


def resume(arguments: list[str]) -> int:
    directory, flags = run_directory("resume", arguments)
    from phalanx.logs.directory import locked, run_checkpoints
    from phalanx.registry import topology
    from phalanx.session import Session
    from phalanx.stored import difference, load

    saved = load(directory / "config.json")
    experiment = parse_flags("phalanx resume RUN_DIR", saved, flags).validate()
    for name, (old, _) in difference(experiment, saved).items():
        if name.startswith((*KEPT, *kept_by(saved))):
            raise UserError(f"a resumed run keeps its {name} ({old}); start a new run to change it")
    checkpoints = run_checkpoints(experiment, directory, warn)
    with locked(directory):
        loaded = checkpoints.load()
        return Session(experiment, directory, checkpoints, loaded).run(topology(experiment))


def kept_by(saved: Experiment) -> list[str]:
    """Further values that a resumed run cannot change: they shape what its checkpoints hold."""
    kept = ["sampler.batch"]  # the horizon that followed from it is kept, and would win
    kept += ["sampler.horizon"] if getattr(saved.topology, "overlap", False) else []
    return kept + (["algorithm.prioritized"] if getattr(saved.algorithm, "checkpoint_replay", False) else [])


def add_options_of_play(parser: argparse.ArgumentParser, games: int) -> None:
    """What `eval` and `play` both want to know."""
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--games", type=int, default=games, help="games to play")
    parser.add_argument(
        "--greedy", action="store_true", help="always the best action: no draw, and no random one of Q-learning"
    )
    parser.add_argument("--best", action="store_true", help="the checkpoint with the best score instead of the newest")
    parser.add_argument("--seed", type=int, default=0, help="seed of the games")
    parser.add_argument("--device", help="cpu or cuda instead of the run's device")


def evaluate_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx eval", description="Play whole games and report raw scores.")
    add_options_of_play(parser, games=30)
    options = parser.parse_args(arguments)
    import statistics

    from phalanx.sampling.evaluator import evaluate

    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    config, policy, compute, progress = load_policy(options)
    scores = evaluate(config, policy, compute, games, seed, progress)
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    print(
        f"{len(scores)} games of {config.name}: mean {statistics.mean(scores):.2f}, deviation {spread:.2f}, "
        f"min {min(scores):g}, max {max(scores):g} (raw scores, whole games, "
        f"{'greedy' if options.greedy else 'drawn'} actions, {progress.steps:,} steps of training)"
    )
    return 0


def play(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx play", description="Record games.")
    add_options_of_play(parser, games=1)
    parser.add_argument("--video", type=Path, required=True, help="file to write, .mp4 or .gif")
    parser.add_argument("--max-frames", type=int, default=20_000, help="pictures recorded at most")
    options = parser.parse_args(arguments)
    from phalanx.logs.video import check_format, check_place, write_video
    from phalanx.sampling.evaluator import evaluate

    check_format(options.video)
    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    config, policy, compute, progress = load_policy(options)
    check_place(options.video)
    pictures: list[object] = []

    def watch(picture: object) -> None:
        if len(pictures) < options.max_frames:
            pictures.append(picture)

    scores = evaluate(config, policy, compute, games, seed, progress, environments=1, watch=watch)
    write_video(options.video, pictures, fps=15)  # type: ignore[arg-type]
    print(f"{options.video}: {len(pictures)} pictures, scores {', '.join(f'{score:g}' for score in scores)}")
    return 0


def plan(arguments: list[str]) -> int:
    from phalanx.plan import describe

    experiment = parse_experiment("plan", arguments)
    check_pieces(experiment)
    print(describe(experiment))
    return 0


def bench(arguments: list[str]) -> int:
    if arguments[:1] == ["gpu"]:
        from phalanx.gpu_bench import command
    else:
        from phalanx.bench import command

    return command(arguments)


def presets(arguments: list[str]) -> int:
    from phalanx.presets import PRESETS

    print(f"{'default':<18} the preset for this kind of machine: pong, or pong-fast with a GPU; what `make train` runs")
    for name, (text, _) in PRESETS.items():
        print(f"{name:<18} {text}")
    return 0


COMMANDS = {
    "train": train,
    "resume": resume,
    "eval": evaluate_command,
    "play": play,
    "bench": bench,
    "plan": plan,
    "presets": presets,
}


def parse_experiment(command: str, arguments: list[str]) -> Experiment:
    """The validated experiment a preset and flags describe."""
    from phalanx.presets import preset

    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"name a preset: phalanx {command} PRESET; `phalanx presets` lists them")
    name = arguments[0]
    if name == "default":
        from phalanx.probe import default_preset

        name = default_preset()
    return parse_flags(f"phalanx {command} {name}", preset(name), arguments[1:]).validate()


def parse_flags(program: str, base: Experiment, flags: list[str]) -> Experiment:
    """An experiment with fields changed by dotted flags; tyro names the nearest flag for an unknown one."""
    if not flags:
        return base
    import tyro

    from phalanx.config import Experiment

    base, flags = choose_topology(base, flags)
    kind = tyro.conf.AvoidSubcommands[tyro.conf.FlagConversionOff[Experiment]]
    return tyro.cli(kind, prog=program, default=base, args=flags)


def choose_topology(base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """`--topology NAME` swaps the whole topology; what is left are flags of fields."""
    import dataclasses

    from phalanx.config import TOPOLOGIES

    if "--topology" not in flags[:-1]:
        return base, flags
    at = flags.index("--topology")
    name = flags[at + 1]
    if name not in TOPOLOGIES:
        raise unknown("topology", name, TOPOLOGIES)
    return dataclasses.replace(base, topology=TOPOLOGIES[name]()), flags[:at] + flags[at + 2 :]


def run_directory(command: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"name a run directory: phalanx {command} runs/NAME")
    return existing_run(Path(arguments[0])), arguments[1:]


def existing_run(directory: Path) -> Path:
    try:
        found = (directory / "config.json").is_file()
    except OSError as error:
        raise UserError(f"cannot read {directory} ({error.strerror}); ask its owner for permission") from None
    if not found:
        raise UserError(f"{directory} is no run directory: it has no config.json; give the one `phalanx train` named")
    return directory


def load_policy(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Environment, policy, device and counters of a run's checkpoint, by the options of `eval` and `play`."""
    import dataclasses

    from phalanx.logs.directory import run_checkpoints
    from phalanx.parameters.flat import FlatParameters
    from phalanx.registry import MakeEnv, make_evaluation_policy, make_network
    from phalanx.runtime.device import choose_compute
    from phalanx.stored import load
    from phalanx.types import Progress

    experiment = load(existing_run(options.run) / "config.json").validate()
    checkpoints = run_checkpoints(experiment, options.run, warn)
    loaded = checkpoints.load_best() if options.best else checkpoints.load()
    device = options.device or experiment.run.device
    compute = choose_compute(dataclasses.replace(experiment.run, device=device), "--device cpu")
    spec = MakeEnv(experiment.env, 0)(0).spec
    model = make_network(experiment, spec).to(compute.device)
    FlatParameters(model).load(loaded.weights)
    policy = make_evaluation_policy(experiment, model, compute, options.greedy)
    return experiment.env, policy, compute, Progress(**loaded.state["replica"]["progress"])


def check_pieces(experiment: Experiment, spec: EnvSpec | None = None) -> None:
    """Make one of each piece, so that an unknown game or a misfit fails before a run directory exists; no environment
    where workers have made some. Refuses what fits into no memory."""
    from phalanx.config import DQNConfig
    from phalanx.probe import check_room
    from phalanx.registry import MakeEnv
    from phalanx.replay.experience import frames_on_host
    from phalanx.runtime.device import choose_compute
    from phalanx.sampling.placement import place

    device = choose_compute(experiment.run).device
    place(experiment, device.type)
    if spec is None:
        env = MakeEnv(experiment.env, experiment.run.seed)(0)
        spec = env.spec
        env.close()
    check_room(experiment, spec, device)
    if isinstance(experiment.algorithm, DQNConfig):
        frames_on_host(experiment.algorithm, spec, experiment.sampler.environments, device)


def not_negative(value: int, name: str) -> int:
    require(0 <= value < 2**63, f"{name} is {value}, but must not be negative, and less than 2^63")
    return value


def positive(value: int, name: str) -> int:
    require(value > 0, f"{name} is {value}, but must be at least 1")
    return value


def find_environments_here() -> None:
    """A user's own environments may be modules of the current directory. It comes last, so that a file there never
    stands in for a module of phalanx, of Python or of a package; workers do the same."""
    with contextlib.suppress(OSError):  # a directory that was removed holds none
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())


def warn(sentence: str) -> None:
    with contextlib.suppress(OSError):  # where nobody can be told, the exit code must do
        print(f"phalanx: {sentence}", file=sys.stderr, flush=True)


def entry() -> None:
    """The `phalanx` command."""
    code: int | str | None = 130
    with contextlib.suppress(Interrupted):
        interrupt_once()
        streams.open_missing()
        try:
            code = main()
        except SystemExit as leaving:  # how the parsers of flags end
            code = leaving.code
        except BrokenPipeError:
            code = 1
        code = show_the_rest(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end takes a while and must not be torn
    streams.drop_what_is_left()
    sys.exit(code)


def show_the_rest(code: int | str | None) -> int | str | None:
    """Write what was printed and not written yet; the exit code, which says if that failed."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return code or 1
    except OSError as error:
        warn(f"cannot write to the standard output ({error.strerror}); send it elsewhere")
        return code or 1
    return code


if __name__ == "__main__":
    entry()
