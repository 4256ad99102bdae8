"""Inject many random faults into one run on three hosts (network namespaces, as root) and compare its digest.

    python -m bench.soak.run --faults 1000 --seed 1 --keep NAME      keep bench/soak/DATE-NAME/; half an hour on two cores

Faults: SIGKILL to a worker, the leader, an agent or a whole host; SIGSTOP; a link that is down for four seconds; a flipped bit in a
weight. Each happens up to half a second after the first step that follows the previous fault, even if the affected workers are not back:
two workers are enough. Only a flipped bit needs three, since two cannot tell which of them is wrong.

The run has no last step: it is stopped after all faults. One worker then trains the same run to exactly that step, without faults; the
digests, and the loss and norm of each step, must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from support.hosts import Host, Network, Training, undisturbed

from bench.results import keep, machine
from lockstep.elastic.generation_log import Generation

FAULTS = {
    "worker": 8,
    "leader": 4,
    "flip": 3,
    "agent": 3,
    "stop": 1,
    "host": 1,
    "cable": 1,
}  # how often, in parts
CABLE_S = 4.0
PAUSE_S = 0.5  # at most
HEALED_S = 90.0  # far above what it takes, far below the 600 s of a collective
FOR_EVER = 1_000_000  # steps
# The weights must keep changing, or a wrong gradient would leave no trace: by default the learning rate is 0 after 300 steps.
VALUES = {
    "optim__schedule": "constant",
    "optim__learning_rate": 5e-4,
    "elastic__rendezvous_timeout_s": 2.0,
}


@dataclass(frozen=True)
class Fault:
    """One fault and its cost.

    met      host and slot of the affected worker
    step     the newest committed step before it
    workers  number of workers before it
    back_s   seconds until a step was committed without the affected worker; for an agent, until the next step
    """

    number: int
    what: str
    met: str
    step: int
    workers: int
    back_s: float


def strike(
    training: Training, network: Network, before: Generation, what: str, chance: random.Random
) -> str:
    """Cause one fault, restart what a person or systemd would restart, and return the affected worker."""
    victim = before.members[0] if what == "leader" else chance.choice(before.members)
    host = next(one for one in network.hosts if one.name == victim.host)
    if what in ("worker", "leader"):
        training.kill(victim)
    elif what == "stop":
        training.kill(victim, number=signal.SIGSTOP)
    elif what == "flip":
        training.request_fault(victim.slot, "flip", host, at="forward")
    elif what == "cable":
        network.disconnect(host)
        time.sleep(CABLE_S)
        network.reconnect(host)
    else:
        training.kill_host(host) if what == "host" else training.kill_agent(host)
        training.start_agent(host)
    return f"{victim.host}/{victim.slot}"


def wait_for(training: Training, workers: int) -> Generation:
    """Wait for a generation of at least `workers` members that committed a step, and return it."""

    def ready() -> bool:
        newest = training.newest
        return len(newest.members) >= workers and training.step > newest.step

    training.wait(ready, HEALED_S, what=f"a step of {workers} workers")
    return training.newest


def disturb(training: Training, network: Network, number: int, chance: random.Random) -> Fault:
    """Cause one fault and wait until the others continue."""
    what = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
    wait_for(training, workers := 3 if what == "flip" else 2)
    time.sleep(chance.uniform(0, PAUSE_S))
    before = wait_for(training, workers)
    step, members, began_s = training.step, {one.id for one in before.members}, time.monotonic()
    met = strike(training, network, before, what, chance)

    def back() -> bool:
        newest = training.newest
        someone_left = not members <= {one.id for one in newest.members}
        return training.step > (newest.step if someone_left else step) and (
            someone_left or what == "agent"
        )

    training.wait(
        back,
        HEALED_S,
        what=f"a step after fault {number}, {what} of {met} at step {step} of generation {before.number},",
    )
    return Fault(number, what, met, step, len(before.members), round(time.monotonic() - began_s, 3))


def soak(
    folder: Path, hosts: Sequence[Host], network: Network, faults: int, seed: int
) -> tuple[list[Fault], dict[str, object]]:
    """Disturb a run `faults` times: (what each fault cost, what came of it all). An AssertionError tells the story where it went wrong."""
    chance, felt, began_s = random.Random(seed), list[Fault](), time.monotonic()
    training = Training(folder, hosts, workers=1, steps=FOR_EVER, values=VALUES)
    try:
        training.wait_for_step(1, HEALED_S)
        for number in range(1, faults + 1):
            felt.append(disturb(training, network, number, chance))
            print(json.dumps(asdict(felt[-1])), flush=True)
        wait_for(training, len(hosts))
        disturbed_s = time.monotonic() - began_s
        training.stop()
        training.end()
        steps = training.step
        goodput = training.events("goodput")[-1]
        print(f"stopped at step {steps:,}; one worker now trains to there, undisturbed", flush=True)
        (folder / "undisturbed").mkdir()
        truth = undisturbed(folder / "undisturbed", steps, **VALUES)
        training.assert_same_bits(truth, code=75)
    finally:
        training.close()
    facts: dict[str, object] = {
        "steps": steps,
        "generations": training.newest.number,
        "seconds": round(disturbed_s),
    }
    facts |= {
        name: round(goodput[name], 3)
        for name in ("goodput", "wall_s", "training_s", "communication_s", "regrouping_s", "lost_s")
    }
    return felt, facts | {"digest": truth.digest}


def table(felt: Sequence[Fault]) -> str:
    """As Markdown, a row for each kind of fault."""
    rows = [
        "| fault | times | median until the next step | worst |",
        "| --- | ---: | ---: | ---: |",
    ]
    for what in FAULTS:
        if seconds := [one.back_s for one in felt if one.what == what]:
            rows.append(
                f"| {what} | {len(seconds)} | {median(seconds):.2f} s | {max(seconds):.2f} s |"
            )
    return "\n".join(rows)


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--faults", type=int, default=1000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--keep", metavar="NAME", default="")
    args = asked.parse_args()
    load_before, folder = os.getloadavg(), Path(tempfile.mkdtemp(prefix="lockstep-soak-"))
    print(f"in {folder}, which is kept on failure", flush=True)
    with Network(3) as network:
        felt, facts = soak(folder, network.hosts, network, args.faults, args.seed)
    shutil.rmtree(folder)
    text = (
        f"{args.faults} faults, seed {args.seed}, on three hosts with one worker each, within {facts['seconds']} s and "
        f"{facts['steps']:,} steps; {facts['generations']} generations, {facts['goodput']:.0%} of the time in training. Each step is "
        f"in the metrics once, with the loss and the norm of the undisturbed run. Both end with\n\n"
        f"    {facts['digest']}\n\n{table(felt)}\n\nA link is down for {CABLE_S:g} s, and the step counts once it is up; "
        "`stop` and `cable` wait for `elastic.heartbeat_timeout_s`, 2.5 s, and twice as long if the silent worker is the leader of two.\n"
    )
    print(text)
    if args.keep:
        about = machine("bf16 where the processor has units for it, else fp32", load_before)
        keep(args.keep, [*map(asdict, felt), facts], text, about)


if __name__ == "__main__":
    main()
