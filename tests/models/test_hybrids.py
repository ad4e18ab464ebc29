"""Models of transformers with linear attention, such as Qwen3-Next: counts, layouts against transformers alone, documents, initial weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from tests.support.hf_families import (
    LAYOUTS,
    PACKED,
    PROOFS,
    VOCABULARY,
    job_of,
    overrides_of,
    row_of,
    std_of,
)
from tests.support.hf_folders import twin_of
from tests.support.ranks import Pool
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.model import resolve_model
from titan.models.transformers import build_model
from titan.parallel import initialize, materialize

EP = {"FSDP2 x EP": {"dp_shard": 2, "ep": 2}}
CONTIGUOUS = {"parallelism": {"context_parallel_load_balancer": "none"}}


def qwen3_next() -> tuple[Any, Any]:
    """Return the sizes of a small Qwen3-Next and its model on the CPU."""
    name = "Qwen3NextForCausalLM"
    sizes, problems = resolve_model(job_of(name, {}, overrides_of(name)).model)
    assert not problems
    with torch.device("meta"):
        model = build_model(sizes)
    materialize(model, device="cpu")
    return sizes, model


@pytest.mark.slow
def test_the_count_of_qwen3_next_80b_is_that_of_transformers() -> None:
    name = "Qwen3NextForCausalLM"
    sizes, problems = resolve_model(job_of(name, {}, {}).model)
    with torch.device("meta"):
        theirs = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig())
    assert not problems
    assert sizes.num_params == sum(p.numel() for p in theirs.parameters()) == 79_674_391_296


def test_initial_decays_are_those_of_transformers() -> None:
    """exp(A_log) is uniform from 0.01 to 16, and the steps' bias is one."""
    _, model = qwen3_next()
    initialize(model, seed=3, std_of=model.init_std)
    layers = [model.layers[n].linear_attn for n in ("0", "1", "2")]
    decays = torch.cat([layer.A_log.detach() for layer in layers]).exp()
    assert len(decays.unique()) == len(decays)
    assert decays.min() >= 0.01 and 4 < decays.max() <= 16
    assert all((layer.dt_bias == 1).all() for layer in layers)
    before = layers[0].A_log.detach().clone()
    initialize(model, seed=3, std_of=model.init_std)
    assert torch.equal(layers[0].A_log, before)


def test_logits_are_those_of_transformers() -> None:
    """Over 200 tokens, which are several chunks of the recurrence."""
    sizes, model = qwen3_next()
    initialize(model, seed=1, std_of=std_of)
    twin = twin_of(json.loads(sizes.source.hf)).eval()
    theirs = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parent, _, leaf = model.hf_name(name).rpartition(".")
            whole = theirs.get(f"{parent}.{leaf}")
            if whole is None:
                whole = theirs[f"{parent}.gate_up_proj"].chunk(2, 1)[leaf == "up_proj"]
            whole.copy_(parameter)
        tokens = torch.randint(3, VOCABULARY, (2, 200))
        ours, true = model(tokens), twin(input_ids=tokens, use_cache=False).logits
    assert (ours - true).norm() < 1e-5 * true.norm()


def test_qwen3_next_on_layouts(pool: Pool) -> None:
    layouts = {name: LAYOUTS[name] for name in ("TP+SP", "CP", "PP", "EP")}
    row = row_of(pool, "qwen3_next", layouts)
    assert all(float(row[name]) < 1e-5 for name in layouts), row


def test_qwen3_next_with_documents(pool: Pool) -> None:
    """transformers is called with each document alone."""
    row = row_of(pool, "qwen3_next", PACKED)
    assert all(float(row[name]) < 1e-5 for name in PACKED), row


@pytest.mark.slow
def test_qwen3_next_compiled_and_recomputed(pool: Pool) -> None:
    more = {"compile": {"enable": True}, "activation_checkpoint": {"mode": "full"}}
    row = row_of(pool, "qwen3_next", EP, more=more)
    assert float(row["FSDP2 x EP"]) < 1e-5, row


@pytest.mark.slow
def test_qwen3_next_with_contiguous_parts(pool: Pool) -> None:
    row = row_of(pool, "qwen3_next", {"CP": {"cp": 2}}, more=CONTIGUOUS)
    assert float(row["CP"]) < 1e-5, row


@pytest.mark.slow
def test_qwen3_next_resumes_and_exports(pool: Pool) -> None:
    row = row_of(pool, "qwen3_next", PROOFS)
    assert float(row["resumed"]) < 1e-5 and row["exported"] == "equal", row


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kimi_linear", "bamba", "olmo_hybrid", "qwen3_5_text"])
def test_other_hybrids_on_layouts(kind: str, pool: Pool) -> None:
    layouts = {name: LAYOUTS[name] for name in ("TP+SP", "CP", "PP")}
    row = row_of(pool, kind, layouts)
    assert all(float(row[name]) < 1e-5 for name in layouts), row


def test_a_convolution_that_is_three_on_disk_is_refused_before_a_run() -> None:
    name, folder = (
        "OlmoHybridForCausalLM",
        {"checkpoint": {"enable": True, "last_save_in_hf": True}},
    )
    job = job_of(name, {}, overrides_of(name), more=folder)
    with pytest.raises(
        ConfigError, match=r"checkpoint.last_save_in_hf: .*conv1d.weight is 3 tensors on disk"
    ):
        check_to_run(job, world_size=1)
