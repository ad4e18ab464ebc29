"""A Slurm cluster on this machine: a controller, and nodes, each a host of its own (hosts.py). Needs root and Debian's packages.

Two partitions: `low`, the default, whose jobs are requeued for those of `high`. No cgroups, no systemd; nodes claim more cores
than the machine has.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree, which
from tempfile import mkdtemp

from tests.support.commands import finished
from tests.support.hosts import Hosts, run, why_not

PACKAGES = ["slurmd", "slurmctld", "slurm-client", "munge"]
KILL_WAIT_S = 10  # from SIGTERM to SIGKILL
NODE_TIMEOUT_S = 10
CONFIG = """
ClusterName=lab
SlurmctldHost=n{controller}({subnet}.{controller})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1,sched_min_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
OverTimeLimit=0
MinJobAge=3600
SlurmdTimeout={node_timeout}
MessageTimeout=10
GresTypes=gpu
PartitionName=low Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-{count}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_no_slurm() -> str:
    """Installs Slurm if it is missing; why there can be none here, or nothing."""
    if reason := why_not():
        return reason
    if which("slurmctld") and which("munged"):
        return ""
    if not which("apt-get"):
        return "Slurm is not installed, and there is no apt-get"
    quiet = {"capture_output": True, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    if subprocess.run(install, **quiet).returncode != 0:
        subprocess.run(["apt-get", "update"], **quiet)
        done = subprocess.run(install, **quiet)
        if done.returncode != 0:
            return (
                f"Slurm cannot be installed: {done.stderr.decode().strip().splitlines()[-1:]}"
            )
    return ""


class Slurm:
    """`count` nodes named n1, n2, ..., each with two fake GPUs; `close` takes everything away."""

    def __init__(self, count: int) -> None:
        self.controller = count + 1  # the last host
        self.nodes = range(1, count + 1)
        self.hosts = Hosts(count + 1, name="n", subnet="10.77.0")
        self.folder = Path(mkdtemp(prefix="titan-slurm-"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self._start(count)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("state", "log", *(f"spool/n{i}" for i in self.nodes)):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        for gpu in range(2):  # slurmd only looks whether the files are there
            run("mknod", str(folder / f"gpu{gpu}"), "c", "1", "3")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")
        nodes = [
            f"NodeName=n{i} NodeHostname=n{i} NodeAddr=10.77.0.{i} Port=17001 CPUs=2 RealMemory=4000 Gres=gpu:2"
            for i in self.nodes
        ]
        text = CONFIG.format(
            controller=self.controller,
            subnet=self.hosts.subnet,
            folder=folder,
            kill_wait=KILL_WAIT_S,
            node_timeout=NODE_TIMEOUT_S,
            count=count,
        )
        head, _, partitions = text.partition("PartitionName")
        (folder / "slurm.conf").write_text(
            head + "\n".join(nodes) + "\nPartitionName" + partitions
        )
        munged = f"munged --force --key-file={folder}/munge.key --socket={folder}/munge.sock --pid-file={folder}/munged.pid --log-file={folder}/log/munged --seed-file={folder}/munge.seed".split()
        for daemon in (munged, ["slurmctld", "-c"]):
            self.run(*self.hosts.on(self.controller, daemon))
        for i in self.nodes:
            self.run(*self.hosts.on(i, ["slurmd", "-N", f"n{i}"]))
        self.wait_for(lambda: self.idle_nodes() == count, within_s=30)

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """A command's output; raises if it fails."""
        environment = self.environment | variables
        done = finished(command, cwd=cwd, env=environment)
        return done.stdout.strip()

    def wait_for(self, ready: Callable[[], bool], *, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            assert time.monotonic() < deadline, self.run("squeue", "--long")
            time.sleep(0.2)

    def idle_nodes(self) -> int:
        return len(self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").split())

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def requeue_now(self, job: str, *changes: str, within_s: float = 90) -> None:
        """Wait until the job, which runs, is requeued; change it, and spare us the two minutes that Slurm then lets pass."""
        state = ("squeue", "--noheader", f"--jobs={job}", "--format=%T")
        self.wait_for(lambda: self.run(*state) == "PENDING", within_s=within_s)
        # Its credential was revoked; one made within the same second would count as revoked, too.
        time.sleep(2)
        self.run("scontrol", "update", f"JobId={job}", *changes, "StartTime=now")

    def log(self) -> str:
        """The end of the controller's."""
        return "\n".join((self.folder / "log" / "slurmctld").read_text().splitlines()[-20:])

    def wait_ended(self, job: str, *, within_s: float = 180) -> str:
        """The state in which it has ended."""
        going_on = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        self.wait_for(lambda: self.state(job) not in going_on, within_s=within_s)
        return self.state(job)

    def close(self) -> None:
        """End all jobs and daemons, and remove what they have left."""
        with suppress(AssertionError, OSError):
            self.run("scancel", "--user=root")
        self.hosts.close()
        rmtree(self.folder, ignore_errors=True)
