"""`--help`: what people change comes first, what has no effect is hidden, and no flag is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import get_args, get_type_hints

import pytest

from phalanx import __version__
from phalanx.api import FIXED_ON_RESUME
from phalanx.cli.help import UNUSED, USUAL, field_documents, is_unused, names
from phalanx.cli.main import COMMANDS, main
from phalanx.cli.options import StudyOptions
from phalanx.config import TOPOLOGIES
from phalanx.config.presets import PRESETS, preset
from phalanx.sampling.placement import place, sends_raw_screens
from phalanx.studies import STUDIES


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def flags(text: str) -> list[str]:
    """In the order in which they are explained."""
    return [flag.replace("-", "_") for flag in re.findall(r"^[│ ] +--([a-z][\w.-]+)", text, flags=re.MULTILINE)]


@pytest.mark.parametrize("name", ["pong", "dqn-gym", "c51-catch", "eps-rainbow", "appo"])
def test_what_people_change_comes_first_and_nothing_is_lost(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capsys, "train", name, "--help")
    found, base = flags(text), preset(name)
    first = [field for field in USUAL if field in names(base) and field in found]
    assert found[: len(first)] == first and 8 <= len(first) <= 16
    hidden = {field for field in names(base) if is_unused(field, base)}
    assert set(found) == (set(names(base)) - hidden) | {"topology", "algorithm"} and len(found) == len(set(found))
    assert f"{len(hidden)} flags that have no effect here are hidden" in text
    assert PRESETS[name][0].split(",")[0] in text
    everything = flags(shown(capsys, "train", name, "--help-all"))
    assert set(everything) == {*names(base), "topology", "algorithm"}


def test_a_flag_that_is_used_after_a_change_is_shown_after_it(capsys):
    assert "optimizer.momentum" not in flags(shown(capsys, "train", "a2c", "--help"))
    text = shown(capsys, "train", "a2c", "--optimizer.rule", "sgd", "--env.game", "breakout", "--help")
    assert "optimizer.momentum" in flags(text)
    assert "breakout. (default: breakout)" not in text and "(default: breakout)" in text


OTHERS = {"workers": 2, "workers_per_core": 3, "pin": False, "balance": 9.0, "squads": 2, "raw_screens": False}


@pytest.mark.parametrize("name", PRESETS)
def test_fields_of_workers_are_hidden_where_they_change_no_placement(name):
    base = preset(name).validate()
    for field, value in OTHERS.items():
        changed = dataclasses.replace(base, sampler=dataclasses.replace(base.sampler, **{field: value}))
        if is_unused(f"sampler.{field}", base):
            for device in ("cpu", "cuda"):
                assert place(changed, device, range(8)) == place(base, device, range(8))
                assert sends_raw_screens(changed, device) == sends_raw_screens(base, device)


def test_agents_of_ga3c_are_its_workers(capsys):
    shown_flags = flags(shown(capsys, "train", "ga3c", "--help"))
    assert not ({f"sampler.{field}" for field in OTHERS} - {"sampler.raw_screens"}) & set(shown_flags)
    assert {"sampler.raw_screens", "sampler.max_deaths"} <= set(shown_flags)


def test_each_rule_of_a_hidden_field_is_of_one_that_there_is():
    fields = {field for name in PRESETS for field in names(preset(name))}
    assert all(rule in fields or any(field.endswith(f".{rule}") for field in fields) for rule in UNUSED)


def test_every_field_is_explained():
    documents = field_documents()
    assert documents["AtariConfig", "game"].startswith("ROM name")
    assert documents["C51Config", "discount"] == documents["DQNConfig", "discount"]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_explains_itself_in_one_style(capsys, command):
    try:
        main([command, "--help"])
    except SystemExit as leaving:  # a parser that was asked
        assert not leaving.code
    text = capsys.readouterr().out
    assert text.startswith(f"usage: phalanx {command} [-h]")
    assert ("positional arguments" in text) == (command != "presets")
    assert "show this help message and exit" in text


def test_every_command_is_in_the_first_help_which_fits_80_columns(capsys):
    text = shown(capsys, "--help")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


def test_the_help_of_study_names_every_study():
    assert get_args(get_type_hints(StudyOptions)["name"]) == tuple(STUDIES)


def test_version(capsys):
    assert shown(capsys, "--version") == f"phalanx {__version__}\n"


def test_help_of_an_unknown_preset_names_the_nearest(capsys):
    assert main(["train", "pppo", "--help"]) == 2
    assert "unknown preset 'pppo'; did you mean ppo" in capsys.readouterr().err


def test_an_algorithm_of_ones_own_has_its_flags_explained(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "class Mine:\n"
        "    @dataclass(frozen=True)\n"
        "    class Config:\n"
        "        own_number: float = 0.25\n"
        "    batches = loss = print\n"
    )
    text = shown(capsys, "train", "a2c-gym", "--algorithm", f"{tmp_path}/mine.py:Mine", "--help")
    assert "algorithm.own_number" in flags(text) and "(default: 0.25)" in text


def test_the_help_of_train_names_every_topology(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in text for name in TOPOLOGIES)


def test_the_help_of_resume_names_what_a_run_keeps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):  # how a parser ends that was asked for help
        main(["resume", "--help"])
    words = capsys.readouterr().out
    fixed = [name for name in FIXED_ON_RESUME if name.rstrip(".") not in words]
    assert not fixed and "sampler.batch" in words and "what it learns with" not in words


def test_what_is_given_by_its_place_is_shown_by_its_name(capsys):
    """One of a few words by these."""
    for command, words in (("train", "PRESET"), ("export", "RUN OUT"), ("completion", "{bash,zsh}")):
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
        usage = capsys.readouterr().out.splitlines()[0]
        assert words in usage and "STR [" not in usage.partition("--")[0] and "PATH" not in usage
