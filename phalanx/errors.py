"""Errors that are the user's to fix: one sentence that says what is wrong and what to do."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
OURS = f"{Path(__file__).parent}{os.sep}"


class UserError(Exception):
    """Shown as one line, without a traceback, with exit code 2."""


class RunError(Exception):
    """The run cannot go on (not finite, too many dead workers, full disk); shown as one line, exit code 1."""


class EnvironmentFailed(RunError):  # noqa: N818
    """An environment raised something, which is the cause and is shown with its traceback."""


class NotFinite(RunError):  # noqa: N818
    """A NaN or an infinity; carries the rollout or batch it was found in."""

    def __init__(self, sentence: str, batch: Any) -> None:
        super().__init__(sentence)
        self.batch = batch


def nearest(name: str, known: Iterable[str], likeness: float = 0.4) -> list[str]:
    """The known names that may be meant; 1 asks for the same one."""
    by_small_letters = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_small_letters, n=3, cutoff=likeness)
    return [by_small_letters[each] for each in near]


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name nobody knows, naming the nearest known ones."""
    names = sorted(known)
    near = nearest(name, names)
    listed = ", ".join([*names[:30], *(["..."] if len(names) > 30 else [])])
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are: {listed}"
    return UserError(f"unknown {kind} '{name}'; {hint}")


def in_words(error: BaseException) -> str:
    """Kind and message of an exception, on one line that is not too long."""
    message = " ".join(str(error).split())
    message = message if len(message) <= 300 else f"{message[:200]} ... {message[-80:]}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def place_of(error: BaseException) -> str:
    """The file and the line of a user's code that an exception came from; empty where it came from none."""
    frames = traceback.extract_tb(error.__traceback__, limit=-50)  # one of endless recursion has thousands
    theirs = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, OURS, "<"))]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""


def require(condition: bool, sentence: str) -> None:
    """Refuse what the user asked for, unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def tell(sentence: str) -> None:
    """Something the user should know, on standard error."""
    with contextlib.suppress(OSError):  # where nobody can be told, the exit code must do
        print(f"phalanx: {sentence}", file=sys.stderr, flush=True)
