"""Look at a run while it goes on, stop it early, and go on with it later.

python examples/callbacks.py
"""

import phalanx


def main(steps: int = 200_000, enough: float = 100.0) -> phalanx.Run:
    best = []

    def on_record(record: dict) -> bool:
        """Gets each line of metrics.jsonl, every `run.log_every` seconds; False stops the run."""
        if record["score"] is not None:  # None until a first game is finished
            best.append(record["score"])
            print(f"{record['steps']:>8,} steps  {record['sps']:>6,.0f} steps/s  score {record['score']:.1f}")
        return not best or max(best) < enough

    run = phalanx.train(
        "ppo-gym",
        env="CartPole-v1",
        overrides={"run.steps": steps, "run.log_every": 0.5},
        on_record=on_record,
        quiet=True,  # on_record prints instead
    )
    print(f"{run.directory}: {run.end}")

    run = phalanx.resume(run.directory, overrides={"run.steps": run.records[-1]["steps"] + 2_000}, quiet=True)
    print(f"{run.directory}: {run.end}")
    return run


if __name__ == "__main__":
    main()
