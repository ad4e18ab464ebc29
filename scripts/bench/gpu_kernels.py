"""Time the kernels of a training step alone, without training, and say which choice of each pair is faster and by how much a step.

    python scripts/bench/gpu_kernels.py --json OUT.json      # at most a minute on one H100; gpu.sh runs it
    python scripts/bench/gpu_kernels.py --tiny               # on a CPU, where the figures mean nothing

The shapes are those of steps.py's rows on one H100: 1B with 2 x 8,192 tokens, and 8 blocks of the 8B model with 1 x 8,192. Measured are
attention by each kernel that is installed; the matmuls of a block, also with q, k and v joined; the output layer's matmuls with logits in
fp32 and bf16, by chunks of 2,048 and 8,192 tokens; log-sum-exp and gradient of the loss; AdamW; and copies between fp32 and bf16.

A figure is the median of at least 3 calls. Before each, the device waits 0.9 ms, so that the host is ahead, and writes 256 MB, so
that no input is in its L2 cache. Clocks of a long run are lower than in such short calls. A kernel that fails or is not installed is a
row with the reason. OUT.json has each row with its sizes, FLOPs, bytes and milliseconds. The last lines set the choices beside each
other: milliseconds of a kernel times its calls in a step.

N tokens, C tokens of a chunk of the loss, B batch, S sequence, H heads, K head dim, V vocabulary
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steps import machine
from torch import Tensor
from torch.nn import attention

BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[], Any]
FLUSH_BYTES = 2**28  # five times the L2 cache of an H100
SLEEP_CYCLES = (
    1_500_000  # 0.9 ms at 1.7 GHz: what the host needs to launch a call of many kernels
)
SECONDS = 0.1  # of calls for each row
SAMPLE = 300_000_000  # parameters that copies and AdamW are timed on, in whole blocks


@dataclass(frozen=True)
class Model:
    """Sizes of a row of steps.py, and its batch. Its output layer shares no weights."""

    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int
    batch: int
    seq_len: int
    chunks: tuple[int, int] = (2048, 8192)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def weights(self) -> dict[str, tuple[int, int, int]]:
        """Outputs, inputs and number of each kind of matrix in a block."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.dim, 1),
            "k, v": (kv, self.dim, 2),
            "o": (self.dim, q, 1),
            "w1, w3": (self.ffn_dim, self.dim, 2),
            "w2": (self.dim, self.ffn_dim, 1),
        }

    @property
    def block_shapes(self) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = [(self.dim,), (self.dim,)]  # norms
        for outputs, inputs, count in self.weights.values():
            shapes += [(outputs, inputs)] * count
        return shapes

    @property
    def num_block_params(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.block_shapes)

    @property
    def num_params(self) -> int:
        return self.layers * self.num_block_params + (2 * self.vocab + 1) * self.dim

    @property
    def sample_blocks(self) -> int:
        return max(1, min(self.layers, SAMPLE // self.num_block_params))

    @property
    def samples_of_step(self) -> float:
        """Parameters of the model over those of the sample."""
        return self.num_params / (self.sample_blocks * self.num_block_params)


MODELS = [
    Model("1B", 16, 2048, 32, 8, 64, 8192, 128_256, 2, 8192),
    Model("8B-blocks", 8, 4096, 32, 8, 128, 14_336, 128_256, 1, 8192),
]
TINY = [
    Model("tiny", 2, 64, 4, 2, 16, 128, 512, 2, 64, (16, 64)),
    Model("tiny-blocks", 1, 128, 4, 2, 32, 256, 512, 1, 64, (16, 64)),
]


@dataclass
class Row:
    """A kernel: what it does in one call, and the milliseconds of a call, or why there are none."""

    model: str
    name: str
    sizes: dict[str, Any]
    flops: float = 0
    bytes: float = 0
    ms: float | None = None
    reason: str = ""

    @property
    def rate(self) -> str:
        if self.ms is None:
            return self.reason
        if self.flops:
            return f"{self.flops / self.ms / 1e9:,.1f} TFLOP/s"
        return f"{self.bytes / self.ms / 1e9:,.3f} TB/s"


@dataclass
class Book:
    """The rows measured so far, and how they are measured."""

    device: torch.device
    end: float
    rows: list[Row] = field(default_factory=list)

    def time(
        self,
        row: Row,
        prepare: Callable[[], Call],
        *,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Measure a call that `prepare` returns, and print the row. Both are made in the context `within`."""
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("no time left (--limit-s)")
            with within():
                row.ms = round(measure(prepare(), self.device), 5)
        except Exception as error:  # of any kernel: the others are to be measured
            row.reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:120]
        self.rows.append(row)
        ms = "-" if row.ms is None else f"{row.ms:.3f}"
        print(f"| {row.model} | {row.name} | {ms} | {row.rate.replace('|', '/')} |", flush=True)

    def find(self, model: Model, name: str) -> Row:
        return next(row for row in self.rows if (row.model, row.name) == (model.name, name))


def measure(call: Call, device: torch.device) -> float:
    """Return the median of the milliseconds that a call takes."""
    if device.type == "cpu":
        call()
        return statistics.median(_on_cpu(call) for _ in range(3))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    call()
    first_ms = _on_gpu(call, flush, 1)[0]
    calls = max(3, min(20, int(1e3 * SECONDS / (first_ms + 1))))
    return statistics.median(_on_gpu(call, flush, calls))


def _on_cpu(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def _on_gpu(call: Call, flush: Tensor, calls: int) -> list[float]:
    events = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda._sleep(SLEEP_CYCLES)
        flush.zero_()
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


# ---- attention ---------------------------------------------------------------------------------

ATTENTION = {"cudnn": "CUDNN", "flash": "FLASH", "fa3": "FLASH", "fa4": "FLASH"}


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Choose a kernel of torch's attention, as `model.attention_backend` does."""
    other = name in ("fa3", "fa4")
    if other:
        attention.activate_flash_attention_impl(name.upper())
    try:
        with attention.sdpa_kernel(
            getattr(attention.SDPBackend, f"{ATTENTION[name]}_ATTENTION")
        ):
            yield
    finally:
        if other:
            attention.restore_flash_attention_impl()


def attention_rows(model: Model, book: Book) -> None:
    def inputs(heads: int) -> Tensor:
        # Projections write (B, S, H, K).
        shape = (model.batch, model.seq_len, heads, model.head_dim)
        x_BSHK = torch.randn(shape, device=book.device, dtype=BF16)
        return x_BSHK.transpose(
            1, 2
        ).requires_grad_()  # else no kernel would write the log-sum-exp

    def forward() -> Call:
        q, k, v = (inputs(heads) for heads in (model.heads, model.kv_heads, model.kv_heads))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward() -> Call:
        q, k, v = (inputs(heads) for heads in (model.heads, model.kv_heads, model.kv_heads))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    # Half of the scores: causal.
    flops = 2 * model.batch * model.heads * model.seq_len**2 * model.head_dim
    sizes = {"B": model.batch, "H": model.heads, "Hkv": model.kv_heads}
    sizes |= {"S": model.seq_len, "K": model.head_dim, "causal": True}
    for name in ATTENTION:
        for part, prepare, times in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            row = Row(model.name, f"attention {name} {part}", sizes, flops=times * flops)
            book.time(row, prepare, within=partial(attention_kernel, name))


# ---- matmuls of a block ------------------------------------------------------------------------

MATMULS = ("forward", "dX", "dW")


def matmul_rows(model: Model, book: Book) -> None:
    kinds = {name: sizes[:2] for name, sizes in model.weights.items()}
    joined = kinds["q"][0] + 2 * kinds["k, v"][0]
    kinds["q, k, v joined"] = (joined, model.dim)
    for name, (outputs, inputs) in kinds.items():

        def prepare(part: str, outputs: int = outputs, inputs: int = inputs) -> Call:
            make = partial(torch.randn, device=book.device, dtype=BF16)
            if part == "forward":
                x, weight = make(model.tokens, inputs), make(outputs, inputs)
                return lambda: F.linear(x, weight)
            gradient = make(model.tokens, outputs)
            if part == "dX":
                weight = make(outputs, inputs)
                return lambda: torch.mm(gradient, weight)
            x = make(model.tokens, inputs)
            return lambda: torch.mm(gradient.T, x)

        for part in MATMULS:
            sizes = {"N": model.tokens, "inputs": inputs, "outputs": outputs}
            flops = 2 * model.tokens * inputs * outputs
            row = Row(model.name, f"{name} {part}", sizes, flops=flops)
            book.time(row, lambda part=part, prepare=prepare: prepare(part))

    def cat() -> Call:
        shapes = [kinds["q"], kinds["k, v"], kinds["k, v"]]
        weights = [torch.randn(shape, device=book.device, dtype=BF16) for shape in shapes]
        return lambda: torch.cat(weights)

    sizes = {"inputs": model.dim, "outputs": joined}
    book.time(Row(model.name, "q, k, v cat", sizes, bytes=4 * joined * model.dim), cat)


# ---- output layer and loss ---------------------------------------------------------------------


def output_rows(model: Model, book: Book) -> None:
    def make(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, device=book.device).to(dtype)

    def prepare(part: str, chunk: int) -> Call:
        if part.startswith("logits"):
            x, weight = make(chunk, model.dim), make(model.vocab, model.dim)
            into: dict[str, Any] = {"out_dtype": FP32} if part.endswith("fp32") else {}
            return lambda: torch.mm(x, weight.T, **into)
        d_logits = make(chunk, model.vocab)
        if part == "dX":
            weight, out = make(model.vocab, model.dim), make(chunk, model.dim)
            return lambda: torch.mm(d_logits, weight, out=out)
        x = make(chunk, model.dim)
        if part == "dW bf16":
            return lambda: torch.mm(d_logits.T, x)
        total = make(model.vocab, model.dim, dtype=FP32)
        if part == "dW fp32, written":
            return lambda: torch.mm(d_logits.T, x, out=total, out_dtype=FP32)
        return lambda: torch.addmm(total, d_logits.T, x, out=total, out_dtype=FP32)

    parts = (
        "logits fp32",
        "logits bf16",
        "dX",
        "dW fp32, added",
        "dW fp32, written",
        "dW bf16",
    )
    for chunk in model.chunks:
        for part in parts:
            sizes = {"C": chunk, "inputs": model.dim, "outputs": model.vocab}
            flops = 2 * chunk * model.dim * model.vocab
            row = Row(model.name, f"output {part}, chunk {chunk}", sizes, flops=flops)
            book.time(row, lambda part=part, chunk=chunk: prepare(part, chunk))
    elements = model.vocab * model.dim
    sizes = {"inputs": model.dim, "outputs": model.vocab}

    def zeros() -> Call:
        total = make(model.vocab, model.dim, dtype=FP32)
        return total.zero_

    book.time(Row(model.name, "output dW zeros", sizes, bytes=4 * elements), zeros)


def lse_torch(logits_CV: Tensor, column_C: Tensor) -> tuple[Tensor, Tensor]:
    target_C = logits_CV.gather(1, column_C[:, None])[:, 0].float()
    return torch.logsumexp(logits_CV.float(), dim=-1), target_C


def lse_online(logits_CV: Tensor, column_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by operations that Inductor knows as a softmax of one pass."""
    target_C = logits_CV.gather(1, column_C[:, None])[:, 0].float()
    x_CV = logits_CV.float()
    most_C1 = x_CV.amax(-1, keepdim=True)
    return (most_C1 + (x_CV - most_C1).exp().sum(-1, keepdim=True).log())[:, 0], target_C


def loss_gradient(logits_CV: Tensor, lse_C: Tensor, column_C: Tensor) -> Tensor:
    columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    is_target_CV = columns_V == column_C[:, None]
    return ((logits_CV - lse_C[:, None]).exp() - is_target_CV.float()).to(BF16)


def loss_rows(model: Model, book: Book) -> None:
    """Both models have the same vocabulary, so the chunk of one is the chunk of the other."""
    chunk = model.chunks[0]

    def prepare(function: Callable[..., Any], dtype: torch.dtype) -> Call:
        logits_CV = torch.randn((chunk, model.vocab), device=book.device).to(dtype)
        column_C = torch.randint(model.vocab, (chunk,), device=book.device)
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        if function is not loss_gradient:
            return lambda: compiled(logits_CV, column_C)
        lse_C = logits_CV.float().logsumexp(-1)
        return lambda: compiled(logits_CV, lse_C, column_C)

    for dtype, size in ((FP32, 4), (BF16, 2)):
        kind = str(dtype).removeprefix("torch.")
        for name, function in (("torch", lse_torch), ("online", lse_online)):
            sizes = {"C": chunk, "V": model.vocab, "dtype": kind}
            row = Row(model.name, f"logsumexp {name} {kind}", sizes)
            row.bytes = size * chunk * model.vocab
            book.time(row, lambda function=function, dtype=dtype: prepare(function, dtype))
        row = Row(model.name, f"gradient {kind}", {"C": chunk, "V": model.vocab, "dtype": kind})
        row.bytes = (size + 2) * chunk * model.vocab
        book.time(row, lambda dtype=dtype: prepare(loss_gradient, dtype))


# ---- optimizer and copies ----------------------------------------------------------------------


def adamw_with_cast(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    low: Tensor,
    scale: Tensor,
    corrections: Tensor,
) -> None:
    """Clip by `scale`, update as AdamW, and write the weight in bf16: 30 bytes a parameter."""
    gradient = gradient * scale
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient * gradient, 0.05)
    root = (square / corrections[1]).sqrt() + 1e-8
    weight.mul_(1 - 3e-4 * 0.1)
    weight.sub_(3e-4 * (mean / corrections[0]) / root)
    low.copy_(weight)


def optimizer_rows(model: Model, book: Book) -> None:
    shapes = model.block_shapes * model.sample_blocks
    count = model.num_block_params * model.sample_blocks
    sizes = {"parameters": count, "tensors": len(shapes)}

    def tensors(dtype: torch.dtype = FP32) -> list[Tensor]:
        return [torch.randn(shape, device=book.device).to(dtype) for shape in shapes]

    def optimizer(*, scaled: bool) -> Call:
        weights = [weight.requires_grad_() for weight in tensors()]
        for weight, gradient in zip(weights, tensors(), strict=True):
            weight.grad = gradient
        adamw: Any = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), fused=True)
        if scaled:
            adamw.grad_scale = torch.ones((), device=book.device)
            adamw.found_inf = torch.zeros((), device=book.device)
        return adamw.step

    def compiled() -> Call:
        flat = [
            [tensor.view(-1) for tensor in (*one, one[0].to(BF16))]
            for one in zip(tensors(), tensors(), tensors(), tensors(), strict=True)
        ]
        for *_, square, _ in flat:
            square.square_()
        scale = torch.ones((), device=book.device)
        corrections = torch.full((2,), 0.5, device=book.device)
        # By one program for any length.
        update: Any = torch.compile(adamw_with_cast, fullgraph=True, dynamic=True)

        def step() -> None:
            for one in flat:
                update(*one, scale, corrections)

        return step

    def cast(source: torch.dtype, target: torch.dtype, *, one_by_one: bool = False) -> Call:
        sources, targets = tensors(source), tensors(target)
        if one_by_one:
            return lambda: [tensor.to(target) for tensor in sources]
        return lambda: torch._foreach_copy_(targets, sources)

    def chunk_cat() -> Call:
        """FSDP's copy of a unit's gradients into the buffer that it reduces, one unit a block."""
        unit = [torch.randn(s, device=book.device).to(BF16) for s in model.block_shapes]
        out = torch.empty((1, model.num_block_params), device=book.device)
        units = range(model.sample_blocks)
        return lambda: [torch._chunk_cat(unit, dim=0, num_chunks=1, out=out) for _ in units]

    def memcpy() -> Call:
        source, target = (torch.randn(count, device=book.device) for _ in "ab")
        return lambda: target.copy_(source)

    def norm() -> Call:
        gradients = tensors()
        return lambda: torch._foreach_norm(gradients, 2)

    def multiply() -> Call:
        gradients, scale = tensors(), torch.ones((), device=book.device)
        return lambda: torch._foreach_mul_(gradients, scale)

    for name, bytes_each, prepare in (
        ("AdamW fused", 28, lambda: optimizer(scaled=False)),
        ("AdamW fused, grad_scale", 32, lambda: optimizer(scaled=True)),
        ("AdamW compiled, clips and casts", 30, compiled),
        ("clip: norm", 4, norm),
        ("clip: multiply", 8, multiply),
        ("fp32 to bf16, foreach_copy", 6, lambda: cast(FP32, BF16)),
        ("fp32 to bf16, one by one", 6, lambda: cast(FP32, BF16, one_by_one=True)),
        ("bf16 to bf16, foreach_copy", 4, lambda: cast(BF16, BF16)),
        ("bf16 to fp32, foreach_copy", 6, lambda: cast(BF16, FP32)),
        ("bf16 to fp32, chunk_cat", 6, chunk_cat),
        ("fp32 memcpy", 8, memcpy),
    ):
        book.time(Row(model.name, name, sizes, bytes=bytes_each * count), prepare)


# ---- choices -----------------------------------------------------------------------------------

Terms = list[tuple[str, float]]  # names of rows, each with its calls in a step


def step_ms(model: Model, book: Book, terms: Terms) -> float | str:
    """Return the milliseconds of a step, or why they are not known."""
    total = 0.0
    for name, calls in terms:
        row = book.find(model, name)
        if row.ms is None:
            return f"{name}: {row.reason[:60]}"
        total += calls * row.ms
    return total


def choices(model: Model) -> list[tuple[str, dict[str, Terms]]]:
    """Return what is to be decided, and for each choice the calls in a step. The first choice is titan's of November 2026."""
    small, large = model.chunks
    layers, sample = model.layers, model.samples_of_step

    def output(chunk: int, *, kind: str = "fp32", write_first: bool = False) -> Terms:
        calls = -(-model.tokens // chunk)
        scale = chunk / small  # of rows that are measured for one chunk only
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[kind]
        terms = [
            (f"output logits {kind}, chunk {chunk}", calls),
            (f"output dX, chunk {chunk}", calls),
        ]
        terms += [
            (f"logsumexp torch {dtype}", calls * scale),
            (f"gradient {dtype}", calls * scale),
        ]
        if write_first:
            terms.append((f"output dW fp32, written, chunk {chunk}", 1))
            calls -= 1
        else:
            terms.append(("output dW zeros", 1))
        return [*terms, (f"output dW fp32, added, chunk {chunk}", calls)]

    def block(kinds: list[tuple[str, int]]) -> Terms:
        return [(f"{kind} {part}", layers * calls) for kind, calls in kinds for part in MATMULS]

    calls = -(-model.tokens // small)
    moves = [(name, sample) for name in ("bf16 to fp32, chunk_cat", "fp32 memcpy")]
    casts = [("fp32 to bf16, one by one", sample), ("bf16 to bf16, foreach_copy", sample)]
    cast = ("fp32 to bf16, foreach_copy", sample)
    norm, multiply = ("clip: norm", sample), ("clip: multiply", sample)
    attentions: dict[str, Terms] = {
        name: [(f"attention {name} {part}", layers) for part in ("forward", "backward")]
        for name in ATTENTION
    }
    joined = [*block([("q, k, v joined", 1)]), ("q, k, v cat", layers)]
    once = [cast, ("bf16 to fp32, foreach_copy", sample)]
    return [
        (
            "copies of weights and gradients",
            {"FSDP's": casts + moves, "one cast each way": once},
        ),
        (
            "log-sum-exp",
            {
                f"{name}'s form": [(f"logsumexp {name} float32", calls)]
                for name in ("torch", "online")
            },
        ),
        (
            "dW of the first chunk",
            {"added to zeros": output(small), "written": output(small, write_first=True)},
        ),
        (
            "clip, update and cast",
            {
                "multiply, fused AdamW, cast": [norm, multiply, ("AdamW fused", sample), cast],
                "fused AdamW with grad_scale, cast": [
                    norm,
                    ("AdamW fused, grad_scale", sample),
                    cast,
                ],
                "compiled": [norm, ("AdamW compiled, clips and casts", sample)],
            },
        ),
        ("attention", attentions),
        # Joined, the gradient of x needs two additions less, which are not in here.
        ("q, k, v", {"three matmuls": block([("q", 1), ("k, v", 2)]), "joined": joined}),
        ("logits", {"fp32": output(small), "bf16": output(small, kind="bf16")}),
        ("tokens of a chunk", {str(small): output(small), str(large): output(large)}),
    ]


def decide(model: Model, book: Book) -> list[dict[str, Any]]:
    """Print for each choice what it takes a step, and which one pays."""
    decisions = []
    for what, terms_of in choices(model):
        found = {name: step_ms(model, book, terms) for name, terms in terms_of.items()}
        known = {name: ms for name, ms in found.items() if not isinstance(ms, str)}
        said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in known.items())
        unknown = "; ".join(
            f"{name} not known ({ms})" for name, ms in found.items() if isinstance(ms, str)
        )
        now = next(iter(found))
        best = min(known, key=lambda name: known[name]) if known else ""
        if now not in known or len(known) < 2:
            verdict = "nothing to compare"
        elif best == now:
            second = min(ms for name, ms in known.items() if name != now)
            verdict = f"keep {now}, by {second - known[now]:.2f} ms a step"
        else:
            verdict = f"{best} PAYS {known[now] - known[best]:.2f} ms a step"
        print(
            f"{model.name}, {what}: {verdict}. {said}{'; ' if said and unknown else ''}{unknown}"
        )
        decisions.append(
            {
                "model": model.name,
                "what": what,
                "now": now,
                "ms_a_step": found,
                "verdict": verdict,
            }
        )
    return decisions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where rows and decisions are written")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument(
        "--limit-s", type=float, default=60, help="rows begun later have no figure"
    )
    args = parser.parse_args()
    end = time.monotonic() + args.limit_s
    torch.manual_seed(0)
    device = torch.device("cpu" if args.tiny else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here: --tiny runs on a CPU")
    models = TINY if args.tiny else MODELS
    book = Book(device, end)
    about = machine()
    print(f"{about}\n\n| model | kernel | ms | rate |\n|---|---|--:|---|")
    # In order of what they may decide: if time runs out, the last ones have no figure.
    for rows in (attention_rows, optimizer_rows, matmul_rows, loss_rows, output_rows):
        for model in models:
            rows(model, book)
    print("\nMilliseconds a step, kernels alone. The first choice is titan's of November 2026:")
    decisions = [decision for model in models for decision in decide(model, book)]
    if args.json:
        content = {"machine": about, "rows": [asdict(row) for row in book.rows]}
        args.json.write_text(json.dumps(content | {"decisions": decisions}, indent=1) + "\n")
    print(f"{args.limit_s - end + time.monotonic():.0f} s")


if __name__ == "__main__":
    main()
