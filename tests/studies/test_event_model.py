"""The model of a cluster beside closed forms, and what holds of every course."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.studies.events import Cluster, Course, Running, limits, simulate

FAR = {"size": 1600, "bandwidth": 4e6, "latency": 3e-4, "call": 2e-4, "send": 1e-4, "apply": 1e-7, "copy": 5e-8}


def course(updates: int = 4000, **values: float) -> Course:
    return simulate(Cluster(**values), updates, np.random.default_rng(1), warm_up=updates // 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("quorum", [0, 1])
def test_one_worker_computes_pushes_and_pulls_in_turn(one_host, servers, quorum):
    cluster = Cluster(
        act=0.02, learn=0.01, polls=2, servers=servers, one_host=one_host, quorum=quorum, take=1e-8, **FAR
    )
    found = simulate(cluster, 50, np.random.default_rng(0), warm_up=5)
    assert found.updates_per_second == pytest.approx(1 / cluster.round_time)
    assert found.mean_staleness == 0
    by_hand = 0.02 + 0.01 + cluster.push_time + cluster.pull_time + 2 * cluster.asking_time
    assert cluster.round_time == pytest.approx(by_hand)


def test_the_time_of_a_push_by_hand():
    """Over a link of 4 MB/s 1,600 numbers take 1.6 ms; two servers have 800 numbers each."""
    cluster = Cluster(servers=2, **FAR)
    assert cluster.push_time == pytest.approx(2 * 1e-4 + 1.6e-3 + 2 * 3e-4 + 2e-4 + 800 * 1e-7)
    assert cluster.pull_time == pytest.approx(2 * (2 * 1e-4 + 2 * 3e-4 + 2e-4) + 800 * 5e-8 + 1.6e-3)


def test_workers_that_meet_nobody_are_so_many_times_as_fast():
    for workers in (2, 7, 64):
        found = course(workers=workers, learn=0.1, spread=0.5, points=32)
        assert found.points_per_second == pytest.approx(workers * 32 / 0.1, rel=0.05)


def test_a_server_that_is_saturated_serves_one_gradient_after_the_other():
    found = course(workers=50, learn=0.01, spread=1.0, call=1e-3, apply=1e-6, size=1000, one_host=True)
    assert found.updates_per_second == pytest.approx(1 / 2e-3, rel=0.01)
    assert found.busy["processor"] == pytest.approx(1.0, abs=0.01)
    halved = course(workers=50, learn=0.01, call=1e-3, apply=1e-6, size=1000, one_host=True, servers=2)
    assert halved.updates_per_second == pytest.approx(1 / 1.5e-3, rel=0.01)


def test_a_link_that_is_saturated_lets_through_what_it_can():
    found = course(workers=50, learn=1e-3, size=1000, bandwidth=4e6, servers=2)
    assert found.updates_per_second == pytest.approx(4e6 / 2000, rel=0.01)
    assert found.busy["inward"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("spread", [0.2, 1.0])
@pytest.mark.parametrize("workers", [2, 8])
def test_equal_workers_are_as_stale_as_there_are_others(workers, spread):
    found = course(20_000, workers=workers, learn=0.1, spread=spread)
    assert found.mean_staleness == pytest.approx(workers - 1, rel=0.03)


@pytest.mark.parametrize(("workers", "quorum"), [(1, 1), (4, 4), (10, 10), (4, 3), (10, 9), (10, 1)])
def test_a_step_takes_as_long_as_the_order_statistic_of_exponentials(workers, quorum):
    """n - k workers are late after every step: they finish what nobody wants any more, and begin anew."""

    @cache
    def expected(fresh: int, late: int, missing: int) -> float:
        if not missing:
            return 0.0
        busy = fresh + late
        after = fresh * expected(fresh - 1, late, missing - 1) if fresh else 0.0
        after += late * expected(fresh + 1, late - 1, missing) if late else 0.0
        return (1 + after) / busy

    found = course(12_000, workers=workers, quorum=quorum, learn=1.0, spread=1.0)
    assert 1 / found.updates_per_second == pytest.approx(expected(quorum, workers - quorum, quorum), rel=0.03)
    if quorum == workers:
        harmonic = sum(1 / number for number in range(1, workers + 1))
        assert expected(quorum, 0, quorum) == pytest.approx(harmonic)


def test_backup_workers_hide_slow_ones():
    slow = {"workers": 40, "learn": 0.1, "slow": 0.1, "slowness": 10.0, "spread": 0.05}
    alone = course(500, workers=40, learn=0.1, spread=0.05, quorum=40)
    assert course(500, quorum=40, **slow).updates_per_second < 0.12 * alone.updates_per_second
    assert course(500, quorum=36, **slow).updates_per_second > 0.98 * alone.updates_per_second


def test_a_driver_that_is_slow_holds_workers_up_only_when_their_credits_are_gone():
    found = course(12_000, workers=100, learn=0.01, turn=0.095, tell=2e-3, credits=2)
    assert found.updates_per_second == pytest.approx(10 / 2e-3, rel=0.02)  # 500 turns of 10 gradients a second
    assert found.busy["driver"] == pytest.approx(1.0, abs=0.01)
    assert course(workers=40, learn=0.01, turn=0.095, tell=2e-3).updates_per_second == pytest.approx(4000, rel=0.02)


def test_a_bound_drops_what_is_older():
    found = course(workers=10, learn=0.1, spread=1.0, bound=5)
    assert max(found.staleness) == 5 and found.dropped > 0


def test_more_servers_and_smaller_layers_help_until_something_else_is_what_takes_the_time():
    """The shape of the paper's figures 6 and 7."""
    base = {"workers": 32, "learn": 0.02, "spread": 0.1, "bandwidth": 1.25e8, "call": 1e-4, "send": 5e-5, "quorum": 29}
    by_servers = [course(200, size=332_295, servers=servers, **base).updates_per_second for servers in (1, 2, 4, 16)]
    assert by_servers == sorted(by_servers)
    gains = np.diff(np.log2(by_servers)) / (1, 1, 2)
    assert list(gains) == sorted(gains, reverse=True)
    by_size = [course(200, size=size, servers=4, **base).updates_per_second for size in (538_119, 332_295, 152_199)]
    assert by_size == sorted(by_size)


def test_the_speed_of_the_papers_cluster_is_nearly_linear_to_64_nodes():
    """32 data points in a quarter of a second, 332,295 numbers on 4 servers, 10 Gbit/s, and what Ray takes."""
    base = {"learn": 0.24, "spread": 0.1, "points": 32, "size": 332_295, "servers": 4, "bandwidth": 1.25e9}
    ray = {"call": 1.7e-4, "send": 1.3e-4, "latency": 2e-4, "apply": 1e-9, "take": 3e-10, "copy": 1e-10}
    speeds = {n: course(100, workers=n, quorum=round(0.9 * n) or 1, **base, **ray).points_per_second for n in (1, 64)}
    assert speeds[64] > 0.7 * 64 * speeds[1]  # nine tenths of the gradients count


CLUSTERS = st.builds(
    Cluster,
    workers=st.integers(1, 6),
    servers=st.integers(1, 4),
    act=st.sampled_from([0.0, 0.05]),
    learn=st.floats(0.001, 0.1),
    spread=st.sampled_from([0.0, 0.3, 1.0]),
    slow=st.sampled_from([0.0, 0.4]),
    slowness=st.floats(1, 5),
    gradients=st.integers(1, 3),
    polls=st.integers(0, 3),
    size=st.integers(0, 2000),
    bandwidth=st.sampled_from([1e6, float("inf")]),
    latency=st.floats(0, 1e-3),
    send=st.floats(0, 1e-4),
    call=st.floats(0, 2e-3),
    apply=st.floats(0, 1e-6),
    take=st.floats(0, 1e-6),
    copy=st.floats(0, 1e-6),
    one_host=st.booleans(),
    quorum=st.integers(0, 1),
    bound=st.sampled_from([0, 2]),
    turn=st.sampled_from([0.05, float("inf")]),
    tell=st.floats(0, 0.02),
)


@settings(max_examples=60, deadline=None)
@given(CLUSTERS, st.integers(0, 100), st.integers(0, 2**31))
def test_no_gradient_is_lost_and_no_station_works_more_than_all_the_time(cluster, share, seed):
    if cluster.quorum:
        cluster = Cluster(**{**vars(cluster), "quorum": 1 + share % cluster.workers})
    running = Running(cluster, np.random.default_rng(seed))
    found = running.course
    for _ in range(400):
        running.simulation.step()
        assert found.sent == found.all_applied + found.dropped + sum(running.pushing)
        assert 0 <= found.sent - found.all_applied - found.dropped <= cluster.workers
        if cluster.quorum:
            assert len(running.waiting) < cluster.quorum and not found.staleness.keys() - {0}
            assert found.all_applied == cluster.quorum * running.version
        else:
            assert found.all_applied == running.version
        assert all(station.busy <= running.simulation.now + 0.1 for station in running.stations.values())


@settings(max_examples=30, deadline=None)
@given(CLUSTERS, st.integers(0, 2**31))
@example(Cluster(workers=6, learn=1 / 64, size=0, turn=0.05, tell=1 / 64), 0)
def test_no_cluster_is_faster_than_its_stations_or_than_its_workers_alone(cluster, seed):
    cluster = Cluster(**{**vars(cluster), "slow": 0.0, "spread": 0.0, "bound": 0, "quorum": min(cluster.quorum, 1)})
    if cluster.quorum and cluster.workers > 1:  # what is dropped costs time as well
        cluster = Cluster(**{**vars(cluster), "quorum": cluster.workers})
    found = simulate(cluster, 60, np.random.default_rng(seed), warm_up=10)
    gradients = found.applied / found.seconds
    at_once = cluster.workers / (0.9 * found.seconds)  # that may have been under way when measuring began
    alone = cluster.workers * cluster.gradients / cluster.round_time
    most = {**limits(cluster), "workers": alone if not cluster.polls else float("inf")}
    if np.isfinite(cluster.turn):  # workers may be so many turns ahead of the driver
        rounds = np.ceil(cluster.turn / cluster.round_time)
        most["driver"] += cluster.credits * max(1, rounds) * cluster.gradients * at_once
    assert gradients <= min(most.values()) * 1.05 + 3 * at_once


def test_a_turn_holds_whole_rounds_when_the_driver_is_the_limit():
    assert limits(Cluster(workers=6, learn=1 / 64, size=0, turn=0.05, tell=1 / 64))["driver"] == 4 * 64
