"""Command `titan check`: the mistakes in a job, its layout and memory, and whether it fits some hardware.

Only a simulation (--hardware without --formula) imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan.base.hardware import HARDWARE, MARGIN, by_name
from titan.checkpoint.identity import sources_of
from titan.checks.machine import advise_config, first_weights, try_rows, try_tokenizer
from titan.checks.rules import device_of, load_to_run
from titan.config.errors import ConfigError
from titan.config.layout import Layout
from titan.config.load import leaves_layout_open, print_warnings
from titan.config.model import model_title
from titan.config.options import known_options, mistake, put_json
from titan.config.phases import memory_of, phases_of
from titan.config.schema import CsvSource, JobConfig, JsonlSource, ParquetSource, ShardsSource
from titan.sim.price import profiles
from titan.sim.price.profiles import Profile

from .check_extension import check_extensions
from .shipped import folders
from .tables import parser_of

_TRIED_ROWS = 100  # rows of a source that are read


def main(argv: list[str]) -> int:
    """Run `titan check`."""
    parser = parser_of("check")
    parser.add_argument(
        "--hardware",
        metavar="H",
        help=f"will it fit another machine? {profiles.hardware_names()}. Files and folders of the job are then not "
        "looked for on this one",
    )
    parser.add_json()
    options, job = parser.parse_known_args(argv)
    if options.hf:
        if job or options.hardware or options.formula:
            raise mistake("--hf", "goes with --json, and with no job")
        return folders().main(options)
    profile = None
    try:
        if options.hardware and options.hardware.lower() not in {row.name for row in HARDWARE}:
            profile = profiles.load_profile(options.hardware)
        elif options.hardware:
            job.append(f"--hardware.name={options.hardware}")
        # The names are for the error of a misspelled option.
        names = known_options(parser)
        # With --hardware the question is about another machine, which has the files, or will have.
        here = options.hardware is None
        job = _with_layout(job, world_size=options.world_size, hardware=options.hardware)
        config, layout = load_to_run(
            job,
            world_size=options.world_size,
            options=names,
            here=here,
            device=profile.device_kind if profile else None,
        )
        if here:
            print_warnings(advise_rows(config) + advise_config(config, first_weights(config)))
    except ConfigError as error:
        if not options.json:
            raise
        put_json({"problems": [asdict(problem) for problem in error.problems]}, options.json)
        if options.json != "-":
            raise
        return 2
    device = device_of(config)
    facts = _facts(config.on_device(device), layout, profile)
    if device == "cpu" and here and facts["memory_gib"]:
        gpu = _facts(config.on_device("cuda"), layout, None)
        facts["on_gpus"] = {"gib": gpu["memory_gib"]["total"], "precision": gpu["precision"]}
    config = config.on_device(device)
    judged: dict[str, Any] = {}
    if options.hardware and not options.formula:
        from titan.sim.search.fit_advisor import suggest  # imports torch

        judged = suggest(job, config, layout, hardware=options.hardware)
        if "simulation" in judged:
            step = judged["simulation"]
            facts |= {
                "memory_method": "simulation",
                "fits": step["fits"],
                "tight": step["tight"],
            }
    if not put_json(facts | judged | {"problems": []}, options.json):
        print(_page(facts, judged))
    return 1 if facts["fits"] is False and not facts["tight"] else 0


def advise_rows(config: JobConfig) -> list[str]:
    """Return a line for each source with keys that nothing reads: of prepared rows, or of the first rows."""
    tokenizer, lines = try_tokenizer(config), []
    if tokenizer is None:
        return lines
    for key, source in sources_of(config, "training"):
        if isinstance(source, ShardsSource | JsonlSource | CsvSource | ParquetSource):
            found = try_rows(config, tokenizer, source, count=_TRIED_ROWS)
            lines += [f"{key}: {line}" for line in found]
    return lines


def _with_layout(job: Sequence[str], *, world_size: int, hardware: str | None) -> list[str]:
    """Return a job with the layout of its run folder, or by formula, if it leaves the choice to titan."""
    if not leaves_layout_open(job):
        return [*job]
    from titan.sim.search.auto import profile_here, resolve

    def profile(config: JobConfig) -> Profile:
        if hardware:
            return profiles.load_profile(hardware)
        return profile_here(config, world_size)

    chosen, _ = resolve(
        job, world_size=world_size, profile=profile, keep=not hardware, simulate=False
    )
    return chosen


def _facts(config: JobConfig, layout: Layout, profile: Profile | None) -> dict[str, Any]:
    """Return the answer of `titan check` as data. A profile of the simulator replaces the job's hardware."""
    model, training = config.model.sizes, config.training
    phases = phases_of(config, world_size=layout.world_size)
    memory = memory_of(phases, model)
    # Of the phase that needs the most memory. Empty: nothing that estimates it is installed.
    memory_gib = max(memory, key=lambda gib: gib["total"], default={})
    total_gib = memory_gib.get("total")
    named = config.hardware.name != "auto"
    hardware = profile or (by_name(config.hardware.name) if named else None)
    available_gib = hardware.memory_gib if hardware else None
    fits, tight = None, False
    if available_gib is not None and total_gib is not None:
        fits = total_gib <= available_gib * (1 - getattr(hardware, "margin", MARGIN))
        tight = not fits and total_gib <= available_gib
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
        "fits": fits,
        "tight": tight,
    }


def _page(facts: dict[str, Any], judged: dict[str, Any]) -> str:
    """Format the answer of `titan check` for people. `judged` is the simulator's part, if it ran."""
    model, layout = facts["model"], facts["layout"]
    axes = " x ".join(f"{axis} {n}" for axis, n in layout.items() if axis != "accumulation")
    batch = (
        f"{facts['local_batch_size']} sequences x {facts['seq_len']:,} tokens x "
        f"{layout['dp_replicate'] * layout['dp_shard']} data-parallel ranks x {layout['accumulation']} accumulation"
    )
    verdict, first = [], []
    if judged:
        from titan.sim.search.fit_advisor import describe

        verdict = describe(judged)
    if "simulation" in judged:
        from titan.sim.report.text import unsupported

        first = unsupported(judged["simulation"])
    if facts["fits"] is not None and "simulation" not in judged:
        total, available = facts["memory_gib"]["total"], facts["hardware_memory_gib"]
        answer = "fits" if facts["fits"] else "TIGHT" if facts["tight"] else "DOES NOT FIT"
        what = f"{total:.1f} of {available:.1f} GiB on {facts['hardware']}, by formula"
        verdict += [f"{answer}: {what}; a job that fits leaves {MARGIN:.0%}"]
    # Counts only the experts of a token.
    num_active = model["active_parameters"]
    active = "" if num_active == model["parameters"] else f", {num_active:,} of them active"
    holds = "the simulated value below is used" if "simulation" in judged else "not measured"
    memory = [f"    {name:<12} {gib:10.3f}" for name, gib in facts["memory_gib"].items()]
    if memory:
        precision = facts["precision"]
        memory.insert(
            0, f"memory   GiB on the fullest rank, in {precision}, by formula ({holds})"
        )
    if gpus := facts.get("on_gpus"):
        what = f"{gpus['gib']:.1f} GiB in {gpus['precision']}"
        memory.append(f"    for this CPU. For a GPU add --hardware, such as h100-sxm: {what}")
    # The step above belongs to the first phase.
    phases = [f"{p['about']}; {p['memory_gib']:.1f} GiB" for p in facts["phases"]]
    phases = [f"         {line}" for line in phases] * (len(phases) > 1)
    return "\n".join(
        [
            *first,
            f"model    {model['name']} {model['flavor']}, {model['parameters']:,} parameters{active}",
            f"layout   {facts['world_size']} {'rank' if facts['world_size'] == 1 else 'ranks'} = {axes}",
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
