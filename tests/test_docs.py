"""Every command in README and docs is one that phalanx takes, and every Python block is Python.

Commands are collected from fenced blocks and from code in the text. Each goes through the real command line as far as
the experiment that it describes, with something in the place of PRESET, RUN_DIR and the like; what is cheap is run.
`test_docs_run.py` runs the README; `make check-install` does so in an environment of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from phalanx.bench.gpu import GpuOptions
from phalanx.bench.machine import BenchOptions
from phalanx.bench.tune import TuneOptions
from phalanx.cli.completion import SCRIPTS
from phalanx.cli.export import ExportOptions
from phalanx.cli.main import COMMANDS, HELP, main
from phalanx.cli.play import EvalOptions, PlayOptions
from phalanx.config.flags import parse_experiment, parse_flags, parse_known, parse_options
from phalanx.config.presets import default_preset, preset
from phalanx.registry import find
from phalanx.studies import STUDIES

ROOT = Path(phalanx.__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
PROGRAM = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/|torchrun .*|python3? )?(?:-m )?phalanx(?= )")
STAND_FOR = {"PRESET": "ppo", "RUN_DIR": "runs/NAME", "DIR": "out", "WHAT": "sampling", "SHELL": "bash", "F": "x.mp4"}
STAND_FOR |= {"N": "1", "study NAME": "study gradients"}
SHORT = ("--run.steps", "300", "--run.name", "documented")
OPTIONS = {"eval": EvalOptions, "play": PlayOptions, "export": ExportOptions}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    yield from re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def lines(page: Path) -> Iterator[str]:
    """Of fenced blocks, continued ones joined; then code in the text."""
    for language, text in blocks(page):
        if language not in ("python", "toml", "yaml", "json"):
            yield from re.sub(r"\\\n\s*", "", text).splitlines()
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def command(line: str) -> str | None:
    """The words after `phalanx`, without what explains them; None if the line is no such command."""
    found = PROGRAM.match(line.strip())
    if found is None:
        return None
    words = re.split(r"\s{2,}|\s+#", line.strip()[found.end() :].strip())[0]
    return words if words.split(" ")[0] in COMMANDS or "--" in words or words == "COMMAND" else None


def concrete(words: str) -> str:
    """The command with something in the place of each word in capitals, and without `[--flags]`."""
    words = re.sub(r" *\[[^]]*\]", "", words)
    for word, example in STAND_FOR.items():
        words = re.sub(rf"\b{word}\b", example, words)
    return words


def is_whole(words: str) -> bool:
    """Could one type it? Code in the text may leave the preset out (`phalanx tune --environments`), or more (`...`)."""
    name, *rest = shlex.split(words)
    alone = name in ("presets", "study") or name.startswith("-")
    headless = bool(rest) and rest[0].startswith("-") and rest[0] not in HELP
    return (bool(rest) or alone) and not headless and "..." not in words and "|" not in words


FOUND = {(page, line): concrete(words) for page in PAGES for line in lines(page) if (words := command(line))}
COMPLETE = sorted({words for words in FOUND.values() if is_whole(words)})
USAGE = sorted({*FOUND.values()} - {*COMPLETE})


def test_commands_are_found():
    assert {"train", "eval", "play", "plan", "tune", "study"} <= {words.split()[0] for words in FOUND.values() if words}
    assert command("$ torchrun --nproc-per-node 4 -m phalanx train ppo-sync   # why") == "train ppo-sync"
    assert command(".venv/bin/phalanx plan a2c  what it does") == "plan a2c"
    assert command("phalanx trains agents") is None and command("phalanx.load(x)") is None


@pytest.mark.parametrize("words", USAGE)
def test_a_usage_line_names_a_command(words):
    assert words.split()[0] in {*COMMANDS, "COMMAND"}


@pytest.mark.parametrize("words", COMPLETE)
def test_a_command_is_one_that_phalanx_takes(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *rest = shlex.split(words)
    for file in re.findall(r"--from (\S+)", words):
        Path(file).write_text("{}")
    if name.startswith("-") or words == "study" or HELP & set(rest) or name in ("presets", "completion"):
        shown(name, rest)
        assert capsys.readouterr().out
        return
    assert name in COMMANDS
    parse(name, rest)
    toy = rest[0].endswith(("-catch", "-gym")) and "--run.loggers" not in rest
    if name == "plan" or (name == "train" and toy):
        assert main([name, *rest, *SHORT]) == 0


def shown(name: str, rest: list[str]) -> None:
    try:
        assert main([name, *rest]) == 0
    except SystemExit as leaving:  # a parser that was asked for help
        assert not leaving.code


def parse(name: str, rest: list[str]) -> None:
    """As far as the validated experiment, without running anything."""
    if name in ("train", "plan"):
        parse_experiment(name, rest)
    elif name == "resume":
        parse_flags("phalanx resume", preset("pong"), rest[1:]).validate()
    elif name in OPTIONS:
        parse_options(OPTIONS[name], name, rest)
    elif name == "study":
        options, flags = parse_known(find(f"{STUDIES[rest[0]].module}:StudyOptions"), "study", rest[1:])
        for name in getattr(options, "presets", None) or [getattr(options, "preset", "a2c")]:
            parse_flags("phalanx study", preset(name), flags).validate()
    elif name == "bench" and rest[0] == "gpu":
        _, flags = parse_known(GpuOptions, "bench gpu", rest[1:])
        parse_flags("phalanx bench gpu", preset("a2c"), flags).validate()
    else:
        kind = {"bench": BenchOptions, "tune": TuneOptions}[name]
        if name == "bench" and len(rest) > 1 and not rest[1].startswith("-"):
            rest = [rest[0], "--preset", *rest[1:]]
        options, flags = parse_known(kind, name, rest)
        chosen = default_preset() if options.preset == "default" else options.preset
        parse_flags(f"phalanx {name}", preset(chosen), flags).validate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_a_page_is_python(page):
    for language, text in blocks(page):
        if language == "python" and ">>>" not in text:
            compile(text, str(page), "exec")


def test_what_make_is_asked_for_exists():
    makefile = (ROOT / "Makefile").read_text()
    asked = {target for page in PAGES for line in lines(page) for target in re.findall(r"^make ([a-z][\w-]*)", line)}
    assert {"train", "test", "check"} <= asked
    assert not {target for target in asked if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)}


def test_scripts_that_pages_name_exist_and_know_their_flags():
    named = 0
    for page in PAGES:
        for line in lines(page):
            for script, flags in re.findall(r"python3? ((?:benchmarks|examples)/\w+\.py)([^#|]*)", line):
                named += 1
                text = (ROOT / script).read_text()
                own = re.split(r" -- ", f"{flags} ")[0]
                unknown = [flag for flag in re.findall(r"(--[a-z][\w-]*)(?![\w.-])", own) if f'"{flag}"' not in text]
                assert not unknown, f"{page.name}: {script} has no {', '.join(unknown)}"
    assert named > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_tree_lead_somewhere(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        place, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_both_shells_are_documented():
    text = (ROOT / "docs/command-line.md").read_text()
    assert all(f'eval "$(phalanx completion {shell})"' in text for shell in SCRIPTS)


def test_the_version_is_the_same_everywhere():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == phalanx.__version__ and citation["license"] == "MIT"
    assert len(citation["references"]) == 5 and all(each["authors"] for each in citation["references"])
    assert f"## [{phalanx.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{phalanx.__version__}"' in (ROOT / "pyproject.toml").read_text()
