"""Files written for TorchTitan v0.2.2 load: every key of its interface, those with another name here with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.checks.rules import check, check_layout
from titan.config.load import ConfigError, load_config
from titan.config.schema import JobConfig
from titan.contrib.torchtitan_import.differences import Differences, differences

EVERY_KEY = """
[job]
dump_folder = "./outputs"
description = "every key of v0.2.2"
print_config = false
custom_config_module = ""

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
profiler_active = 1
profiler_warmup = 3
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 10
enable_tensorboard = false
disable_color_printing = false
save_tb_folder = "tb"
save_for_all_ranks = false
enable_wandb = false

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
converters = []

[optimizer]
name = "AdamW"
lr = 8e-4
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
implementation = "fused"
early_step_in_backward = false

[lr_scheduler]
warmup_steps = 2
total_steps = 10
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0

[training]
dataset = "c4_test"
dataset_path = "./tests/assets/c4_test"
local_batch_size = 8
global_batch_size = -1
seq_len = 2048
max_norm = 1.0
steps = 10
enable_cpu_offload = false
dtype = "float32"
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
gc_freq = 50

[training.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false
prefetch_factor = 2

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
disable_loss_parallel = false
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_schedule_csv = ""
pipeline_parallel_microbatch_size = 1
pipeline_parallel_layers_per_stage = 2
pipeline_parallel_first_stage_less_layers = 1
pipeline_parallel_last_stage_less_layers = 1
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
context_parallel_degree = 1
context_parallel_load_balancer = "headtail"
context_parallel_rotate_method = "allgather"
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 10
initial_load_path = "./seed"
initial_load_model_only = true
initial_load_in_hf = false
last_save_model_only = true
last_save_in_hf = false
export_dtype = "float32"
async_mode = "disabled"
keep_latest_k = 10
load_step = -1
exclude_from_loading = ["optimizer"]
enable_first_step_checkpoint = false
create_seed_checkpoint = false
load_only = false

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
memory_budget = 0.5
preserve_rng_state = false

[compile]
enable = false
components = ["model", "loss"]
backend = "inductor"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
recipe_name = "tensorwise"
filter_fqns = ["output"]
emulate = false

[comm]
init_timeout_seconds = 300
train_timeout_seconds = 100
trace_buf_size = 20000
save_traces_folder = "comm_traces"
save_traces_file_prefix = "rank_"

[validation]
enable = false
dataset = "c4_validation"
dataset_path = "./tests/assets/c4_test"
local_batch_size = 8
seq_len = 2048
freq = 5
steps = 10

[debug]
seed = 1
deterministic = false
"""

# Keys of v0.2.2 that titan has no use for, at their defaults there.
UNUSED_KEYS = """
[model]
print_after_conversion = false
[training]
gc_debug = false
[parallelism]
pipeline_parallel_expert_parallel_overlap = true
expert_parallel_comm_backend = "standard"
[checkpoint]
enable_ft_dataloader_checkpoints = true
initial_load_in_hf_quantized = false
[activation_checkpoint]
per_op_sac_force_recompute_mm_shapes_by_fqns = ["moe.router.gate"]
early_stop = false
visualize_memory_budget_pareto = false
determinism_check = "default"
debug = false
[comm]
mode = "default"
[quantize.grouped_mm.mx]
recipe_name = "mxfp8"
[memory_estimation]
enable = false
[validation.dataloader]
num_workers = 2
[debug]
deterministic_warn_only = false
"""

# Shaped like the Llama 3 files of v0.2.2.
LLAMA_8B = """
[metrics]
enable_tensorboard = true
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
# converters = ["quantize.linear.float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[checkpoint]
enable = false
interval = 500
last_save_model_only = true
async_mode = "disabled"
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 500

"""


def load_text(text: str, folder: Path) -> JobConfig:
    path = folder / "job.toml"
    path.write_text(text)
    return load_config(path)


def test_every_key_loads_as_written(tmp_path: Path) -> None:
    config = load_text(EVERY_KEY, tmp_path)
    assert check(config) == []
    warnings = [w.removeprefix(f"{tmp_path}/job.toml:") for w in config.source_map.warnings]
    assert sorted(warning.partition(" is ignored")[0] for warning in warnings) == [
        "64: training.dataloader.persistent_workers",
        "6: job.custom_config_module",
    ]
    assert config.optimizer.beta2 == 0.95
    assert config.training.dataloader.prefetch_factor == 2
    assert config.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "norm", "output"],
    ]
    assert config.quantize.linear.float8.filter_fqns == ["output"]


def test_unused_keys_are_ignored_at_their_defaults_and_refused_otherwise(
    tmp_path: Path,
) -> None:
    config = load_text(UNUSED_KEYS, tmp_path)
    assert config == JobConfig()
    assert len(config.source_map.warnings) == 16 and all(
        " is ignored: " in warning for warning in config.source_map.warnings
    )
    asked = UNUSED_KEYS.replace('mode = "default"', 'mode = "fake_backend"')
    asked = asked.replace("early_stop = false", "early_stop = true").replace('["moe', '["')
    with pytest.raises(ConfigError) as caught:
        load_text(asked, tmp_path)
    assert sorted(problem.key for problem in caught.value.problems) == [
        "activation_checkpoint.early_stop",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "comm.mode",
    ]


NORMS = "optimizer.decay_norms: false spares norms from weight decay; TorchTitan does not"


def test_what_differs_is_reported(tmp_path: Path) -> None:
    assert differences(load_text(LLAMA_8B, tmp_path)) == [NORMS]
    for text, found in ((LLAMA_8B, []), (LLAMA_8B + "[memory_estimation]\n", [NORMS])):
        assert Differences().facts(load_text(text, tmp_path))["differences"] == found
    assert differences(load_text(LLAMA_8B.replace('"8B"', '"tiny"'), tmp_path)) == []
    same = LLAMA_8B.replace("eps = 1e-8", "decay_norms = true")
    assert differences(load_text(same, tmp_path)) == []
    (tmp_path / "same.toml").write_text(same)
    changed = load_config(tmp_path / "same.toml", overrides=["--model.overrides.rope_factor=0"])
    assert differences(changed) == ["model.overrides.rope_factor: 0; 8B has 8.0 there"]
    own = '[optimizer]\nname = "Adam"\n[validation]\nenable = true\n'
    assert differences(load_text(own, tmp_path)) == [
        "optimizer.weight_decay: 0.0 by default; TorchTitan's default is 0.1",
        "validation.freq: 100 by default; TorchTitan's default is 10",
        "validation.seq_len: that of training by default; TorchTitan's default is 2048",
        "validation.steps: 10 by default; TorchTitan's default is -1",
    ]
    float8 = differences(load_text('[model]\nconverters = ["float8"]\n', tmp_path))
    assert float8 == [
        NORMS,
        'quantize.linear.float8.filter_fqns: ["output"] by default; TorchTitan\'s default is []',
    ]


# The keys of models/deepseek_v3/train_configs of TorchTitan v0.2.2.
DEEPSEEK = """
[job]
dump_folder = "./outputs"
print_config = false
[profiling]
enable_profiling = false
enable_memory_snapshot = false
[metrics]
disable_color_printing = false
[model]
name = "deepseek_v3"
flavor = "FLAVOR"
[lr_scheduler]
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 4
seq_len = 4096
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = EP
expert_tensor_parallel_degree = 1
[checkpoint]
enable = false
last_save_model_only = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = 'op'
[compile]
enable = true
components = ["loss"]
[quantize.linear.float8]
filter_fqns = ["output", "router.gate"]
[quantize.grouped_mm.float8]
fqns = ["experts"]
"""


@pytest.mark.parametrize(("flavor", "ep"), [("debugmodel", 1), ("16B", 8), ("671B", 1)])
def test_deepseek_files_load_as_written(flavor: str, ep: int, tmp_path: Path) -> None:
    text = DEEPSEEK.replace("FLAVOR", flavor).replace("EP", str(ep))
    config = load_text(text, tmp_path)
    assert config.source_map.warnings == []
    assert [p.key for p in [*check(config), *check_layout(config, world_size=64)]] == []
    found = {line.partition(":")[0] for line in differences(config)}
    assert "model.overrides.rope_factor" in found and "model.flavor" not in found


@pytest.mark.parametrize(("flavor", "ep"), [("debugmodel", 1), ("20b", 8), ("120b", 8)])
def test_gpt_oss_files_load_as_written(flavor: str, ep: int, tmp_path: Path) -> None:
    text = DEEPSEEK.replace("deepseek_v3", "gpt_oss").replace("4096", "2048")
    config = load_text(text.replace("FLAVOR", flavor).replace("EP", str(ep)), tmp_path)
    assert config.source_map.warnings == []
    assert [p.key for p in [*check(config), *check_layout(config, world_size=64)]] == []
    balance = [
        f"model.overrides.load_balance_coeff: 0.0; {flavor} has 0.001 there",
        f"model.overrides.global_balance_coeff: 0.001; {flavor} has 0.0 there",
    ]
    assert differences(config) == [*(balance if flavor != "debugmodel" else []), NORMS]


def test_a_flavor_with_flexattention_is_the_flavor_and_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B_flex"\n')
    config = load_config(path)
    assert (config.model.flavor, config.data.document_mask) == ("8B", True)
    (warning,) = config.source_map.warnings
    assert "job.toml:3: 8B_flex is 8B with data.document_mask = true" in warning
    # What the job says itself stays.
    config = load_config(path, overrides=["data.document_mask=false", "model.flavor=8B_varlen"])
    assert (config.model.flavor, config.data.document_mask) == ("8B", False)
    assert load_config(path, overrides=["model.flavor=9B_flex"]).model.flavor == "9B_flex"
