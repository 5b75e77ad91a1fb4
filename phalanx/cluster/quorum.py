"""How many gradients make a step, while workers come and go. No Ray here."""

from __future__ import annotations

from phalanx.errors import RunError

SILENCE = 20.0  # seconds after which a step no longer waits for a worker that does not answer


class Quorum:
    """What was asked for, and what is so at present. A step must never wait for more gradients than there are workers
    to make them."""

    def __init__(self, asked: int, too_few: str) -> None:
        self.asked = asked  # 0: each gradient is a step
        self.too_few = too_few  # "lower" or "stop"
        self.present = asked

    def look(self, alive: int) -> str:
        """So many workers are alive; a sentence if a step takes another number of gradients from now on."""
        wanted = max(1, min(self.asked, alive))
        if not self.asked or wanted == self.present:
            return ""
        if wanted < self.asked and self.too_few == "stop":
            raise RunError(
                f"{workers(alive)} alive, but a step needs the gradients of {self.asked}; start more, or go on with "
                "fewer by --topology.too-few lower"
            )
        self.present = wanted
        return f"{workers(alive)} alive: a step takes the gradients of {wanted} from now on"


def workers(count: int) -> str:
    return "1 worker is" if count == 1 else f"{count} workers are"
