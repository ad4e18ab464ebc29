"""TorchTitan v0.2.2's integration list: its commands, as spelled there, run here and agree with one process.

Its runner starts `torchrun ... --job.config_file base_config.toml --job.dump_folder OUT/NAME ARGUMENTS` in the root of
its repository, through a shell, one command of an entry after the other. Here a folder stands for that root: a job
file with the same keys and a tiny model, a tokenizer, text, and the CSV, at the places that the arguments name.

Each entry's commands run on the entry's ranks, and again on one process without the arguments that say how to
parallelise, with the same global batch. Losses, gradient norms and validation losses of every step must agree.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.checks.rules import load_to_run
from titan.config.errors import ConfigError
from titan.config.load import parse_args
from titan.tools.generate import main as generate
from titan.tools.tokenizer import main as tokenizer_main

# The keys of TorchTitan's base_config.toml. Sizes are small, and in fp32 so that bf16 hides no mistake; all sizes are given, so
# that the flavor does not matter. Compiled by the tracer alone: inductor would take minutes for the same graphs.
JOB = """
[job]
description = "model debug training for integration tests"
print_config = false
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"
[metrics]
log_freq = 1
disable_color_printing = false
enable_tensorboard = false
save_tb_folder = "tb"
enable_wandb = false
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[model.overrides]
n_layers = 6
dim = 32
n_heads = 8
n_kv_heads = 4
ffn_dim = 64
vocab_size = 300
[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-6
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 64
max_norm = 1.0
steps = 10
dataset = "c4_test"
mixed_precision_param = "float32"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
context_parallel_degree = 1
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 10
last_save_model_only = false
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = '2'
[compile]
enable = false
components = ["model", "loss"]
backend = "aot_eager"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"""
# What DeepSeek's attention and experts have in the place of key/value heads.
LATENT = """
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
expert_dim = 32
"""
# Sizes of gpt-oss that other families do not have, or derive.
WINDOWS = """
n_kv_heads = 4
head_dim = 8
window = 24
expert_dim = 32
"""
BOUND = 1e-5  # relative, as in tests/parity
OUT = "artifacts-to-be-uploaded"
PP, TP, CP = (
    f"--parallelism.{axis}_parallel_degree" for axis in ("pipeline", "tensor", "context")
)
EP, ETP = "--parallelism.expert_parallel_degree", "--parallelism.expert_tensor_parallel_degree"
SHARD, REPLICATE = (
    f"--parallelism.data_parallel_{kind}_degree" for kind in ("shard", "replicate")
)
SCHEDULE, PER_STAGE = (
    f"--parallelism.pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage")
)
ROTATE = "--parallelism.context_parallel_rotate_method"
SAVE, STEPS, COMPILE = "--checkpoint.enable", "--training.steps", "--compile.enable"
AC, OPTION = "--activation_checkpoint.mode", "--activation_checkpoint.selective_ac_option"
FLOAT8, LOADER = "--quantize.linear.float8", "--training.dataloader"
NO_ETP = "parallelism.expert_tensor_parallel_degree"  # FSDP shards experts over tensor-parallel ranks
NO_FAMILY = "model.name"
THREE_D = f"{PP} 2 {SHARD} 2 {TP} 2"
OFFLOADED = "--training.enable_cpu_offload --optimizer.early_step_in_backward"
DEEPSEEK = f"--model.name deepseek_v3 {PP} 2 {SCHEDULE}"


@dataclass(frozen=True)
class Entry:
    """One entry of the list. refused: the key that a refusal names."""

    name: str
    ranks: int
    commands: tuple[str, ...]
    refused: str = ""


def entry(name: str, *commands: str, ranks: int = 4, refused: str = "") -> Entry:
    return Entry(name, ranks, commands, refused)


ENTRIES = [
    # tests/integration_tests/features.py
    entry("default", "--profiling.enable_profiling --metrics.enable_tensorboard"),
    entry("1d_compile", COMPILE),
    entry("1d_compile_sac_op", f"{COMPILE} {AC} selective {OPTION} op"),
    entry("2d_eager", f"{TP} 2"),
    entry("2d_compile", f"{COMPILE} {TP} 2"),
    entry("full_checkpoint", SAVE, f"{SAVE} {STEPS} 20"),
    entry(
        "model_only_hf_checkpoint",
        f"{SAVE} --checkpoint.folder hf_checkpoint --checkpoint.last_save_model_only --checkpoint.last_save_in_hf",
        f"{SAVE} --checkpoint.initial_load_path {OUT}/model_only_hf_checkpoint/hf_checkpoint/step-10/ "
        "--checkpoint.initial_load_model_only --checkpoint.initial_load_in_hf",
    ),
    entry("last_save_model_only_fp32", f"{SAVE} --checkpoint.last_save_model_only"),
    entry(
        "last_save_model_only_bf16",
        f"{SAVE} --checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16",
    ),
    entry("pp_looped_zero_bubble", f"{PP} 4 {SCHEDULE} InterleavedZeroBubble"),
    entry("pp_zbv", f"{PP} 2 {SCHEDULE} ZBVZeroBubble", ranks=2),
    entry("pp_1f1b", f"{PP} 2 {SCHEDULE} 1F1B {SHARD} 1", ranks=2),
    entry("pp_gpipe", f"{PP} 2 {SCHEDULE} GPipe {SHARD} 1", ranks=2),
    entry(
        "pp_dp_1f1b",
        f"{PP} 2 {SCHEDULE} 1F1B {SHARD} 2",
        f"{PP} 2 {SCHEDULE} 1F1B {PER_STAGE} 4 {SHARD} 2",
    ),
    entry("pp_dp_gpipe", f"{PP} 2 {SCHEDULE} GPipe {SHARD} 2"),
    entry("pp_tp", f"{PP} 2 {TP} 2"),
    entry("pp_dp_tp", f"{SAVE} {THREE_D}", f"{STEPS} 20 {SAVE} {THREE_D}", ranks=8),
    entry("3d_compile", f"{THREE_D} {COMPILE}", ranks=8),
    entry(
        "pp_looped_1f1b",
        f"{PP} 4 {SCHEDULE} Interleaved1F1B",
        f"{PP} 4 {SCHEDULE} Interleaved1F1B {PER_STAGE} 1",
    ),
    entry(
        "pp_custom_csv",
        f"{PP} 2 {SCHEDULE} PipelineScheduleMulti {SCHEDULE}_csv ./tests/assets/custom_schedule.csv",
        ranks=2,
    ),
    entry(
        "optimizer_foreach",
        "--optimizer.name AdamW --optimizer.implementation foreach",
        ranks=2,
    ),
    entry("ddp", f"{SHARD}=1 {REPLICATE}=4"),
    entry("hsdp", f"{SHARD}=2 {REPLICATE}=2"),
    entry(
        "fsdp+flex_attn",
        f"{SHARD}=4 {AC}='full' --model.flavor=debugmodel_flex_attn",
    ),
    entry(
        "fsdp+flex_attn+per_op_sac",
        f"{SHARD}=4 {AC}=selective {OPTION}=op --model.flavor=debugmodel_flex_attn",
    ),
    entry(
        "fsdp+varlen_attn+per_op_sac",
        f"{SHARD}=4 {AC}=selective {OPTION}=op --model.flavor=debugmodel_varlen_attn",
    ),
    entry("cp_allgather", f"{CP}=4 {ROTATE}='allgather'"),
    entry("cp_alltoall", f"{CP}=4 {ROTATE}='alltoall'"),
    entry("hsdp+tp", f"{SHARD}=2 {REPLICATE}=2 {TP}=2", ranks=8),
    entry("fsdp+cp", f"{SHARD}=2 {CP}=2"),
    entry("hsdp+cp_without_dp_shard", f"{SHARD}=1 {REPLICATE}=2 {CP}=2"),
    entry("hsdp+cp_with_dp_shard", f"{SHARD}=2 {REPLICATE}=2 {CP}=2", ranks=8),
    entry("fsdp+tp+cp", f"{SHARD}=2 {TP}=2 {CP}=2", ranks=8),
    # TorchTitan runs it, and clips nothing: the update is over before the norm is known.
    entry(
        "cpu_offload+opt_in_bwd+TP+DP+CP",
        f"{SAVE} {TP}=2 {CP}=2 {OFFLOADED}",
        f"{TP}=2 {CP}=2 {REPLICATE}=2 {OFFLOADED}",
        ranks=8,
        refused="optimizer.early_step_in_backward",
    ),
    entry("test_generate", SAVE, ranks=2),
    entry("fsdp_reshard_always", "--parallelism.fsdp_reshard_after_forward always", ranks=2),
    entry(
        "optional_checkpoint",
        f"{SAVE} {STEPS} 10",
        f"{SAVE} --checkpoint.exclude_from_loading lr_scheduler,dataloader,optimizer {TP} 2 {STEPS} 20",
    ),
    entry(
        "float8_emulation",
        f"--model.converters quantize.linear.float8 {FLOAT8}.enable_fsdp_float8_all_gather "
        f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp {FLOAT8}.emulate",
    ),
    entry(
        "gradient_accumulation",
        "--training.local_batch_size 8 --training.global_batch_size 32",
        ranks=2,
    ),
    entry(
        "validation_tp_cp_pp",
        f"--validation.enable --validation.dataset c4_test {TP}=2 {CP}=2 {PP}=2 {SCHEDULE} Interleaved1F1B",
        ranks=8,
    ),
    entry(
        "dataloader_kwargs",
        f"{LOADER}.num_workers 2 {LOADER}.pin_memory {LOADER}.persistent_workers {LOADER}.prefetch_factor 4",
        ranks=2,
    ),
    # Disabled in TorchTitan
    entry(
        "2d_asynctp_compile",
        f"{COMPILE} {TP} 2 --parallelism.enable_async_tensor_parallel",
    ),
    entry(
        "fsdp2_memory_estimation",
        "--memory_estimation.enable",
        ranks=2,
        refused="memory_estimation.enable",
    ),
    # tests/integration_tests/models.py
    entry(
        "deepseek_v3_fsdp+ep+compile",
        f"--model.name deepseek_v3 {SHARD} 4 {EP} 2 {COMPILE}",
    ),
    entry(
        "pp_dualpipev",
        f"--model.name deepseek_v3 {PP} 2 {EP} 2 {SCHEDULE} DualPipeV {AC} 'none'",
    ),
    entry(
        "deepseek_v3_pp+fsdp+tp+ep",
        f"{DEEPSEEK} Interleaved1F1B {SHARD} 2 {TP} 2 {EP} 4 {ETP} 1",
        ranks=8,
    ),
    entry(
        "deepseek_v3_pp+fsdp+tp+ep+etp",
        f"{DEEPSEEK} Interleaved1F1B {SHARD} 2 {TP} 2 {EP} 2 {ETP} 2",
        ranks=8,
        refused=NO_ETP,
    ),
    entry(
        "deepseek_v3_flex+pp+fsdp+ep+sacop",
        f"--model.name deepseek_v3 --model.flavor debugmodel_flex_attn {SHARD} 4 {PP} 2 {SCHEDULE} Interleaved1F1B "
        f"{EP} 4 {AC} 'selective' {OPTION} 'op'",
        ranks=8,
    ),
    entry("qwen3_fsdp+tp", f"--model.name qwen3 {SHARD} 2 {TP} 2"),
    entry(
        "qwen3_fsdp+tp+ep+etp",
        f"--model.name qwen3 --model.flavor debugmodel_moe {SHARD} 2 {TP} 2 {EP} 2 {ETP} 2",
        refused=NO_ETP,
    ),
    entry(
        "llama4_pp+fsdp+tp+ep+compile",
        f"--model.name llama4 {PP} 2 {SCHEDULE} Interleaved1F1B {SHARD} 2 {TP} 2 {EP} 4 {ETP} 1 {COMPILE}",
        ranks=8,
        refused=NO_FAMILY,
    ),
    entry(
        "gpt_oss_fsdp+tp+ep+compile",
        f"--model.name gpt_oss {SHARD} 4 {TP} 2 {EP} 4 {ETP} 1 {COMPILE}",
        ranks=8,
    ),
]
RUN = [entry for entry in ENTRIES if not entry.refused]
# What one process leaves out: how to parallelise, compile, recompute, read.
LEFT_OUT = (
    "parallelism.",
    "compile.",
    "activation_checkpoint.",
    "profiling.",
    "metrics.",
    "training.dataloader.",
    "optimizer.implementation",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks, to these commands, like the root of TorchTitan's repository."""
    root = tmp_path_factory.mktemp("root")
    assets = root / "tests" / "assets"
    (assets / "c4_test").mkdir(parents=True)
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))[:60]
    rows = [json.dumps({"text": source.read_text("utf-8")[:4000]}) for source in sources]
    (assets / "c4_test" / "data.json").write_text("\n".join(rows) + "\n")
    train = ["train", "--input", str(sources[0]), "--vocab-size", "300"]
    assert tokenizer_main([*train, "--output", str(assets / "tokenizer")]) == 0
    # The order of TorchTitan's file: all forward, then two microbatches at a time, gradients of inputs and weights apart.
    lines = []
    for stages in ((0, 2), (1, 3)):
        forward = [f"{stage}F{m}" for stage in stages for m in range(8)]
        backward = [
            f"{stage}{kind}{m}"
            for pair in range(0, 8, 2)
            for stage in reversed(stages)
            for m in (pair, pair + 1)
            for kind in "IW"
        ]
        lines.append(",".join(forward + backward))
    (assets / "custom_schedule.csv").write_text("\n".join(lines) + "\n")
    (root / "base_config.toml").write_text(JOB)
    for file, sizes in (("deepseek.toml", LATENT), ("gpt_oss.toml", WINDOWS)):
        (root / file).write_text(JOB.replace("n_kv_heads = 4\n", sizes))
    return root


def words(command: str, *more: str) -> list[str]:
    """The arguments, as a shell passes them on, in the order of TorchTitan's runner."""
    files = (f"{name}.toml" for name in ("deepseek", "gpt_oss") if name in command)
    file = next(files, "base_config.toml")
    return [file, *more, *shlex.split(command)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_runs_or_is_refused(entry: Entry, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    for command in entry.commands:
        keys = set()
        try:
            load_to_run(words(command), world_size=entry.ranks, warn=False)
        except ConfigError as error:
            keys = {problem.key for problem in error.problems}
        assert entry.refused in keys if entry.refused else not keys


def train(root: Path, argv: list[str]) -> None:
    """Run on one rank."""
    os.chdir(root)
    config, _ = load_to_run(argv, world_size=dist.get_world_size(), warn=False)
    trainer = PoolTrainer(config)
    try:
        assert trainer.run() == 0
    finally:
        trainer.close()


def measured(run: Path) -> list[dict[str, float]]:
    """The numbers of each step that a layout must not change."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "tokens", "lr", "loss", "grad_norm", "validation_loss")
    return [{name: row[name] for name in names if name in row} for row in rows]


def alone(argv: list[str], ranks: int) -> list[str]:
    """The same training on one process: without the ways to run it, and with the same global batch."""
    config, layout = load_to_run(argv, world_size=ranks, warn=False)
    batch = config.training.local_batch_size * layout.dp * layout.accumulation
    kept = [o for o in parse_args(argv).overrides if not o.startswith(LEFT_OUT)]
    return [argv[0], *(f"--{o}" for o in kept), f"--training.global_batch_size={batch}"]


References = dict[tuple[str, ...], list[list[dict[str, float]]]]


@pytest.fixture(scope="module")
def references() -> References:
    """What one process measures, by its commands: most entries share theirs."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("entry", RUN, ids=lambda entry: entry.name)
def test_agrees_with_one_process(
    entry: Entry,
    root: Path,
    references: References,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    folder = f"{OUT}/{entry.name}"
    found = []
    for command in entry.commands:
        argv = words(command, "--job.dump_folder", folder)
        pool.run(entry.ranks, train, root, argv)
        found.append(measured(root / folder))
    commands = [alone(words(command), entry.ranks) for command in entry.commands]
    key = tuple(map(" ".join, commands))
    if key not in references:
        folder = f"alone/{len(references)}"
        references[key] = []
        for argv in commands:
            pool.run(1, train, root, [*argv, f"--job.dump_folder={folder}"])
            references[key].append(measured(root / folder))
    expected = references[key]
    assert len(expected[-1]) >= 10 and expected[0][9]["loss"] < expected[0][0]["loss"]
    for rows, expected_rows in zip(found, expected, strict=True):
        assert rows == [pytest.approx(row, rel=BOUND) for row in expected_rows]
    if (
        entry.name == "test_generate"
    ):  # after it, TorchTitan's runner generates from the checkpoint
        step = f"{root}/{OUT}/{entry.name}/checkpoint/step-10"
        assert generate(["--checkpoint", step, "--prompt", "What is", "--device", "cpu"]) == 0
