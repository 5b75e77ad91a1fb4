"""`phalanx study`: the paper's studies of learning itself, each with a figure and its data."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from phalanx.cli.options import StudyOptions
from phalanx.config.flags import parse_options
from phalanx.errors import unknown
from phalanx.studies import STUDIES


def command(arguments: list[str]) -> int:
    """Run a study; without a name, list them."""
    if not arguments:
        for name, study in STUDIES.items():
            print(f"{name:<12} {study.text}")
        return 0
    if arguments[0] in ("-h", "--help"):
        parse_options(StudyOptions, "study", arguments)
    name, flags = arguments[0], arguments[1:]
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    import tyro

    from phalanx.config.checks import check_bounds
    from phalanx.studies.book import Book

    module = import_module(STUDIES[name].module)
    options, rest = tyro.cli(module.StudyOptions, prog=f"phalanx study {name}", args=flags, return_unknown_args=True)
    check_bounds(options)
    book = Book(Path(options.directory or f"studies/{name}"))
    module.run(options, rest, book)
    print(f"figures and data are in {book.directory}")
    return 0
