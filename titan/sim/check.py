"""Option --hardware of `titan check`: whether a job fits, by formula or by a simulation.

Only a simulation imports torch.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from titan.base.hardware import HARDWARE, MARGIN, by_name
from titan.checks.check_extension import CheckExtension
from titan.config.layout import layout_of, stage_split
from titan.config.load import leaves_layout_open
from titan.config.schema import JobConfig
from titan.sim.price.profiles import Profile, hardware_names, load_profile


class HardwareCheck(CheckExtension):
    """Hardware of a job, and whether the job fits it."""

    usage = " [--hardware H] [--formula]"

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--hardware",
            metavar="H",
            help=f"will it fit another machine? {hardware_names()}. Files and folders of the job are then not "
            "looked for on this one",
        )
        parser.add_argument(
            "--formula",
            action="store_true",
            help="with --hardware: do not simulate, which takes seconds",
        )

    def prepare(self, options: Namespace, job: list[str]) -> list[str]:
        self._options, self._profile = options, None
        # With --hardware the question is about another machine, which has the files, or will have.
        self.here = options.hardware is None
        if options.hardware and options.hardware.lower() not in {row.name for row in HARDWARE}:
            self._profile = load_profile(options.hardware)
            self.device = self._profile.device_kind
        elif options.hardware:
            job = [*job, f"--hardware.name={options.hardware}"]
        self._job = self._with_layout(job) if leaves_layout_open(job) else job
        return self._job

    def _with_layout(self, job: list[str]) -> list[str]:
        """Return a job with the layout of its run folder, or by formula."""
        from titan.sim.search.auto import profile_here, resolve

        hardware, world_size = self._options.hardware, self._options.world_size

        def profile(config: JobConfig) -> Profile:
            return load_profile(hardware) if hardware else profile_here(config, world_size)

        return resolve(
            job, world_size=world_size, profile=profile, keep=not hardware, simulate=False
        )[0]

    def facts(self, config: JobConfig, known: dict[str, Any]) -> dict[str, Any]:
        # A profile of the simulator replaces the job's hardware.
        named = config.hardware.name != "auto"
        hardware = self._profile or (by_name(config.hardware.name) if named else None)
        available_gib = hardware.memory_gib if hardware else None
        total_gib = known["memory_gib"].get("total")
        fits, tight = None, False
        if available_gib is not None and total_gib is not None:
            fits = total_gib <= available_gib * (1 - getattr(hardware, "margin", MARGIN))
            tight = not fits and total_gib <= available_gib
        facts = {
            "hardware": hardware.name if hardware else None,
            "hardware_memory_gib": available_gib,
            "fits": fits,
            "tight": tight,
        }
        if config.parallelism.pipeline_parallel_degree > 1:
            split = stage_split(config, num_layers=config.model.sizes.n_layers)
            facts["bubble"] = split.schedule.bubble_fraction()
        if not self._options.hardware or self._options.formula:
            return facts
        from titan.sim.search.fit_advisor import suggest  # imports torch

        layout = layout_of(config, self._options.world_size)
        judged = suggest(self._job, config, layout, hardware=self._options.hardware)
        if "simulation" in judged:
            step = judged["simulation"]
            facts |= {
                "memory_method": "simulation",
                "fits": step["fits"],
                "tight": step["tight"],
            }
        return facts | judged

    def first_lines(self, facts: dict[str, Any]) -> list[str]:
        if "simulation" not in facts:
            return []
        from titan.sim.report.text import unsupported

        return unsupported(facts["simulation"])

    def lines(self, facts: dict[str, Any]) -> list[str]:
        lines = []
        if bubble := facts.get("bubble"):
            lines = [
                f"bubble   {bubble:.0%} of the step, by the schedule alone: more microbatches shrink it"
            ]
        if self._options.hardware and not self._options.formula:
            from titan.sim.search.fit_advisor import describe

            lines += describe(facts)
        if facts["fits"] is not None and "simulation" not in facts:
            total, available = facts["memory_gib"]["total"], facts["hardware_memory_gib"]
            answer = "fits" if facts["fits"] else "TIGHT" if facts["tight"] else "DOES NOT FIT"
            numbers = f"{total:.1f} of {available:.1f} GiB on {facts['hardware']}, by formula"
            lines += [f"{answer}: {numbers}; a job that fits leaves {MARGIN:.0%}"]
        return lines
