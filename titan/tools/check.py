"""Command `titan check`: the mistakes in a job, its layout and its memory. Imports no torch.

Optional parts add options and lines, such as --hardware of the simulator (titan/checks/check_extension.py).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from titan.checkpoint.identity import sources_of
from titan.checks.check_extension import CheckExtension
from titan.checks.machine import advise_config, first_weights, try_rows, try_tokenizer
from titan.checks.rules import device_of, load_to_run
from titan.config.errors import ConfigError
from titan.config.layout import Layout
from titan.config.load import print_warnings
from titan.config.model import model_title
from titan.config.options import known_options, mistake, put_json
from titan.config.phases import memory_of, phases_of
from titan.config.plug_ins import parts_of
from titan.config.schema import CsvSource, JobConfig, JsonlSource, ParquetSource, ShardsSource

from .shipped import folders
from .tables import parser_of

_TRIED_ROWS = 100  # rows of a source that are read
_BESIDE_FOLDER = ("hf", "json", "world_size")  # options that go with --hf


def main(argv: list[str]) -> int:
    """Run `titan check`."""
    extensions = [*parts_of(CheckExtension)]
    parser = parser_of("check")
    parser.usage = str(parser.usage).format("".join(each.usage for each in extensions))
    for extension in extensions:
        extension.add_options(parser)
    options, job = parser.parse_known_args(argv)
    if options.hf:
        others = (value for name, value in vars(options).items() if name not in _BESIDE_FOLDER)
        if job or any(others):
            raise mistake("--hf", "goes with --json, and with no job")
        return folders().main(options)
    try:
        for extension in extensions:
            job = extension.prepare(options, job)
        here = all(extension.here for extension in extensions)
        config, layout = load_to_run(
            job,
            world_size=options.world_size,
            # The names are for the error of a misspelled option.
            options=known_options(parser),
            here=here,
            device=next((e.device for e in extensions if e.device), None),
        )
        if here:
            print_warnings(advise_rows(config) + advise_config(config, first_weights(config)))
    except ConfigError as error:
        put_json({"problems": [asdict(problem) for problem in error.problems]}, options.json)
        if options.json != "-":
            raise
        return 2
    device = device_of(config)
    facts = _facts(config.on_device(device), layout)
    if device == "cpu" and here and facts["memory_gib"]:
        gpu = _facts(config.on_device("cuda"), layout)
        facts["on_gpus"] = {"gib": gpu["memory_gib"]["total"], "precision": gpu["precision"]}
    for extension in extensions:
        facts |= extension.facts(config.on_device(device), facts)
    if not put_json(facts | {"problems": []}, options.json):
        print("\n".join(_page(facts, extensions)))
    return 1 if facts.get("fits") is False and not facts["tight"] else 0


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


def _facts(config: JobConfig, layout: Layout) -> dict[str, Any]:
    """Return the answer of `titan check` as data, without that of its optional parts."""
    model, training = config.model.sizes, config.training
    phases = phases_of(config, world_size=layout.world_size)
    memory = memory_of(phases, model)
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
        # Of the phase that needs the most memory. Empty: nothing that estimates it is installed.
        "memory_gib": max(memory, key=lambda gib: gib["total"], default={}),
        "memory_method": "formula",
    }


def _page(facts: dict[str, Any], extensions: list[CheckExtension]) -> list[str]:
    """Return the lines of the answer for people."""
    model, layout = facts["model"], facts["layout"]
    axes = " x ".join(f"{axis} {n}" for axis, n in layout.items() if axis != "accumulation")
    batch = (
        f"{facts['local_batch_size']} sequences x {facts['seq_len']:,} tokens x "
        f"{layout['dp_replicate'] * layout['dp_shard']} data-parallel ranks x {layout['accumulation']} accumulation"
    )
    # Counts only the experts of a token.
    num_active = model["active_parameters"]
    active = "" if num_active == model["parameters"] else f", {num_active:,} of them active"
    # The step above belongs to the first phase.
    phases = [f"         {p['about']}; {p['memory_gib']:.1f} GiB" for p in facts["phases"]]
    return [
        *(line for extension in extensions for line in extension.first_lines(facts)),
        f"model    {model['name']} {model['flavor']}, {model['parameters']:,} parameters{active}",
        f"layout   {facts['world_size']} {'rank' if facts['world_size'] == 1 else 'ranks'} = {axes}",
        f"step     {batch} = {facts['tokens_per_step']:,} tokens",
        *(phases if len(phases) > 1 else ()),
        *_memory(facts),
        *(line for extension in extensions for line in extension.lines(facts)),
        "no mistakes in the job, but it does not fit with room to spare"
        if facts.get("fits") is False
        else "no problems",
    ]


def _memory(facts: dict[str, Any]) -> list[str]:
    """Return the lines about the memory by formula. Without one, an empty list."""
    lines = [f"    {name:<12} {gib:10.3f}" for name, gib in facts["memory_gib"].items()]
    if lines:
        holds = "the simulated value below is used" if "simulation" in facts else "not measured"
        precision = facts["precision"]
        lines.insert(
            0, f"memory   GiB on the fullest rank, in {precision}, by formula ({holds})"
        )
    if gpus := facts.get("on_gpus"):
        more = f"{gpus['gib']:.1f} GiB in {gpus['precision']}"
        lines.append(f"    for this CPU. For a GPU add --hardware, such as h100-sxm: {more}")
    return lines
