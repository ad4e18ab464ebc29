"""Rules of the pipeline stages that a job lists (docs/parallelism.md)."""

from __future__ import annotations

from titan.config.errors import Violations, did_you_mean
from titan.config.model import is_plug_in
from titan.config.schema import JobConfig
from titan.parallel.stage_split import split_modules
from titan.parallel.traits import USUAL_ENDS, ends_of


def check_modules(config: JobConfig) -> Violations:
    """Check that the listed stages hold each module once."""
    parallel, model = config.parallelism, config.model.known_sizes
    stages, layers = parallel.module_fqns_per_model_part, model.n_layers
    if not stages or not layers or parallel.pipeline_parallel_degree == 1:
        return
    if is_plug_in(config.model.name):
        return  # a plug-in's modules may have other names, which only its model knows
    key = "module_fqns_per_model_part"
    # One stage has all modules, in the order of the model.
    ends = ends_of(model)
    [modules] = split_modules(layers, num_stages=1, first_less=0, last_less=0, ends=ends)
    named = [name for names in stages for name in names]
    for name in dict.fromkeys(named):
        if name not in modules:
            yield key, f"the model has no module '{name}'{did_you_mean(name, modules)}"
        elif named.count(name) > 1:
            yield (
                key,
                f"module '{name}' is named {named.count(name)} times; name it in one stage",
            )
    if ends.last != USUAL_ENDS.last and not {*ends.last} <= {*stages[-1]}:
        yield key, f"multi-token prediction needs {', '.join(ends.last)} in the last stage"
    if missing := [name for name in modules if name not in named]:
        listed = ", ".join(missing[:5]) + f" and {len(missing) - 5} more" * (len(missing) > 5)
        yield key, f"{listed} would be in no stage; name each module of the model in one stage"
