"""Malformed jobs and environments of every kind: `titan check` and `titan train` refuse each alike, before torch is imported.

Each is refused with exit code 2, one line for each problem, with file and line, the option or the variable, within a second of
processor time. The cases run in this process; a sample of them, and in the slow lane all, as users run them.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from titan import cli, launch

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
RANKS |= {"MASTER_PORT": "29500"}
PP = "[parallelism]\npipeline_parallel_degree = 1\n"
FP8 = "[model]\nconverters = ['float8']\n"
AC = "[activation_checkpoint]\nmode = 'selective'\n"
OPTIONS = "command line: "

# What the job file holds, overrides, how a line of the report begins, and what that line says.
Case = tuple[str, tuple[str, ...], str, str]
SYNTAX: list[Case] = [
    ("[training\n", (), "job.toml:1: ", "not valid TOML"),
    ("[training]\nsteps = \n", (), "job.toml:2: ", "not valid TOML"),
    ("[training]\nsteps = 1\nsteps = 2\n", (), "job.toml:3: ", "set twice"),
    ("x = " + "[" * 9000, (), "job.toml:1: ", "nested too deeply"),
    ("x = " + "{a=" * 9000, (), "job.toml:1: ", "nested too deeply"),
    ("[training]\nsteps = " + "9" * 9000, (), "job.toml:", "not valid TOML"),
    ("\x00\x01", (), "job.toml:1: ", "not valid TOML"),
    ("[job]\ndescription = '''", (), "job.toml:2: ", "not valid TOML"),
    ("[[training]]\n", (), "job.toml:1: training: ", "expected a table"),
    ("[a.b.c.d.e.f]\n", (), "job.toml:1: a: ", "unknown section"),
]
TYPES: list[Case] = [
    ("[training]\nsteps = '3'\n", (), "job.toml:2: training.steps: ", "without quotes"),
    ("[training]\nseq_len = 1e26\n", (), "job.toml:2: training.seq_len: ", "a whole number"),
    ("[debug]\nseed = 1e23\n", (), "job.toml:2: debug.seed: ", "a whole number"),
    (
        "[training]\nlocal_batch_size = true\n",
        (),
        "job.toml:2: training.local_batch_size: ",
        "true",
    ),
    ("[optimizer]\nlr = inf\n", (), "job.toml:2: optimizer.lr: ", "finite"),
    ("[model.overrides]\ndim = inf\n", (), "job.toml:2: model.overrides.dim: ", ""),
    ("[model]\noverrides = 5\n", (), "job.toml:2: model.overrides: ", "expected a table"),
    ("[data]\nsources = 'stdlib'\n", (), "job.toml:2: data.sources: ", "[[data.sources]]"),
    ("[data]\nsources = [[]]\n", (), "job.toml:2: data.sources[0]: ", ""),
    (
        "[parallelism]\nmodule_fqns_per_model_part = ['a']\n",
        (),
        "job.toml:2: parallelism.module",
        "",
    ),
    ("[model]\nconverters = {a = 1}\n", (), "job.toml:2: model.converters: ", "a list"),
    ("", ("--training.steps",), OPTIONS + "training.steps: ", "a whole number"),
    ("", ("--training.steps=" + "9" * 5000,), OPTIONS + "training.steps: ", "a whole number"),
]
NAMES: list[Case] = [
    ("[training]\nstep = 3\n", (), "job.toml:2: training.step: ", "'steps'"),
    ("[trainig]\nsteps = 3\n", (), "job.toml:1: trainig: ", "'training'"),
    ('[training]\n"a.b" = 3\n', (), 'job.toml:2: training."a.b": ', "unknown key"),
    ('["\\u0000"]\n', (), "job.toml:1: ", "unknown section"),
    ("[model]\nname = 'lama3'\n", (), "job.toml:2: model.name: ", "'llama3'"),
    ("[model]\nname = ''\n", (), "job.toml:2: model.name: ", "unknown model family"),
    ("[model]\nname = '../llama3'\n", (), "job.toml:2: model.name: ", "unknown model family"),
    ("[model]\nflavor = '8b'\n", (), "job.toml:2: model.flavor: ", "'8B'"),
    ("[optimizer]\nname = 'adam'\n", (), "job.toml:2: optimizer.name: ", "'Adam'"),
    ("[hardware]\nname = 'h1000'\n", (), "job.toml:2: hardware.name: ", "unknown hardware"),
    (
        "[model]\nconverters = ['float9']\n",
        (),
        "job.toml:2: model.converters: ",
        "unknown converter",
    ),
    (
        "[checkpoint]\nexclude_from_loading = ['x']\n",
        (),
        "job.toml:2: checkpoint.exclude",
        "unknown",
    ),
    (PP + "pipeline_parallel_schedule = 'x'\n", (), "job.toml:3: parallelism.pipeline", "unknown"),
    (
        "[job]\ncustom_config_module = 'x'\n",
        (),
        "job.toml:2: job.custom_config_module: ",
        "no such",
    ),
    ("[training]\nbatch_size = 0\n", (), "job.toml:2: training.batch_size: ", "at least 1"),
]
SIZES: list[Case] = [
    (
        "[model.overrides]\ndim = 6400000000000\n",
        (),
        "job.toml:2: model.overrides.dim: ",
        "at most",
    ),
    (
        "[model.overrides]\ndim = 16777216\n",
        (),
        "job.toml:1: model.overrides: ",
        "no machine holds",
    ),
    (
        "[model.overrides]\nn_layers = 100000\n",
        (),
        "job.toml:2: model.overrides.n_layers: ",
        "10,000",
    ),
    (
        "[model.overrides]\nn_heads = 16777215\n",
        (),
        "job.toml:2: model.overrides.n_heads: ",
        "heads",
    ),
    (
        "[model.overrides]\nvocab_size = 2147483648\n",
        (),
        "job.toml:2: model.overrides.vocab",
        "at most",
    ),
    (
        f"[model.overrides]\nffn_dim = {10**30}\n",
        (),
        "job.toml:2: model.overrides.ffn_dim: ",
        "at most",
    ),
    ("[model.overrides]\nhead_dim = 7\n", (), "job.toml:2: model.overrides.head_dim: ", "odd"),
    ("[model.overrides]\nn_heads = 0\n", (), "job.toml:2: model.overrides.n_heads: ", "at least 1"),
    (f"[training]\nseq_len = {10**26}\n", (), "job.toml:2: training.seq_len: ", "at most"),
    ("[training]\nseq_len = 2147483647\n", (), "job.toml:2: training.seq_len: ", "tokens in one"),
    (f"[training]\nsteps = {2**63}\n", (), "job.toml:2: training.steps: ", "at most"),
    (
        f"[training]\nlocal_batch_size = {2**40}\n",
        (),
        "job.toml:2: training.local_batch",
        "at most",
    ),
    (
        f"[training]\nglobal_batch_size = {2**80}\n",
        (),
        "job.toml:2: training.global_batch",
        "at most",
    ),
    (f"[debug]\nseed = {10**23}\n", (), "job.toml:2: debug.seed: ", "less than"),
    ("[debug]\nseed = -1\n", (), "job.toml:2: debug.seed: ", "at least 0"),
    (f"[comm]\ninit_timeout_seconds = {10**18}\n", (), "job.toml:2: comm.init_timeout", "at most"),
    (f"[comm]\ntrace_buf_size = {10**9}\n", (), "job.toml:2: comm.trace_buf_size: ", "at most"),
    (f"[checkpoint]\nload_step = {10**20}\n", (), "job.toml:2: checkpoint.load_step: ", "at most"),
    (
        "[training.dataloader]\nprefetch_factor = 99999999\n",
        (),
        "job.toml:2: training.data",
        "at most",
    ),
    (
        f"[parallelism]\ntensor_parallel_degree = {10**9}\n",
        (),
        "job.toml:2: parallelism.t",
        "1 ranks",
    ),
    (
        "[lr_scheduler]\ndecay_ratio = 2\n",
        (),
        "job.toml:2: lr_scheduler.decay_ratio: ",
        "at most 1",
    ),
]
DATA: list[Case] = [
    ("[training]\ndataset = 'stdlb'\n", (), "job.toml:2: training.dataset: ", "'stdlib'"),
    ("[training]\ndataset = 'c4_tst'\n", (), "job.toml:2: training.dataset: ", "'c4_test'"),
    ("[training]\ndataset = 'fineweb'\n", (), "job.toml:2: training.dataset: ", "is no preset"),
    ("[training]\ndataset = ''\n", (), "job.toml:2: training.dataset: ", "is no preset"),
    ("[training]\ndataset = 'text'\n", (), "job.toml:1: training.dataset_path: ", "missing"),
    (
        "[training]\ndataset = 'text'\ndataset_path = 'none/*.txt'\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "matches nothing",
    ),
    (
        "[training]\ndataset = 'jsonl'\ndataset_path = 'empty'\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "in folder 'empty'",
    ),
    (
        "[training]\ndataset = 'parquet'\ndataset_path = 'none.parquet'\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "is no file or folder",
    ),
    (
        "[training]\ndataset = 'shards'\ndataset_path = 'empty'\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "holds no token shards",
    ),
    (
        "[training]\ndataset = 'shards'\ndataset_path = 'junk'\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "index.json",
    ),
    (
        "[[data.sources]]\ntype = 'text'\npath = 'none'\n",
        (),
        "job.toml:3: data.sources[0].path: ",
        "is no file or folder",
    ),
    (
        "[[data.sources]]\ntype = 'stdlib'\n[[data.sources]]\ntype = 'jsonl'\npath = 'empty'\n",
        (),
        "job.toml:5: data.sources[1].path: ",
        "in folder 'empty'",
    ),
    (
        "[[data.sources]]\ntype = 'huggingface'\npath = './none'\n",
        (),
        "job.toml:3: data.sources[0].path: ",
        "does not exist",
    ),
    ("[[data.sources]]\ntype = 'texd'\n", (), "job.toml:2: data.sources[0].type: ", "'text'"),
    (
        "[training]\ndataset = 'text'\ndataset_path = \"a\\u0000b\"\n",
        (),
        "job.toml:3: training.dataset_path: ",
        "a character that no file can",
    ),
    (
        "[validation]\nenable = true\ndataset = 'c5'\n",
        (),
        "job.toml:3: validation.dataset: ",
        "preset",
    ),
    (
        "[validation]\nenable = true\ndataset = 'text'\ndataset_path = 'none'\n",
        (),
        "job.toml:4: validation.dataset_path: ",
        "is no file or folder",
    ),
    (
        "[validation]\nenable = true\ndataset = 'c4_validation'\nsteps = -1\n",
        (),
        "job.toml:4: validation.steps: ",
        "a stream has no end",
    ),
    ("[data]\ncache_folder = 'file/x'\n", (), "job.toml:2: data.cache_folder: ", "is a file"),
]
TOKENIZERS: list[Case] = [
    ("[tokenizer]\npath = 'none'\n", (), "job.toml:2: tokenizer.path: ", "does not exist"),
    ("[tokenizer]\npath = 'empty'\n", (), "job.toml:2: tokenizer.path: ", "no tokenizer in folder"),
    ("[tokenizer]\npath = 'junk'\n", (), "job.toml:2: tokenizer.path: ", "not a valid tokenizer"),
    ("[tokenizer]\npath = 'ranks'\n", (), "job.toml:2: tokenizer.path: ", "not a line of"),
    (
        "[tokenizer]\nname = 'tiktoken'\n",
        (),
        "job.toml:2: tokenizer.name: ",
        "needs tokenizer.path",
    ),
    (
        "[tokenizer]\nname = 'huggingface'\npath = 'ranks'\n",
        (),
        "job.toml:3: tokenizer.path: ",
        "no tokenizer in folder",
    ),
    ("[model]\nhf_assets_path = 'none'\n", (), "job.toml:2: model.hf_assets_path: ", "not exist"),
    (
        "[model]\nflavor = '8B'\nhf_assets_path = './assets/hf/Llama-3.1-8B'\n",
        (),
        "job.toml:3: ",
        "not exist",
    ),
    ("[model.overrides]\nvocab_size = 100\n", (), "job.toml:1: tokenizer.name: ", "258 tokens"),
    (
        "[data]\ndocument_mask = true\nadd_bos = false\nadd_eos = false\n",
        (),
        "job.toml:2: data.document_mask: ",
        "begin or end with a token",
    ),
]
FOLDERS: list[Case] = [
    ("[job]\ndump_folder = 'file'\n", (), "job.toml:2: job.dump_folder: ", "file is a file"),
    ("[job]\ndump_folder = 'file/run'\n", (), "job.toml:2: job.dump_folder: ", "file is a file"),
    ("[job]\ndump_folder = '/dev/null/x'\n", (), "job.toml:2: job.dump_folder: ", "is a file"),
    ('[job]\ndump_folder = "a\\u0000b"\n', (), "job.toml:2: job.dump_folder: ", "no file can"),
    (f"[job]\ndump_folder = '{'x' * 300}'\n", (), "job.toml:2: job.dump_folder: ", "too long"),
    (
        '[metrics]\nsave_tb_folder = "\\u0000"\n',
        (),
        "job.toml:2: metrics.save_tb_folder: ",
        "no file can",
    ),
    (
        '[comm]\nsave_traces_folder = "\\u0000"\n',
        (),
        "job.toml:2: comm.save_traces_folder: ",
        "no file",
    ),
    ("[checkpoint]\nfolder = 'nothing://x'\n", (), "job.toml:2: checkpoint.folder: ", "nothing"),
    ("[checkpoint]\nfolder = '/dev/null/x'\n", (), "job.toml:2: checkpoint.folder: ", "is a file"),
    (
        "[checkpoint]\nload_step = 7\n",
        (),
        "job.toml:2: checkpoint.load_step: ",
        "there is none at all",
    ),
    (
        "[checkpoint]\ninitial_load_path = 'none'\n",
        (),
        "job.toml:2: checkpoint.initial",
        "not exist",
    ),
    (
        "[checkpoint]\ninitial_load_path = 'empty'\n",
        (),
        "job.toml:2: checkpoint.initial",
        "is no checkpoint",
    ),
    (
        "[checkpoint]\ninitial_load_path = 'saved'\n",
        (),
        "job.toml:2: checkpoint.initial",
        "saved/step-5",
    ),
    (
        "[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = 'empty'\n",
        (),
        "job.toml:3: checkpoint.initial_load_path: ",
        "it has no config.json",
    ),
]
STEP: list[Case] = [
    (
        "[compile]\nenable = true\nbackend = 'induktor'\n",
        (),
        "job.toml:3: compile.backend: ",
        "'inductor'",
    ),
    (
        "[compile]\nenable = true\nbackend = ''\n",
        (),
        "job.toml:3: compile.backend: ",
        "unknown backend",
    ),
    (
        AC + "op_keep = ['aten.mmm']\n",
        (),
        "job.toml:3: activation_checkpoint.op_keep: ",
        "'aten.mm'",
    ),
    (AC + "op_keep = ['matmull']\n", (), "job.toml:3: activation_checkpoint.op_keep: ", "'matmul'"),
    (
        AC + "op_keep = ['matmul/0']\n",
        (),
        "job.toml:3: activation_checkpoint.op_keep: ",
        "no group",
    ),
    (
        AC + f"op_keep = ['matmul/{'9' * 5000}']\n",
        (),
        "job.toml:3: activation_checkpoint.op",
        "no group",
    ),
    (
        AC + "selective_ac_option = '9'\n",
        (),
        "job.toml:3: activation_checkpoint.sel",
        "has 6 layers",
    ),
    (
        AC + "selective_ac_option = 100\n",
        (),
        "job.toml:3: activation_checkpoint.sel",
        "has 6 layers",
    ),
    (
        AC + f"selective_ac_option = '{'9' * 5000}'\n",
        (),
        "job.toml:3: activation_checkpoint.s",
        "number",
    ),
    (AC + "selective_ac_option = '-1'\n", (), "job.toml:3: activation_checkpoint.sel", "number"),
    (FP8, (), "job.toml:2: model.converters: ", "no GPU to multiply in 8 bits"),
    (FP8 + "[hardware]\nname = 'h100-sxm'\n", (), "job.toml:2: model.converters: ", "no GPU"),
    (
        "[model]\nconverters = ['quantize.linear.mx']\n",
        (),
        "job.toml:2: model.converters: ",
        "no GPU",
    ),
]
# On two ranks.
WORLD: list[Case] = [
    (
        "[parallelism]\ntensor_parallel_degree = 3\n",
        (),
        "job.toml:2: parallelism.tensor",
        "not whole",
    ),
    (
        PP.replace("1", "2"),
        ("--training.local_batch_size=1",),
        OPTIONS + "training.local_batch",
        "2",
    ),
    (
        PP.replace("1", "2")
        + "module_fqns_per_model_part = [['tok_embeddings', 'layers.0'], ['norm', 'output']]\n"
        + "[model]\nflavor = 'tiny'\n",
        (),
        "job.toml:3: parallelism.module_fqns_per_model_part: ",
        "layers.1, layers.2, layers.3, layers.4, layers.5 and 2 more would be in no stage",
    ),
    (
        PP.replace("1", "2")
        + "module_fqns_per_model_part = [['tok_embeddings', 'norm'], ['norm', 'output']]\n"
        + "[model.overrides]\nn_layers = 1\n",
        (),
        "job.toml:3: parallelism.module_fqns_per_model_part: ",
        "'norm' is named 2 times",
    ),
    (
        PP.replace("1", "2") + "module_fqns_per_model_part = [['tok_embedding'], ['output']]\n",
        (),
        "job.toml:3: parallelism.module_fqns_per_model_part: ",
        "no module 'tok_embedding'; did you mean 'tok_embeddings'?",
    ),
    (
        PP.replace("1", "2") + "pipeline_parallel_schedule_csv = 'none.csv'\n",
        (),
        "job.toml:3: parallelism.pipeline_parallel_schedule_csv: ",
        "none.csv",
    ),
    (
        PP.replace("1", "2")
        + "[model.overrides]\nn_layers = 10000\n[training]\nlocal_batch_size = 1\n",
        (),
        "job.toml:6: training.local_batch_size: ",
        "use 2 or more",
    ),
    (
        PP.replace("1", "2") + "pipeline_parallel_layers_per_stage = 1\n",
        (),
        "job.toml:3: ",
        "stages",
    ),
    (
        "[training]\nglobal_batch_size = 2147483647\nlocal_batch_size = 1073741824\nseq_len = 1\n",
        (),
        "job.toml:2: training.global_batch_size: ",
        "is not a multiple",
    ),
]
# What the environment has beside, or instead of, that of rank 0 of 2; None: it lacks the variable.
ENVIRONMENT: list[tuple[Mapping[str, str | None], str, str]] = [
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: ", "expected a whole number, got 'abc'"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE: ", "expected a whole number"),
    ({"WORLD_SIZE": "-1"}, "WORLD_SIZE: ", "expected a whole number"),
    ({"WORLD_SIZE": "1e3"}, "WORLD_SIZE: ", "expected a whole number"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE: ", "expected a whole number"),
    ({"WORLD_SIZE": "0"}, "RANK: ", "no rank of WORLD_SIZE = 0"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE: ", "missing beside RANK = 0"),
    ({"RANK": "2"}, "RANK: ", "2 is no rank of WORLD_SIZE = 2, which are 0 to 1"),
    ({"RANK": "x"}, "RANK: ", "expected a whole number"),
    ({"RANK": "\u0662"}, "RANK: ", "expected a whole number"),
    ({"RANK": None}, "RANK: ", "missing beside WORLD_SIZE = 2"),
    ({"LOCAL_RANK": "one"}, "LOCAL_RANK: ", "expected a whole number"),
    (
        {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"},
        "LOCAL_RANK: ",
        "no rank of LOCAL_WORLD_SIZE = 2",
    ),
    ({"MASTER_ADDR": None}, "MASTER_ADDR: ", "missing beside RANK = 0"),
    ({"MASTER_ADDR": " "}, "MASTER_ADDR: ", "missing beside RANK = 0"),
    ({"MASTER_PORT": None}, "MASTER_PORT: ", "missing beside RANK = 0"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT: ", "expected a whole number"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT: ", "70000 is no port"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT: ", "0 is no port"),
    ({"TORCHELASTIC_MAX_RESTARTS": "many"}, "TORCHELASTIC_MAX_RESTARTS: ", "whole number"),
    ({"TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT: ", "whole number"),
    ({"TITAN_FAULT": "nan"}, "TITAN_FAULT: ", "expected nan:SAMPLE"),
    ({"TITAN_FAULT": "flip:1"}, "TITAN_FAULT: ", "expected nan:SAMPLE"),
    ({"TITAN_FAULT": "nan:" + "9" * 5000}, "TITAN_FAULT: ", "expected nan:SAMPLE"),
]
COMMAND_LINE: list[Case] = [
    ("", ("--training.step=1",), OPTIONS + "training.step: ", "'steps'"),
    ("", ("--frobnicate=2",), OPTIONS + "--frobnicate: ", "unknown option"),
    ("", ("training.steps=2",), OPTIONS + "training.steps=2: ", "did you mean --training.steps=2?"),
    ("", ("none.toml",), "none.toml: ", "no such file"),
    ("", ("empty",), "empty: ", "a folder, not a job file"),
    ("", ("a\0b.toml",), "a\\u0000b.toml: ", "cannot be read"),
    ('[model]\nname = "\\u001b]52;c;eA==\\u0007"\n', (), "job.toml:2: model.name: ", "\\u001b]52;"),
    ("", ("--training..steps=2",), OPTIONS + "training..steps: ", "not a key"),
    ("", ("--model.name=\udcff",), OPTIONS + "model.name: ", ""),
]
CASES = [*SYNTAX, *TYPES, *NAMES, *SIZES, *DATA, *TOKENIZERS, *FOLDERS, *STEP, *COMMAND_LINE]
EVERY = [
    *((text, overrides, {}, 1, place, said) for text, overrides, place, said in CASES),
    *((text, overrides, {}, 2, place, said) for text, overrides, place, said in WORLD),
    *(
        ("", (), {**RANKS, **changes}, 2, f"environment: {place}", said)
        for changes, place, said in ENVIRONMENT
    ),
]
IDS = [f"{number:03}-{re.sub(r'[^a-z_]+', '-', case[4])[:40]}" for number, case in enumerate(EVERY)]
assert len(EVERY) >= 128


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of everything that a job may name wrongly."""
    for name in ("empty", "junk", "ranks", "saved/step-5"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    (tmp_path / "junk" / "tokenizer.json").write_text("{")
    (tmp_path / "junk" / "index.json").write_text('{"format": 7}')
    (tmp_path / "ranks" / "tokenizer.model").write_text("no rank\n")
    (tmp_path / "saved" / "step-5" / ".metadata").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> None:
    (folder / "job.toml").write_text(text, encoding="utf-8", errors="surrogateescape")


def without_warnings(report: str) -> list[str]:
    return [line for line in report.splitlines() if " is now " not in line]


def require_report(report: str, place: str, said: str) -> None:
    *lines, count = without_warnings(report)
    assert re.fullmatch(r"\d+ problems?", count), report
    assert "Traceback" not in report
    hits = [line for line in lines if line.startswith(place)]
    assert hits and any(said in line for line in hits), report
    for line in lines:  # each names a file with its line, the option or the variable
        assert re.match(
            r"(job\.toml:\d+|command line|environment|none\.toml|empty|a\\u0000b\.toml): ", line
        ), line


@pytest.mark.parametrize(
    ("text", "overrides", "environment", "ranks", "place", "said"), EVERY, ids=IDS
)
def test_check_and_train_refuse_alike(
    text: str,
    overrides: tuple[str, ...],
    environment: dict[str, str | None],
    ranks: int,
    place: str,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "count_accelerators", lambda: 0)
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    write(folder, text)
    start = time.process_time()
    code = cli.main(["check", "job.toml", *overrides, f"--world-size={ranks}"])
    report = capsys.readouterr().err
    assert code == 2, report
    require_report(report, place, said)
    assert time.process_time() - start < 1.0
    # Only now, for a job that is not refused would train.
    assert cli.main(["train", "job.toml", *overrides, f"--nproc={ranks}"]) == 2
    assert capsys.readouterr().err == report
    assert not (folder / "outputs").exists()


def run(command: str, case: tuple, folder: Path) -> None:
    """As a user runs it: exit code, report, no torch, a second of processor time."""
    text, overrides, environment, ranks, place, said = case
    write(folder, text)
    variables = {k: v for k, v in (os.environ | environment).items() if v is not None}
    probe = "import sys; from titan.cli import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    option = f"--world-size={ranks}" if command == "check" else f"--nproc={ranks}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", probe, command, "job.toml", *overrides, option],
        capture_output=True,
        text=True,
        env=variables,
        timeout=300,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stdout) == (2, "False\n"), result.stderr
    require_report(result.stderr, place, said)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def runnable(case: tuple) -> bool:
    """A null character cannot be given to a process."""
    words = [*case[1], *(value or "" for value in case[2].values())]
    return not any("\0" in word for word in words)


SAMPLE = [case for case in EVERY if runnable(case)]


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_sample_as_users_run_it(command: str, folder: Path) -> None:
    for case in SAMPLE[::30]:
        run(command, case, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "train"])
def test_all_of_them_as_users_run_them(command: str, folder: Path) -> None:
    for case in SAMPLE:
        run(command, case, folder)
