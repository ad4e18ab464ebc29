"""Command `titan`. Each subcommand imports its modules when it runs, so that help and mistakes cost no time.

Exit codes: 0 done; 2 the user's mistake, a line for each; 75 stopped by a signal after saving; 1
any other failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.commands import (
    COMMANDS,
    command_names,
    load_command,
    missing_part,
    prepare_process,
    summary_of,
)
from titan.config.options import JOB, add_new_layout, add_quiet, command_parser, positive, whole
from titan.config.plug_ins import load_plug_in, load_plug_ins, plug_ins

# Commands that draw on the terminal. They read the files of a job that was named.
_DRAWS = ("train", "sim", "plan", "autosac", "preflight")

if TYPE_CHECKING:
    from titan.config.layout import Layout
    from titan.config.schema import JobConfig
    from titan.sim.price.profiles import Profile

# What to do in place of commands that are gone.
_FORMER = {
    "autofsdp": "is now `titan plan --only fsdp`",
    "reproduce": "is gone; `titan sim` takes the jobs of train_configs/published",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    if problem := prepare_process():
        print(problem, file=sys.stderr)
        return 2
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "--version":
        from titan import __version__

        print(f"titan {__version__}")
        return 0
    names = command_names()
    if name not in names:
        # The nearest name, or all of them.
        match = get_close_matches(name, names, n=1)
        hint = f"did you mean '{match[0]}'?" if match else f"there are {', '.join(names)}"
        text = _FORMER.get(name, f"unknown command; {hint}")
        if name in COMMANDS:
            text = f"this titan was installed without {missing_part(name)}, which has this command"
        print(f"command line: {name}: {text}", file=sys.stderr)
        return 2
    # pydantic looks for plug-ins in every installed package, which takes 0.1 s. titan has none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with nullcontext() if name in _DRAWS else _printable_output(name):
            return load_command(name)(rest)
    except SystemExit as request:  # by argparse, after --help or a wrong option
        return request.code if isinstance(request.code, int) else 1
    # As of `titan config ... | head`; Python would complain again when it flushes.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Imported here, so that --help imports neither pydantic nor other large modules.
        from titan.run.supervisor import explain

        failure = explain(error)
        if failure is None:
            raise
        print(failure, file=sys.stderr)
        return failure.exit_code


@contextmanager
def _printable_output(name: str) -> Iterator[None]:
    """Escape characters that could control the terminal. The files that these commands print may come from anybody."""
    from titan.base.untrusted import PrintableStream

    plain = sys.stdout, sys.stderr
    # What a model says stays as it is in a file or a pipe.
    if name != "generate" or sys.stdout.isatty():
        sys.stdout = PrintableStream(sys.stdout)
    # Progress bars of libraries return to the beginning of the line.
    sys.stderr = PrintableStream(sys.stderr, allowed="\r")
    try:
        yield
    finally:
        sys.stdout, sys.stderr = plain


def _overview() -> str:
    names = command_names()
    width = max(map(len, names))
    rows = (f"  {name:{width}}  {summary_of(name)}" for name in names)
    return "\n".join(
        [
            "usage: titan COMMAND ...",
            "",
            *rows,
            "",
            "`titan COMMAND --help` says more. The keys of a job file: `titan config JOB.toml --comments`, docs/config.md",
        ]
    )


def _parser(name: str, arguments: str = JOB) -> argparse.ArgumentParser:
    return command_parser(name, arguments, summary=summary_of(name))


def _leaves_layout_open(job: Sequence[str]) -> bool:
    """Return whether a job has `parallelism.layout = "auto"`. Mistakes in it are reported later."""
    from titan.config.errors import ConfigError
    from titan.config.load import load_from_argv

    try:
        return load_from_argv(job, warn=False).parallelism.layout == "auto"
    except ConfigError:
        return False


def train(argv: list[str]) -> int:
    """Run `titan train`: this process alone, or as the launcher of several."""
    extensions = [extension() for extension in load_plug_ins("titan.extensions", of="train")]
    more = "".join(f" {extension.usage}" for extension in extensions)
    parser = _parser(
        "train", f"{JOB} [--nproc N] [--max-restarts R] [--new-layout]{more} [--quiet]"
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes on this machine; default: one per accelerator, else one",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole,
        metavar="R",
        help="times to go on from the newest checkpoint after a process has failed; default: 0",
    )
    add_new_layout(parser)
    for extension in extensions:
        extension.add_options(parser)
    add_quiet(parser)
    options, job = parser.parse_known_args(argv)
    # torchrun sets RANK. Then this process is a rank already, and starts no others.
    if "RANK" not in os.environ:
        from titan.base.hardware import count_accelerators

        known = [f"--{name.replace('_', '-')}" for name in vars(options)]
        num_processes = options.nproc or max(1, count_accelerators())
        choice = None
        if _leaves_layout_open(job):  # other jobs import no simulator
            auto = import_module("titan.sim.search.auto")
            job, choice = auto.resolve(
                job,
                world_size=num_processes,
                profile=lambda config: auto.profile_here(config, num_processes),
                keep=not options.new_layout,
            )

        def load(num_processes: int) -> JobConfig:
            # Rank 0 warns.
            how: dict[str, Any] = {"options": known, "here": True, "warn": False}
            return _load_to_run(job, world_size=num_processes, **how)[0]

        for extension in extensions:
            if (code := extension.launch(options, job, load)) is not None:
                return code
        config = load(num_processes)
        if num_processes > 1 or options.max_restarts or choice:
            code = import_module("titan.train").before_start(config)
            if code is not None:
                return code
        if choice:
            choice.write(config)
        # One process without restarts needs no launcher.
        if num_processes > 1 or options.max_restarts:
            return _launcher(num_processes)(
                job,
                num_processes=num_processes,
                dump_folder=config.job.dump_folder,
                max_restarts=options.max_restarts or 0,
            )
    return import_module("titan.train").main(job)


def _launcher(num_processes: int) -> Callable[..., int]:
    """Return the function that starts the processes of a run on this machine, such as titan.ops.launch.launch."""
    from titan.config.errors import COMMAND_LINE, ConfigError, Problem

    for launch in load_plug_ins("titan.extensions", of="launch"):
        return launch
    fix = f"torchrun --nproc-per-node={num_processes} -m titan.train JOB.toml"
    text = f"the launcher of several processes is not installed; start them by `{fix}`"
    raise ConfigError([Problem(COMMAND_LINE, 0, "--nproc", text)])


def check(argv: list[str]) -> int:
    """Run `titan check`."""
    usage = f"{JOB} [--world-size N] [--hardware H] [--formula] [--json]\n       titan check --hf FOLDER [--json]"
    parser = _parser("check", usage)
    parser.add_argument(
        "--world-size", type=positive, default=1, metavar="N", help="ranks in all; default: 1"
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument(
        "--hardware",
        metavar="H",
        help=f"will it fit another machine? {_profiles().hardware_names()}. Files and folders of the job are then not "
        "looked for on this one",
    )
    about = "with --hardware: do not simulate, which takes seconds"
    parser.add_argument("--formula", action="store_true", help=about)
    about = "instead of a job: a Hugging Face folder, or its config.json. Print which model of titan it is, and whether its weights load"
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help=about)
    options, job = parser.parse_known_args(argv)
    if options.hf:
        if job or options.hardware or options.formula:
            parser.error("--hf goes with --json, and with no job")
        for entry in plug_ins("titan.extensions", of="folder"):
            return load_plug_in(entry)(options)
        parser.error(
            "--hf: this titan was installed without titan/huggingface, which reads folders"
        )
    from titan.config.errors import ConfigError

    profile = None
    try:
        if options.hardware and not _is_datasheet(options.hardware):
            profile = _profiles().load_profile(options.hardware)
        elif options.hardware:
            job.append(f"--hardware.name={options.hardware}")
        # The names are for the error of a misspelled option.
        names = ["--world-size", "--hardware", "--json", "--formula", "--hf"]
        # With --hardware the question is about another machine, which has the files, or will have.
        here = options.hardware is None
        how = {"here": here, "device": profile.device_kind if profile else None}
        job = _with_layout(job, world_size=options.world_size, hardware=options.hardware)
        config, layout = _load_to_run(job, world_size=options.world_size, options=names, **how)
        if here:
            machine = import_module("titan.checks.machine")
            lines = machine.advise_rows(config)
            lines += machine.advise_config(config, machine.first_weights(config))
            import_module("titan.config.load").print_warnings(lines)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"problems": [asdict(problem) for problem in error.problems]}, indent=2))
        return 2
    device = import_module("titan.checks.rules").device_of(config)
    facts = _facts(config.on_device(device), layout, profile)
    if device == "cpu" and here and facts["memory_gib"]:
        gpu = _facts(config.on_device("cuda"), layout, None)
        facts["on_gpus"] = {"gib": gpu["memory_gib"]["total"], "precision": gpu["precision"]}
    config = config.on_device(device)
    judged: dict[str, Any] = {}
    if options.hardware and not options.formula:
        # Only this part imports torch.
        judged = import_module("titan.sim.search.fit_advisor").suggest(
            job, config, layout, hardware=options.hardware
        )
        if "simulation" in judged:
            step = judged["simulation"]
            facts |= {"memory_method": "simulation", "fits": step["fits"], "tight": step["tight"]}
    if options.json:
        print(json.dumps(facts | judged | {"problems": []}, indent=2))
    else:
        print(_page(facts, judged))
    return 2 if facts["fits"] is False and not facts["tight"] else 0


def config(argv: list[str]) -> int:
    """Run `titan config`."""
    parser = _parser("config", f"{JOB} [--comments]")
    parser.add_argument("--comments", action="store_true", help="with the meaning of every key")
    options, job = parser.parse_known_args(argv)
    from titan.checks.rules import check as check_rules
    from titan.config.errors import ConfigError
    from titan.config.render import to_toml

    # Report broken rules together with wrong keys: check the readable part of the config.
    problems = []
    try:
        resolved = _load(job, options=["--comments"])
    except ConfigError as error:
        problems, resolved = error.problems, error.partial
    if resolved is not None:
        problems += check_rules(resolved)
    if problems or resolved is None:
        raise ConfigError(problems)
    print(to_toml(resolved, comments=options.comments), end="")
    return 0


def schema(argv: list[str]) -> int:
    """Run `titan schema`."""
    _parser("schema", "").parse_args(argv)
    from titan.config.render import json_schema

    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0


def _load(argv: Sequence[str], *, options: Sequence[str]) -> JobConfig:
    from titan.config.load import load_from_argv

    return load_from_argv(argv, options=options)


def _load_to_run(argv: Sequence[str], **how: Any) -> tuple[JobConfig, Layout]:
    from titan.checks.rules import load_to_run

    return load_to_run(argv, **how)


def _with_layout(job: Sequence[str], *, world_size: int, hardware: str | None) -> list[str]:
    """Return a job with the layout of its run folder, or by formula, if it leaves the choice to titan."""
    if not _leaves_layout_open(job):
        return [*job]
    auto = import_module("titan.sim.search.auto")

    def profile(config: JobConfig) -> Profile:
        if hardware:
            return _profiles().load_profile(hardware)
        return auto.profile_here(config, world_size)

    how: dict[str, Any] = {"keep": not hardware, "simulate": False}
    return auto.resolve(job, world_size=world_size, profile=profile, **how)[0]


def _profiles() -> Any:
    return import_module("titan.sim.price.profiles")


def _is_datasheet(hardware: str) -> bool:
    """Return whether `hardware.name` may have this value. Any other name is a profile, or unknown."""
    from titan.base.hardware import HARDWARE

    return hardware.lower() in {row.name for row in HARDWARE}


def _facts(config: JobConfig, layout: Layout, profile: Profile | None) -> dict[str, Any]:
    """Return the answer of `titan check` as data. A profile of the simulator replaces the job's hardware."""
    from titan.base.hardware import MARGIN, by_name
    from titan.checks.extension import check_extensions
    from titan.config.model import model_title
    from titan.config.phases import memory_of, phases_of

    model, training = config.model.sizes, config.training
    phases = phases_of(config, world_size=layout.world_size)
    memory = memory_of(phases, model)
    # Of the phase that needs the most memory. Empty: nothing that estimates it is installed.
    memory_gib = max(memory, key=lambda gib: gib["total"], default={})
    total_gib = memory_gib.get("total")
    named = config.hardware.name != "auto"
    hardware = profile or (by_name(config.hardware.name) if named else None)
    available_gib = hardware.memory_gib if hardware else None
    usable_gib = (available_gib or 0) * (1 - getattr(hardware, "margin", MARGIN))
    # Counts all ranks and all micro-batches of a step.
    sequences = training.local_batch_size * layout.dp * layout.accumulation
    return {
        "world_size": layout.world_size,
        "layout": asdict(layout),
        "layout_reason": config.parallelism.layout_reason,
        "model": {
            "name": config.model.name,
            "flavor": model_title(config.model),
            "parameters": model.num_params,
            "active_parameters": model.num_active_params,
        },
        "local_batch_size": training.local_batch_size,
        "global_batch_size": sequences,
        "seq_len": training.seq_len,
        "tokens_per_step": sequences * training.seq_len,
        "phases": [
            {"about": str(phase), "memory_gib": gib["total"]}
            for phase, gib in zip(phases, memory, strict=False)
        ],
        "precision": training.compute_dtype,
        **{k: v for part in check_extensions() for k, v in part.facts(config).items()},
        "memory_gib": memory_gib,
        "memory_method": "formula",
        "hardware": hardware.name if hardware else None,
        "hardware_memory_gib": available_gib,
        "fits": None if None in (available_gib, total_gib) else total_gib <= usable_gib,
        "tight": None not in (available_gib, total_gib) and usable_gib < total_gib <= available_gib,
    }


def _page(facts: dict[str, Any], judged: dict[str, Any]) -> str:
    """Format the answer of `titan check` for people. `judged` is the simulator's part, if it ran."""
    from titan.base.hardware import MARGIN
    from titan.checks.extension import check_extensions

    model, layout = facts["model"], facts["layout"]
    axes = " x ".join(f"{axis} {n}" for axis, n in layout.items() if axis != "accumulation")
    batch = (
        f"{facts['local_batch_size']} sequences x {facts['seq_len']:,} tokens x "
        f"{layout['dp_replicate'] * layout['dp_shard']} data-parallel ranks x {layout['accumulation']} accumulation"
    )
    verdict = import_module("titan.sim.search.fit_advisor").describe(judged) if judged else []
    first = []
    if "simulation" in judged:
        first = import_module("titan.sim.report.text").unsupported(judged["simulation"])
    if facts["fits"] is not None and "simulation" not in judged:
        total, available = facts["memory_gib"]["total"], facts["hardware_memory_gib"]
        answer = "fits" if facts["fits"] else "TIGHT" if facts["tight"] else "DOES NOT FIT"
        what = f"{total:.1f} of {available:.1f} GiB on {facts['hardware']}, by formula"
        verdict += [f"{answer}: {what}; a job that fits leaves {MARGIN:.0%}"]
    # Counts only the experts of a token.
    num_active = model["active_parameters"]
    active = "" if num_active == model["parameters"] else f", {num_active:,} of them active"
    holds = "the simulation below holds" if "simulation" in judged else "not measured"
    memory = [f"    {name:<12} {gib:10.3f}" for name, gib in facts["memory_gib"].items()]
    if memory:
        precision = facts["precision"]
        memory.insert(0, f"memory   GiB on the fullest rank, in {precision}, by formula ({holds})")
    if gpus := facts.get("on_gpus"):
        what = f"{gpus['gib']:.1f} GiB in {gpus['precision']}"
        memory.append(f"    counted as for this machine's CPU; on GPUs {what}: --hardware H")
    # The step above belongs to the first phase.
    phases = [f"{p['about']}; {p['memory_gib']:.1f} GiB" for p in facts["phases"]]
    phases = [f"         {line}" for line in phases] * (len(phases) > 1)
    return "\n".join(
        [
            *first,
            f"model    {model['name']} {model['flavor']}, {model['parameters']:,} parameters{active}",
            f"layout   {facts['world_size']} ranks = {axes}",
            *([f"chosen   {facts['layout_reason']}"] if facts["layout_reason"] else []),
            f"step     {batch} = {facts['tokens_per_step']:,} tokens",
            *phases,
            *memory,
            *(line for part in check_extensions() for line in part.lines(facts)),
            *verdict,
            "no mistakes in the job, but it does not fit with room to spare"
            if facts["fits"] is False
            else "no problems",
        ]
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # As in titan/run/train.py: gloo's threads may be at work while the interpreter is torn down.
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
