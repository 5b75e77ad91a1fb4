"""`phalanx bench gpu`: what can be known of it without a GPU, and one measurement with one."""

from __future__ import annotations

import pytest
import torch

from phalanx import gpu_bench
from phalanx.__main__ import main
from phalanx.config import SynchronousConfig


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("name", gpu_bench.ALGORITHMS)
def test_every_algorithm_fits_any_number_of_cores(name, cores):
    preset, horizon, overlap = gpu_bench.ALGORITHMS[name]
    experiment = gpu_bench.settled(preset, "pong", cores, horizon, overlap, ["--run.precision", "float32"])
    assert experiment.env.name == "pong" and experiment.model.torso == "nature"
    assert experiment.topology == SynchronousConfig(overlap=overlap)
    assert experiment.sampler.environments == 32 * max(1, cores - 1)


def test_the_busy_share_is_a_mean_of_percentages():
    assert gpu_bench.mean_percent("10\n30\n[N/A]\n50\n") == pytest.approx(0.3)
    assert gpu_bench.mean_percent("") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "gpu", "--json"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_training_is_measured_with_its_shares():
    found = gpu_bench.training(gpu_bench.settled("a2c", "pong", 2, 5, False, []), 0.5, 1)
    assert found["training_sps"] > 0
    assert sum(found[f"{stage}_share"] for stage in ("env", "infer", "learn", "other")) == pytest.approx(1, abs=0.01)
