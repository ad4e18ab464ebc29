"""The table [simulator], with assumptions about machines that need not exist. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from titan.config.base import Section
from titan.config.errors import Violations


class WholeRunSection(Section):
    """Assumptions of `titan sim --run` about a whole run: failures, storage, prices. docs/simulator.md has the formulas."""

    mtbf_gpu_hours: Annotated[float, Field(gt=0)] = 50_000.0
    """Mean time between failures that end the job, in hours of one GPU. The default is Llama 3's:
    419 failures in 54 days on 16,384 GPUs. For a job's own figure, multiply it by its GPUs."""
    restart_seconds: Annotated[float, Field(ge=0)] = 600.0
    """Seconds from a failure until training goes on from the checkpoint: noticing it, a new node,
    starting, loading, compiling. A run's events.jsonl has them: down, setup and compile."""
    node_storage_gb_per_s: Annotated[float, Field(gt=0)] = 1.0
    """GB/s with which each node writes checkpoints, all nodes at once. `titan preflight` measures it."""
    save_blocking_share: Annotated[float | None, Field(ge=0, le=1)] = None
    """Part of the time of a save for which training stands still. Unset: what follows from
    checkpoint.async_mode, which is all of it, or the copy to the host."""
    gpu_hour_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of a GPU hour, in any currency. 0: the cost is not reported."""
    repair_hours: Annotated[float, Field(ge=0)] = 24.0
    """Hours that a node is away after a failure."""
    spare_probability: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Probability, at any moment, that the spare nodes are enough to go on."""


class SimulatorSection(Section):
    """Assumptions of `titan sim`, `titan check` and `titan plan`."""

    attention_kernel: Literal["auto", "flash2", "cudnn", "flash3", "efficient"] = "auto"
    """Kernel by which attention is priced. "auto": that of model.attention_backend, or the first in the order of torch_version,
    that the card and the head dims allow. With "flash2", attention that it does not support (a dense mask, values of another size than
    keys) is priced as "efficient". Documents and windows are FlashAttention's or FlexAttention's whatever this says."""
    torch_version: str = ""
    """torch that the job will run with, such as "2.8.0" or "2.11.0+cu126": its order of attention kernels. Without a tag it is PyPI's
    wheel; a tag such as "+cudnn9.19.0" names another cuDNN than the wheel's. Empty: the installed one."""
    document_tokens: Annotated[int, Field(ge=0)] = 0
    """Length of documents in tokens, which decides what attention costs with data.document_mask. 0: as in the token
    shards that the job reads; with other data, documents count as long as the sequence."""
    dispatch: Literal["all_to_all", "deepep"] = "all_to_all"
    """How tokens are dispatched to experts on other ranks. "all_to_all": as titan does, each copy of a token separately.
    "deepep": the time of DeepEP, which sends one copy to each node and from there to each rank. A run does not have it."""
    routing: str = "zipf:0.18"
    """How tokens spread over experts, which decides the load of the busiest expert-parallel rank: "even";
    "zipf:s", where the i-th busiest expert gets i^-s of the busiest expert's tokens; "W0" to "W7", named imbalances
    (docs/simulator.md); or a run's experts.json.
    The default gives the published spread of a learned router: 1.34 times the mean on the busiest of 64
    ranks with 256 experts (marin issue 7668). debug.moe_force_load_balance: even."""
    expert_imbalance: Annotated[float | None, Field(ge=1)] = None
    """Tokens of the busiest expert-parallel rank, as a multiple of the mean, in place of the figure that
    follows from routing. It sets time and memory. A run reports its own. Without expert parallelism: no effect."""
    run: WholeRunSection = WholeRunSection()

    @field_validator("routing")
    @classmethod
    def _known_routing(cls, value: str) -> str:
        if re.fullmatch(r"even|zipf:\d+(\.\d+)?|W[0-7]|.*\.json", value):
            return value
        raise ValueError(
            'expected "even", "zipf:s" such as "zipf:0.18", "W0" to "W7", or a run\'s experts.json'
        )

    @field_validator("torch_version")
    @classmethod
    def _release(cls, value: str) -> str:
        if re.fullmatch(r"(\d+\.\d+(\.\w+)?(\+[\w.]+)?)?", value):
            return value
        raise ValueError('expected a release of torch, such as "2.8.0" or "2.11.0+cu128"')


def assumptions(config: Any) -> SimulatorSection:
    """Return the table of a job."""
    return config.simulator


def check_routing(config: Any) -> Violations:
    """Check that a file of routing is there."""
    routing = config.simulator.routing
    if routing.endswith(".json") and not Path(routing).is_file():
        yield "routing", f"there is no file {routing}; name the experts.json of a run"
