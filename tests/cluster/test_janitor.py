"""Nothing of a local Ray survives its janitor."""

from __future__ import annotations

import os
import subprocess
import sys

from phalanx.cluster import janitor


def test_processes_are_found_by_their_environment_or_by_their_logs(tmp_path):
    """Ray's agents write a title over their environment. The run itself has files of Ray open, too, and lives on."""
    directory = tmp_path / "ray"
    directory.mkdir()
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    marked = subprocess.Popen(sleep, env={**os.environ, janitor.MARK: str(directory)}, stdout=subprocess.PIPE)
    with (directory / "agent.out").open("w") as log:
        titled = ["ray::Agent", *sleep[1:]]
        logging = subprocess.Popen(titled, executable=sys.executable, stdout=subprocess.PIPE, stderr=log)
        other = subprocess.Popen(sleep, stdout=subprocess.PIPE, stderr=log)  # as the run itself, which is to go on
    try:
        for process in (marked, logging, other):
            process.stdout.readline()  # it has begun
        cleaner = [sys.executable, "-I", "-S", janitor.__file__, str(directory)]
        subprocess.run(cleaner, stdin=subprocess.DEVNULL, timeout=60, check=True)
        assert (marked.wait(10), logging.wait(10)) == (-9, -9)
        assert other.poll() is None
        assert not directory.exists()
    finally:
        for process in (marked, logging, other):
            process.kill()
            process.wait(60)
            process.stdout.close()


def test_who_started_the_janitor_lives_on_with_files_open_there(tmp_path):
    """The driver has logs of Ray, and what it does after Ray has ended is nobody's business."""
    place = tmp_path / "ray"
    place.mkdir()
    code = "import subprocess, sys; log = open(sys.argv[1] + '/log', 'w'); subprocess.run(sys.argv[2:], input=b'')"
    cleaner = [sys.executable, "-I", "-S", janitor.__file__, str(place)]
    driver = [sys.executable, "-c", f"{code}; print('alive')", str(place), *cleaner]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n" and not place.exists()
