"""A user's code as the value of a configuration field: by name where it can be found, by value where not."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest

from phalanx import given
from phalanx.errors import UserError


def test_what_a_module_holds_is_kept_by_its_name():
    text = given.by_name_or_value(json.JSONDecoder)
    assert text == "json.decoder:JSONDecoder"
    assert given.resolve(text, "env.id") is json.JSONDecoder


def test_a_function_within_another_travels_by_value_to_another_process():
    secret = 41

    def answer() -> int:
        return secret + 1

    text = given.by_name_or_value(answer)
    assert text == f"given:{answer.__qualname__}"
    program = (
        "import pickle, sys; from phalanx import given; print(given.resolve(pickle.load(sys.stdin.buffer), 'x')())"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(text), capture_output=True, check=True)
    assert done.stdout.split() == [b"42"]


def test_a_copy_still_has_the_code_and_json_has_only_the_name():
    text = given.by_name_or_value(lambda: 7)
    assert given.resolve(copy.deepcopy(text), "env.id")() == 7
    plain = json.loads(json.dumps({"id": text}))["id"]
    with pytest.raises(UserError, match=r"env.id was given to this run as a Python object, .*lambda.*; give it again"):
        given.resolve(plain, "env.id")


def test_a_file_is_imported_once_and_its_names_are_suggested(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Torso: pass\n")
    assert given.resolve(f"{file}:Torso", "model.torso") is given.resolve(f"{file}:Torso", "model.torso")
    with pytest.raises(UserError, match=r"unknown name in .*mine.py 'Torsoo'; did you mean Torso"):
        given.resolve(f"{file}:Torsoo", "model.torso")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nowhere_at_all:make", "env.id: there is no module nowhere_at_all; start phalanx where it is"),
        ("missing/file.py:make", "env.id: there is no file missing/file.py"),
    ],
)
def test_what_is_not_there_is_said(text, sentence):
    with pytest.raises(UserError, match=sentence):
        given.resolve(text, "env.id")


def test_a_module_that_fails_is_said_with_its_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"broken.py cannot be imported: ZeroDivisionError"):
        given.resolve(f"{file}:make", "env.id")


def test_what_cannot_be_pickled_is_said():
    lock = __import__("threading").Lock()
    with pytest.raises(UserError, match=r"cannot be sent to other processes .*module:name"):
        given.by_name_or_value(lambda: lock)
