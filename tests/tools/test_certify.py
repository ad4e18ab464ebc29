"""`titan certify`: verdicts on right and wrong layouts, small jobs of all families, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support import planted
from tests.support.commands import Shell
from tests.support.hf_families import overrides_of
from tests.support.jobs import ROOT, job
from tests.support.metadata import write_metadata
from titan.checks.layout_rules import resolve_layout
from titan.checks.rules import check, check_to_run
from titan.config.model import families, family, parameter_counts
from titan.config.phases import phases_of
from titan.config.schema import JobConfig
from titan.numerics.certify import command, steps
from titan.numerics.certify.command import LAYOUTS, CertifiedLayout, Certifier
from titan.numerics.certify.shrink import changed, small_keys
from titan.tasks.base import Microbatch

TINY = """
[model]
flavor = "tiny"
[training]
seq_len = 32
"""


def model(name: str, flavor: str = "tiny", **sections: Any) -> JobConfig:
    return job(model={"name": name, "flavor": flavor, "overrides": {}}, **sections)


def verdict(config: JobConfig, layout: str, **options: Any) -> CertifiedLayout:
    certifier = Certifier(config, resolve_layout(config, 1))
    vars(certifier).update(options)
    return certifier.certify(layout, LAYOUTS[layout])


# ---- small jobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in families() if name not in ("flux", "llava")])
def test_each_flavor_becomes_a_small_job_with_its_ratios_and_kinds_of_layers(name: str) -> None:
    for flavor, whole in family(name).FLAVORS.items():
        certifier = Certifier(model(name, flavor), resolve_layout(model(name, flavor), 1))
        small = certifier.small.model.sizes
        assert small.num_params < 8e6, (flavor, small)
        assert whole.n_heads * small.n_kv_heads == whole.n_kv_heads * small.n_heads, flavor
        assert whole.vocab_size % 16 == small.vocab_size % 16
        for key in (
            "tied_embeddings",
            "top_k",
            "num_groups",
            "top_groups",
            "num_shared_experts",
        ):
            assert getattr(whole, key, 0) == getattr(small, key, 0), (flavor, key)
        for kind in ("window_of", "is_moe_layer"):
            if hasattr(whole, kind):
                both = [
                    {bool(getattr(s, kind)(n)) for n in range(s.n_layers)}
                    for s in (whole, small)
                ]
                assert both[0] == both[1], (flavor, kind)
        for layout, degrees in certifier.layouts(None).items():
            if layout not in LAYOUTS or (layout == "pp" and whole.tied_embeddings):
                continue
            world = prod(n for axis, n in degrees.items() if axis != "ep")
            check_to_run(changed(certifier.small, certifier._keys(degrees)), world_size=world)


def test_more_ranks_than_key_value_heads_stay_more() -> None:
    keys = small_keys(model("llama3", "8B"), tp=16)
    assert changed(model("llama3", "8B"), keys).model.sizes.n_kv_heads == 1


def test_frozen_parameters_have_their_namesakes_frozen() -> None:
    config = model("llama3", "8B")
    patterns = [
        "tok_embeddings.*",
        "layers.31.*",
        "layers.0.attention.wq.weight",
        "layers.15.*",
    ]
    config = changed(config, {"model.freeze": patterns})
    small = changed(config, small_keys(config, tp=1)).model
    names = parameter_counts("llama3", small.sizes)
    last = {name for name in names if name.startswith("layers.3.")}
    assert {*small.freeze} == {"tok_embeddings.weight", "layers.0.attention.wq.weight", *last}


def test_phases_are_spread_over_the_steps() -> None:
    phases = [
        {"from_step": 1000, "global_batch_size": 64},
        {"from_tokens": 10**12, "seq_len": 8192, "min_lr_factor": 0.1},
    ]
    training = {"seq_len": 2048, "global_batch_size": 32, "steps": 10**6}
    config = model("llama3", "8B", training=training, phase=phases)
    small = changed(config, small_keys(config, tp=1))
    assert not check(small)
    found = [
        (p.steps, p.sequences, p.config.training.seq_len)
        for p in phases_of(small, world_size=1)
    ]
    assert found == [(3, 8, 64), (3, 16, 64), (4, 16, 128)]


# ---- verdicts ------------------------------------------------------------------------------------


def theirs(architecture: str) -> JobConfig:
    model = {"name": "transformers", "architecture": architecture}
    return job(model={**model, "flavor": "tiny", "overrides": overrides_of(architecture)})


FAULTS = {
    "lost_partial_sum": (model("llama3"), "tp", "layers.0.attention.wo: its output"),
    "doubled_gradient": (model("llama3"), "fsdp", "layers.1.feed_forward.w2: the gradient of"),
    "clipped_late": (model("llama3"), "fsdp", "output: the update of its weight"),
    "halved_router": (
        model("qwen3", "tiny_moe"),
        "ep",
        "layers.1.moe.router.gate: the gradient of",
    ),
    "ignored_window": (
        model("gpt_oss"),
        "cp",
        "layers.0.attention.inner_attention: its output",
    ),
    "positions_of_a_part": (theirs("Qwen2ForCausalLM"), "cp", "rotary_emb: its output"),
    "damaged_between_stages": (theirs("Qwen2ForCausalLM"), "pp", "layers.2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_the_row_red_and_its_module_is_named(fault: str) -> None:
    config, layout, reason = FAULTS[fault]
    row = verdict(config, layout, program=getattr(planted, fault))
    assert row.verdict == "differs" and row.reason.startswith(reason), row
    assert verdict(config, layout).verdict == "equal"


class Neighbours(torch.nn.Module):
    """Blocks 1, 3, 5 read what the block before made, which is kept in a variable of `forward`, in a table, or on the model."""

    table: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.tok_embeddings = kept, torch.nn.Embedding(7, 4)
        blocks = {str(n): torch.nn.Linear(4, 4) for n in range(6)}
        self.layers, self.norm = torch.nn.ModuleDict(blocks), torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local: dict[str, torch.Tensor] = {}
        state = {"variable": local, "table": self.table, "model": self.__dict__}[self.kept]
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for number, block in self.layers.items():
            if int(number) % 2:
                x = x + block(state.get("keys", x))
            state["keys"] = x.sin()
        return x if self.norm is None else self.norm(x)


@pytest.mark.parametrize("kept", ["variable", "table", "model"])
def test_what_passes_between_blocks_is_found_by_cutting_them_apart(kept: str) -> None:
    blocks = [f"layers.{number}" for number in range(6)]
    modules = [["tok_embeddings", *blocks[:2]], blocks[2:4], [*blocks[4:], "norm"]]
    drawn = [
        torch.randint(7, (1, 5), generator=torch.Generator().manual_seed(n)) for n in (1, 2)
    ]
    batches = [Microbatch(ids, ids, torch.tensor(5)) for ids in drawn]
    found = steps.try_cuts(Neighbours(kept), modules, *batches, sent=torch.Size((1, 5, 4)))
    assert [*found] == blocks
    assert [*steps.parted(found, 1e-6)] == blocks[1::2]


def test_the_pipeline_of_the_job_is_cut_at_its_own_depth() -> None:
    """The second of two stages of 32 layers begins with layer 16. An odd number of layers stays odd."""
    config = model("llama3", "8B")
    assert Certifier(config, resolve_layout(config, 1)).small.model.sizes.n_layers == 4
    odd = changed(config, {"model.overrides": {"n_layers": 33}})
    assert Certifier(odd, resolve_layout(odd, 1)).small.model.sizes.n_layers == 5
    right = verdict(config, "pp", cut=planted.reads_before_2)
    assert right.verdict == "equal" and right.reason == "not to be cut before layers.2", right
    wrong = verdict(config, "pp", cut=planted.reads_before_16)
    assert wrong.verdict == "differs" and wrong.reason.startswith(
        "cut before layers.16: the out"
    )


@pytest.mark.parametrize(
    ("trait", "found", "reason"),
    [
        ("dies", "failed", "rank 1 died with exit code 9"),
        ("raises", "failed", "norm: RuntimeError: "),
        ("pair", "refused", "Llama.forward returned a tuple of Tensor, NoneType"),
        ("unmeta", "differs", "; parameters only: the model does not run on meta"),
    ],
)
def test_a_row_has_the_cause_and_says_what_it_has_not_seen(
    trait: str, found: str, reason: str
) -> None:
    row = verdict(model("llama3"), "fsdp", program=partial(planted.with_trait, trait))
    assert row.verdict == found and reason in row.reason, row


JOBS: dict[str, tuple[JobConfig, str]] = {
    "MTP, groups, shared experts": (
        changed(model("deepseek_v3"), {"model.overrides": {"num_mtp_modules": 1}}),
        "ep",
    ),
    "windows, sinks, biases": (model("gpt_oss"), "fsdp_tp"),
    "pictures in text": (
        model("llava", training={"seq_len": 64}, task={"options": {"path": "x"}}),
        "tp",
    ),
    "flow matching": (model("flux", training={"seq_len": 20}), "cp"),
    "phases": (
        model(
            "llama3",
            training={"steps": 30},
            phase=[
                {"from_step": 9, "seq_len": 64},
                {"from_step": 20, "global_batch_size": 64},
            ],
        ),
        "pp",
    ),
    "frozen, float8": (
        changed(
            model("llama3"),
            {
                "model.freeze": ["tok_embeddings.*", "layers.0.*"],
                "model.converters": ["float8"],
            },
        ),
        "fsdp",
    ),
    "compiled, selective AC": (
        changed(
            model("llama3"), {"compile.enable": True, "activation_checkpoint.mode": "selective"}
        ),
        "fsdp_tp",
    ),
    "Muon, accumulation": (
        model("llama3", optimizer={"name": "Muon"}, training={"global_batch_size": 8}),
        "hsdp",
    ),
    "8-bit moments": (model("llama3", optimizer={"name": "AdamW8bit"}), "tp"),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_titan_computes_is_equal(name: str) -> None:
    row = verdict(*JOBS[name])
    assert row.verdict == "equal" and row.differences, row


def test_other_layouts_leave_out_the_keys_of_axes_that_they_lack() -> None:
    config = model(
        "deepseek_v3",
        training={"global_batch_size": 8},
        parallelism={"fsdp_kept_blocks": 2},
    )
    certifier = Certifier(config, resolve_layout(config, 1))
    for name in ("ddp", "tp", "pp"):
        check_to_run(changed(certifier.small, certifier._keys(LAYOUTS[name])), world_size=2)


def test_a_missing_gradient_and_nan_differ_and_rounding_of_nothing_does_not() -> None:
    expected = {"a": torch.ones(100), "zero": torch.full((4,), 1e-10)}
    found = {"a": torch.ones(100), "zero": torch.full((4,), -1e-10)}

    def ratios(**changes: Any) -> dict[str, float]:
        return steps.ratios([{"x": found | changes}], {"x": expected}, "x", steps.LEAST)

    assert max(ratios().values()) < steps.BOUND
    assert ratios(a=torch.full((100,), torch.nan))["a"] == torch.inf
    assert ratios(more=torch.ones(1))["more"] == torch.inf
    del found["a"]
    assert ratios()["a"] == torch.inf
    assert ratios(zero=torch.full((4,), 1e-5))["zero"] > steps.BOUND


def test_a_layout_is_refused_in_the_words_of_the_check() -> None:
    row = verdict(model("qwen3"), "pp")
    assert row.verdict == "refused"
    assert "tied embeddings would be on the first and on the last rank" in row.reason
    assert verdict(model("llama3", "10M"), "tp").reason.startswith(
        "parallelism.tensor_parallel_degree: 2 does not divide the model's 5 heads"
    )


def test_a_layout_that_is_named_is_a_row() -> None:
    """Also one that the model has no use for, or that is the job's own."""
    config = model("llama3", parallelism={"tensor_parallel_degree": 2})
    certifier = Certifier(config, resolve_layout(config, 2))
    assert [*certifier.layouts(["tp", "ep", "job"])] == ["job", "tp", "ep"]
    assert {"tp", "ep"}.isdisjoint(certifier.layouts(None))


def test_a_job_on_more_than_three_axes_is_certified_on_each_three() -> None:
    degrees = {
        "pipeline_parallel_degree": 4,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
        "data_parallel_shard_degree": 4,
    }
    config = model("llama3", parallelism=degrees, training={"local_batch_size": 4})
    found = Certifier(config, resolve_layout(config, 64)).layouts(["job"])
    assert [*found] == [
        "job: pp 2 x dp_shard 2 x cp 2",
        "job: pp 2 x dp_shard 2 x tp 2",
        "job: pp 2 x cp 2 x tp 2",
        "job: dp_shard 2 x cp 2 x tp 2",
    ]


def test_a_package_is_certified(tmp_path: Path) -> None:
    """A family and a loss of two packages, which ranks find as pip would leave them."""
    folders = [ROOT / "examples/opt_family", ROOT / "examples/z_loss"]
    for folder in folders:
        write_metadata(folder, tmp_path)
    (path := tmp_path / "opt.toml").write_text('model = {name = "opt", flavor = "6.7B"}\n')
    command = [sys.executable, "-m", "titan.cli", "certify", path, "--loss.name=z_loss"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *folders, ROOT)))
    }
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--layouts=tp"], **options)
    assert done.returncode == 0 and "equal (largest" in done.stdout, done.stdout + done.stderr
    written = json.loads((tmp_path / "opt.certificate.json").read_text())
    assert written["sizes"]["max_positions"] == {"job": 2048, "certified": 256}


# ---- the command ---------------------------------------------------------------------------------


def test_certificates(tmp_path: Path, shell: Shell) -> None:
    (path := tmp_path / "tiny.toml").write_text(TINY)
    call = f"{path} --world-size=8 --parallelism.tensor_parallel_degree=4"
    assert "dp_shard 2 x tp 2" in shell(f"certify {call} --output {tmp_path}/new").out
    page = (tmp_path / "new/tiny.certificate.md").read_text()
    written = json.loads((tmp_path / "new/tiny.certificate.json").read_text())
    [_, row] = written["rows"]  # after transformers, the job's own layout alone
    assert row["name"] == "job" and row["verdict"] == "equal"
    assert f"| job | dp_shard 2 x tp 2 | {CertifiedLayout(**row)} |" in page
    assert written["versions"].keys() >= {"python", "torch"} and "commit" in written["titan"]
    assert written["sizes"]["vocab_size"] == {"job": 2048, "certified": 512}


def test_a_difference_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "tiny.toml").write_text(TINY)
    options = f"{path} --layouts fsdp --output {tmp_path}".split()
    monkeypatch.setattr(steps, "train_job", planted.doubled_gradient)
    assert command.main(options) == 1
    assert "differs (layers.1.feed_forward.w2" in capsys.readouterr().out


def test_layouts_that_all_are_refused_make_no_certificate(tmp_path: Path, shell: Shell) -> None:
    (path := tmp_path / "tiny.toml").write_text(TINY)
    said = shell.refuse(f"certify {path} --layouts=ep")
    assert "no layout was compared, so there is no certificate" in said
