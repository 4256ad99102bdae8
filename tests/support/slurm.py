"""A small real Slurm cluster: slurmctld, slurmd and munged, each node in a network namespace.

    with SlurmCluster(folder, nodes=3) as cluster:      nodes n1, n2, n3; needs root and Debian's packages
        job = cluster.submit("job.sbatch", "--nodes=2")
        cluster.kill_node("n2")                         slurmd and all processes of the node
        cluster.wait_for_state(job, "COMPLETED")

The controller is on host a of the network; node n1 is host b, and so on. All files are in `folder`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from support.hosts import Host, Network, why_no_hosts
from support.waiting import wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
# A requeued job waits until the credentials of its steps have expired (cred_expire, 120 s by default).
CONFIG = """
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
KillWait=30
MinJobAge=600
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def why_no_slurm() -> str:
    """Return why no Slurm cluster can run here; "" if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    return why_no_hosts() if os.geteuid() == 0 else "Slurm's daemons need root here"


class SlurmCluster:
    """Context manager: a controller and nodes n1, n2, ...; each node is a host of a network."""

    def __init__(self, folder: Path, nodes: int, *, slurmd_timeout_s: int = 10) -> None:
        self.folder, self.names, self.slurmd_timeout_s = (
            folder,
            [f"n{number}" for number in range(1, nodes + 1)],
            slurmd_timeout_s,
        )

    def __enter__(self) -> SlurmCluster:
        with ExitStack() as stack:
            network = stack.enter_context(Network(len(self.names) + 1))
            stack.callback(self._stop)
            self.network = network
            controller, *hosts = network.hosts
            self.controller, self.hosts = controller, dict(zip(self.names, hosts, strict=True))
            self._daemons: dict[str, subprocess.Popen[bytes]] = {}
            self._write_files()
            self._start("munged", controller, "ctl", *self._munged())
            self.wait((self.folder / "munge.socket").exists, 10, "munged's socket")
            self._start("slurmctld", controller, "ctl", "slurmctld", "-D", "-f", str(self.config))
            for name in self.names:
                self.start_node(name)
            self.wait(
                lambda: self.run("sinfo", "-h", "-o", "%t").split() == ["idle"], 30, "idle nodes"
            )
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _write_files(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(64))
        (self.folder / "munge.key").chmod(0o600)
        hosts = {"localhost": "127.0.0.1", "ctl": self.controller.address} | {
            name: host.address for name, host in self.hosts.items()
        }
        (self.folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in hosts.items())
        )
        self.config = self.folder / "slurm.conf"
        lines = [
            f"NodeName={name} NodeAddr={host.address} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for name, host in self.hosts.items()
        ]
        text = CONFIG.replace("NodeName={names} CPUs=2 RealMemory=4000 State=UNKNOWN\n", "")
        values = {
            "controller": self.controller.address,
            "folder": self.folder,
            "nodes": "\n".join(lines),
        }
        self.config.write_text(text.format(**values, slurmd_timeout_s=self.slurmd_timeout_s))

    def _munged(self) -> list[str]:
        files = {
            "key-file": "munge.key",
            "log-file": "munged.log",
            "pid-file": "munged.pid",
            "seed-file": "munged.seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        return [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder / 'munge.socket'}",
            *options,
        ]

    def _start(self, key: str, host: Host, hostname: str, *command: str) -> None:
        """Start a daemon with its own host name and /etc/hosts."""
        script = f'hostname {hostname} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        words = [
            *host.enter,
            "unshare",
            "--uts",
            "--mount",
            "--",
            "bash",
            "-c",
            script,
            "bash",
            *command,
        ]
        with open(self.folder / f"{key}.out", "ab") as output:
            environ = os.environ | {"SLURM_CONF": str(self.config)}
            self._daemons[key] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        """Start slurmd on a node, or start it again after `kill_node`."""
        self._start(
            name, self.hosts[name], name, "slurmd", "-N", name, "-D", "-f", str(self.config)
        )

    def _stop(self) -> None:
        for name in self.names:
            self.kill_node(name)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    # -- nodes and jobs ----------------------------------------------------------------------------------------------------

    def processes(self, name: str) -> list[int]:
        """Return the pids in the network namespace of a node, except its holder."""
        namespace = os.readlink(f"/proc/{self.hosts[name].holder}/ns/net")
        pids = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == namespace:
                    pids.append(int(entry.name))
        return [pid for pid in pids if pid != self.hosts[name].holder]

    def kill_node(self, name: str) -> None:
        """Kill slurmd and all processes of a node, as a power loss does."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if name in self._daemons:
            self._daemons.pop(name).wait()

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm on the controller's host; return its output."""
        script = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        words = [
            *self.controller.enter,
            "unshare",
            "--mount",
            "--",
            "bash",
            "-c",
            script,
            "bash",
            *command,
        ]
        environ = os.environ | {"SLURM_CONF": str(self.config)}
        done = subprocess.run(
            words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, file: Path, *options: str) -> str:
        """Submit a batch file from its folder; return the number of the job."""
        return self.run("sbatch", "--parsable", *options, file.name, cwd=file.parent).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as scontrol shows them."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until a job has one of the states, such as COMPLETED; return its fields."""
        self.wait(
            lambda: self.job(number)["JobState"] in states, timeout_s, f"{states} of job {number}"
        )
        return self.job(number)

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait until `done()`; return the seconds. AssertionError with the logs of the daemons."""
        return wait_until(done, what, timeout_s, report=self.report)

    def report(self, tails: Sequence[str] = ("*.out", "*.log")) -> str:
        paths = [path for pattern in tails for path in sorted(self.folder.glob(pattern))]
        return "\n".join(
            f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths
        )
