"""`phalanx study`: the paper's studies of learning itself, each with a figure and its data."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from phalanx.errors import unknown
from phalanx.studies import STUDIES


def command(arguments: list[str]) -> int:
    """Run a study; without a name, list them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: phalanx study NAME [--flags] [--flags.of.the.preset]\n")
        for name, study in STUDIES.items():
            print(f"  {name:<12} {study.text}")
        print("\n  study NAME --help         every flag of a study")
        return 0
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
