"""Former names of titan's modules. Importing one gives the module of today, and warns. They stay for one release."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# A former name, and the name of today. All modules below a name that ends with a dot have moved with it.
_NAMES = """
titan.async_scalars titan.base.async_scalars
titan.base.flight_recorder titan.ops.flight_recorder
titan.bench titan.ops.bench
titan.checkpoint.export titan.huggingface.export
titan.checkpoint.hf_folders titan.huggingface.hf_folders
titan.checkpoint.hf_model titan.huggingface.hf_model
titan.checkpoint.huggingface titan.huggingface.load
titan.checkpoint.interval titan.sim.report.interval
titan.checkpoint.quantized titan.huggingface.quantized
titan.checkpoint.saved titan.checkpoint.identity
titan.checks.evaluation_rules titan.contrib.evaluation.rules
titan.checks.extension titan.tools.check_extension
titan.checks.text_identity titan.checkpoint.identity
titan.config.resume_diff titan.checkpoint.identity
titan.config.shipped titan.tools.shipped
titan.contrib.demo_pictures titan.contrib.flux
titan.contrib.demo_pictures.captions titan.contrib.flux.captions
titan.contrib.demo_pictures.shapes titan.contrib.flux.shapes
titan.contrib.lm_eval titan.contrib.evaluation.lm_eval
titan.contrib.lm_eval.harness titan.contrib.evaluation.harness
titan.contrib.sweep titan.contrib.scaling
titan.data.chat titan.contrib.chat.template
titan.data.examples titan.contrib.evaluation.examples
titan.data.named_tokens titan.data.special_tokens
titan.data.parts titan.contrib.prepare_hosts.parts
titan.data.passes titan.contrib.evaluation.passes
titan.data.scoring titan.contrib.evaluation.scoring
titan.data.tokenizer_base titan.data.special_tokens
titan.generation titan.tools.generation
titan.hardware titan.base.hardware
titan.health titan.ops
titan.health.errors titan.base.errors
titan.health.flight_recorder titan.ops.flight_recorder
titan.health.heartbeats titan.ops.heartbeats
titan.health.launch titan.ops.launch
titan.health.memory_limit titan.ops.memory_limit
titan.health.monitor titan.ops.monitor
titan.health.peers titan.ops.peers
titan.health.recovery titan.ops.recovery
titan.health.rendezvous titan.ops.rendezvous
titan.health.run_lock titan.ops.run_lock
titan.health.signals titan.base.signals
titan.health.warm_start titan.ops.warm_start
titan.hook titan.run.hook
titan.hooks titan.run.standard_hooks
titan.hooks.checkpointing titan.run.checkpointing
titan.hooks.compilation titan.run.compilation
titan.hooks.evaluation titan.contrib.evaluation.hook
titan.hooks.experts titan.run.experts
titan.hooks.metrics titan.run.metrics
titan.hooks.mtp titan.run.mtp
titan.hooks.profiling titan.tools.profiling_hook
titan.hooks.rank_times titan.ops.rank_times
titan.hooks.recording titan.numerics.recording_hook
titan.hooks.recovery titan.ops.recovery_hook
titan.hooks.replay titan.numerics.replay_hook
titan.hooks.replica_check titan.ops.replica_check
titan.hooks.run_events titan.run.run_events
titan.hooks.step_limit titan.run.step_limit
titan.hooks.validation titan.run.validation
titan.loss titan.losses.loss
titan.loss_kernels titan.losses.loss_kernels
titan.models.common.linear_attention titan.contrib.transformers.linear_attention
titan.models.common.short_convolution titan.contrib.transformers.short_convolution
titan.models.flux. titan.contrib.flux
titan.models.llava. titan.contrib.llava
titan.models.transformers. titan.contrib.transformers
titan.observe.estimate titan.sim.estimate
titan.observe.profiler titan.tools.profiler
titan.observe.ranks titan.ops.ranks
titan.observe.recorded titan.numerics.recorded
titan.observe.routing titan.sim.routing
titan.observe.trace titan.tools.trace
titan.observe.trace_files titan.tools.trace_files
titan.observe.trace_kinds titan.tools.trace_kinds
titan.optim.adam titan.contrib.small_adam.optimizer
titan.optim.average titan.contrib.averages.average
titan.optim.muon titan.contrib.muon.optimizer
titan.parallel.digests titan.numerics.digests
titan.parallel.fake_tensors titan.contrib.transformers.fake_tensors
titan.parallel.linear_attention titan.contrib.transformers.linear_attention_borders
titan.parallel.linear_attention_kernels titan.contrib.transformers.linear_attention_kernels
titan.parallel.module_hooks titan.numerics.module_hooks
titan.parallel.overlap titan.contrib.expert_overlap.overlap
titan.parallel.recorder titan.numerics.recorder
titan.parallel.replay titan.numerics.replay
titan.parallel.replicas titan.ops.replicas
titan.parallelize titan.step.parallelize
titan.progress titan.run.progress
titan.random_draws titan.step.random_draws
titan.recording titan.numerics.recording
titan.refusals titan.step.refusals
titan.resolved titan.step.resolved
titan.run.profiling titan.tools.profiling_hook
titan.run_folder titan.base.run_folder
titan.run_writer titan.base.run_writer
titan.sim.price.library titan.sim.price.measured
titan.sim.record.script titan.contrib.sim_script.script
titan.sim.script titan.contrib.sim_script.simulated
titan.step_report titan.step.step_report
titan.tasks.flow_data titan.contrib.flux.flow_data
titan.tasks.flow_matching titan.contrib.flux.flow_matching
titan.tasks.flow_options titan.contrib.flux.flow_options
titan.tasks.flow_task titan.contrib.flux.flow_task
titan.tasks.image_text titan.contrib.llava.image_text
titan.tasks.image_text_options titan.contrib.llava.image_text_options
titan.tasks.image_text_task titan.contrib.llava.image_text_task
titan.tasks.patches titan.contrib.flux.patches
titan.tools.average titan.contrib.averages.command
titan.tools.certify. titan.numerics.certify
titan.tools.check_hf titan.huggingface.check_hf
titan.tools.cluster. titan.ops.cluster
titan.tools.convert titan.huggingface.convert
titan.tools.diff. titan.numerics.diff
titan.tools.doctor. titan.ops.doctor
titan.tools.evaluate titan.contrib.evaluation.evaluate
titan.tools.preflight. titan.ops.preflight
titan.tools.prepare_hosts titan.contrib.prepare_hosts.hosts
titan.tools.saved_model titan.checkpoint.saved_model
titan.train_step titan.step.train_step
titan.trainer titan.run.trainer
titan.untrusted titan.base.untrusted
titan.vocabulary titan.losses.vocabulary
titan.whole_model titan.step.whole_model
"""


@cache
def names_today() -> dict[str, str]:
    """Return today's names of modules by their former ones."""
    words = _NAMES.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def name_today(name: str) -> str | None:
    """Return today's name of a module, or None if `name` has always been its name."""
    names = names_today()
    parent, _, last = name.rpartition(".")
    if name in names:
        return names[name]
    if f"{name}." in names:
        return names[f"{name}."]
    below = name_today(parent) if parent else None
    is_whole = f"{parent}." in names or (below is not None and parent not in names)
    return f"{below}.{last}" if is_whole else None


class FormerNames:
    """Finds modules by their former names, for `sys.meta_path`."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if not name.startswith("titan.") or name_today(name) is None:
            return None
        return ModuleSpec(name, self)  # pyrefly: ignore[bad-argument-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        today = name_today(spec.name)
        assert today is not None
        warnings.warn(f"{spec.name} is now {today}", FutureWarning, stacklevel=2)
        module = import_module(today)
        module.__dict__["_spec_today"] = module.__spec__
        module.__dict__.setdefault(
            "__path__", []
        )  # or modules below its former name are not looked for
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__dict__.pop("_spec_today")

    def get_code(self, name: str) -> CodeType:
        """Return the program of `python -m FORMER_NAME`."""
        today = name_today(name)
        assert today is not None
        return compile(
            f"from runpy import run_module\nrun_module({today!r}, run_name='__main__')",
            today,
            "exec",
        )


def install() -> None:
    """Add former names to what imports find."""
    sys.meta_path.insert(0, FormerNames())
