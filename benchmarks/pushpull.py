"""What a push and a pull of all parameters cost between a learner and parameter servers on Ray, on one host.

python benchmarks/pushpull.py [--numbers N] [--shards N] [--rule NAME] [--rounds N] [--calls N]

Three ways, measured in turn, medians over all calls in milliseconds: `blocks` is what a run uses on one host (shared
memory, and a call of a few bytes to every shard), `arrays` what it uses between hosts (arrays travel with the calls),
`bfloat16` the same with two bytes a number. `copies` is what no way can avoid: gradient and parameters copied once.
Ray runs as in training: a small one, for the time of the benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from phalanx.cluster.engine import running
from phalanx.config import OptimizerConfig
from phalanx.parameters.client import ShardedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.parameters.shards import cut
from phalanx.types import Gradient


def main() -> int:
    """Start servers, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1_700_000, help="parameters")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rule", default="adagrad", help="of the optimizer, which runs on the servers")
    parser.add_argument("--rounds", type=int, default=10, help="times each way is measured")
    parser.add_argument("--calls", type=int, default=20, help="in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with running(""):
        measure(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    from phalanx.cluster.server import ShardOrder, with_arrays
    from phalanx.cluster.servers import start_servers
    from phalanx.parameters.client import states_of

    config = OptimizerConfig(rule=options.rule, epsilon=1e-3, clip="none")
    rule = make_rule(config)
    flat = torch.randn(options.numbers)
    parts = cut(options.numbers, options.shards)
    orders = [ShardOrder(number, part.stop - part.start, config) for number, part in enumerate(parts)]
    begun = states_of(flat, {"version": 0, "rule": rule.init(options.numbers)}, parts, rule)
    servers = start_servers(orders, parts, [with_arrays(state) for state in begun], workers=3)

    def store(worker: int, near: bool, bfloat16: bool) -> ShardedStore:
        parameters = FlatParameters(nn.Linear(options.numbers, 1, bias=False))
        shards = servers.reach(bfloat16)()
        if not near:
            shards.blocks = [None for _ in parts]  # as if the servers were on other hosts
        return ShardedStore(shards, parameters, rule, make_clip(config, []), worker, bfloat16=bfloat16)

    gradient, copied = torch.randn(options.numbers), torch.empty(options.numbers)

    def push(store: ShardedStore) -> Callable[[], None]:
        return lambda: (store.push(Gradient(gradient, torch.tensor(1.0), 0), 1e-4), None)[1]

    def copies() -> None:
        copied.copy_(gradient)
        copied.copy_(flat)

    ways = {
        "blocks": push(store(0, near=True, bfloat16=False)),
        "arrays": push(store(1, near=False, bfloat16=False)),
        "bfloat16": push(store(2, near=False, bfloat16=True)),
        "copies": copies,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(5):
            way()
    for _ in range(options.rounds):
        for name, way in ways.items():
            for _ in range(options.calls):
                started = time.perf_counter()
                way()
                times[name].append(1e3 * (time.perf_counter() - started))
    print(f"{options.numbers:,} parameters on {options.shards} shards, {options.rule}; ms for a push and a pull")
    for name, values in times.items():
        ordered = sorted(values)
        least, most = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
        print(f"{name:9} median {statistics.median(values):6.2f}   10 % {least:6.2f}   90 % {most:6.2f}")
    servers.end()


if __name__ == "__main__":
    raise SystemExit(main())
