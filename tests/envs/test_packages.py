"""Ids of packages: registered where the package is installed, else refused with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.envs import packages

KNOWN = ["CartPole-v1", "FrozenLake-v1", "phys2d/CartPole-v0", "phys2d/Pendulum-v0", "ALE/Mine-v0"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setattr(packages, "entry_points", lambda group: [])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-5x5-v0 needs minigrid; pip install minigrid"),
        ("MinAtar/Breakout-v1", "MinAtar/Breakout-v1 needs minatar; pip install minatar"),
        ("VizdoomBasic-v1", "VizdoomBasic-v1 needs vizdoom; pip install vizdoom"),
        (
            "My-Lab/Maze-v0",
            "nobody has registered 'My-Lab/Maze-v0'; if a module of yours does, name it, too: "
            "--env.id module:My-Lab/Maze-v0, perhaps my_lab:My-Lab/Maze-v0",
        ),
        ("phys2d/CartPol-v0", "unknown Gymnasium environment 'phys2d/CartPol-v0'; did you mean phys2d/CartPole-v0"),
        ("FetchReach-v3", "FetchReach-v3 needs gymnasium-robotics; pip install gymnasium-robotics"),
        ("mo-lunar-lander-v3", "mo-lunar-lander-v3 needs mo-gymnasium; pip install mo-gymnasium"),
        (
            "Mine-v0",
            "nobody has registered 'Mine-v0'; if a module of yours does, name it, too: --env.id module:Mine-v0",
        ),
        ("CartPoll-v1", "unknown Gymnasium environment 'CartPoll-v1'; did you mean CartPole-v1"),
    ],
)
def test_an_unknown_id_is_one_sentence(nothing_installed: None, name: str, sentence: str) -> None:
    assert not packages.register(name)
    assert str(packages.unregistered(name, KNOWN)).startswith(sentence)


def test_a_file_without_the_name_of_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mygame.py").touch()
    for name in ("mygame", "mygame.py"):
        assert f"did you mean {name}:Class" in str(packages.unregistered(name, KNOWN))
    assert "is an Atari game; use a preset such as ppo and --env.game breakout" in str(
        packages.unregistered("breakout", KNOWN)
    )


def test_an_installed_package_is_imported_and_its_entry_point_called(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Entry:
        name = "MinAtar"

        def load(self) -> Any:
            return lambda: done.append("registered")

    monkeypatch.setattr(packages, "find_spec", lambda name: name)
    monkeypatch.setattr(packages, "import_module", done.append)
    monkeypatch.setattr(packages, "entry_points", lambda group: [Entry()])
    assert packages.register("MinAtar/Breakout-v1") and done == ["minatar", "registered"]
    assert not packages.register("CartPoll-v1") and len(done) == 2
