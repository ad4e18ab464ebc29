"""Plant a fault in a copy of the project, one in each subsystem, and see that the default lane finds it.

    python scripts/planted.py             all of them; prints a table
    python scripts/planted.py clipping    those whose names hold a word

Each fault replaces one text of one file by another. A fault whose text is no longer there is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """Hold one fault. tests: the folders and files whose default lane must find it."""

    name: str
    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


PARITY = ("tests/parity",)
FAULTS = (
    Fault(
        "tensor parallelism",
        "the loss's gradient is kept, not summed, over the ranks of tp",
        "titan/parallel/tensor_styles.py",
        "return (x.to_local(grad_placements=(Partial(),)), *args[1:])",
        "return (x.to_local(grad_placements=(Replicate(),)), *args[1:])",
        PARITY,
    ),
    Fault(
        "context parallelism",
        "gradients of gathered keys are averaged, not summed",
        "titan/parallel/collectives.py",
        "mine = wait(start_reduce_scatter(precise, group=ctx.group, size=ctx.size))",
        "mine = wait(start_reduce_scatter(precise / ctx.size, group=ctx.group, size=ctx.size))",
        PARITY,
    ),
    Fault(
        "pipeline parallelism",
        "gradients are divided by the number of microbatches",
        "titan/parallel/pipeline.py",
        '"scale_grads": False',
        '"scale_grads": True',
        PARITY,
    ),
    Fault(
        "expert parallelism",
        "results of experts go back in another order",
        "titan/parallel/expert.py",
        "results_RD = permute(results_RD, routes.inverse_R, routes.order_R)",
        "results_RD = permute(results_RD, routes.order_R, routes.inverse_R)",
        PARITY,
    ),
    Fault(
        "FSDP's units",
        "gradients are halved where FSDP reduces them",
        "titan/parallel/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        PARITY,
    ),
    Fault(
        "clipping",
        "each pipeline stage clips by its own norm",
        "titan/optim/clipping.py",
        "    if stages is not None:\n        dist.all_reduce(square, group=stages)\n",
        "",
        PARITY,
    ),
    Fault(
        "divisor of the loss",
        "each rank takes its own tokens for an equal share of all",
        "titan/step/train_step.py",
        "num_valid = _sum(_count_valid(local), self.groups.tokens)",
        "num_valid = _count_valid(local) * self.num_replicas",
        PARITY,
    ),
    Fault(
        "order of samples",
        "the rows of ranks overlap",
        "titan/data/loader.py",
        "first = begin + self.share.rank * self.share.batch",
        "first = begin + self.share.rank",
        ("tests/data",),
    ),
    Fault(
        "commit of a checkpoint",
        "a step that is saved again is deleted before the new one has its name",
        "titan/checkpoint/commit.py",
        "storage.rename(final, replaced)",
        "storage.remove(final)",
        ("tests/checkpoint", "tests/faults"),
    ),
    Fault(
        "rules of the config",
        "a rule is not asked",
        "titan/checks/section_rules.py",
        '    ("parallelism", _kept_blocks),\n',
        "",
        ("tests/config",),
    ),
    Fault(
        "memory in the simulator",
        "what a phase frees is counted once more",
        "titan/sim/replay/memory.py",
        "event, size = alive.pop(event.block), -size",
        "event, size = alive.pop(event.block), 0",
        ("tests/sim",),
    ),
    Fault(
        "time in the simulator",
        "arithmetic and memory traffic of attention do not overlap",
        "titan/sim/price/cost.py",
        "busy = max(busy, self._attention_s(kernel))",
        "busy = busy + self._attention_s(kernel)",
        ("tests/sim",),
    ),
)


def copy_with(fault: Fault, folder: Path) -> None:
    """Copy the tracked files to `folder`, with the fault. Raises ValueError for a text that is not there once."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, folder / name)
    text = (folder / fault.file).read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(
            f"{fault.name}: {fault.file} holds the text {text.count(fault.right)} times"
        )
    (folder / fault.file).write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")


def lane() -> list[str]:
    """Return the ids of the default lane's tests, as the commit draws them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    return [line for line in run.stdout.splitlines() if re.match(r"t\S*\.py::", line)]


def failures_with(fault: Fault, tests: list[str]) -> list[str]:
    """Return those of some tests that fail with the fault, no more than the first ten. Parity rows train three steps."""
    with tempfile.TemporaryDirectory() as name:
        copy_with(fault, Path(name))
        # An editable install finds the copy's modules first, since it comes last on the path.
        environment = {**os.environ, "PYTHONPATH": name, "TITAN_PARITY_STEPS": "3"}
        pytest = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--maxfail", "10"]
        command = [sys.executable, *pytest, "--lane", "full", "-p", "no:cacheprovider"]
        command += [test for test in tests if test.startswith(fault.tests)]
        run = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1, 2):
        raise RuntimeError(
            f"{fault.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}"
        )
    return re.findall(
        r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", run.stdout, re.MULTILINE
    )


def main(words: list[str]) -> int:
    """Print a row for each fault. Return how many were not found."""
    missed, tests = 0, lane()
    print("| planted in | fault | found by |\n|---|---|---|", flush=True)
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        failures = failures_with(fault, tests)
        missed += not failures
        found = (
            f"{len(failures)}{'+' * (len(failures) >= 10)}, such as `{failures[0]}`"
            if failures
            else "**nothing**"
        )
        print(f"| {fault.name} | {fault.what} | {found} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
