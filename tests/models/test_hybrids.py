"""Models of transformers with linear attention, such as Qwen3-Next: counts, layouts against transformers alone, documents, initial weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.hf_families import (
    PROOFS,
    VOCABULARY,
    families,
    is_equal,
    job_of,
    num_ranks,
    overrides_of,
    row_of,
    std_of,
    twin_with,
    whole_weights,
)
from tests.support.hf_folders import save_twin
from tests.support.linear_attention import plant
from tests.support.ranks import Pool
from tests.support.tables import table, tabled
from tests.support.trainers import PoolTrainer
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.contrib.transformers import build_model
from titan.contrib.transformers.shrink import shrink
from titan.parallel import initialize, materialize
from titan.sim.price.profiles import load_profile
from titan.sim.simulate import simulate

# name -> degrees and keys of the job. The method of CP is that of the layers with softmax attention.
CROSSED: dict[str, tuple[dict[str, int], dict[str, Any]]] = table(__file__, "crossed")


def check(pool: Pool, kind: str, names: Iterable[str], **options: Any) -> None:
    """Compare a family on layouts of `CROSSED` with transformers alone; those of experts are left out for a family without them."""
    layouts = {name: CROSSED[name][0] for name in names}
    more = {name: CROSSED[name][1] for name in layouts}
    row = row_of(pool, kind, layouts, more=more, **options)
    wanted = [name for name in layouts if row["experts"] or "ep" not in layouts[name]]
    assert not {name: row[name] for name in wanted if not is_equal(row[name])}


def qwen3_next() -> tuple[Any, Any]:
    """Return the sizes of a small Qwen3-Next and its model on the CPU."""
    name = "Qwen3NextForCausalLM"
    sizes, problems = job_of(name, {}, overrides_of(name)).model.resolved
    assert not problems
    with torch.device("meta"):
        model = build_model(sizes)
    materialize(model, device="cpu")
    return sizes, model


@pytest.mark.slow
def test_the_count_of_qwen3_next_80b_is_that_of_transformers() -> None:
    name = "Qwen3NextForCausalLM"
    sizes, problems = job_of(name, {}, {}).model.resolved
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
    _, model = qwen3_next()
    initialize(model, seed=1, std_of=std_of)
    twin = twin_with(model).eval()
    with torch.no_grad():
        tokens = torch.randint(3, VOCABULARY, (2, 200))
        ours, true = model(tokens), twin(input_ids=tokens, use_cache=False).logits
    assert (ours - true).norm() < 1e-5 * true.norm()


DEFAULT = ("TP+SP", "CP 2", "CP 2, documents", "PP 2", "EP 2")


def test_qwen3_next_on_layouts(pool: Pool) -> None:
    """transformers is called with each document alone."""
    check(pool, "qwen3_next", DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_crossed_layouts(kind: str, ranks: int, pool: Pool) -> None:
    """Gated delta net, and Mamba 2 without rotary embeddings, both with experts and a shared expert."""
    check(pool, kind, [name for name, (axes, _) in CROSSED.items() if num_ranks(axes) == ranks])


FAULTS = {
    "a state that is not passed": "CP 2",
    "tokens that are not passed": "CP 2, contiguous",
    "a state that leaks over a document": "CP 2, documents",
    "a gate applied twice": "TP+SP",
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("qwen3_next", fault) for fault in FAULTS),
        *(pytest.param("bamba", fault, marks=pytest.mark.slow) for fault in FAULTS),
    ],
)
def test_a_planted_fault_turns_the_row_red(kind: str, fault: str, pool: Pool) -> None:
    name = FAULTS[fault]
    options = {"more": {name: CROSSED[name][1]}, "plant": partial(plant, fault)}
    row = row_of(pool, kind, {name: CROSSED[name][0]}, **options)
    assert row[name].startswith("DIFFERS") and float(row[name].split()[1]) > 1e-3, row


@pytest.mark.slow
def test_qwen3_next_by_inductor(pool: Pool) -> None:
    more = {"compile": {"enable": True}, "activation_checkpoint": {"mode": "full"}}
    row = row_of(pool, "qwen3_next", {"EP 2": CROSSED["EP 2"][0]}, more={"EP 2": more})
    assert is_equal(row["EP 2"]), row


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
def test_resumes_and_exports(kind: str, pool: Pool) -> None:
    """The config.json of Granite has an infinite number, which JSON has not."""
    row = row_of(pool, kind, PROOFS)
    assert float(row["resumed"]) < 1e-5 and row["exported"] == "equal", row


def begin(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return what a run says of the folder that it begins with, and its weights."""
    keys = {
        "job": {"dump_folder": str(folder.parent / "run")},
        "training": {"dataset": "synthetic", "seq_len": 32, "steps": 1},
        "checkpoint": {
            "enable": True,
            "initial_load_in_hf": True,
            "initial_load_path": str(folder),
        },
    }
    trainer = PoolTrainer(job_of("", {"cp": 2}, {}, source=folder, more=keys))
    weights = whole_weights(trainer.train_step)
    trainer.close()
    return trainer.checkpointing.notes, weights


def test_modules_of_multi_token_prediction_in_a_folder_are_left_out_and_named(
    pool: Pool, tmp_path: Path
) -> None:
    """As in the hub's folders of Qwen3-Next, of which transformers reads no tensor mtp.*."""
    folder = tmp_path / "source"
    name = "Qwen3NextForCausalLM"
    save_twin(name, overrides_of(name) | {"vocab_size": 300}, folder)
    tensors = load_file(folder / "model.safetensors")
    more = {
        f"mtp.{name}": torch.ones(2, 2) for name in ("fc.weight", "layers.0.mlp.gate.weight")
    }
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    for notes, weights in pool.run(2, begin, folder):
        assert notes == [f"left out mtp* of {folder}: the model's output does not depend on it"]
        assert torch.equal(weights["output.weight"], tensors["lm_head.weight"])
        assert torch.equal(
            weights["layers.0.linear_attn.A_log"], tensors["model.layers.0.linear_attn.A_log"]
        )


@pytest.mark.slow
def test_the_simulator_spreads_tokens_over_experts_in_float32() -> None:
    name = "Qwen3NextForCausalLM"
    more = {"training": {"mixed_precision_param": "float32"}}
    config = job_of(name, {"dp_shard": 2}, overrides_of(name), more=more).on_device("cuda")
    profile = load_profile("h100-sxm")
    found = simulate(config, world_size=2, profile=profile, processes=1, use_cache=False)
    assert found.runs and found.timeline.step_s > 0


OTHERS = (
    "kimi_linear",
    "bamba",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "falcon_h1",
    "lfm2",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_hybrids_on_layouts(kind: str, pool: Pool) -> None:
    check(pool, kind, ("TP+SP", "CP 2", "CP 2, documents", "PP 2", "TP x CP, documents"))


@tabled("kind, reason")
def test_a_hybrid_that_titan_cannot_run_is_refused_with_the_reason(
    kind: str, reason: str
) -> None:
    name = families()[kind]
    problems = job_of(name, {}, overrides_of(name)).model.resolved[1]
    assert problems == [("model.architecture", reason)]


def test_stages_of_a_model_whose_blocks_read_two_hidden_states_are_refused() -> None:
    """Zamba 2 gives the embeddings to later blocks, too, and a later stage would take what it receives for them."""
    fields = overrides_of("Zamba2ForCausalLM") | {"tie_word_embeddings": False}
    sizes = job_of("Zamba2ForCausalLM", {}, fields).model.sizes
    reason = dict(sizes.refuses)["pipeline_parallel_degree"]
    assert reason == "layers.3 reads two hidden states, and a stage sends one"


def test_a_convolution_beside_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the code of a folder: attention is split over ranks, and the convolution would stop at their borders."""
    forward = LlamaMLP.forward

    def shifted(self: Any, x_BSD: torch.Tensor) -> torch.Tensor:
        kernel = x_BSD.new_ones(x_BSD.shape[-1], 1, 2)
        before = F.pad(x_BSD.transpose(1, 2), (1, 0))
        return forward(self, F.conv1d(before, kernel, groups=x_BSD.shape[-1]).transpose(1, 2))

    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    fields = overrides_of("LlamaForCausalLM") | {"intermediate_size": 88}  # not built before
    [(_, reason)] = job_of("LlamaForCausalLM", {}, fields).model.resolved[1]
    assert reason.startswith("a convolution follows layers.0.mlp,")


def test_sizes_that_a_config_class_computes_follow_the_overrides() -> None:
    """Bailing takes as many heads for linear attention as for attention, and keeps both numbers."""
    fields = overrides_of("BailingHybridForCausalLM") | dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "first_k_dense_replace"), 2
    )
    del fields["linear_num_heads"]
    sizes = job_of("BailingHybridForCausalLM", {}, fields).model.sizes
    kind: Any = transformers.BailingHybridConfig
    twin = transformers.BailingHybridForCausalLM(kind(**fields))
    assert sizes.num_params == sum(p.numel() for p in twin.parameters())


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


@pytest.mark.parametrize(("method", "pieces"), [("allgather", 4), ("ulysses", 2)])
def test_a_convolution_needs_pieces_that_are_long_enough(method: str, pieces: int) -> None:
    """Each needs the two tokens before it, all from the piece before."""
    name, needed = "Lfm2ForCausalLM", 2 * pieces

    def job(seq_len: int) -> Any:
        keys = {"parallelism": {"context_parallel_rotate_method": method}}
        more = {**keys, "training": {"seq_len": seq_len}}
        return job_of(name, {"cp": 2}, overrides_of(name), more=more)

    with pytest.raises(ConfigError, match=rf"set training.seq_len = {needed} or more"):
        check_to_run(job(needed - pieces), world_size=2)
    check_to_run(job(needed), world_size=2)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "BambaForCausalLM",
            {"attn_layer_indices": [1], "mamba_expand": 3, "mamba_n_heads": 192},
        ),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"] * 6}),
    ],
)
def test_the_small_model_of_a_hybrid_has_its_kinds_of_layers(
    name: str, fields: dict[str, Any]
) -> None:
    """The simulator measures the host, and `titan certify` proves the job, on a model of small values."""
    section = job_of(name, {}, {"num_hidden_layers": 12, **fields}).model
    sizes, problems = section.resolved
    assert not problems
    overrides = {**section.overrides, **shrink(sizes)["model.overrides"]}
    small, problems = section.model_copy(update={"overrides": overrides}).resolved
    assert not problems
    assert {*small.windows} == {*sizes.windows} == {0, 1}
    assert small.num_params < sizes.num_params
