"""phalanx: deep reinforcement learning at the speed of the hardware."""

import os

# A torch thread with nothing to do must soon sleep, for the simulators need its core; but not at once, for waking it
# between two layers costs more than the layer. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
