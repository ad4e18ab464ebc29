"""Cost of replica groups in `titan sim`. Imports no torch for a job without groups."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titan.config.options import mistake
from titan.config.schema import JobConfig
from titan.sim.extension import SimExtension
from titan.sim.report.text import duration

from .section import groups_of

if TYPE_CHECKING:
    from titan.sim.simulate import Facts, Simulation


class GroupCosts(SimExtension):
    """The facts `groups`, and their lines on the page."""

    def check(self, options: Namespace, config: JobConfig) -> None:
        if options.run and groups_of(config).enable:
            raise mistake(
                "--run", "does not know replica groups; add --fault_tolerance.enable=false"
            )

    def facts(self, simulation: Simulation, **how: Any) -> Facts:
        from .cost import group_facts

        return group_facts(simulation, **how)

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield the cost of the groups, next to HSDP. The rest of the page describes one group."""
        facts = facts.get("groups", {})
        if not facts:
            return
        link = f"{facts['link_gbit_per_s']:g} Gbit/s a rank"
        link += f" and {facts['link_latency_us']:g} us" * (facts["link_latency_us"] > 0)
        yield f"  groups    {facts['replica_groups']} of these, joined by {link}"
        yield f"            a rank sends {facts['sent_bytes'] / 1e9:,.2f} GB in a step, which waits {duration(facts['exposed_s'])} for it"
        for name, row in {"a step": facts, "as HSDP": facts["hsdp"]}.items():
            if row:
                yield f"            {name} {duration(row['step_time_s'])}, {row['tokens_per_s']:,.0f} tokens/s in all"
