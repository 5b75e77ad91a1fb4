"""`phalanx bench`: what this machine reaches, beside its own limit."""

from __future__ import annotations


def command(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if arguments[:1] == ["gpu"]:
        from phalanx.bench import gpu

        return gpu.command(arguments)
    from phalanx.bench import machine

    return machine.command(arguments)
