"""The recipes for clusters hold commands that exist: in docs/clusters.md and in examples/cluster."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from hosts import wait_until

from phalanx.config.flags import parse_experiment
from phalanx.studies.cluster import StudyOptions

ROOT = Path(__file__).parents[2]
SLURM, YAML, TEXT = ROOT / "examples/cluster/slurm.sh", ROOT / "examples/cluster/ray.yaml", ROOT / "docs/clusters.md"
BIN = Path(sys.executable).parent


def sources():
    """Everything that holds commands, with what the shell would put in place of its variables."""
    text = SLURM.read_text().replace("\\\n", " ")
    slurm = re.sub(r"\$\(\(.*?\)\)|\$\{[^}]*\}|\$\w+", "1", text.replace("${@:-dba3c}", "dba3c"))
    launcher = yaml.safe_load(YAML.read_text())
    lines = [*launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]]
    lines += [line.strip("# ") for line in YAML.read_text().splitlines() if "phalanx train" in line]
    blocks = re.findall(r"```[a-z]*\n(.*?)```", TEXT.read_text(), re.DOTALL)
    return [slurm, "\n".join(lines), "\n".join(blocks).replace("\\\n", " ")]


def commands(beginning):
    """The words after `beginning`, wherever it stands in a command."""
    found = []
    for line in "\n".join(sources()).splitlines():
        for match in re.finditer(rf"(?<![\w-]){beginning} ([^'#&|]*)", line.strip()):
            found.append(shlex.split(match.group(1)))
    return found


@cache
def ray_options(command):
    done = subprocess.run([BIN / "ray", *command.split(), "--help"], capture_output=True, text=True, timeout=120)
    return set(re.findall(r"(--[a-z][a-z-]+)", done.stdout))


def test_commands_of_phalanx_are_valid():
    trains = commands("phalanx train")
    assert len(trains) >= 4
    for words in trains:
        experiment = parse_experiment("train", [word for word in words if word != "..."])
        assert experiment.topology.name in ("gorila", "dba3c", "synchronous")


def test_every_command_that_joins_a_cluster_has_its_token():
    """On its line, or by an `export` before it in the same file, unless another host's shell runs it."""
    joining = re.compile(r"ray (start|status)|phalanx (train|resume)\b.*--topology\.address")
    token = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN"
    for text in sources():
        exported, joins = False, 0
        for line in text.splitlines():
            exported = exported or f"export {token}" in line
            if found := joining.search(line):
                joins += 1
                assert token in line[: found.start()] or (exported and "ray exec" not in line), line
        assert joins >= 3


def test_flags_of_studies_exist():
    known = set(StudyOptions.__dataclass_fields__)
    for words in commands("phalanx study cluster"):
        assert {word[2:].replace("-", "_") for word in words if word.startswith("--") and "." not in word} <= known


def test_options_of_ray_exist():
    pytest.importorskip("ray")
    starts = commands("ray start")
    assert len(starts) >= 6
    for words in starts:
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= ray_options("start")


def test_the_slurm_script_is_a_shell_script_and_asks_for_what_it_uses():
    subprocess.run(["bash", "-n", SLURM], check=True, timeout=30)
    assert os.stat(SLURM).st_mode & stat.S_IXUSR
    asked = re.findall(r"^#SBATCH (--[a-z-]+)=", SLURM.read_text(), re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--signal"} <= set(asked)


def test_the_cluster_file_has_what_the_launcher_needs():
    launcher = yaml.safe_load(YAML.read_text())
    assert launcher["provider"]["type"] == "local" and launcher["provider"]["head_ip"]
    assert launcher["max_workers"] == len(launcher["provider"]["worker_ips"])
    head, worker = launcher["head_start_ray_commands"][-1], launcher["worker_start_ray_commands"][-1]
    token = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=change-me"
    assert head.startswith(token) and worker.startswith(token)


FAKE = {
    "srun": 'while [[ $1 == -* ]]; do shift; done\n[[ $1 == hostname ]] && echo "$FAKE_IP" || exec "$@"\n',
    "scontrol": 'printf "one\\ntwo\\n"\n',
}
"""Slurm's commands, on one machine."""


@pytest.mark.slow
def test_the_slurm_script_runs_and_resumes(tmp_path, ray_place):
    """With a Slurm that runs everything here: two nodes, a run, the signal before the time limit, and a second job."""
    pytest.importorskip("ray")
    from ray.util import get_node_ip_address

    for name, text in FAKE.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    port = 21_000 + os.getpid() % 9_000
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FAKE_IP": get_node_ip_address(),
        "STORE": str(80 << 20),
        "RAY_TMPDIR": ray_place,
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    events = tmp_path / "runs/slurm/events.log"
    for job in (1, 2):
        output = tmp_path / f"output-{job}"
        with output.open("w") as file:
            command = [SLURM, "gorila-catch", "--run.steps", "100000000", "--run.log-every", "0.5"]
            script = subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**environment, "PORT": str(port + job)},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: (tmp_path / "runs/slurm/metrics.jsonl").exists() and steps(tmp_path) > 2000 * job,  # noqa: B023
                180,
                lambda: output.read_text() + (events.read_text() if events.exists() else ""),  # noqa: B023
            )
            os.kill(script.pid, signal.SIGTERM)  # to the shell, as --signal=B:TERM says
            assert script.wait(90) == 128 + signal.SIGTERM
            assert steps(tmp_path) > 2000 * job
        finally:
            for process in of_session(script.pid):
                os.kill(process, signal.SIGKILL)
    assert events.read_text().count("stopped by SIGTERM") == 2  # both jobs wrote to one run
    assert len(list((tmp_path / "runs").iterdir())) == 1


def steps(directory):
    last = (directory / "runs/slurm/metrics.jsonl").read_text().splitlines()[-1:]
    found = re.search(r'"steps": ?(\d+)', last[0]) if last else None
    return int(found.group(1)) if found else 0


def of_session(leader):
    """Processes that belong to a script which was started in a session of its own."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == leader:
                    found.append(int(entry))
            except OSError:
                continue
    return found
