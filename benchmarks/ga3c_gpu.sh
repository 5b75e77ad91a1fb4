#!/usr/bin/env bash
# ga3c_gpu.sh: everything that is measured of GA3C on a machine with a GPU and many cores, in about twelve minutes.
# use: benchmarks/ga3c_gpu.sh RESULTS [PART...]      (from the root of the repository; PARTS: tests emulator networks score)
#      PYTHONPATH=.gpu-bundle:. and PYTHON=python3 unless they are set; a part that takes too long is ended, and the
#      next one begins. RESULTS gets a log and data of each part.
set -uo pipefail
results=${1:?say where the results go: benchmarks/ga3c_gpu.sh RESULTS [PART...]}; shift
parts=${*:-emulator networks score tests}
export PYTHONPATH=${PYTHONPATH:-.gpu-bundle:.} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
mkdir -p "$results"

measure() { # seconds, name of the log, arguments of benchmarks/ga3c.py
  local limit=$1 name=$2; shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$python" benchmarks/ga3c.py "$@" --out "$results" 2>&1 | tee "$results/$name.log" ||
    echo "== $name did not end within $limit s, or failed" | tee -a "$results/$name.log"
}

for part in $parts; do
  case $part in
    emulator) # predictions a second beside the emulator's rate, the tuner on: the paper's batch, and one for such speeds
      measure 90 emulator emulator --name emulator --tuning-seconds 40 --window 2 --environments 128 \
        -- --topology.max-agents 256
      measure 90 emulator-large emulator --name emulator-large --tuning-seconds 40 --window 2 --environments 128 \
        --predictors 2 -- --topology.max-agents 256 --topology.min-batch 640 --topology.queue 400 \
        --optimizer.learning-rate 1e-4
      ;;
    networks) # the paper's table 2: GA3C with the GPU beside A3C on the CPU
      measure 240 networks networks --rounds 1 --seconds 8 --environments 128 --predictors 2 --trainers 2
      ;;
    score) # Pong to 18: PPO as in the preset pong-fast, on agents, predictors and trainers; then the paper's preset
      measure 120 score-ppo score --name score-ppo --preset pong-fast --seconds 90 \
        -- --sampler.overlap False --sampler.groups 1 --sampler.squads 1 --topology.predictors 2 \
        --topology.trainers 1 --topology.min-batch 1920 --topology.queue 120
      measure 180 score-ga3c score --name score-ga3c --preset ga3c-static --seconds 150 \
        -- --sampler.environments 128 --topology.predictors 2 --topology.trainers 2
      ;;
    tests) # graphs beside the eager way
      if "$python" -c "import pytest" 2>/dev/null; then
        timeout --kill-after=10 120 "$python" -m pytest tests/gpu/test_ga3c_graphs.py -q 2>&1 | tee "$results/tests.log"
      else
        echo "no pytest here: tests/gpu/test_ga3c_graphs.py is left out" | tee "$results/tests.log"
      fi
      ;;
    *) echo "there is no part $part" >&2; exit 2 ;;
  esac
done
