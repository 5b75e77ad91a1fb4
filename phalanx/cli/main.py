"""The command line. Each command is one function; heavy packages are imported by the command that needs them."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from phalanx import __version__
from phalanx.errors import EnvironmentFailed, RunError, UserError, tell, unknown
from phalanx.given import look_here
from phalanx.runtime import streams
from phalanx.runtime.signals import Interrupted, interrupt_once

USAGE = """usage: phalanx COMMAND ...

  train PRESET [--flags]    train an agent
  resume RUN_DIR [--flags]  continue a run where it stopped
  eval RUN_DIR              play whole games, report scores
  play RUN_DIR --video F    record games as .mp4 or .gif
  export RUN_DIR DIR        weights, model card and video, to give away
  plan PRESET [--flags]     what would run, without running
  bench WHAT                measure this machine: sampling, training, or gpu
  tune PRESET [--flags]     find the fastest sampler for this machine
  study NAME [--flags]      experiments about learning itself
  presets                   the presets, one line each
  completion SHELL          Tab for bash or zsh

  COMMAND --help            the options of a command
  train PRESET --help       the flags of a preset
  --from FILE               fields of the experiment; other flags win over it
  --version                 the version of phalanx
  --debug                   show the whole traceback of an error

  phalanx train ppo-gym --env.id CartPole-v1 --run.steps 100000
  phalanx train ppo --env.game breakout --sampler.environments 64
  phalanx resume runs/NAME --run.steps 20000000
  phalanx play runs/NAME --video play.mp4"""

COMMANDS = {
    "train": "phalanx.cli.train:train",
    "resume": "phalanx.cli.train:resume",
    "eval": "phalanx.cli.play:evaluate_command",
    "play": "phalanx.cli.play:play",
    "export": "phalanx.cli.export:command",
    "bench": "phalanx.bench:command",
    "tune": "phalanx.bench.tune:command",
    "plan": "phalanx.cli.plan:command",
    "study": "phalanx.cli.study:command",
    "presets": "phalanx.cli.main:presets",
    "completion": "phalanx.cli.completion:command",
}

TAKE_FLAGS = ("train", "plan", "resume")  # of an experiment; the others have options of their own
HELP = {"-h", "--help", "--help-all"}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code. Errors that are the user's to fix are one line, without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(USAGE)
            return 0
        look_here()
        if arguments[0] == "--version":
            print(f"phalanx {__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        if arguments[0] in TAKE_FLAGS and HELP.intersection(arguments):
            from phalanx.cli import help as explain

            return explain.command(arguments[0], arguments[1:])
        return find(COMMANDS[arguments[0]])(arguments[1:])
    except (UserError, RunError, OSError) as error:
        sentence = explained(error)
        if debug or sentence is None:
            raise
        if isinstance(error, EnvironmentFailed):
            show_traceback(error.__cause__)
        tell(sentence)
        return 2 if isinstance(error, UserError) else 1
    except (KeyboardInterrupt, Interrupted):
        return 130


def find(path: str) -> Callable[[list[str]], int]:
    """The function of a command, imported now."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


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


def presets(arguments: list[str]) -> int:
    from phalanx.config.presets import PRESETS

    if arguments:
        from phalanx.cli.options import PresetsOptions
        from phalanx.config.flags import parse_options

        parse_options(PresetsOptions, "presets", arguments)
    print(f"{'default':<18} the preset for this kind of machine: pong, or pong-fast with a GPU; what `make train` runs")
    for name, (text, _) in PRESETS.items():
        print(f"{name:<18} {text}")
    return 0


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
        tell(f"cannot write to the standard output ({error.strerror}); send it elsewhere")
        return code or 1
    return code
