"""Imports point one way, algorithms are pure, and nobody pays for a package that is not used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent

LAYERS = (
    "phalanx struct errors files figure",
    "given",
    "types config",
    "seams deferred runtime",
    "algorithms",
    "models envs",
    "registry parameters replay",
    "sampling",
    "learning probe",
    "replica",
    "runs cluster",
    "topologies agent",
    "bench",
    "studies api",
    "cli",
    "__main__",
)
"""Parts of the package, lowest first; at module level a part imports lower ones and itself only."""

HEAVY = ("torch", "tyro", "rich", "gymnasium", "ale_py", "tensorboard", "ray", "matplotlib")


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "phalanx"


def modules() -> dict[str, ast.Module]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(node: ast.AST, inside_functions: bool) -> set[str]:
    """Modules imported below a node; imports for type checkers only do not count."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            inner = [f"{child.module}.{alias.name}" for alias in child.names]
            found |= {name if name in MODULES else str(child.module) for name in inner}
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.Lambda):
            found |= imported(child, inside_functions)
    return found


def of_the_package(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "phalanx"}


TOP = {name: imported(tree, inside_functions=False) for name, tree in MODULES.items()}
ALL = {name: imported(tree, inside_functions=True) for name, tree in MODULES.items()}


def test_the_scan_sees_both_kinds_of_imports():
    assert "phalanx.errors" in TOP["phalanx.cli.main"]
    assert "tyro" in ALL["phalanx.config.flags"] - TOP["phalanx.config.flags"]


def test_every_module_has_a_layer():
    known = {name for layer in LAYERS for name in layer.split()}
    assert {part(name) for name in MODULES} == known


def test_imports_point_one_way():
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer.split()}
    wrong = [
        f"{name} imports {other}"
        for name, others in TOP.items()
        for other in of_the_package(others)
        if part(other) != part(name) and height[part(other)] >= height[part(name)]
    ]
    assert not wrong


def test_there_are_no_cycles():
    graph = {name: of_the_package(others) - {name} for name, others in TOP.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_imports_within_functions_point_no_other_way():
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer.split()}
    upward = {
        (name, other)
        for name, others in ALL.items()
        for other in of_the_package(others)
        if height[part(other)] > height[part(name)]
    }
    assert not upward


def test_algorithms_are_pure():
    forbidden = {"multiprocessing", "subprocess", "queue", "threading", "concurrent", "socket", "os", "logging", "ray"}
    for name, others in ALL.items():
        if part(name) == "algorithms":
            assert not {other.split(".")[0] for other in others} & forbidden, name
            allowed = {"algorithms", "config", "deferred", "seams", "types"}
            assert {part(other) for other in of_the_package(others)} <= allowed, name


def test_ray_is_imported_by_one_part_only():
    users = {name for name, others in ALL.items() if any(other.split(".")[0] == "ray" for other in others)}
    assert {part(name) for name in users} == {"cluster"}


@pytest.mark.parametrize(
    "module",
    ["phalanx.topologies.gorila", "phalanx.topologies.dba3c", "phalanx.cluster.server", "phalanx.cluster.engine"],
)
def test_what_runs_on_ray_is_plain_python(module):
    assert "ray" not in loaded_by(module)


def loaded_by(module: str, path: Path = PACKAGE.parent, cwd: Path | None = None) -> set[str]:
    """Top-level packages in sys.modules after importing a module in a fresh process."""
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(path), "PATH": os.environ["PATH"]},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize("module", ["phalanx.__main__", "phalanx.config.presets", "phalanx.config"])
def test_the_command_line_starts_without_heavy_packages(module):
    loaded = loaded_by(module)
    assert "phalanx" in loaded
    assert not loaded & {*HEAVY, "numpy"}


@pytest.mark.parametrize("module", ["phalanx.sampling.worker", "phalanx.registry", "phalanx.envs.toy"])
def test_env_workers_do_not_import_torch(module):
    loaded = loaded_by(module)
    assert "numpy" in loaded
    assert not loaded & set(HEAVY)


def test_an_atari_environment_does_not_import_torch():
    assert not loaded_by("phalanx.envs.atari") & (set(HEAVY) - {"ale_py", "gymnasium"})


def test_importing_works_from_elsewhere_without_being_installed(tmp_path):
    (tmp_path / "phalanx").symlink_to(PACKAGE)
    assert "phalanx" in loaded_by("phalanx.runs.session", tmp_path, cwd=tmp_path)


def test_the_package_is_found_beside_a_clone_of_its_name(tmp_path):
    """A script that lies beside the clone has the clone's folder first on its path, by the package's own name."""
    (tmp_path / "phalanx").mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, "-c", "import phalanx; print(phalanx.__file__)"],
        env=clean,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.strip() == phalanx.__file__, shown.stderr
