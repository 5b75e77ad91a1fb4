"""`phalanx bench gpu`: what can be known of it without a GPU, and one measurement with one."""

from __future__ import annotations

import pytest
import torch

from phalanx.bench import gpu as gpu_bench
from phalanx.bench.emulators import BareEmulators
from phalanx.cli.main import main
from phalanx.config import SynchronousConfig
from phalanx.errors import UserError


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("shape", [gpu_bench.SAMPLING, *gpu_bench.ALGORITHMS.values()])
def test_every_shape_fits_any_number_of_cores(shape, cores):
    experiment = gpu_bench.sized_for_machine(shape, "pong", cores, ["--run.precision", "float32"])
    assert experiment.env.name == "pong" and experiment.model.torso == "nature"
    assert experiment.topology == SynchronousConfig() and experiment.sampler.overlap
    assert experiment.sampler.environments == shape.envs_per_worker * 2 * shape.cores(cores)
    assert experiment.sampler.squads == 2 * shape.cores(cores) // shape.squad
    assert experiment.sampler.pin == shape.busy


def test_a_part_of_it_can_be_measured():
    assert [task.name for task in gpu_bench.plan()] == ["breakout", "pong", *gpu_bench.ALGORITHMS]
    assert [task.name for task in gpu_bench.plan(["dqn_512", "pong"])] == ["pong", "dqn_512"]
    with pytest.raises(UserError, match="unknown measurement 'dqn'"):
        gpu_bench.plan(["dqn"])


def test_the_busy_share_is_a_mean_of_percentages():
    assert gpu_bench.mean_percent("10\n30\n[N/A]\n50\n") == pytest.approx(0.3)
    assert gpu_bench.mean_percent("") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "gpu", "--json"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("learn", [False, True])
def test_speed_is_measured_beside_the_emulator(learn, monkeypatch):
    monkeypatch.setattr(gpu_bench, "SETTLING", 0.5)
    shape = gpu_bench.Shape("a2c", 5)
    experiment = gpu_bench.sized_for_machine(shape, "pong", 2, ["--sampler.environments", "8"])
    with BareEmulators("pong", 2, 4) as emulators:
        found = gpu_bench.beside_emulator(experiment, emulators, 0.5, 1, learn)
    assert found["training_sps" if learn else "inference_sps"] > 0
    assert found["emulator_sps"] > 0
    assert sum(found[f"{stage}_share"] for stage in ("env", "infer", "learn", "other")) == pytest.approx(1, abs=0.01)
