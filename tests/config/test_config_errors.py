"""Malformed job files of many kinds: each is reported with its file, line and key, with the rule and a way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from titan.config.load import load_config
from titan.config.problems import ConfigError, key_text
from titan.config.rules import advise, check, check_layout, check_supported, load_to_run
from titan.config.schema import fields_at
from titan.untrusted import printable


def report(
    text: str | bytes, folder: Path, *, world_size: int = 1, overrides: Sequence[str] = ()
) -> str:
    """Everything that is said of a job file; the folder's name is taken out."""
    path = folder / "job.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        config = load_config(path, overrides=overrides)
        if problems := check(config) or check_layout(config, world_size=world_size):
            raise ConfigError(problems)
    return str(caught.value).replace(f"{folder}/", "")


# What is written, where the first line of the report points, and what it says.
SYNTAX = [
    ("[training]\nsteps = ten\n", "job.toml:2: not valid TOML", 'write steps = "ten"'),
    ("[training]\nsteps = True\n", "job.toml:2: not valid TOML", "write steps = true"),
    ("[model]\n\nflavor = 8B\n", "job.toml:3: not valid TOML", "flavor = 8B"),
    ("[training\nsteps = 1\n", "job.toml:1: not valid TOML", "expected ']'"),
    ("[training]\nsteps 10\n", "job.toml:2: not valid TOML", "expected '='"),
    ("[training]\nsteps = 1\nsteps = 2\n", "job.toml:3: not valid TOML", "this key is set twice"),
    (
        "[training]\nsteps = 1\n[training]\n",
        "job.toml:3: not valid TOML",
        "this table is written twice",
    ),
    ('[job]\ndescription = "open\n', "job.toml:2: not valid TOML", "description"),
    ('[job]\ndescription = """\nopen\n', "job.toml:3: not valid TOML", "open"),
    ("[data]\nsources = [{type = 'stdlib'}\n", "job.toml:2: not valid TOML", "sources"),
    ("[training]\nsteps = 01\n", "job.toml:2: not valid TOML", "steps = 01"),
    ("training:\n  steps: 10\n", "job.toml:1: not valid TOML", "training:"),
    ('{"training": {"steps": 10}}', "job.toml:1: not valid TOML", "{"),
    ("x = " + "[" * 3000 + "]" * 3000, "job.toml:1: values are nested too deeply", ""),
    ("[training]\nsteps = " + "9" * 5000 + "\n", "job.toml:", "not valid TOML"),
    (
        b"[job]\ndescription = '\xff'\n",
        "job.toml:2: not UTF-8 text (byte 0xff)",
        "save the file as UTF-8",
    ),
    ("[job]\n".encode("utf-16"), "job.toml:1: not UTF-8 text", ""),
    (b"\x00\x01", "job.toml:1: not valid TOML", ""),
]
TYPES = [
    (
        '[training]\nsteps = "ten"\n',
        "job.toml:2: training.steps",
        'expected a whole number, got the string "ten"',
    ),
    ('[training]\nsteps = "10"\n', "job.toml:2: training.steps", "write 10 without quotes"),
    (
        "[training]\nsteps = 1e3\n",
        "job.toml:2: training.steps",
        "got the number 1000.0; write 1000",
    ),
    ("[training]\nsteps = 1.5\n", "job.toml:2: training.steps", "write 1 or 2"),
    (
        "[training]\nsteps = true\n",
        "job.toml:2: training.steps",
        "expected a whole number, got true",
    ),
    ("[training]\nsteps = [10]\n", "job.toml:2: training.steps", "got a list"),
    (
        "[training]\nsteps = 2024-01-01\n",
        "job.toml:2: training.steps",
        "got the date or time 2024-01-01",
    ),
    ('[optimizer]\nlr = "3e-4"\n', "job.toml:2: optimizer.lr", "write 3e-4 without quotes"),
    ('[checkpoint]\nenable = "true"\n', "job.toml:2: checkpoint.enable", "expected true or false"),
    ("[checkpoint]\nenable = 0\n", "job.toml:2: checkpoint.enable", "write false"),
    (
        "[job]\ndump_folder = 7\n",
        "job.toml:2: job.dump_folder",
        'expected text, got the number 7; write "7"',
    ),
    (
        "training = 5\n",
        "job.toml:1: training",
        "expected a table, got the number 5; write [training]",
    ),
    ('optimizer = "AdamW"\n', "job.toml:1: optimizer", "expected a table"),
    (
        "[training]\ndataloader = 4\n",
        "job.toml:2: training.dataloader",
        "write [training.dataloader]",
    ),
    ('[data.sources]\ntype = "stdlib"\n', "job.toml:1: data.sources", "write [[data.sources]]"),
    ('[data]\nsources = ["stdlib"]\n', "job.toml:2: data.sources[0]", 'write {type = "stdlib"}'),
    ('[compile]\ncomponents = "model"\n', "job.toml:2: compile.components", 'write ["model"]'),
    ("[model]\nconverters = [1]\n", "job.toml:2: model.converters[0]", "expected text"),
    ("[model.overrides]\nn_layers = [1]\n", "job.toml:2: model.overrides.n_layers", "got a list"),
    (
        "[parallelism]\nmodule_fqns_per_model_part = [\n  ['a'],\n  ['b', 1],\n]\n",
        "job.toml:4: parallelism.module_fqns_per_model_part[1][1]",
        "expected text",
    ),
    (
        "[activation_checkpoint]\nselective_ac_option = 1.5\n",
        "job.toml:2: activation_checkpoint.selective_ac_option",
        "",
    ),
]
NAMES = [
    ("[training]\nstep = 10\n", "job.toml:2: training.step", "unknown key; did you mean 'steps'?"),
    (
        "\n\n[traning]\nsteps = 10\n",
        "job.toml:3: traning",
        "unknown section; did you mean 'training'?",
    ),
    (
        "steps = 10\n",
        "job.toml:1: steps",
        "key outside any section; did you mean [training] steps or",
    ),
    ("[model]\nlr = 1.0\n", "job.toml:2: model.lr", "did you mean [optimizer] lr?"),
    (
        "[optimizer]\nwarmup_steps = 4\n",
        "job.toml:2: optimizer.warmup_steps",
        "[lr_scheduler] warmup_steps?",
    ),
    ("[xyzzy]\n", "job.toml:1: xyzzy", "unknown section; there are job, model"),
    (
        "[debug]\nxyzzy = 1\n",
        "job.toml:2: debug.xyzzy",
        "unknown key; there are seed, deterministic",
    ),
    ('[training]\n"seq len" = 1\n', 'job.toml:2: training."seq len"', "did you mean 'seq_len'?"),
    (
        "training.dataloader.num_worker = 2\n",
        "job.toml:1: training.dataloader.num_worker",
        "'num_workers'",
    ),
    ('[optimizer]\nname = "adamm"\n', "job.toml:2: optimizer.name", "There are AdamW, Adam"),
    (
        '[[data.sources]]\ntype = "texd"\n',
        "job.toml:2: data.sources[0].type",
        "did you mean 'text'?",
    ),
    (
        "[[data.sources]]\nweight = 1.0\n",
        "job.toml:1: data.sources[0]",
        "type is missing; write type =",
    ),
    (
        "[[data.sources]]\ntype = 'text'\n",
        "job.toml:1: data.sources[0].path",
        'missing: data.sources[0] needs it, being of type "text"',
    ),
    (
        "[[data.sources]]\ntype='text'\npath='a'\n[[data.sources]]\ntype='text'\npath='b'\ntext_key='c'\n",
        "job.toml:7: data.sources[1].text_key",
        'unknown key; only type = "jsonl", type = "parquet", type = "huggingface" have it',
    ),
    (
        '[training]\ndtype = "bf16"\n',
        "job.toml:2: training.dtype",
        'one of "float32", "bfloat16", got "bf16"; did you mean "bfloat16"?',
    ),
    (
        '[lr_scheduler]\ndecay_type = "Cosine"\n',
        "job.toml:2: lr_scheduler.decay_type",
        'did you mean "cosine"?',
    ),
    (
        '[compile]\ncomponents = ["models"]\n',
        "job.toml:2: compile.components[0]",
        'did you mean "model"?',
    ),
    ("[checkpoint]\nasync_mode = 1\n", "job.toml:2: checkpoint.async_mode", '"disabled", "async"'),
]
RANGES = [
    (
        "[training]\nlocal_batch_size = 0\n",
        "job.toml:2: training.local_batch_size",
        "must be at least 1, got 0",
    ),
    (
        "[training]\nmax_norm = -1.0\n",
        "job.toml:2: training.max_norm",
        "must be at least 0, got -1.0",
    ),
    (
        "[training]\nmax_norm = nan\n",
        "job.toml:2: training.max_norm",
        "expected a finite number, got nan",
    ),
    ("[optimizer]\nlr = inf\n", "job.toml:2: optimizer.lr", "expected a finite number, got inf"),
    ("[optimizer]\nbeta2 = 1\n", "job.toml:2: optimizer.beta2", "must be less than 1, got 1"),
    (
        "[lr_scheduler]\nmin_lr_factor = 1.5\n",
        "job.toml:2: lr_scheduler.min_lr_factor",
        "must be at most 1, got 1.5",
    ),
    (
        "[activation_checkpoint]\nselective_ac_option = 0\n",
        "job.toml:2: activation_checkpoint.selective_ac_option",
        "at least 1",
    ),
    (
        "[training]\nglobal_batch_size = 0\n",
        "job.toml:2: training.global_batch_size",
        "must be at least 1, or -1, got the number 0",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 0\n",
        "job.toml:2: parallelism.data_parallel_shard_degree",
        "or -1",
    ),
]
RULES = [
    (
        '[model]\nname = "lama3"\n',
        "job.toml:2: model.name",
        "unknown model family \"lama3\"; did you mean 'llama3'?",
    ),
    ('[model]\nflavor = "8b"\n', "job.toml:2: model.flavor", "did you mean '8B'?"),
    (
        "[model.overrides]\nn_layer = 4\n",
        "job.toml:2: model.overrides.n_layer",
        "did you mean 'n_layers'?",
    ),
    (
        "[model]\noverrides = {n_layers = 'four'}\n",
        "job.toml:2: model.overrides.n_layers",
        'expected a whole number, got "four"',
    ),
    ("[model.overrides]\nn_heads = 0\n", "job.toml:2: model.overrides.n_heads", "at least 1"),
    (
        "[model.overrides]\nnorm_eps = -1e-5\n",
        "job.toml:2: model.overrides.norm_eps",
        "must not be negative",
    ),
    (
        "[model.overrides]\nn_heads = 6\nn_kv_heads = 2\n",
        "job.toml:2: model.overrides.n_heads",
        "6 heads do not divide dim 256; use 4 or 8 heads",
    ),
    (
        "[model.overrides]\nn_kv_heads = 3\n",
        "job.toml:2: model.overrides.n_kv_heads",
        "do not divide 16 heads; use 2 or 4",
    ),
    ("[model.overrides]\nhead_dim = 15\n", "job.toml:2: model.overrides.head_dim", "use 16"),
    (
        "[validation]\nenable = true\n",
        "job.toml:1: validation.dataset",
        "data.validation_fraction = 0.01",
    ),
    (
        "[training]\ndataset = 'c4'\n[[data.sources]]\ntype = 'stdlib'\n",
        "job.toml:2: training.dataset",
        "remove one",
    ),
    (
        "[training]\ndataset = 'jsonl'\n",
        "job.toml:1: training.dataset_path",
        'dataset "jsonl" needs it',
    ),
    (
        "[training]\ndataset_path = 'x'\n",
        "job.toml:2: training.dataset_path",
        'dataset "stdlib" reads no files',
    ),
    (
        "[data]\nreset_positions = true\n",
        "job.toml:2: data.reset_positions",
        "set document_mask = true",
    ),
    (
        "[training]\nmixed_precision_param = 'float32'\nmixed_precision_reduce = 'bfloat16'\n",
        "job.toml:3: training.mixed_precision_reduce",
        'use "float32"',
    ),
    (
        "[model]\nconverters = ['float9']\n",
        "job.toml:2: model.converters",
        'unknown converter "float9"',
    ),
    (
        "[quantize.linear.float8]\nemulate = true\n",
        "job.toml:2: quantize.linear.float8.emulate",
        "no layer is converted",
    ),
    (
        "[model]\nconverters = ['float8']\n[hardware]\nname = 'a100-80g'\n",
        "job.toml:4: hardware.name",
        "a100-80g does not multiply in float8; set emulate = true",
    ),
    (
        "[model]\nconverters = ['quantize.linear.mx', 'float8']\n",
        "job.toml:2: model.converters",
        "a layer is converted once",
    ),
    (
        "[model]\nconverters = ['float8']\n[quantize.linear.mx]\nemulate = true\n",
        "job.toml:4: quantize.linear.mx.emulate",
        'set model.converters = ["quantize.linear.mx"]',
    ),
    (
        "[model]\nconverters = ['float8']\n[quantize.linear.float8]\n"
        "recipe_name = 'rowwise'\nenable_fsdp_float8_all_gather = true\n",
        "job.toml:5: quantize.linear.float8.enable_fsdp_float8_all_gather",
        'recipe_name = "tensorwise"',
    ),
    (
        "[model]\nconverters = ['float8']\n[quantize.linear.float8]\n"
        "precompute_float8_dynamic_scale_for_fsdp = true\n",
        "job.toml:4: quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "set enable_fsdp_float8_all_gather = true",
    ),
    (
        "[model]\nconverters = ['float8']\n[training]\nenable_cpu_offload = true\n[quantize.linear.float8]\n"
        "enable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true\n",
        "job.toml:7: quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "training.enable_cpu_offload = false",
    ),
    (
        "[model]\nconverters = ['float8']\n[quantize.linear.float8]\n"
        "recipe_name = 'rowwise_with_gw_hp'\nfilter_fqns = ['auto_filter_small_kn']\n",
        "job.toml:5: quantize.linear.float8.filter_fqns",
        'recipe_name = "rowwise"',
    ),
    (
        "[model]\nconverters = ['float8']\n[training]\nseq_len = 1001\nlocal_batch_size = 2\n",
        "job.toml:4: training.seq_len",
        "2002 tokens at once, which in 8 bits must divide by 16; use 992",
    ),
    (
        "[parallelism]\npipeline_parallel_schedule = '1F2B'\n",
        "job.toml:2: parallelism.pipeline_parallel_schedule",
        "'1F1B'",
    ),
    (
        "[parallelism]\nenable_async_tensor_parallel = true\n",
        "job.toml:2: parallelism.enable_async_tensor_parallel",
        "compile.enable",
    ),
    (
        "[activation_checkpoint]\nselective_ac_option = 'none'\n",
        "job.toml:2: activation_checkpoint.selective_ac_option",
        'expected "op"',
    ),
    (
        "[activation_checkpoint]\nmode = 'memory_budget'\n",
        "job.toml:2: activation_checkpoint.mode",
        "compile.enable",
    ),
    (
        "[checkpoint]\ninitial_load_in_hf = true\n",
        "job.toml:2: checkpoint.initial_load_in_hf",
        "no folder to load from",
    ),
    (
        "[checkpoint]\nlast_save_in_hf = true\nload_only = true\n",
        "job.toml:2: checkpoint.last_save_in_hf",
        "load_only = false",
    ),
    (
        "[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = 'x'\ninitial_load_model_only = false\n",
        "job.toml:4: checkpoint.initial_load_model_only",
        "initial_load_model_only = true",
    ),
    (
        "[checkpoint]\nexclude_from_loading = ['optimiser']\n",
        "job.toml:2: checkpoint.exclude_from_loading",
        "'optimizer'",
    ),
    ("[hardware]\nname = 'h100'\n", "job.toml:2: hardware.name", "h100-sxm"),
    (
        "[optimizer]\nstochastic_rounding = true\n",
        "job.toml:2: optimizer.stochastic_rounding",
        'use false, or dtype = "bfloat16"',
    ),
    (
        "[optimizer]\nname = 'AdamW8bit'\n[parallelism]\ntensor_parallel_degree = 16\n",
        "job.toml:2: optimizer.name",
        'use a degree of 1, 2, 4 or 8, or "AdamW" with state_dtype = "bfloat16"',
    ),
    (
        "[optimizer]\nearly_step_in_backward = true\n",
        "job.toml:2: optimizer.early_step_in_backward",
        "training.max_norm = 1 would clip; set max_norm = 0",
    ),
    (
        "[training]\nmax_norm = 0.0\n[optimizer]\nearly_step_in_backward = true\n"
        "[parallelism]\npipeline_parallel_degree = 2\n",
        "job.toml:4: optimizer.early_step_in_backward",
        "later microbatches still need them; use false, or pipeline_parallel_degree = 1",
    ),
    (
        "[training]\nmax_norm = 0.0\nenable_cpu_offload = true\n[optimizer]\nearly_step_in_backward = true\n",
        "job.toml:5: optimizer.early_step_in_backward",
        "use false, or training.enable_cpu_offload = false",
    ),
    (
        "[training]\nmax_norm = 0.0\n[optimizer]\nearly_step_in_backward = true\n[metrics]\nlog_layer_norms_every_n_steps = 5\n",
        "job.toml:4: optimizer.early_step_in_backward",
        "uses up each gradient before metrics.log_layer_norms_every_n_steps could measure it",
    ),
    (
        "[training]\nmax_norm = 0.0\n[optimizer]\nname = 'Muon'\nearly_step_in_backward = true\n",
        "job.toml:5: optimizer.early_step_in_backward",
        'use false, or name = "AdamW"',
    ),
]
PARALLEL = "[parallelism]\n"
WORLD = [
    (
        16,
        f"{PARALLEL}tensor_parallel_degree = 3\n",
        "job.toml:2: parallelism.tensor_parallel_degree",
        "16 ranks / (tp 3) is not whole; tensor_parallel_degree = 2 or 4, or 15 or 18 ranks would do",
    ),
    (
        8,
        f"{PARALLEL}data_parallel_shard_degree = 4\ntensor_parallel_degree = 4\n",
        "job.toml:2: parallelism.data_parallel_shard_degree",
        "tp 4 = 16, but there are 8 ranks; data_parallel_shard_degree = 2, or tensor_parallel_degree = 2, or 16 ranks would do",
    ),
    (
        6,  # 3 and 6 divide it, but not the heads
        f"{PARALLEL}tensor_parallel_degree = 4\n",
        "job.toml:2: parallelism.tensor_parallel_degree",
        "6 ranks / (tp 4) is not whole; tensor_parallel_degree = 2, or 4 or 8 ranks would do",
    ),
    (
        2,
        f"{PARALLEL}data_parallel_shard_degree = 1\n",
        "job.toml:2: parallelism.data_parallel_shard_degree",
        "but there are 2 ranks; data_parallel_shard_degree = 2",
    ),
    (
        6,
        f"{PARALLEL}data_parallel_replicate_degree = 4\n",
        "job.toml:2: parallelism.data_parallel_replicate_degree",
        "6 ranks / (dp_replicate 4)",
    ),
    (
        4,
        "[training]\nglobal_batch_size = 40\n",
        "job.toml:2: training.global_batch_size",
        "8 x 4 data-parallel ranks = 32; 32 or 64 would do",
    ),
    (
        4,
        "[training]\nglobal_batch_size = 8\n",
        "job.toml:2: training.global_batch_size",
        "= 32; 32 would do",
    ),
    (
        8,
        f"[model]\nflavor = 'tiny'\n{PARALLEL}tensor_parallel_degree = 8\n",
        "job.toml:4: parallelism.tensor_parallel_degree",
        "does not divide the model's 4 heads; 4 would do",
    ),
    (
        2,
        f"{PARALLEL}context_parallel_degree = 2\n[training]\nseq_len = 2050\n",
        "job.toml:4: training.seq_len",
        "2 x cp 2 x tp 1 = 4; 2048 or 2052",
    ),
    (
        16,
        f"{PARALLEL}pipeline_parallel_degree = 16\n[training]\nlocal_batch_size = 16\n",
        "job.toml:2: parallelism.pipeline_parallel_degree",
        "16 stages are more than 6 layers",
    ),
    (
        4,
        f"{PARALLEL}pipeline_parallel_degree = 4\n[training]\nlocal_batch_size = 2\n",
        "job.toml:4: training.local_batch_size",
        "needs a microbatch for each of its 4 stages, not 2; use 4 or more",
    ),
    (
        2,
        f"{PARALLEL}pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3\n",
        "job.toml:1: training.local_batch_size",
        "6 or 9 would do",
    ),
    (
        2,
        f"{PARALLEL}pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 3\n",
        "job.toml:3: parallelism.pipeline_parallel_layers_per_stage",
        "2 ranks take 2 stages, not 3",
    ),
]
ALIASES = [
    (
        "[training]\nbatch_size = 0\n",
        "job.toml:2: training.batch_size",
        "must be at least 1, got 0",
    ),
    (
        "[training]\nbatch_size = 1\nlocal_batch_size = 2\n",
        "job.toml:2: training.batch_size",
        "is the old name of training.local_batch_size, which job.toml:3 sets too",
    ),
    ("[float8]\nemulate = 'yes'\n", "job.toml:2: float8.emulate", "expected true or false"),
    ("[float8]\n[quantize.linear.float8]\n", "job.toml:1: float8", "quantize.linear.float8"),
    ("[optimizer]\nfused = 'yes'\n", "job.toml:2: optimizer.fused", '"fused", "foreach"'),
    (
        "[job]\ncustom_config_module = 'mine'\n",
        "job.toml:2: job.custom_config_module",
        "entry points",
    ),
    (
        "[fault_tolerance]\nenable = true\n",
        "job.toml:2: fault_tolerance.enable",
        "titan train --max-restarts",
    ),
    (
        "[quantize.grouped_mm.mx]\nrecipe_name = 'mxfp8'\nfqns = ['experts']\n",
        "job.toml:1: quantize.grouped_mm.mx",
        "use [quantize.linear.float8]",
    ),
    (
        '[memory_estimation]\n"a.b" = 1\n',
        'job.toml:2: memory_estimation."a.b"',
        "use `titan check`",
    ),
    (
        '[fault_tolerance]\non_spike = "rewind"\n[checkpoint]\nload_only = true\n',
        "job.toml:2: fault_tolerance.on_spike",
        '"rewind" needs checkpoints to go back to',
    ),
    (
        '[fault_tolerance]\non_nonfinite = "skip"\n[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = 0\n',
        "job.toml:2: fault_tolerance.on_nonfinite",
        '"skip" cannot undo what optimizer.early_step_in_backward updates',
    ),
    (
        "[fault_tolerance]\nspike_window = 20\n",
        "job.toml:1: fault_tolerance.spike_min_steps",
        "32 losses do not fit spike_window = 20",
    ),
    (
        "[fault_tolerance]\nstep_timeout_seconds = 95\n",
        "job.toml:2: fault_tolerance.step_timeout_seconds",
        "comm.train_timeout_seconds = 100 ends the ranks before their stacks are written; use 85, or raise",
    ),
    ('[hardware]\nname = "h100"\n', "job.toml:2: hardware.name", "did you mean 'h100-sxm'?"),
    (
        "[experimental]\ncustom_import = 'x'\n",
        "job.toml:2: experimental.custom_import",
        "titan has no such setting",
    ),
    (
        '[optimizer]\nname = "AdamW"\nmomentum = 0.9\n',
        "job.toml:3: optimizer.momentum",
        'unknown key; only name = "Muon" has it',
    ),
    (
        '[tokenizer]\nname = "bytes"\npath = "tokenizer.json"\n',
        "job.toml:3: tokenizer.path",
        'tokenizer "bytes" reads no file',
    ),
    (
        "[activation_checkpoint]\nop_keep = 'attention, matmul/0'\n",
        "job.toml:2: activation_checkpoint.op_keep",
        '"matmul/0" is no operation such as "aten.mm" and no group',
    ),
    (
        "[training]\ndebug_moe_force_load_balance = true\n",
        "job.toml:2: training.debug_moe_force_load_balance",
        "remove the key",
    ),
]


@pytest.mark.parametrize(
    ("text", "place", "fragment"), SYNTAX + TYPES + NAMES + RANGES + RULES + ALIASES
)
def test_first_line_tells_place_and_cure(
    text: str | bytes, place: str, fragment: str, tmp_path: Path
) -> None:
    first, *_, count = report(text, tmp_path).splitlines()
    assert first.startswith(place)
    assert fragment in first
    assert count.endswith(("1 problem", "problems"))


@pytest.mark.parametrize(("world_size", "text", "place", "fragment"), WORLD)
def test_world_size_is_explained(
    world_size: int, text: str, place: str, fragment: str, tmp_path: Path
) -> None:
    first = report(text, tmp_path, world_size=world_size).splitlines()[0]
    assert first.startswith(f"{place}: ")
    assert fragment in first


@pytest.mark.parametrize(
    ("override", "key", "fragment"),
    [
        ("training.steps=ten", "training.steps", 'got the string "ten"'),
        ("training.steps=", "training.steps", 'got the string ""'),
        ("training.step=5", "training.step", "did you mean 'steps'?"),
        ("training=5", "training", "expected a table"),
        ("training..steps=5", "training..steps", "not a key"),
        ("data.sources[0].path=x", "data.sources[0].path", "not a key"),
        ("training.steps=5\nx = 3", "training.steps", "expected a whole number"),
        ("training.batch_size=0", "training.batch_size", "at least 1"),
        ('data.sources=[{type="text"}]', "data.sources[0].path", "missing"),
        ("model.flavor=9B", "model.flavor", "there are tiny, demo"),
    ],
)
def test_override_is_told_by_its_key(
    override: str, key: str, fragment: str, tmp_path: Path
) -> None:
    text = "[[data.sources]]\ntype = 'text'\npath = 'a'\n" if key.startswith("data") else ""
    first = report(text, tmp_path, overrides=[override]).splitlines()[0]
    assert first.startswith(f"command line: {key}: ")
    assert fragment in first


def test_every_problem_is_in_one_report(tmp_path: Path) -> None:
    text = "[training]\nstep = 1\nseq_len = 'x'\nbatch_size = 0\n[traning]\n[optimizer]\nlr = -1\nfoo = 1\n"
    lines = report(text, tmp_path, overrides=["checkpoint.interval=0"]).splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        *(f"job.toml:{n}" for n in (2, 3, 4, 5, 7, 8)),
        "command line",
    ]
    assert lines[-1] == "7 problems"


def test_rules_are_told_together(tmp_path: Path) -> None:
    text = "[validation]\nenable = true\n[data]\nreset_positions = true\n[model]\nflavor = '9B'\n"
    lines = report(text, tmp_path).splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [
        "validation.dataset",
        "data.reset_positions",
        "model.flavor",
    ]


def test_a_short_run_is_warned_of_what_is_cut(tmp_path: Path) -> None:
    """TorchTitan's build_lr_schedulers cuts warm-up, then decay, and warns."""
    path = tmp_path / "job.toml"
    for text, cut in {
        "[lr_scheduler]\nwarmup_steps = 30\n[training]\nsteps = 20\n": [
            "2: lr_scheduler.warmup_steps: 30 steps of warm-up do not fit into training.steps = 20, and are cut to 20"
        ],
        "[training]\nsteps = 100\n": ["1: lr_scheduler.warmup_steps: 200 steps"],
        "[lr_scheduler]\nwarmup_steps = 30\ndecay_ratio = 0.8\n[training]\nsteps = 100\n": [
            "3: lr_scheduler.decay_ratio: 0.8 of training.steps = 100 is 80 steps of decay, which 30 of warm-up leave no "
            "room for: they are cut to 70"
        ],
        "[lr_scheduler]\nwarmup_steps = 9\ntotal_steps = 8\ndecay_ratio = 1.0\n": [
            "2: lr_scheduler.warmup_steps: 9 steps of warm-up do not fit into lr_scheduler.total_steps = 8, and are cut to 8",
            "4: lr_scheduler.decay_ratio: 1.0 of lr_scheduler.total_steps = 8 is 8 steps of decay, which 8 of warm-up leave",
        ],
        "[lr_scheduler]\nwarmup_steps = 2\n[training]\nsteps = 5\n[profiling]\nenable_profiling = true\n": [
            "5: profiling.profile_freq: 10, but the run ends at training.steps = 5: no trace will be written"
        ],
        "[lr_scheduler]\nwarmup_steps = 20\ndecay_ratio = 0.8\n[training]\nsteps = 100\n": [],
    }.items():
        path.write_text(text)
        config = load_config(path)
        assert check(config) == []
        warnings = advise(config)
        assert len(warnings) == len(cut)
        for line, said in zip(warnings, cut, strict=True):
            assert line.startswith(f"{path}:{said}")


def test_rules_judge_what_is_left_of_a_misspelt_job(tmp_path: Path) -> None:
    """A mistake in one setting hides no other; what depends on it is not guessed."""
    path = tmp_path / "job.toml"
    for text, keys in {
        # A misspelt key, a wrong type, an unknown section: rules about anything else still hold.
        "[training]\nstep = 1\n[model]\nname = 'lama3'\n": ["training.step", "model.name"],
        "[traning]\n[model]\nflavor = '9B'\n": ["traning", "model.flavor"],
        "[optimizer]\nname = 'adamm'\n[hardware]\nname = 'h1'\n": [
            "optimizer.name",
            "hardware.name",
        ],
        "[[data.sources]]\ntype = 'text'\n[model]\nname = 'lama3'\n": [
            "data.sources[0].path",
            "model.name",
        ],
        "[job]\ncustom_config_module = 'x'\n[model]\nname = 'x'\n": [
            "job.custom_config_module",
            "model.name",
        ],
        # ... but not rules that would have to know it.
        "[training]\nseq_len = '7'\n[parallelism]\ncontext_parallel_degree = 4\n": [
            "training.seq_len"
        ],
        "[parallelism]\ntensor_paralel_degree = 4\ndata_parallel_shard_degree = 1\n": [
            "parallelism.tensor_paralel_degree"
        ],
        "[model]\nname = 'x'\n[parallelism]\npipeline_parallel_degree = 4\n": ["model.name"],
        "[model]\nflavour = '8B'\n[parallelism]\ntensor_parallel_degree = 4\n": ["model.flavour"],
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_to_run([str(path)], world_size=4)
        assert [problem.key for problem in caught.value.problems] == keys, text


def test_a_misspelt_option_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nsteps = 0\n[model]\nname = 'lama3'\n")
    with pytest.raises(ConfigError) as caught:
        load_to_run([str(path), "--nprocs", "2", "--model.flavour=8B"], world_size=1)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["training.steps", "model.name", "--nprocs", "model.flavour"]


def test_an_unknown_schedule_is_told_once(tmp_path: Path) -> None:
    text = "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'foo'\n"
    told = report(text, tmp_path, world_size=2).splitlines()
    assert len(told) == 2 and told[0].startswith(
        "job.toml:3: parallelism.pipeline_parallel_schedule: unknown"
    )


def test_a_problem_in_an_overlay_is_told_there(tmp_path: Path) -> None:
    base, top = tmp_path / "base.toml", tmp_path / "top.toml"
    base.write_text("[training]\nsteps = 1000\n[[data.sources]]\ntype = 'text'\npath = 'a'\n")
    top.write_text("\n[data]\nsources = [\n {type = 'text'},\n]\n[training]\nsteps = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(base, overlays=[top])
    places = [(Path(p.file).name, p.line, p.key) for p in caught.value.problems]
    assert places == [("top.toml", 4, "data.sources[0].path"), ("top.toml", 7, "training.steps")]


def test_a_missing_key_points_at_the_section_of_the_file_that_has_it(tmp_path: Path) -> None:
    base, top = tmp_path / "base.toml", tmp_path / "top.toml"
    base.write_text("\n[validation]\nenable = true\n")
    top.write_text("[validation]\nfreq = 5\n")
    (problem,) = check(load_config(base, overlays=[top]))
    assert (Path(problem.file).name, problem.line, problem.key) == (
        "base.toml",
        2,
        "validation.dataset",
    )


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train_configs").mkdir()
    Path("train_configs/debug_model.toml").write_text("")
    for name, said in {
        "train_configs/debug_modl.toml": "no such file; did you mean 'train_configs/debug_model.toml'?",
        "debug_model.toml": "no such file; did you mean 'train_configs/debug_model.toml'?",
        "zzz": "no such file; there are train_configs/debug_model.toml",
        "train_configs": "a folder, not a job file; there are train_configs/debug_model.toml",
        "a\0b": "cannot be read: embedded null byte",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(name)
        assert str(caught.value).startswith(printable(f"{name}: {said}"))


def test_two_unreadable_files_are_both_told(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("x = \n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.toml", overlays=[bad], overrides=["=1"])
    assert [p.line for p in caught.value.problems] == [0, 1, 0]


def test_what_is_not_built_yet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[parallelism]\nexpert_tensor_parallel_degree = 3\nexpert_parallel_degree = 2\n"
    )
    problems = check_supported(load_config(path))
    assert [(p.line, p.key) for p in problems] == [
        (3, "parallelism.expert_parallel_degree"),
        (2, "parallelism.expert_tensor_parallel_degree"),
    ]
    assert problems[0].message == "2 is not built yet in titan 0.1; use 1"
    path.write_text(
        "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2\n"
    )
    assert check_supported(load_config(path)) == []


def every_key(path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in fields_at(path):
        yield (*path, name)
        yield from every_key((*path, name))


ODD_VALUES = [
    "-1",
    "1.5",
    "nan",
    "true",
    '"x"',
    "[]",
    "[[1]]",
    "{a={b=[1]}}",
    "2024-01-01",
    '[{type="text"}]',
    '{"a.b"=1}',
]


def test_no_value_of_any_key_shows_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    keys = [key_text(key) for key in every_key() if len(key) < 5]
    assert len(keys) > 140
    num_problems = 0
    for key in keys:
        for value in ODD_VALUES:
            path.write_text(f"\n{key} = {value}\n")
            try:
                config = load_config(path)
                problems = check(config) + check_layout(config, world_size=8)
            except ConfigError as error:
                problems = error.problems
            for problem in problems:
                assert problem.file == str(path) and problem.line in (1, 2), problem
                assert "nput should" not in problem.message, problem  # pydantic's own words
            num_problems += len(problems)
    assert num_problems > 1000
