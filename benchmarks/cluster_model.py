"""Is what `phalanx study cluster` predicts what happens? Real runs on Ray beside the model, on one machine.

    .venv/bin/python benchmarks/cluster_model.py [--workers 1 2 4] [--ms 20] [--seconds 15] [--json FILE]

Gorila and Distributed BA3C (a step waits for all workers) learn from environments that sleep (`sleeping.py`), so that
two cores can host several workers. The model is fed with times that are measured first: of one worker without servers,
of a shard, and of Ray's calls. Speed is that of the last seconds of a run, when all are at work.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cluster.timing import measure_ray
from phalanx.config.flags import parse_experiment
from phalanx.probe import resolve_precision
from phalanx.studies.cluster import CREDITS, TURN
from phalanx.studies.events import Cluster, simulate
from phalanx.studies.times import measure_server, measure_worker

ROOT = Path(__file__).resolve().parent.parent
FIRST = 2  # updates for each worker, after which a run has begun
SETTLING = 6.0  # seconds from then on that are not measured
LONGEST = 180.0  # seconds that a run may take until it has begun
SERVERS = 2
SYSTEMS = {
    "gorila": "dqn-gym --topology gorila --topology.bundles {0} --sampler.horizon 4 --algorithm.batch-size 32 "
    "--algorithm.intensity 8 --algorithm.learning-starts 200 --algorithm.replay-size 20000",
    "dba3c": "a2c-gym --topology dba3c --topology.workers {0} --topology.quorum 1 --sampler.horizon 16",
}


def words(system: str, workers: int) -> list[str]:
    """What follows `phalanx train`."""
    common = f"--topology.shards {SERVERS} --sampler.environments {workers} --env.id sleeping:Sleeping-v0"
    return [*SYSTEMS[system].format(workers).split(), *common.split(), "--run.threads", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds of a step")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured at the end of each run")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    os.environ["SLEEPING_MS"] = str(options.ms)
    ray = measure_ray(800)
    print(f"Ray: {json.dumps(dataclasses.asdict(ray))}", flush=True)
    results = []
    for system in options.systems:
        one = model(system, ray)
        for workers in options.workers:
            expected = predict(one, workers, quorum=system == "dba3c")
            result = {"system": system, "workers": workers, **expected, **measure(system, workers, one, options)}
            print(json.dumps(result), flush=True)
            results.append(result)
    show(results)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")


def model(system: str, ray: Any) -> Cluster:
    """A cluster of one worker, as this machine would host it."""
    experiment = resolve_precision(parse_experiment("train", words(system, 1)))
    worker, server = measure_worker(experiment, 4.0), measure_server(experiment.optimizer)
    print(f"{system}: {json.dumps({**dataclasses.asdict(worker), **dataclasses.asdict(server)})}", flush=True)
    poll = getattr(experiment.topology, "poll_every", 0)
    return Cluster(
        servers=SERVERS,
        act=worker.act,
        learn=worker.learn,
        spread=0.05,
        gradients=worker.gradients,
        points=worker.points,
        polls=(experiment.sampler.horizon - 1) // poll if poll else 0,
        size=worker.size,
        one_host=True,
        latency=ray.latency,
        send=ray.send,
        call=ray.call,
        apply=server.apply,
        take=server.take,
        copy=server.copy,
        turn=TURN,
        tell=ray.tell,
        tell_each=ray.tell_each,
        credits=CREDITS,
    )


def predict(one: Cluster, workers: int, quorum: bool) -> dict[str, float]:
    cluster = dataclasses.replace(one, workers=workers, quorum=workers if quorum else 0)
    course = simulate(cluster, 4000, np.random.default_rng(0), warm_up=1000)
    return {"predicted": course.points_per_second, "predicted_staleness": course.mean_staleness}


def measure(system: str, workers: int, one: Cluster, options: argparse.Namespace) -> dict[str, float]:
    """One run: data points per second and mean staleness of some seconds, when all are at work."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    with tempfile.TemporaryDirectory() as place, open(Path(place) / "output", "w+") as output:
        command = [sys.executable, "-m", "phalanx", "train", *words(system, workers), "--run.directory", place]
        command += ["--run.name", "run", "--run.log-every", "0.5", "--run.steps", "1000000000"]
        environment = {**os.environ, "PYTHONPATH": path}
        began = time.monotonic()
        run = subprocess.Popen(command, env=environment, cwd=place, stdout=output, stderr=output)
        try:
            while not (records := read(place)) or records[-1]["updates"] < FIRST * workers:
                if run.poll() is not None or time.monotonic() > began + LONGEST:
                    sys.exit((Path(place) / "output").read_text()[-500:])
                time.sleep(0.1)
            first = time.monotonic() - began
            time.sleep(SETTLING + options.seconds)
            records = read(place)
            run.send_signal(signal.SIGINT)
            run.wait(120)
        finally:
            run.kill()
            run.wait()
    end = records[-1]["time_s"]
    window = [record for record in records if record["time_s"] > end - options.seconds]
    updates = window[-1]["updates"] - window[0]["updates"]
    each = workers if system == "dba3c" else 1  # gradients of an update
    ages = [record["staleness_mean"] for record in window if "staleness_mean" in record]
    return {
        "measured": updates * each * one.points / (window[-1]["time_s"] - window[0]["time_s"]),
        "measured_staleness": sum(ages) / len(ages) if ages else 0.0,
        "first_update_s": first,
    }


def read(place: str) -> list[dict[str, Any]]:
    """The records so far; the last line may not be whole yet."""
    with contextlib.suppress(OSError):
        lines = (Path(place) / "run/metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def show(results: list[dict[str, Any]]) -> None:
    heads = ("workers", "predicted", "measured", "ratio", "staleness", "measured", "first s")
    print("\n" + f"{'points/s':<10}" + "".join(f"{head:>11}" for head in heads))
    for row in results:
        ratio = row["measured"] / row["predicted"]
        numbers = f"{row['workers']:>11}{row['predicted']:>11.1f}{row['measured']:>11.1f}{ratio:>11.2f}"
        ages = f"{row['predicted_staleness']:>11.2f}{row['measured_staleness']:>11.2f}{row['first_update_s']:>11.1f}"
        print(f"{row['system']:<10}{numbers}{ages}")


if __name__ == "__main__":
    main()
