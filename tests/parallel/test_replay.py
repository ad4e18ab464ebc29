"""titan/numerics/replay.py: one bit that flips in the second evaluation, on one rank of several layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.jobs import SMALL, job, with_changes
from tests.support.ranks import Pool
from tests.support.tables import table
from tests.support.trainers import PoolTrainer
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.numerics.replay import BitsError, describe, fingerprint

Sections = dict[str, dict[str, Any]]
STEPS, REPLAYED = 3, 2


def _parallel(**degrees: int) -> Sections:
    return {"parallelism": {f"{name}_parallel_degree": n for name, n in degrees.items()}}


# Layout, module that fails, and the module that must be named.
FFN = "layers.1.feed_forward.w2"
CASES: dict[str, tuple[Sections, str, str]] = table(__file__, "cases")


def _train(folder: Path, base: Sections, every: int, fault: str = "") -> tuple[Any, list[str]]:
    """Train. Return losses, gradient norms and weights, and what was announced or raised."""
    faults = {"fault_tolerance": base.get("fault_tolerance", {}) | {"replay_every": every}}
    training = {"steps": STEPS, "mixed_precision_param": "bfloat16"} | base.get("training", {})
    sections: Sections = base | faults | {"training": training, "checkpoint": {"enable": False}}
    trainer = PoolTrainer(job(folder, base=with_changes(SMALL, **sections)))
    if fault and trainer.rank == 1:
        _break(trainer, fault)
    numbers: list[float] = []
    said: list[str] = []
    trainer.announce = lambda text: said.append(text)
    try:
        for _ in range(STEPS):
            trainer.train_one_step()
            trainer.read_results()
            numbers += [trainer.result.loss, trainer.result.grad_norm]
            if (loads := trainer.train_step.balance.loads) is not None:
                numbers += loads.flatten().tolist()
    except BitsError as error:
        said.append(str(error))
    weights = [p.detach() for p in trainer.train_step.model_parts[0].parameters()]
    numbers += [fingerprint(w).item() for w in weights]
    trainer.close()
    return numbers, said


def _break(trainer: Any, name: str) -> None:
    """Flip the lowest bit of one value of a module's output in the second evaluation of the replayed step."""
    (model,) = trainer.train_step.model_parts
    evaluations: list[int] = []
    model.register_forward_pre_hook(lambda *_: evaluations.append(trainer.step))
    (module,) = (
        m
        for n, m in model.named_modules()
        if n.replace("_checkpoint_wrapped_module.", "") == name
    )
    forward: Callable[..., Any] = module._compiled_call_impl or module.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if evaluations.count(REPLAYED) == 2 and torch._C._current_graph_task_id() == -1:
            x = out[0] if isinstance(out, tuple) else out
            local = (x.to_local() if isinstance(x, DTensor) else x).data
            local.view(-1)[3:4].view(torch.uint8)[0] ^= 1
        return out

    vars(module)["_compiled_call_impl" if module._compiled_call_impl else "forward"] = fail


def on_ranks(folder: Path, base: Sections, fault: str) -> dict[str, Any]:
    return {
        "plain": _train(folder / "plain", base, 0),
        "clean": _train(folder / "clean", base, 1),
        "fault": _train(folder / "fault", base, REPLAYED, fault),
    }


@pytest.mark.parametrize("name", CASES)
def test_a_bit_that_flips_on_one_rank_is_named(name: str, pool: Pool, tmp_path: Path) -> None:
    base, fault, named = CASES[name]
    found = pool.run(2, on_ranks, tmp_path, base, fault)
    for of_rank in found:
        assert of_rank["clean"] == of_rank["plain"], (
            "a replay changes no number, and clean runs raise no alarm"
        )
        assert of_rank["plain"][1] == []
        (text,) = of_rank["fault"][1]
        assert text.startswith(f"replay before step {REPLAYED}: rank 1 on "), text
        assert f"first in the output of {named}" in text, text


def test_it_warns_and_trains_on(pool: Pool, tmp_path: Path) -> None:
    base = {"fault_tolerance": {"on_replay_mismatch": "warn"}}
    [plain, warned] = [
        pool.run(2, warns, tmp_path / what, base, fault)
        for what, fault in (("a", ""), ("b", FFN))
    ]
    for (numbers, said), (expected, nothing) in zip(warned, plain, strict=True):
        assert numbers == expected and nothing == []
        assert len(said) == 1 and said[0].endswith("TRAINED ON") and "rank 1 on" in said[0]


def warns(folder: Path, base: Sections, fault: str) -> Any:
    return _train(folder, base, REPLAYED, fault)


def test_a_pipeline_is_refused() -> None:
    base = _parallel(pipeline=2) | {"fault_tolerance": {"replay_every": 5}}
    with pytest.raises(ConfigError, match="replay_every"):
        check_to_run(job(base=with_changes(SMALL, **base)), world_size=2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_any_bit_and_any_place_changes_a_fingerprint(dtype: torch.dtype) -> None:
    x = (
        torch.randn(7, 13).to(dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.arange(91).view(7, 13).to(dtype)
    )
    seen = {fingerprint(x).item()}
    for byte in range(0, x.nbytes, 5):
        changed = x.clone()
        changed.view(-1).view(torch.uint8)[byte] ^= 1 << byte % 8 if dtype != torch.bool else 1
        seen.add(fingerprint(changed).item())
    assert len(seen) == 1 + len(range(0, x.nbytes, 5))
    if dtype == torch.float32:
        swapped = x.clone()
        swapped[0, 0], swapped[0, 1] = x[0, 1], x[0, 0]
        flipped = x.clone()
        flipped.view(torch.int32)[0, :2] ^= 1  # a parity of all bits would miss it
        negated = torch.where(x == x[0, 1], -x, torch.where(x == x[0, 3], -x, x))
        assert len({fingerprint(t).item() for t in (x, swapped, flipped, negated, x.T)}) == 5
        assert fingerprint(x.T.contiguous().T).equal(fingerprint(x))


def test_the_earliest_rank_is_named() -> None:
    place = ("output", "layers.0", 1)
    later = (5, ("output gradient", "layers.1", 2), 0, "a")
    assert describe([None, None]) == ""
    text = describe([later, None, (2, place, 2, "b"), (2, place, 3, "b")])
    assert text.startswith("rank 2 on b and rank 3 on b") and "output of layers.0" in text


# Further techniques, each with all of its state: what a replay leaves behind would show in the numbers of the steps.
# The loads of experts are state that a forward pass adds to, and that the next step reads.
CLEAN: dict[str, Sections] = table(__file__, "clean")


def unchanged(folder: Path, base: Sections) -> list[Any]:
    return [_train(folder / str(every), base, every) for every in (0, 1)]


@pytest.mark.parametrize("name", CLEAN)
def test_further_techniques_keep_their_numbers(name: str, pool: Pool, tmp_path: Path) -> None:
    for plain, clean in pool.run(2, unchanged, tmp_path, CLEAN[name]):
        assert clean == plain and plain[1] == []
