"""`phalanx study cluster`: how fast would a cluster of so many nodes learn, and how stale would its gradients be?

    times of this machine --> a model of workers, links, servers and driver (`events.py`) --> figures by nodes

Gorila applies every gradient as it comes; Distributed BA3C waits for a quorum of them, and is shown without one, too.
Workers and servers have hosts of their own here. Every time can be given by a flag
instead of being measured; `study.json` says what was taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.config import DBA3CConfig, Experiment, GorilaConfig
from phalanx.config.bounds import number
from phalanx.config.flags import parse_flags
from phalanx.config.presets import preset
from phalanx.errors import require
from phalanx.figure import Line, Panel
from phalanx.probe import check_pieces
from phalanx.replica.build import make_model
from phalanx.runtime.device import choose_compute
from phalanx.studies import Options
from phalanx.studies.book import Book, Row
from phalanx.studies.events import Cluster, Course, limits, simulate
from phalanx.studies.times import (
    ServerTimes,
    WorkerTimes,
    cluster_of,
    gradients_of,
    measure_server,
    measure_worker,
    points_of,
    worker_of,
)
from phalanx.studies.variants import positive, refuse
from phalanx.topologies.asynchronous import spec_of

WORTH = 0.8  # of linear: below that, a cluster counts as too large for what it does
TURN, CREDITS = 0.25, 2  # of the fleet's members, as `phalanx/cluster/fleet.py` has them
WHY = {
    "processor": "the processors of the parameter servers are busy",
    "inward": "the links of the parameter servers are full of gradients",
    "outward": "the links of the parameter servers are full of parameters",
    "driver": "the driver, which every worker tells what it has done, is busy",
}


@dataclass(frozen=True)
class StudyOptions(Options):
    """Data points per second and staleness of clusters, predicted from times of this machine. Flags with a dot are
    those of every preset."""

    presets: tuple[str, ...] = ("gorila", "dba3c")
    """Presets of the topologies gorila (with bundles) and dba3c."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
    """Numbers of workers."""
    at: int = number(32, least=1, most=100_000)
    """Workers in the figures of servers, layers and quorum (the paper: 32)."""
    servers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of parameter servers in their figure."""
    neurons: tuple[int, ...] = (256, 128, 64, 32, 16)
    """Widths of the fully connected layer in the figure of servers."""
    rows: int = number(4, least=1, most=1_000_000)
    """Data points of a gradient in the figure of servers: little work, and so much traffic (the paper: 4)."""
    quorums: tuple[float, ...] = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
    """Shares of the workers that a step waits for, in their figure."""
    spread: float = number(0.1, least=0, most=10)
    """Deviation of a worker's times by their mean; 1 is exponential."""
    slow: float = number(0.05, least=0, most=1)
    """Share of workers that are slower, in the figure of the quorum."""
    slowness: float = number(3.0, least=1, most=1e6)
    """How many times slower these are."""
    gigabits: float = number(10.0, above=0, most=1e6)
    """Bandwidth of each host's link, in Gbit/s."""
    latency: float = number(5e-5, least=0, most=100)
    """Seconds that a message takes between two hosts, besides what Ray adds."""
    gradients: int = number(8_000, least=100, most=10**9)
    """Gradients of each simulated cluster that are counted."""
    seed: int = number(0, least=0, most=2**63 - 1)
    """Of the simulation."""
    seconds: float = number(3.0, above=0, most=3600)
    """Length of the measurement of each preset's worker."""
    calls: int = number(800, least=16, most=10**6)
    """Calls on a local Ray that are measured; Ray is not started if --ray names its times."""
    act: tuple[float, ...] = ()
    """Seconds of a rollout on one core, one number for each preset; empty: measured here."""
    learn: tuple[float, ...] = ()
    """Seconds of a gradient on one core, one number for each preset; empty: measured here."""
    server: tuple[float, ...] = ()
    """Nanoseconds for each number that a server takes to apply an update, to add a gradient to a step, and to copy
    parameters; empty: measured here."""
    ray: tuple[float, ...] = ()
    """Microseconds of Ray: of a call at the server, of a call at the worker, of a message within a host, of the driver
    for each turn of a worker, and the same for each worker there is; empty: measured here."""


@dataclass(frozen=True)
class System:
    """One of the two, as its preset has it."""

    name: str
    experiment: Experiment
    one: Cluster  # with the servers of the preset, and one worker


def run(options: StudyOptions, flags: list[str], book: Book) -> None:
    refuse(flags, {"--topology.bundles": "--nodes", "--topology.workers": "--nodes"})
    experiments = [checked(name, flags) for name in options.presets]
    check(options, len(experiments))
    asked = {
        "options": dataclasses.asdict(options),
        "experiments": {experiment.preset: dataclasses.asdict(experiment) for experiment in experiments},
    }
    book.asked(asked)
    systems, times = measured(experiments, options, book)
    book.asked({**asked, "times": times})
    by_nodes = [row for system in systems for row in of_nodes(system, options, book)]
    book.data("cluster", by_nodes)
    by_servers = [row for system in systems if is_synchronous(system) for row in of_servers(system, options)]
    by_quorum = [row for system in systems if is_synchronous(system) for row in of_quorum(system, options)]
    panels = draw_nodes(by_nodes)
    for name, rows in (("servers", by_servers), ("quorum", by_quorum)):
        if rows:
            book.data(name, rows)
    panels += draw_servers(by_servers) + draw_quorum(by_quorum)
    book.figure("cluster", "Clusters of many nodes, predicted from times of one machine", panels)
    for row in by_quorum:
        if row["quorum"] in (1.0, 0.9):
            share, rate = row["quorum"], row["updates_per_second"]
            book.say(f"{row['system']}: a quorum of {share:.0%} makes {rate:.3g} steps/s where some workers are slow")


def checked(name: str, flags: list[str]) -> Experiment:
    experiment = parse_flags("phalanx study cluster", preset(name), flags).with_derived_values().validate()
    require(
        isinstance(experiment.topology, GorilaConfig | DBA3CConfig),
        f"the study `cluster` is of the topologies gorila and dba3c, not of {experiment.topology.name}",
    )
    own = worker_of(experiment)
    check_pieces(own)
    return experiment


def check(options: StudyOptions, presets: int) -> None:
    positive("presets", (presets,))
    for flag in ("nodes", "servers", "neurons"):
        positive(flag, getattr(options, flag))
    inside = bool(options.quorums) and all(0 < share <= 1 for share in options.quorums)
    require(inside, "--quorums needs shares of the workers, above 0 and at most 1")
    for flag, count in (("act", presets), ("learn", presets), ("server", 3), ("ray", 5)):
        values = getattr(options, flag)
        require(len(values) in (0, count), f"--{flag} needs {count} numbers, or none")
        require(all(0 <= value < np.inf for value in values), f"--{flag} needs times, which are not negative")


def measured(experiments: Sequence[Experiment], options: StudyOptions, book: Book) -> tuple[list[System], Row]:
    """The systems as they would be here, and the times that make them so."""
    if options.ray:
        call, send, within, tell, tell_each = (value * 1e-6 for value in options.ray)
    else:
        from phalanx.cluster.timing import measure_ray

        book.say("measuring Ray ...")
        ray = measure_ray(options.calls)
        call, send, within, tell, tell_each = dataclasses.astuple(ray)
    systems: list[System] = []
    times: Row = {"ray": {"call": call, "send": send, "latency": within, "tell": tell, "tell_each": tell_each}}
    for place, experiment in enumerate(experiments):
        topology = cluster_of(experiment)
        book.say(f"measuring a worker of {experiment.preset} ...")
        worker = times_of_worker(experiment, options, place)
        if options.server:
            server = ServerTimes(*(value * 1e-9 for value in options.server))
        else:
            server = measure_server(experiment.optimizer)
        horizon = experiment.sampler.horizon
        poll = getattr(topology, "poll_every", 0)
        one = Cluster(
            servers=topology.shards,
            act=worker.act / topology.cores,
            learn=worker.learn / topology.cores,
            spread=options.spread,
            gradients=worker.gradients,
            points=worker.points,
            polls=(horizon - 1) // poll if poll else 0,
            size=worker.size,
            width=2 if topology.wire == "bfloat16" else 4,
            bandwidth=options.gigabits * 1e9 / 8,
            latency=options.latency + within,
            send=send,
            call=call,
            apply=server.apply,
            take=server.take,
            copy=server.copy,
            bound=getattr(topology, "staleness", 0),
            turn=TURN,
            tell=tell,
            tell_each=tell_each,
            credits=CREDITS,
        )
        systems.append(System(experiment.preset, experiment, one))
        times[experiment.preset] = {**dataclasses.asdict(worker), **dataclasses.asdict(server), "cores": topology.cores}
    return systems, times


def times_of_worker(experiment: Experiment, options: StudyOptions, place: int) -> WorkerTimes:
    if options.act and options.learn:
        return given(experiment, options.act[place], options.learn[place])
    found = measure_worker(experiment, options.seconds)
    act = options.act[place] if options.act else found.act
    return dataclasses.replace(found, act=act, learn=options.learn[place] if options.learn else found.learn)


def given(experiment: Experiment, act: float, learn: float) -> WorkerTimes:
    """Without a measurement: what the experiment itself says of gradients and sizes."""
    own = worker_of(experiment)
    return WorkerTimes(act, learn, gradients_of(own), points_of(own), size_of(own, own.model.hidden))


def size_of(experiment: Experiment, neurons: int) -> int:
    """Numbers of the network with so many neurons in its fully connected layer; 0: as many as it has."""
    changed = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, hidden=neurons))
    model = make_model(changed, spec_of(experiment, choose_compute(experiment.run)).seen)
    return sum(each.numel() for each in model.parameters())


def is_synchronous(system: System) -> bool:
    topology = system.experiment.topology
    return isinstance(topology, DBA3CConfig) and not topology.asynchronous


def quorum_of(share: float, workers: int) -> int:
    """As `DBA3CConfig.quorum_of_workers` has it."""
    return max(1, round(share * workers))


def variants(system: System) -> dict[str, float]:
    """What is shown of a system by nodes: names, and the share of the workers that a step waits for; 0: for none."""
    if not is_synchronous(system):
        return {system.name: 0.0}
    topology = system.experiment.topology
    assert isinstance(topology, DBA3CConfig)
    return {f"{system.name}, quorum {topology.quorum:.0%}": topology.quorum, f"{system.name}, asynchronous": 0.0}


def course(cluster: Cluster, options: StudyOptions) -> Course:
    each = cluster.quorum or 1
    updates = max(30, options.gradients // each)
    warm_up = max(10, updates // 4, 0 if cluster.quorum else 2 * cluster.workers)
    return simulate(cluster, updates, np.random.default_rng(options.seed), warm_up)


def of_nodes(system: System, options: StudyOptions, book: Book) -> list[Row]:
    rows: list[Row] = []
    for name, share in variants(system).items():
        single, found_limit = 0.0, False
        for nodes in sorted(options.nodes):
            quorum = quorum_of(share, nodes) if share else 0
            cluster = dataclasses.replace(system.one, workers=nodes, quorum=quorum)
            found = course(cluster, options)
            single = single or found.points_per_second / nodes
            row = row_of(name, cluster, found, found.points_per_second / nodes / single)
            rows.append(row)
            if row["of_linear"] < WORTH and not found_limit:
                found_limit = True
                book.say(f"{name}: {why(row, cluster)}")
        if not found_limit:
            book.say(f"{name}: {nodes:,} nodes still have {rows[-1]['of_linear']:.0%} of linear speed")
    return rows


def row_of(name: str, cluster: Cluster, found: Course, of_linear: float) -> Row:
    finished = found.all_applied + found.dropped
    return {
        "system": name,
        "nodes": cluster.workers,
        "points_per_second": found.points_per_second,
        "updates_per_second": found.updates_per_second,
        "of_linear": of_linear,
        "staleness_mean": found.mean_staleness,
        "staleness_max": max(found.staleness, default=0),
        "dropped": found.dropped / finished if finished else 0.0,
        **{f"{station}_busy": share for station, share in found.busy.items()},
    }


def why(row: Row, cluster: Cluster) -> str:
    """Where it stops scaling, in words."""
    station = max(WHY, key=lambda name: row[f"{name}_busy"])
    share = row[f"{station}_busy"]
    if share > WORTH or not cluster.quorum:
        reason = f"{WHY[station]} ({share:.0%} of the time)"
    elif row["dropped"] > 1 - WORTH:
        reason = f"{row['dropped']:.0%} of the gradients are dropped"
    else:
        reason = (
            f"workers wait for each other at the end of a step, while the {station} is busy {share:.0%} of the time"
        )
    most = {name: limit for name, limit in limits(cluster).items() if np.isfinite(limit)}
    first = min(most, key=lambda name: most[name])
    least = f"; no more than {most[first]:,.0f} gradients/s pass the {first} at best" if share > WORTH else ""
    return f"{row['nodes']:,} nodes have {row['of_linear']:.0%} of linear speed: {reason}{least}"


def of_servers(system: System, options: StudyOptions) -> list[Row]:
    """The paper's figures 6 and 7: much traffic, because a gradient has few data points."""
    topology = system.experiment.topology
    assert isinstance(topology, DBA3CConfig)
    own, rows, part = worker_of(system.experiment), [], options.rows / system.one.points
    for neurons in options.neurons:
        size = size_of(own, neurons)
        for servers in options.servers:
            cluster = dataclasses.replace(
                system.one,
                workers=options.at,
                servers=servers,
                size=size,
                act=part * system.one.act,
                learn=part * system.one.learn,
                points=options.rows,
                quorum=quorum_of(topology.quorum, options.at),
            )
            found = course(cluster, options)
            rows.append(
                {"neurons": neurons, "servers": servers, "size": size, **row_of(system.name, cluster, found, 0)}
            )
            del rows[-1]["of_linear"]
    return rows


def of_quorum(system: System, options: StudyOptions) -> list[Row]:
    """Steps per second where some workers are slow, by the share of them that a step waits for."""
    rows: list[Row] = []
    for share in options.quorums:
        slow = dataclasses.replace(
            system.one,
            workers=options.at,
            quorum=quorum_of(share, options.at),
            slow=options.slow,
            slowness=options.slowness,
        )
        found = course(slow, options)
        rows.append(
            {
                "system": system.name,
                "quorum": share,
                "updates_per_second": found.updates_per_second,
                "points_per_second": found.points_per_second,
                "dropped": found.dropped / (found.dropped + found.all_applied),
            }
        )
    return rows


def draw_nodes(rows: Sequence[Row]) -> list[Panel]:
    def lines(column: str) -> list[Line]:
        names = dict.fromkeys(row["system"] for row in rows)
        return [Line(name, [(row["nodes"], row[column]) for row in rows if row["system"] == name]) for name in names]

    ends = sorted({row["nodes"] for row in rows})
    others = Line("the others: N - 1", [(nodes, nodes - 1) for nodes in ends], dashed=True)
    linear = Line("linear", [(nodes, 1.0) for nodes in (ends[0], ends[-1])], dashed=True)
    return [
        Panel("Speed", "nodes", "data points/s", lines("points_per_second"), x_log=True, y_log=True),
        Panel("Speed of a node beside one that is alone", "nodes", "share", [*lines("of_linear"), linear], x_log=True),
        Panel("Staleness", "nodes", "updates", [*lines("staleness_mean"), others], x_log=True, y_log=True),
        Panel("Gradients that are dropped", "nodes", "share", lines("dropped"), x_log=True),
    ]


def draw_servers(rows: Sequence[Row]) -> list[Panel]:
    if not rows:
        return []
    lines = [
        Line(
            f"{neurons} neurons",
            [(row["servers"], row["points_per_second"]) for row in rows if row["neurons"] == neurons],
        )
        for neurons in dict.fromkeys(row["neurons"] for row in rows)
    ]
    title = f"Parameter servers, {rows[0]['nodes']} nodes"
    return [Panel(title, "parameter servers", "data points/s", lines, x_log=True)]


def draw_quorum(rows: Sequence[Row]) -> list[Panel]:
    if not rows:
        return []
    points: list[tuple[float, Any]] = [(row["quorum"], row["updates_per_second"]) for row in rows]
    return [Panel("Quorum, with some slow workers", "share of the workers", "steps/s", [Line("quorum", points)])]
