"""Faults that `titan swap` must refuse, and swaps that it must pass. It trains a tiny job, and plants each fault in the new job alone.

    python scripts/bench/swap_faults.py [settings] [faults] [right] [WORD...]     all, or those whose names hold a word

A row says what was printed. Exit code 1: a fault passed, or a right swap did not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.jobs import job
from titan.cli import main as titan
from titan.config.load import load_from_argv
from titan.config.render import to_toml
from titan.contrib.averages.average import WeightAverage
from titan.models.llama3.model import Llama
from titan.numerics import experiment
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer
from titan.step import train_step

BASE: dict[str, Any] = {
    "training": {"steps": 24, "global_batch_size": 4, "max_norm": 0.5},
    "lr_scheduler": {"warmup_steps": 200},
    "checkpoint": {"interval": 10},
    "average": {"enable": True},
    "validation": {"enable": True, "dataset": "synthetic", "steps": 1, "freq": 50},
}
HALVES = ("--training.local_batch_size=1",)
SETTINGS = (
    "checkpoint.exclude_from_loading=optimizer",
    "checkpoint.load_step=10",
    "checkpoint.load_only=true",
    "checkpoint.last_save_model_only=true",
    "lr_scheduler.decay_ratio=0.5",
    "lr_scheduler.total_steps=300",
    "optimizer.state_dtype=bfloat16",
    "average.decay=0.5",
    "average.enable=false",
    "validation.dataset=stdlib",
    "training.max_norm=1",
    "fault_tolerance.on_spike=skip",
    "fault_tolerance.on_nonfinite=skip",
    "model.overrides.mtp_coeff=0.5",
    "optimizer.weight_decay=0.2",
    "debug.seed=1",
    "data.document_mask=true",
    "training.global_batch_size=8",
    "phase",
)
EXPERTS: dict[str, Any] = {
    "model": {"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 2}}
}
DRAWING: dict[str, Any] = {
    "name": "transformers",
    "architecture": "Phi3ForCausalLM",
    "overrides": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "pad_token_id": 0,
        "resid_pdrop": 0.1,
    },
}
TP = ("--parallelism.tensor_parallel_degree=2",)
FULL = ("--activation_checkpoint.mode=full",)
RIGHT: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "halves": ({}, HALVES),
    "full recomputation": ({}, FULL),
    "loss in chunks": ({}, ("--loss.chunk_tokens=16",)),
    "foreach": ({}, ("--optimizer.implementation=foreach",)),
    "other saves and logs": ({}, ("--checkpoint.interval=5", "--metrics.log_freq=3")),
    "FSDP 2": ({}, ("--nproc=2",)),
    "TP 2": ({}, (*TP, "--nproc=2")),
    "PP 2": ({}, ("--parallelism.pipeline_parallel_degree=2", "--nproc=2")),
    "bf16, halves": ({"training": {"mixed_precision_param": "bfloat16"}}, HALVES),
    "bf16, TP 2": ({"training": {"mixed_precision_param": "bfloat16"}}, (*TP, "--nproc=2")),
    "fp32 to bf16": ({}, ("--training.mixed_precision_param=bfloat16",)),
    "bf16 averages off": (
        {"training": {"mixed_precision_param": "bfloat16"}, "average": {"enable": False}},
        FULL,
    ),
    "experts, halves": (EXPERTS, HALVES),
    "experts, EP 2": (EXPERTS, ("--parallelism.expert_parallel_degree=2", "--nproc=2")),
    "draws, halves": ({"model": DRAWING}, HALVES),
    "draws, FSDP 2": ({"model": DRAWING}, ("--nproc=2",)),
    "draws, bf16, halves": (
        {"model": DRAWING, "training": {"mixed_precision_param": "bfloat16"}},
        HALVES,
    ),
    "draws, same layout": ({"model": DRAWING}, ()),
}


# ---- faults in code ------------------------------------------------------------------------------


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Return a patch that calls `change(original, *arguments)` in place of a function."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *a, **o: change(original, *a, **o))


def _rate(factor: float, later: int = 0) -> Any:
    return _around(
        train_step, "learning_rate_factor", lambda f, step, **o: factor * f(step + later, **o)
    )


def _in_optimizer(
    change: Callable[[torch.optim.Optimizer], None], *, after: bool = False
) -> Any:
    def init(original: Any, self: Any) -> None:
        original(self)
        hook = (
            self.optimizer.register_step_post_hook
            if after
            else self.optimizer.register_step_pre_hook
        )
        hook(lambda optimizer, *_: change(optimizer))

    return _around(train_step.TrainStep, "__post_init__", init)


def _beta2(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["betas"] = (group["betas"][0], 0.96)


def _matrix(optimizer: torch.optim.Optimizer) -> torch.nn.Parameter:
    return next(p for p in optimizer.param_groups[0]["params"] if p.ndim == 2)


def _squares(optimizer: torch.optim.Optimizer) -> None:
    if not getattr(optimizer, "struck", False):
        optimizer.struck = True  # pyrefly: ignore[missing-attribute]
        optimizer.state[_matrix(optimizer)]["exp_avg_sq"][3] *= 4


def _gradient(optimizer: torch.optim.Optimizer) -> None:
    gradient = _matrix(optimizer).grad
    assert gradient is not None
    gradient *= 1.01


def _updates() -> Any:
    before: list[torch.Tensor] = []

    def init(original: Any, self: Any) -> None:
        original(self)
        ours = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.register_step_pre_hook(
            lambda *_: before.__setitem__(slice(None), [p.detach().clone() for p in ours])
        )

        def more(*_: Any) -> None:
            with torch.no_grad():
                for p, old in zip(ours, before, strict=True):
                    p += 0.01 * (p - old)

        self.optimizer.register_step_post_hook(more)

    return _around(train_step.TrainStep, "__post_init__", init)


def _positions() -> Any:
    return _around(Llama, "frequencies", lambda f, self, device: 1.01 * f(self, device))


def _in_model(change: Callable[[Any], None]) -> Any:
    def init(original: Any, self: Any, *a: Any, **o: Any) -> None:
        original(self, *a, **o)
        change(self)

    return _around(Llama, "__init__", init)


def _eps(model: Any) -> None:
    model.norm.eps *= 100


def _token(model: Any) -> None:
    def more(_: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == args[0].flatten()[0])[..., None], 1.01 * out, out)

    model.tok_embeddings.register_forward_hook(more)


def _divisor() -> Any:
    return _around(train_step, "_count_valid", lambda f, batches: f(batches) + 1)


def _average() -> Any:
    return _around(WeightAverage, "update", lambda f, self, *a, **o: None)


def _norm() -> Any:
    return _around(
        train_step,
        "clip_gradients",
        lambda f, p, **o: f(p, **(o | {"max_norm": 2 * o["max_norm"]})),
    )


FAULTS: dict[str, Callable[[], Any]] = {
    "rate x 1.05": lambda: _rate(1.05),
    "rate of the next step": lambda: _rate(1.0, 1),
    "loss divisor + 1": _divisor,
    "beta2 0.96": lambda: _in_optimizer(_beta2),
    "positions x 1.01": _positions,
    "a norm's eps x 100": lambda: _in_model(_eps),
    "a token x 1.01": lambda: _in_model(_token),
    "update x 1.01": _updates,
    "a row of exp_avg_sq x 4": lambda: _in_optimizer(_squares),
    "a gradient x 1.01 after clipping": lambda: _in_optimizer(_gradient),
    "the average stands still": _average,
    "clipping at twice the norm": _norm,
    "rate x 1.001": lambda: _rate(1.001),
}


# ---- runs ----------------------------------------------------------------------------------------


def _train(config: Any) -> None:
    trainer = Trainer(config, hooks=standard_hooks)
    trainer.run()
    trainer.close()


def _trains(fault: Callable[[], Any] | None) -> Callable[..., None]:
    """Return what trains in this process, with a fault in the new job; on several ranks in processes of their own."""

    def train(words: Sequence[str], *, ranks: int, what: str, python: str) -> None:
        if ranks > 1:
            return original(words, ranks=ranks, what=what, python=python)
        is_new = " new " in what.replace("the new folder", " new ")
        with fault() if fault and is_new else contextlib.nullcontext():
            _train(load_from_argv(words, warn=False))

    original = experiment.train
    return train


def swap(
    name: str, sections: dict[str, Any], words: Sequence[str], fault: Any = None
) -> tuple[int, str]:
    """Return the exit code of a swap, and its first line of the result or of the error."""
    old = Path(f"old-{name}")
    base: dict[str, Any] = {
        key: BASE.get(key, {}) | sections.get(key, {}) for key in BASE | sections
    }
    if not old.exists():
        _train(job(old, **base))
    Path("new.toml").write_text(to_toml(job("new", **base)))
    if "phase" in words:
        with Path("new.toml").open("a") as file:
            file.write("[[phase]]\nfrom_step = 22\nlr_factor = 0.5\n")
    words = [word for word in words if word != "phase"]
    error = io.StringIO()
    with patch.object(experiment, "train", _trains(fault)), contextlib.redirect_stderr(error):
        code = titan(
            ["swap", str(old), "--to=new.toml", "--steps=4", "--json=found.json", *words]
        )
    if code == 2:
        return code, error.getvalue().strip().replace("\n", " ")
    result = json.loads(Path("found.json").read_text())["result"]
    if Path("new").exists():
        import shutil

        shutil.rmtree("new")
    return code, result[0]


def rows(asked: Sequence[str]) -> Iterator[tuple[str, bool, int, str]]:
    """Yield the name of each row, whether it must pass, the exit code and the line."""
    kinds = [word for word in asked if word in ("settings", "faults", "right")] or [
        "settings",
        "faults",
        "right",
    ]
    wanted = [word for word in asked if word not in kinds]

    def is_asked(name: str) -> bool:
        return not wanted or any(word in name for word in wanted)

    for precision in ("float32", "bfloat16"):
        sections: dict[str, Any] = {"training": {"mixed_precision_param": precision}}
        if "settings" in kinds:
            for key in SETTINGS:
                if is_asked(key):
                    words = ["phase"] if key == "phase" else [f"--{key}"]
                    yield f"{precision}: {key}", False, *swap(precision, sections, words)
        for layout, more in (
            (("same layout", ()), ("other layout", HALVES)) if "faults" in kinds else ()
        ):
            for name, fault in FAULTS.items():
                if is_asked(name):
                    yield (
                        f"{precision}, {layout}: {name}",
                        False,
                        *swap(precision, sections, more, fault),
                    )
    for name, (sections, words) in RIGHT.items() if "right" in kinds else ():
        if is_asked(name):
            yield name, True, *swap(name.replace(" ", "-").replace(",", ""), sections, words)


def main(asked: Sequence[str]) -> int:
    wrong = 0
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, must_pass, code, line in rows(asked):
            is_named = code != 2 or name.rpartition(" ")[2].partition("=")[0] in line
            is_right = (code == 0) == must_pass and is_named
            wrong += not is_right
            print(f"{'ok   ' if is_right else 'WRONG'} {code} {name}: {line[:150]}", flush=True)
        os.chdir(here)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
