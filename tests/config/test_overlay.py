"""`--from FILE`: fields of an experiment from a file, under the flags of the command line."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from phalanx.cli.main import main
from phalanx.config import PPOConfig, SerialConfig, SynchronousConfig, ToyConfig
from phalanx.config.flags import parse_experiment, parse_flags
from phalanx.config.presets import preset
from phalanx.config.stored import save
from phalanx.errors import UserError


@pytest.fixture
def file(tmp_path):
    """A file with some text, or with values."""

    def write(content) -> str:
        path = tmp_path / "tuned.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_a_file_sets_fields_and_flags_win_over_it(file):
    path = file({"preset": "ppo", "sampler": {"groups": 2, "workers": 4}, "run": {"seed": 3}, "measured": {"any": 1}})
    experiment = parse_experiment("train", ["ppo", "--sampler.workers", "2", "--from", path, "--run.seconds", "9"])
    base = preset("ppo").validate()
    assert experiment.sampler == dataclasses.replace(base.sampler, groups=2, workers=2)
    assert (experiment.run.seed, experiment.run.seconds) == (3, 9.0)
    assert experiment.algorithm == base.algorithm
    assert parse_experiment("train", ["ppo", f"--from={path}"]).sampler.workers == 4


def test_later_files_win_over_earlier_ones(tmp_path):
    for name, groups in (("a", 2), ("b", 4)):
        (tmp_path / name).write_text(
            json.dumps({"sampler": {"groups": groups, "squads": groups if name == "a" else 1}})
        )
    flags = ["--from", str(tmp_path / "a"), "--from", str(tmp_path / "b")]
    assert parse_flags("test", preset("ppo"), flags).sampler.groups == 4


def test_the_same_checks_hold_as_for_flags(file):
    with pytest.raises(UserError, match="8 environments do not divide into 3 groups"):
        parse_experiment("train", ["ppo", "--from", file({"sampler": {"groups": 3}})])
    with pytest.raises(UserError, match=r"sampler\.groups is 0, but must be at least 1"):
        parse_experiment("train", ["ppo", "--from", file({"sampler": {"groups": 0}})])


def test_a_part_of_another_kind_is_taken_whole(file):
    base = preset("a2c-catch")
    assert isinstance(base.topology, SerialConfig)
    other = parse_flags("test", base, ["--from", file({"topology": {"name": "synchronous", "replicas": 2}})])
    assert other.topology == SynchronousConfig(replicas=2)
    back = parse_flags("test", other, ["--from", file({"topology": {"name": "serial"}})])
    assert back.topology == SerialConfig()
    ppo = parse_flags("test", base, ["--from", file({"algorithm": {"epochs": 7, "minibatches": 2}})])
    assert ppo.algorithm == PPOConfig(epochs=7, minibatches=2)
    toy = parse_flags("test", base, ["--from", file({"env": {"name": "identity", "length": 5}})])
    assert toy.env == dataclasses.replace(ToyConfig(name="identity", length=5), stack=base.env.stack)


def test_a_run_s_own_configuration_may_be_given(tmp_path):
    """But for its name and place, and with what it says of its origin."""
    flags = ["ppo-catch", "--sampler.environments", "4", "--model.hidden", "7", "--run.seed", "3"]
    path = tmp_path / "config.json"
    save(parse_experiment("train", [*flags, "--run.name", "one", "--run.directory", "there"]), path, {"versions": {}})
    assert parse_experiment("train", ["ppo-catch", "--from", str(path)]) == parse_experiment("train", flags)


def test_code_in_the_directory_of_that_run_is_not_executed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "evil.py").touch()
    (tmp_path / "config.json").write_text(json.dumps({"env": {"id": f"{tmp_path}/evil.py:make"}}))
    with pytest.raises(UserError, match=r"env.id names .*evil.py, a file in the run directory"):
        parse_experiment("train", ["ppo-gym", "--from", str(tmp_path / "config.json")])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
        ("[1]", "holds no object with named values"),
        ({"sampler": {"grups": 2}}, "unknown configuration key 'sampler.grups'; did you mean sampler.groups"),
        ({"topology": {"nam": 2}}, "unknown configuration key 'topology.nam'; did you mean topology.name"),
        ({"smapler": {"groups": 2}}, "unknown configuration key 'smapler'; did you mean sampler"),
        ({"sampler": 2}, "sampler must be an object with named values"),
        ({"sampler": {"groups": "2"}}, "sampler.groups must be of type int, not '2'"),
        ({"topology": {"name": "synchron"}}, "topology"),
        ({"preset": "a2c", "sampler": {"groups": 2}}, "was made for the preset a2c, not for ppo"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(file, content, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tuned.json"
    if isinstance(content, str):
        path.write_bytes(content.encode(errors="surrogateescape"))
    else:
        file(content)
    assert main(["train", "ppo", "--from", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and str(path) in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["tuned.json"]


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "link").symlink_to("/dev/zero")
    for flags, words in (
        (["--from"], "--from needs a file"),
        (["--from", "--run.seed", "3"], "--from needs a file"),
        (["--from", str(tmp_path / "none")], "none does not exist"),
        (["--from", str(tmp_path)], "it is not a plain file"),
        (["--from", str(tmp_path / "link")], "it is not a plain file"),
    ):
        assert main(["plan", "ppo", *flags]) == 2
        assert words in capsys.readouterr().err
