"""dba3c: workers on many hosts that make every update together, on the mean of the first gradients to arrive
(Distributed BA3C).

    worker, one of many: a GA3C node                             parameter servers, a slice of the parameters each
    [simulators] <-> [predictors] -> [queue of a batch]          wait for the first k of n gradients of a step,
                          ^               v                      apply their mean, begin the next step
                          |          [trainer] ---- gradient ------->      |        |  copies, every few updates
                          '---------------+<------- the new step ----------'        v
    supervisor: starts all, replaces the dead, sets the quorum,                 standby
                records, writes what the chief hands it
    chief: the first worker that lives; has the run's checkpoints made of one step
    evaluator: pulls one step now and then, plays whole games, ends the run at the target score

A step is over when `topology.quorum` of the workers have handed in a gradient of it; what comes later is dropped and
counted, so that a few slow workers (backup workers) hold nobody up. When fewer are alive than a step needs, the quorum
is lowered, or the run stopped (`topology.too_few`). With `topology.asynchronous` every gradient is applied as it comes,
for comparison. Workers and evaluator are in `topologies/dba3c_roles.py`.
"""

from __future__ import annotations

from phalanx.cluster.post import Post
from phalanx.config import DBA3CConfig, Experiment
from phalanx.parameters.flat import FlatParameters
from phalanx.replica.build import make_model
from phalanx.runs.session import Session
from phalanx.runtime.device import choose_compute
from phalanx.runtime.share import WHOLE, Share
from phalanx.topologies.asynchronous import spec_of


def run(experiment: Experiment, session: Session) -> None:
    """The supervisor learns nothing: it looks after the fleet, and after the run."""
    from phalanx.cluster.engine import running

    topology = settings(experiment)
    compute = choose_compute(experiment.run).install()
    with running(topology.address):
        from phalanx.cluster.fleet import Fleet

        spec = spec_of(experiment, compute)
        model = FlatParameters(make_model(experiment, spec.seen))
        workers, roles = topology.workers, "phalanx.topologies.dba3c_roles:"
        posts = [Post("worker", rank, f"{roles}Worker", Share(rank, workers)) for rank in range(workers)]
        if topology.evaluate_every:
            posts.append(Post("evaluator", workers, f"{roles}Evaluator", WHOLE, spec))
        quorum = topology.quorum_of_workers
        with (
            Fleet(experiment=experiment, model=model, posts=posts, event=session.event, quorum=quorum) as fleet,
            session.recording(fleet, spec, compute),
        ):
            fleet.start()
            while session.goes_on():
                for report in fleet.reports(timeout=0.2):
                    session.note(report)
                if fleet.reached:
                    session.stop_reason = fleet.reached


def settings(experiment: Experiment) -> DBA3CConfig:
    assert isinstance(experiment.topology, DBA3CConfig)
    return experiment.topology
