"""phalanx: deep reinforcement learning at the speed of the hardware."""

import os

# A torch thread that has nothing to do must sleep, not spin: the simulators need its core. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
