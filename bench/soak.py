"""Many random faults in one run on three hosts (network namespaces, as root), and one hash at the end.

    .venv/bin/python bench/soak.py --faults 1000 --seed 1 --keep NAME      kept under bench/DATE-NAME/

The faults come one after the other, each when the one before is healed: SIGKILL to a worker, to the leader, to an agent, to a whole host;
SIGSTOP; a cable that is out for four seconds; a bit of a weight. The same run with one worker and no fault says which hash is right.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "chaos"))
from hosts import Host, Network, Training, undisturbed

FAULTS = {"worker": 8, "leader": 4, "flip": 3, "agent": 3, "stop": 1, "host": 1, "cable": 1}  # how often, in parts
EACH = 8  # steps from one fault to the next
CABLE_S = 4.0


def strike(training: Training, network: Network, fault: str, chance: random.Random) -> None:
    """Let one fault happen, and what a person or systemd does after it."""
    members = training.newest.members
    victim = members[0] if fault == "leader" else chance.choice(members)
    host = next(one for one in network.hosts if one.name == victim.host)
    if fault in ("worker", "leader"):
        training.kill(victim)
    elif fault == "stop":
        training.kill(victim, number=signal.SIGSTOP)
    elif fault == "flip":
        training.order(victim.slot, "flip", host, at="forward")
    elif fault == "cable":
        network.cut(host)
        time.sleep(CABLE_S)
        network.mend(host)
    else:
        training.kill_host(host) if fault == "host" else training.kill_agent(host)
        training.start_agent(host)


def soak(folder: Path, hosts: list[Host], network: Network, faults: int, seed: int, steps: int) -> list[dict[str, object]]:
    """Disturb a run `faults` times; a line for each fault. It has ended well, with the right bits, or an AssertionError tells its story."""
    chance = random.Random(seed)
    truth_folder, run_folder = folder / "undisturbed", folder / "disturbed"
    truth_folder.mkdir()
    run_folder.mkdir()
    truth = undisturbed(truth_folder, steps)
    training = Training(run_folder, hosts, workers=1, steps=steps)
    lines: list[dict[str, object]] = []
    try:
        for number in range(1, faults + 1):
            training.wait(lambda number=number: training.step >= EACH * number and len(training.newest.members) == len(hosts), 120)  # type: ignore[misc]
            fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            before, step, began_s = training.newest, training.step, time.monotonic()
            strike(training, network, fault, chance)
            if fault == "agent":
                training.wait_for_step(min(steps, step + 1), 120)
            else:
                training.wait(lambda before=before: training.newest.number > before.number and training.step > training.newest.step, 120)  # type: ignore[misc]
            lines.append({"number": number, "fault": fault, "step": step, "seconds": round(time.monotonic() - began_s, 3)})
            print(json.dumps(lines[-1]), flush=True)
        training.judge(truth, timeout_s=600)
    finally:
        training.close()
    lines.append({"digest": truth.digest, "generations": training.newest.number, "steps": steps})
    return lines


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--faults", type=int, default=1000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--keep", default="")
    args = asked.parse_args()
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-soak-"))  # left there when the run goes wrong
    with Network(3) as network:
        lines = soak(folder, network.hosts, network, args.faults, args.seed, EACH * (args.faults + 2))
    shutil.rmtree(folder)
    counts = Counter(str(line["fault"]) for line in lines[:-1])
    slowest = {fault: max(float(str(line["seconds"])) for line in lines[:-1] if line["fault"] == fault) for fault in counts}
    middle = {
        fault: sorted(float(str(line["seconds"])) for line in lines[:-1] if line["fault"] == fault)[counts[fault] // 2] for fault in counts
    }
    table = "\n".join(
        f"| {fault} | {counts[fault]} | {middle[fault]:.2f} s | {slowest[fault]:.2f} s |" for fault in FAULTS if fault in counts
    )
    text = (
        f"{args.faults} faults, seed {args.seed}, three hosts, {time.monotonic() - began_s:.0f} s in all; "
        f"{lines[-1]['generations']} generations; each step once in the metrics; with and without the faults: {lines[-1]['digest']}\n\n"
        f"| fault | times | median until the next step | worst |\n| --- | ---: | ---: | ---: |\n{table}\n"
    )
    print(text)
    if args.keep:
        kept = Path(__file__).parent / f"{datetime.now(UTC):%Y-%m-%d}-{args.keep}"
        kept.mkdir()
        (kept / "command").write_text(f"python bench/soak.py --faults {args.faults} --seed {args.seed} --keep {args.keep}\n")
        (kept / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (kept / "README.md").write_text(f"# {kept.name}\n\n{text}")


if __name__ == "__main__":
    main()
