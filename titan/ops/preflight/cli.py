"""Command `titan preflight JOB.toml [--nproc N] [--json FILE]`, as the launcher or as one rank.

Exit codes: 0 all is well, 1 a problem was found (each is a line), 2 the user's mistake.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan.base.signals import child_environment
from titan.checks.rules import load_to_run
from titan.config.layout import Layout
from titan.config.options import JOB, command_parser, known_options, positive, put_json
from titan.config.schema import JobConfig
from titan.sim.search.auto import profile_here, resolve

_MOST = 30  # printed problems
_SIM_S = 180  # the other ranks wait for it, for comm.init_timeout_seconds at most


def main(argv: list[str] | None = None) -> int:
    """Run the command, as the launcher or as a rank."""
    parser = command_parser(
        "preflight",
        f"{JOB} [--nproc N] [--json [FILE]] [--no-dry-run]",
        summary="Check devices, links, disks, clocks and versions of all ranks, then run two steps of the job on throw-away weights.",
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes on this machine; default: one per accelerator, else one",
    )
    parser.add_json()
    parser.add_argument("--no-dry-run", action="store_true", help="measure only")
    options, job = parser.parse_known_args(argv)
    from titan.base.hardware import count_accelerators

    # torchrun sets it for each rank. Without it, this process is the launcher or the only rank.
    is_rank = "RANK" in os.environ
    num_processes = None if is_rank else options.nproc or max(1, count_accelerators())
    if num_processes is not None:
        here = partial(profile_here, ranks=num_processes)
        job, _ = resolve(job, world_size=num_processes, profile=here, keep=True)
    config, layout = load_to_run(
        job, world_size=num_processes, options=known_options(parser), here=True
    )
    if num_processes is not None and num_processes > 1:
        # Ranks parse the same command line, without --nproc, which is for the launcher.
        rest = [f"--json={options.json}"] if options.json else []
        rest += ["--no-dry-run"] if options.no_dry_run else []
        from titan.ops.launch import launch_module

        # A rank may end with any code. Here a problem is 1.
        name = "titan.ops.preflight"
        return min(launch_module(name, [*job, *rest], num_processes=num_processes), 1)
    return run_rank(config, layout, job, json_file=options.json, dry=not options.no_dry_run)


def run_rank(
    config: JobConfig, layout: Layout, job: Sequence[str], *, json_file: str | None, dry: bool
) -> int:
    """Run the checks on all ranks together.

    Args:
        config: the job.
        layout: layout of the ranks.
        job: files and overrides, for `titan sim`.
        json_file: file for everything as data; "-": standard output, and the page on standard error.
        dry: whether to run steps of the job.

    Returns:
        The exit code, the same on all ranks unless the dry run fails on some.
    """
    from titan.run.train import set_compile_cache

    # Inductor reads this when it is imported.
    set_compile_cache(config.compile.cache_folder)
    import torch.distributed as dist

    from titan.parallel import build_mesh
    from titan.parallel.init_distributed import start_process_group
    from titan.parallel.torch_compat import set_timeout

    device = start_process_group(
        init_timeout_s=config.comm.init_timeout_seconds,
        expandable_segments=config.training.expandable_segments,
        host_tensors=config.training.enable_cpu_offload,
    )
    mesh = build_mesh(device.type, **layout.degrees)
    set_timeout(
        timedelta(seconds=config.comm.init_timeout_seconds)
    )  # also for the mesh's groups
    # --json - leaves standard output to the data.
    with redirect_stdout(sys.stderr) if json_file == "-" else nullcontext():
        code = check_all(
            config, layout, device=device, mesh=mesh, json_file=json_file, dry=dry, job=job
        )
    sys.stdout.flush()
    dist.destroy_process_group()  # not after a failure: it waits for collectives of all ranks
    return code


def check_all(
    config: JobConfig,
    layout: Layout,
    *,
    device: Any,
    mesh: Any,
    json_file: str | None,
    dry: bool,
    job: Sequence[str] = (),
) -> int:
    """Measure, find problems and print; then run the steps of `job`. All ranks call it in a process group."""
    import torch.distributed as dist

    from titan.base.failure import RunFailure
    from titan.sim.estimate import estimate_memory
    from titan.step.parallelize import torch_dtype

    from . import judge, measure
    from .dry_run import dry_run, explain, out_of_memory

    config = config.on_device(device.type)
    rank, dtype = dist.get_rank(), config.training.compute_dtype
    mine = measure.measure(
        device=device, mesh=mesh, dtype=torch_dtype(dtype), folder=Path(config.job.dump_folder)
    )
    facts: list[measure.RankFacts] = [mine] * dist.get_world_size()
    dist.all_gather_object(facts, mine)
    profile = _profile(config, facts[0].device)
    whole = replace(layout, pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)  # as in a checkpoint
    memory_gib = estimate_memory(config, config.model.sizes, whole)
    section = config.checkpoint
    checkpoint_gib = (
        memory_gib["parameters"] + memory_gib["optimizer"] if section.enable else 0.0
    )
    # The last checkpoint stays until the next one is complete, so one more must fit than are kept.
    problems = judge.problems(
        facts,
        profile,
        checkpoint_gib=checkpoint_gib,
        num_kept=max(section.keep_latest_k, 1) + 1,
    )
    report: dict[str, Any] = {
        "ranks": [asdict(f) for f in facts],
        "expected": {what: judge.expectation(what, facts, profile) for what in mine.rates},
        "checkpoint_gib": checkpoint_gib,
        "dry_run": None,
        "problems": problems,
    }
    if rank == 0:
        print(judge.render(facts, profile, checkpoint_gib=checkpoint_gib), flush=True)
        for text in problems[:_MOST]:
            print(f"PROBLEM  {text}", flush=True)
        if len(problems) > _MOST:
            print(
                f"... and {len(problems) - _MOST} more; --json FILE has all of them", flush=True
            )
        _write(json_file, report)
    dist.barrier()  # the table comes first
    if dry:
        try:
            result = dry_run(config, layout, device=device, mesh=mesh)
        except Exception as error:
            text = explain(error, rank=rank, host=mine.host)
            if not isinstance(error, RunFailure) and not out_of_memory(error):
                traceback.print_exc()
            print(f"PROBLEM  {text}", flush=True)
            _write(json_file, report | {"problems": [*problems, text]}, last=True)
            sys.stdout.flush()
            os._exit(1)  # the others wait in a collective: the agent ends them
        # Two ranks must not differ in the exit code, and one of them asks the simulator.
        answer = [predict(job, len(facts), profile) if rank == 0 else None]
        dist.broadcast_object_list(answer, src=0)
        result = replace(result, predicted_s=answer[0])
        problems += result.problems
        if rank == 0:
            print(result, *(f"PROBLEM  {text}" for text in result.problems), sep="\n")
            report |= {"dry_run": asdict(result), "problems": problems}
    if rank == 0:
        _write(json_file, report, last=True)
        print(
            f"{len(problems)} problem{'s'[: len(problems) != 1]}" if problems else "no problems"
        )
    return 1 if problems else 0


def predict(job: Sequence[str], world_size: int, profile: Any) -> float | None:
    """Predict the seconds of a step by `titan sim`, in a separate process.

    Args:
        job: files and overrides of the command line.
        world_size: number of ranks.
        profile: profile of the hardware.

    Returns:
        Seconds; None if the simulator fails, and for a CPU, whose profile is too coarse.
    """
    if not job or profile is None or profile.name == "cpu":
        return None
    # The simulator records the job on pretended ranks, and needs no device.
    ours = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHELASTIC_",
        "PET_",
    )
    environment = {k: v for k, v in child_environment().items() if not k.startswith(ours)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sim.json"
        command = [sys.executable, "-m", "titan.cli", "sim", *job, f"--json={file}"]
        command += [f"--world-size={world_size}", f"--hardware={profile.name}"]
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=_SIM_S)
            return json.loads(file.read_text())["step_time_s"]
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            print(
                f"titan sim predicts nothing of this job ({type(error).__name__})", flush=True
            )
            return None


def _profile(config: JobConfig, device: str) -> Any:
    """Return the profile of the job's hardware, or of this machine's device; None without a profile."""
    from titan.base.hardware import recognise
    from titan.sim.price.profiles import load_profile, profile_names

    name = config.hardware.name
    if name == "auto":
        known = recognise(device)
        name = "cpu" if device == "CPU" else known.name if known else ""
    return load_profile(name) if name in profile_names() else None


def _write(file: str | None, report: dict[str, Any], *, last: bool = False) -> None:
    if file != "-" or last:
        with redirect_stdout(sys.__stdout__):
            put_json(report, file, indent=1)
            print(end="", flush=True)  # a rank may end at once
