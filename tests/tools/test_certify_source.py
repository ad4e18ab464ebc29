"""First row of `titan certify`: transformers itself, and faults that titan would make on one process and on every layout alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.commands import Shell
from tests.support.hf_families import families, overrides_of
from tests.support.jobs import job
from tests.tools.test_certify import model
from titan.checks.layout_rules import resolve_layout
from titan.cli import main as titan
from titan.contrib.transformers import certify as source
from titan.models.common import moe
from titan.models.common.attention import InnerAttention
from titan.numerics.certify.command import LAYOUTS, CertifiedLayout, Certifier
from titan.numerics.certify.steps import train_job
from titan.step import train_step


def theirs(kind: str, **more: Any) -> Any:
    architecture = families()[kind]
    fields = {**overrides_of(architecture), **more}
    return job(model={"name": "transformers", "architecture": architecture, "flavor": "", "overrides": fields})  # fmt: skip


def first_row(config: Any) -> CertifiedLayout:
    return Certifier(config, resolve_layout(config, 1)).certify_source()


JOBS = {
    "Llama": lambda: model("llama3"),
    "gpt-oss": lambda: model("gpt_oss"),
    "Qwen3 with experts": lambda: model("qwen3", "tiny_moe"),
    "DeepSeek-V3": lambda: model("deepseek_v3"),
    "Mixtral": lambda: theirs("mixtral"),
    "a window": lambda: theirs("mistral", sliding_window=8),
    "a table in part": lambda: theirs("gpt_oss", rope_parameters={"rope_theta": 500.0}),
    "a hybrid": lambda: theirs("qwen3_next"),
    "Flux": lambda: model("flux", training={"seq_len": 20}),
    "LLaVA": lambda: model("llava", training={"seq_len": 128}, task={"options": {"path": "."}}),
}
JUDGES = {"Flux": "diffusers"}


@pytest.mark.parametrize("name", JOBS)
def test_one_process_is_transformers(name: str) -> None:
    row = first_row(JOBS[name]())
    assert (row.name, row.verdict) == (JUDGES.get(name, "transformers"), "equal"), row
    assert row.differences.keys() == {"logits", "losses", "gradients"}
    # Not the same program: then it would be compared with itself.
    assert 0 < max(row.differences.values()) <= 1e-5


# ---- faults --------------------------------------------------------------------------------------


def ignored_window() -> None:
    begin: Any = InnerAttention.__init__
    InnerAttention.__init__ = lambda self, **how: begin(self, **{**how, "window": 0})


def wrong_scale() -> None:
    begin: Any = InnerAttention.__init__
    InnerAttention.__init__ = lambda self, **how: begin(
        self, **{**how, "scale": 1.001 * (how.get("scale") or 0.25)}
    )


def loss_of_the_token_itself() -> None:
    to_local = train_step.TrainStep.to_local

    def shifted(self: Any, batch: Any) -> Any:
        local = to_local(self, batch)
        return dataclasses.replace(local, targets=local.targets.roll(1, 1))

    train_step.TrainStep.to_local = shifted


def opposite_bias() -> None:
    choose = moe.Router.choose

    def opposite(self: moe.Router, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
        return choose(self, scores_TE, -bias_E)

    moe.Router.choose = opposite


FAULTS: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
    "scale of attention": (wrong_scale, lambda: theirs("mistral")),
    "a window that is ignored": (ignored_window, lambda: theirs("mistral", sliding_window=8)),
    "bias of the router": (opposite_bias, lambda: model("deepseek_v3")),
    "targets": (loss_of_the_token_itself, lambda: model("llama3")),
}


def planted_compare(config: Any) -> Any:
    FAULTS[config.job.description][0]()
    return REAL(config)


def planted_train(config: Any, *rest: Any) -> Any:
    FAULTS[config.job.description][0]()
    return train_job(config, *rest)


REAL = source.compare


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_every_layout_alike_is_seen_by_transformers_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAULTS[fault][1]()
    config = config.model_copy(
        update={"job": config.job.model_copy(update={"description": fault})}
    )
    monkeypatch.setattr(source, "compare", planted_compare)
    certifier = Certifier(config, resolve_layout(config, 1))
    vars(certifier).update(program=planted_train)
    row = certifier.certify_source()
    assert row.verdict == "differs" and row.reason, row
    assert max(row.differences.values()) > 1e-4
    assert certifier.certify("fsdp", LAYOUTS["fsdp"]).verdict == "equal"


def test_a_config_that_titan_derives_otherwise_is_named() -> None:
    config = theirs("llama")
    sizes = config.model.sizes
    content = {**json.loads(sizes.source.hf), "head_dim": 128}
    changed = SimpleNamespace(**vars(config.model), sizes=sizes)
    object.__setattr__(sizes, "source", sizes.source._replace(hf=json.dumps(content)))
    found = source._differing_fields(SimpleNamespace(model=changed))  # pyrefly: ignore
    assert found == "head_dim is 128, and 16 in transformers"


def test_lost_and_left_tensors_are_named(tmp_path: Path) -> None:
    """transformers' own loader says which tensors its class misses."""
    import transformers

    config = theirs("llama")
    kind = transformers.LlamaForCausalLM
    kind(source.config_of(config)).save_pretrained(tmp_path)
    more = theirs("llama", attention_bias=True)
    with pytest.raises(
        ValueError, match=r"missing_keys: model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        source.CausalJudge().load(more, tmp_path)
    assert isinstance(source.CausalJudge().load(config, tmp_path), torch.nn.Module)


# ---- the certificate -----------------------------------------------------------------------------


def test_a_certificate_says_first_whether_transformers_was_asked(
    tmp_path: Path, shell: Shell
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text('[model]\nflavor = "tiny"\n[training]\nseq_len = 32\n')
    where = f"--layouts=fsdp --output {tmp_path}"
    assert shell(f"certify {path} {where}").out.startswith("transformers one process")
    page = (tmp_path / "tiny.certificate.md").read_text().splitlines()
    assert page[2].startswith("The first row compares one process with the program")
    assert any(line.startswith("| transformers | one process | equal") for line in page)
    [row, _] = json.loads((tmp_path / "tiny.certificate.json").read_text())["rows"]
    assert (row["name"], row["verdict"]) == ("transformers", "equal")


def test_a_model_without_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "hooks_of", lambda _: None)
    path = tmp_path / "tiny.toml"
    path.write_text('[model]\nflavor = "tiny"\n[training]\nseq_len = 32\n')
    assert titan(f"certify {path} --layouts=fsdp --output {tmp_path}".split()) == 0
    page = (tmp_path / "tiny.certificate.md").read_text().splitlines()
    assert page[2].startswith("Not compared with the program that the model comes from")
