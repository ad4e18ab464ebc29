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
titan.base.async_scalars titan.base.async_scalars
titan.ops.bench titan.ops.bench
titan.huggingface.export titan.huggingface.export
titan.huggingface.hf_folders titan.huggingface.hf_folders
titan.huggingface.hf_model titan.huggingface.hf_model
titan.huggingface.load titan.huggingface.load
titan.huggingface.quantized titan.huggingface.quantized
titan.checkpoint.saved titan.checkpoint.identity
titan.contrib.evaluation.rules titan.contrib.evaluation.rules
titan.checks.text_identity titan.checkpoint.identity
titan.config.resume_diff titan.checkpoint.identity
titan.contrib.calibrate titan.contrib.calibrate
titan.contrib.calibrate.from_trace titan.contrib.calibrate.from_trace
titan.contrib.calibrate.calls titan.contrib.calibrate.calls
titan.contrib.calibrate.work titan.contrib.calibrate.work
titan.contrib.demo_pictures titan.contrib.flux
titan.contrib.flux.captions titan.contrib.flux.captions
titan.contrib.flux.shapes titan.contrib.flux.shapes
titan.contrib.evaluation.lm_eval titan.contrib.evaluation.lm_eval
titan.contrib.evaluation.harness titan.contrib.evaluation.harness
titan.contrib.sweep titan.contrib.scaling
titan.contrib.evaluation.examples titan.contrib.evaluation.examples
titan.data.named_tokens titan.data.special_tokens
titan.contrib.prepare_hosts.parts titan.contrib.prepare_hosts.parts
titan.contrib.evaluation.passes titan.contrib.evaluation.passes
titan.contrib.evaluation.scoring titan.contrib.evaluation.scoring
titan.data.tokenizer_base titan.data.special_tokens
titan.base.hardware titan.base.hardware
titan.health titan.ops
titan.base.errors titan.base.errors
titan.base.flight_recorder titan.base.flight_recorder
titan.ops.heartbeats titan.ops.heartbeats
titan.ops.launch titan.ops.launch
titan.ops.memory_limit titan.ops.memory_limit
titan.ops.monitor titan.ops.monitor
titan.ops.peers titan.ops.peers
titan.ops.recovery titan.ops.recovery
titan.ops.rendezvous titan.ops.rendezvous
titan.ops.run_lock titan.ops.run_lock
titan.base.signals titan.base.signals
titan.ops.warm_start titan.ops.warm_start
titan.run.hook titan.run.hook
titan.hooks titan.run.standard_hooks
titan.run.checkpointing titan.run.checkpointing
titan.run.compilation titan.run.compilation
titan.contrib.evaluation.hook titan.contrib.evaluation.hook
titan.run.experts titan.run.experts
titan.run.metrics titan.run.metrics
titan.run.mtp titan.run.mtp
titan.run.profiling titan.run.profiling
titan.ops.rank_times titan.ops.rank_times
titan.numerics.recording_hook titan.numerics.recording_hook
titan.ops.recovery_hook titan.ops.recovery_hook
titan.numerics.replay_hook titan.numerics.replay_hook
titan.ops.replica_check titan.ops.replica_check
titan.run.run_events titan.run.run_events
titan.run.step_limit titan.run.step_limit
titan.run.validation titan.run.validation
titan.losses.loss titan.losses.loss
titan.losses.loss_kernels titan.losses.loss_kernels
titan.contrib.transformers.linear_attention titan.contrib.transformers.linear_attention
titan.contrib.transformers.short_convolution titan.contrib.transformers.short_convolution
titan.contrib.flux. titan.contrib.flux
titan.contrib.llava. titan.contrib.llava
titan.contrib.transformers. titan.contrib.transformers
titan.sim.estimate titan.sim.estimate
titan.ops.ranks titan.ops.ranks
titan.sim.routing titan.sim.routing
titan.tools.trace titan.tools.trace
titan.tools.trace_files titan.tools.trace_files
titan.tools.trace_kinds titan.tools.trace_kinds
titan.contrib.averages.average titan.contrib.averages.average
titan.numerics.digests titan.numerics.digests
titan.contrib.transformers.linear_attention_borders titan.contrib.transformers.linear_attention_borders
titan.contrib.transformers.linear_attention_kernels titan.contrib.transformers.linear_attention_kernels
titan.parallel.overlap titan.contrib.expert_overlap.overlap
titan.numerics.recorder titan.numerics.recorder
titan.numerics.replay titan.numerics.replay
titan.ops.replicas titan.ops.replicas
titan.step.parallelize titan.step.parallelize
titan.run.progress titan.run.progress
titan.step.random_draws titan.step.random_draws
titan.numerics.recording titan.numerics.recording
titan.step.refusals titan.step.refusals
titan.step.resolved titan.step.resolved
titan.base.run_folder titan.base.run_folder
titan.base.run_writer titan.base.run_writer
titan.contrib.calibrate.device titan.contrib.calibrate.device
titan.sim.price.library titan.sim.price.measured
titan.sim.record.script titan.contrib.sim_script.script
titan.sim.script titan.contrib.sim_script.simulated
titan.contrib.twin. titan.contrib.twin
titan.step.step_report titan.step.step_report
titan.contrib.flux.flow_data titan.contrib.flux.flow_data
titan.contrib.flux.flow_matching titan.contrib.flux.flow_matching
titan.contrib.flux.flow_options titan.contrib.flux.flow_options
titan.contrib.flux.flow_task titan.contrib.flux.flow_task
titan.contrib.llava.image_text titan.contrib.llava.image_text
titan.contrib.llava.image_text_options titan.contrib.llava.image_text_options
titan.contrib.llava.image_text_task titan.contrib.llava.image_text_task
titan.contrib.flux.patches titan.contrib.flux.patches
titan.contrib.averages.command titan.contrib.averages.command
titan.numerics.certify. titan.numerics.certify
titan.huggingface.check_hf titan.huggingface.check_hf
titan.ops.cluster. titan.ops.cluster
titan.huggingface.convert titan.huggingface.convert
titan.numerics.diff. titan.numerics.diff
titan.ops.doctor. titan.ops.doctor
titan.contrib.evaluation.evaluate titan.contrib.evaluation.evaluate
titan.ops.preflight. titan.ops.preflight
titan.contrib.prepare_hosts.hosts titan.contrib.prepare_hosts.hosts
titan.checkpoint.saved_model titan.checkpoint.saved_model
titan.step.train_step titan.step.train_step
titan.run.trainer titan.run.trainer
titan.base.untrusted titan.base.untrusted
titan.losses.vocabulary titan.losses.vocabulary
titan.step.whole_model titan.step.whole_model
"""


@cache
def _names() -> dict[str, str]:
    return dict(line.split() for line in _NAMES.strip().splitlines())


def name_today(name: str) -> str | None:
    """Return today's name of a module, or None if `name` has always been its name."""
    names = _names()
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

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("titan.") or name_today(name) is None:
            return None
        return ModuleSpec(name, self)  # pyright: ignore[reportArgumentType]

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
    """Let imports find modules by their former names."""
    sys.meta_path.insert(0, FormerNames())  # pyright: ignore[reportArgumentType]
