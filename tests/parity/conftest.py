"""Collect what the parity tests measure; write build/parity.md and build/composition.md when every row ran.

To renew a page of docs/, copy the file there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import STEPS, Layout, train
from tests.support.ranks import Pool

BUILD = Path(__file__).parents[2] / "build"
_HEAD = f"""# Parity: every layout computes the same numbers

Written by the test run (`pytest tests/parity -m "slow or not slow"`, torch {torch.__version__.split("+")[0]}, CPU, gloo, fp32).

## 1,000 steps

`python scripts/bench/convergence.py --steps 1000 --layouts` trained two blocks of the tiny model for 1,000 steps: 4 x 128 bytes of the
Python library's text, fp32, AdamW with warm-up, decay and clipping (two shared cores, gloo). One run is resumed at step 500 in another
layout. The losses differ in the last digits that fp32 has, and do not drift apart. Float8 is tensorwise, on one process: its
difference is the rounding of 8 bits.

![losses of one process, three layouts, a resumed run, float8 and TorchTitan over 1,000 steps, and how far they are from one process](pictures/layouts_loss.png)

| | loss at step 100 | at step 500 | at step 1,000 | largest difference |
|---|--:|--:|--:|--:|
| one process | 3.02862 | 2.61394 | 2.31379 | - |
| FSDP 2 x TP 2 | 3.02862 | 2.61394 | 2.31379 | 2.6e-07 |
| CP 2 | 3.02862 | 2.61394 | 2.31379 | 3.3e-07 |
| PP 2 | 3.02862 | 2.61394 | 2.31379 | 2.5e-07 |
| FSDP 2 x TP 2, then PP 2 | 3.02862 | 2.61394 | 2.31379 | 2.6e-07 |
| float8, emulated | 3.02794 | 2.61621 | 2.31663 | 1.1e-02 |
| TorchTitan 0.2.2, one process | 3.02862 | 2.61394 | 2.31379 | 2.3e-07 |

## Every three techniques together

`python scripts/crossings.py` lists 2,514 triples of 27 techniques, of which titan refuses 116 with a reason. 96 drawn layouts
cross all others (tests/parity/test_triples.py, slow), multi-token prediction and conversations with loss on answers among
them. Each trains three steps, with the bound below unless it has float8. These are no factors:

| technique | crossed with | not crossed with |
|---|---|---|
| [phases](phases.md) | FSDP2, CP, PP, TP x FSDP2 with accumulation; in one run: conversations, multi-token prediction, an average of the weights, PP x FSDP2 (tests/test_phases.py) | experts, recomputation, compilation, float8, Muon, frozen parameters, offloading |
| [conversations](data.md#conversations) read from files | blended with text, stopped in each phase and resumed, on one process and on PP x FSDP2, with positions that restart at each document (tests/test_phases.py) | other layouts, except their batches in the triples, without such positions |
| [average of the weights](optimizers.md#averages-of-the-weights) | one at a time: FSDP2, DDP, HSDP, TP, CP, 1F1B (tests/optim/test_average.py); phases, as above | experts, compilation, float8, Muon, frozen parameters, offloading |

## Ten steps

Each row is a layout that trained the tiny model for ten AdamW steps. The same steps on one process, without accumulation,
are the reference.

- The model has four blocks, or eight where stages or the choice of blocks need them. All layouts see the same global
  batches. Some tokens are masked, so ranks hold different numbers of valid ones.
- Differences are relative and rounded up to one digit. For loss and gradient norm they are the largest over all steps,
  and for gradients and weights the largest over all parameters (||a - b|| / ||b||). A test fails above the bound.
- The axes of the mesh are pipeline (pp), replicas (dp_replicate), FSDP shards (dp_shard), context (cp) and tensor (tp).
- Sequences hold two documents with no attention between them. Rows of the ring without "document masks" hold one.
- The differences come from the order of fp32 sums. AdamW's eps is 1e-6. A smaller eps would turn the rounding error of a
  gradient near zero into a full step.

"""

_COMPOSITION_HEAD = f"""# Composition: 30 layouts again, compiled, recomputed, in float8

Written by the test run (`pytest tests/parity/test_composition.py -m "slow or not slow"`, torch {torch.__version__.split("+")[0]}, CPU, gloo).
As docs/parity.md: ten AdamW steps against one process, with relative differences, rounded up. All compute in fp32, except float8's
products. "Compiled, selective AC" is compared with plain fp32 on one process, by the same bound.

"float8" is emulated (docs/float8.md). It is compared with float8 on one process that takes as many sequences at a time as a rank does,
since a tensorwise scale is the largest value of what is multiplied at once. FSDP2 gathers weights in float8. The bound is that of the
gradients. Loss and norm must agree to 1e-4 and 1e-3, and weights after ten steps to 2e-2. Data parallelism and pipelines add up no
partial sums before a cast, so their numbers are the same to fp32 rounding. TP and CP add up parts in another order. A value in the middle
between two of float8's may then fall on the other side.

"""


_MOE_HEAD = f"""# Parity of experts: every layout computes the same numbers

Written by the test run (`pytest tests/parity/test_moe.py -m "slow or not slow"`, torch {torch.__version__.split("+")[0]}, CPU, gloo, fp32).
The method is that of docs/parity.md: ten AdamW steps of four blocks against one process, with relative differences,
rounded up. Each block has eight experts, two for a token.

- The routing bias, both balance losses (sequence and global batch) and the z-loss are on, each with a coefficient of 0.01.
- Rows with "latent" train the tiny DeepSeek-V3: a dense block first, latent attention, groups and a shared expert. Rows
  with "wide norms" train OLMoE, those with "sinks" gpt-oss (windows, sinks, and biases everywhere; four of eight experts
  for a token), and all others the tiny Qwen3-MoE.
- The tests also compare integers. In each of the ten steps, each expert of each layer gets **the same number of tokens** as
  on one process. The final routing bias is **the same to the last bit**.
- tests/examples/test_route_records.py compares the routes of every token as sets. tests/support/planted.py plants faults that other
  frameworks had, and each of them makes this comparison fail.
- Weights of the rows with 8-bit moments differ more (bound 5e-4). A moment midway between two of its 256 levels may take
  the other one after any rounding.
- An early step leaves no gradients to compare, so its column says 0.

"""


class ParityTable:
    """The rows of one page's table, written to build/ when all expected ones ran."""

    def __init__(self, page: str, head: str) -> None:
        self.page, self.head = page, head
        self.rows: list[str] = []
        self.expected = 0

    def add(
        self,
        name: str,
        *,
        mesh: str,
        accumulation: int,
        differences: dict[str, float],
        bound: float,
    ) -> None:
        cells = [name, mesh, str(accumulation)]
        cells += [*map(_rounded_up, differences.values()), f"{bound:.0e}"]
        row = "| " + " | ".join(cells) + " |"
        assert row not in self.rows, f"two rows alike: {row}"
        self.rows.append(row)

    def write(self) -> None:
        if not self.expected or len(self.rows) != self.expected:
            return
        columns = "| layout | mesh | accumulation | loss | gradient norm | gradients (step 1) | weights after 10 steps | bound |"
        text = self.head + "\n".join([columns, "|---" * 8 + "|", *self.rows]) + "\n"
        BUILD.mkdir(exist_ok=True)
        (BUILD / self.page).write_text(text)


def _rounded_up(value: float) -> str:
    if value == 0:
        return "0"
    scale = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / scale) * scale:.0e}"


@pytest.fixture(scope="session")
def parity_table() -> Iterator[ParityTable]:
    table = ParityTable("parity.md", _HEAD)
    yield table
    table.write()


@pytest.fixture(scope="session")
def composition_table() -> Iterator[ParityTable]:
    table = ParityTable("composition.md", _COMPOSITION_HEAD)
    yield table
    table.write()


@pytest.fixture(scope="session")
def moe_table() -> Iterator[ParityTable]:
    table = ParityTable("parity_moe.md", _MOE_HEAD)
    yield table
    table.write()


class References:
    """Run a layout's settings on one process, once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.runs: dict[tuple[Layout, int], dict[str, Any]] = {}

    def run(self, *, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
        layout = Layout("one process", **settings)
        if (layout, steps) not in self.runs:
            self.runs[layout, steps] = self.pool.run(1, train, layout, "float32", steps)[0]
        return self.runs[layout, steps]


@pytest.fixture(scope="session")
def references(pool: Pool) -> References:
    return References(pool)
