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
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import steps
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention

from titan.base.hardware import by_name
from titan.config.toml import read_toml

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
    """A model of steps.py with its batch on one H100, and the chunks of its loss that are compared."""

    name: str
    seq_len: int = 8192
    chunks: tuple[int, int] = (2048, 8192)

    @property
    def sizes(self) -> Any:
        return steps.MODELS[self.name].sizes

    @property
    def batch(self) -> int:
        return steps.MODELS[self.name].batch_on(by_name("h100-sxm").memory_gib)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def weights(self) -> dict[str, tuple[int, int, int]]:
        """Outputs, inputs and number of each kind of matrix in a block."""
        sizes = self.sizes
        q, kv = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
        return {
            "q": (q, sizes.dim, 1),
            "k, v": (kv, sizes.dim, 2),
            "o": (sizes.dim, q, 1),
            "w1, w3": (sizes.ffn_dim, sizes.dim, 2),
            "w2": (sizes.dim, sizes.ffn_dim, 1),
        }

    @property
    def block_shapes(self) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = [(self.sizes.dim,), (self.sizes.dim,)]  # norms
        for outputs, inputs, count in self.weights.values():
            shapes += [(outputs, inputs)] * count
        return shapes

    @property
    def num_block_params(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.block_shapes)

    @property
    def sample_blocks(self) -> int:
        return max(1, min(self.sizes.n_layers, SAMPLE // self.num_block_params))

    @property
    def samples_of_step(self) -> float:
        """Parameters of the model over those of the sample."""
        return self.sizes.num_params / (self.sample_blocks * self.num_block_params)


MODELS = [Model("1B"), Model("8B-blocks")]
TINY = [Model(name, 64, (16, 64)) for name in ("tiny", "tiny-blocks")]


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
    sizes = model.sizes
    heads, kv_heads = sizes.n_heads, sizes.n_kv_heads

    def inputs(heads: int) -> Tensor:
        # Projections write (B, S, H, K).
        shape = (model.batch, model.seq_len, heads, sizes.head_dim)
        x_BHSK = torch.randn(shape, device=book.device, dtype=BF16).transpose(1, 2)
        return x_BHSK.requires_grad_()  # else no kernel would write the log-sum-exp

    def prepare(part: str) -> Call:
        q, k, v = (inputs(number) for number in (heads, kv_heads, kv_heads))
        call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        if part == "forward":
            return call
        out = call()
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    # Half of the scores: causal.
    flops = 2 * model.batch * heads * model.seq_len**2 * sizes.head_dim
    about = {"B": model.batch, "H": heads, "Hkv": kv_heads}
    about |= {"S": model.seq_len, "K": sizes.head_dim, "causal": True}
    for name in ATTENTION:
        for part, times in (("forward", 1.0), ("backward", 2.5)):
            row = Row(model.name, f"attention {name} {part}", about, flops=times * flops)
            book.time(row, partial(prepare, part), within=partial(attention_kernel, name))


# ---- matmuls of a block and of the output layer ------------------------------------------------

MATMULS = ("forward", "dX", "dW")


def matmul(
    part: str, tokens: int, inputs: int, outputs: int, *, device: torch.device, into: str = ""
) -> Call:
    """Return a matmul of a linear layer: its forward pass, or the gradient of its input (dX) or weight (dW).

    into: "" for a new result, "fp32" for a new one in fp32, "buffer", and for sums in fp32 "written" or "added".
    """
    make = partial(torch.randn, device=device, dtype=BF16)
    if part == "forward":
        left, right = make(tokens, inputs), make(outputs, inputs).T
    elif part == "dX":
        left, right = make(tokens, outputs), make(outputs, inputs)
    else:
        left, right = make(tokens, outputs).T, make(tokens, inputs)
    call = partial(torch.mm, left, right)
    if not into:
        return call
    if into == "fp32":
        return partial(call, out_dtype=FP32)
    shape = (left.shape[0], right.shape[1])
    if into == "buffer":
        return partial(call, out=make(shape))
    total = torch.randn(shape, device=device)
    if into == "written":
        return partial(call, out=total, out_dtype=FP32)
    return partial(torch.addmm, total, left, right, out=total, out_dtype=FP32)


def time_matmul(
    model: Model, book: Book, name: str, tokens: str, sizes: dict[str, int], **options: str
) -> None:
    """Time a matmul. tokens: the letter of their number in `sizes`, which has inputs and outputs, too."""
    flops = 2 * math.prod(sizes.values())
    numbers = (sizes[tokens], sizes["inputs"], sizes["outputs"])
    prepare = partial(matmul, options.pop("part"), *numbers, device=book.device, **options)
    book.time(Row(model.name, name, sizes, flops=flops), prepare)


def matmul_rows(model: Model, book: Book) -> None:
    kinds = {name: (outputs, inputs) for name, (outputs, inputs, _) in model.weights.items()}
    dim = model.sizes.dim
    joined = kinds["q"][0] + 2 * kinds["k, v"][0]
    for name, (outputs, inputs) in (kinds | {"q, k, v joined": (joined, dim)}).items():
        sizes = {"N": model.tokens, "inputs": inputs, "outputs": outputs}
        for part in MATMULS:
            time_matmul(model, book, f"{name} {part}", "N", sizes, part=part)

    def cat() -> Call:
        shapes = [kinds["q"], kinds["k, v"], kinds["k, v"]]
        weights = [torch.randn(shape, device=book.device, dtype=BF16) for shape in shapes]
        return partial(torch.cat, weights)

    sizes = {"inputs": dim, "outputs": joined}
    book.time(Row(model.name, "q, k, v cat", sizes, bytes=4 * joined * dim), cat)


OUTPUT = {
    "logits fp32": {"part": "forward", "into": "fp32"},
    "logits bf16": {"part": "forward"},
    "dX": {"part": "dX", "into": "buffer"},
    "dW fp32, added": {"part": "dW", "into": "added"},
    "dW fp32, written": {"part": "dW", "into": "written"},
    "dW bf16": {"part": "dW"},
}


def output_rows(model: Model, book: Book) -> None:
    layer = {"inputs": model.sizes.dim, "outputs": model.sizes.vocab_size}
    for chunk in model.chunks:
        for part, options in OUTPUT.items():
            name, sizes = f"output {part}, chunk {chunk}", {"C": chunk, **layer}
            time_matmul(model, book, name, "C", sizes, **options)
    row = Row(model.name, "output dW zeros", layer, bytes=4 * math.prod(layer.values()))
    book.time(row, lambda: torch.randn((*layer.values(),), device=book.device).zero_)


# ---- loss --------------------------------------------------------------------------------------


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
    chunk, vocab = model.chunks[0], model.sizes.vocab_size

    def prepare(function: Callable[..., Any], dtype: torch.dtype) -> Call:
        logits_CV = torch.randn((chunk, vocab), device=book.device).to(dtype)
        column_C = torch.randint(vocab, (chunk,), device=book.device)
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        if function is not loss_gradient:
            return partial(compiled, logits_CV, column_C)
        return partial(compiled, logits_CV, logits_CV.float().logsumexp(-1), column_C)

    for dtype in (FP32, BF16):
        kind = str(dtype).removeprefix("torch.")
        # Bytes that a kernel writes for each logit.
        for name, function, written in (
            ("logsumexp torch", lse_torch, 0),
            ("logsumexp online", lse_online, 0),
            ("gradient", loss_gradient, 2),
        ):
            row = Row(model.name, f"{name} {kind}", {"C": chunk, "V": vocab, "dtype": kind})
            row.bytes = (dtype.itemsize + written) * chunk * vocab
            book.time(row, partial(prepare, function, dtype))


# ---- optimizer and copies ----------------------------------------------------------------------


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

    def foreach_copy(source: torch.dtype, target: torch.dtype) -> Call:
        return partial(torch._foreach_copy_, tensors(target), tensors(source))

    def one_by_one() -> Call:
        sources = tensors()
        return lambda: [tensor.to(BF16) for tensor in sources]

    def chunk_cat() -> Call:
        """FSDP's copy of a unit's gradients into the buffer that it reduces, one unit a block."""
        unit = [torch.randn(s, device=book.device).to(BF16) for s in model.block_shapes]
        out = torch.empty((1, model.num_block_params), device=book.device)
        units = range(model.sample_blocks)
        return lambda: [torch._chunk_cat(unit, dim=0, num_chunks=1, out=out) for _ in units]

    def memcpy() -> Call:
        source, target = (torch.randn(count, device=book.device) for _ in "ab")
        return partial(target.copy_, source)

    def multiply() -> Call:
        return partial(torch._foreach_mul_, tensors(), torch.ones((), device=book.device))

    for name, bytes_each, prepare in (
        ("AdamW fused", 28, partial(optimizer, scaled=False)),
        ("AdamW fused, grad_scale", 32, partial(optimizer, scaled=True)),
        ("clip: norm", 4, lambda: partial(torch._foreach_norm, tensors(), 2)),
        ("clip: multiply", 8, multiply),
        ("fp32 to bf16, foreach_copy", 6, partial(foreach_copy, FP32, BF16)),
        ("fp32 to bf16, one by one", 6, one_by_one),
        ("bf16 to bf16, foreach_copy", 4, partial(foreach_copy, BF16, BF16)),
        ("bf16 to fp32, foreach_copy", 6, partial(foreach_copy, BF16, FP32)),
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
    """Return what is to be decided, and for each choice the calls in a step: the table of gpu_kernels.toml, for a model."""
    small, large = model.chunks
    few, many = -(-model.tokens // large), -(-model.tokens // small)
    numbers = {"small": small, "large": large}
    layers = model.sizes.n_layers
    calls = {
        **{"once": 1, "layer": layers, "twice a layer": 2 * layers},
        **{"sample": model.samples_of_step, "large": few},
        **{"small": many, "small but one": many - 1},
        # Measured for a small chunk only.
        "large, in small": few * large / small,
    }
    found = []
    for each in read_toml(Path(__file__).with_suffix(".toml"))[0]["choice"]:
        terms_of = {}
        for way, rows in each["ways"].items():
            terms = [(name.format(**numbers), calls[number]) for name, number in rows.items()]
            terms_of[way.format(**numbers)] = terms
        found.append((each["what"], terms_of))
    return found


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
        said = "; ".join(filter(None, (said, unknown)))
        print(f"{model.name}, {what}: {verdict}. {said}")
        about = {"model": model.name, "what": what, "now": now}
        decisions.append({**about, "ms_a_step": found, "verdict": verdict})
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
    if not args.tiny and not torch.cuda.is_available():
        parser.error("no GPU here: --tiny runs on a CPU")
    models = TINY if args.tiny else MODELS
    book = Book(torch.device("cpu" if args.tiny else "cuda"), end)
    about = steps.machine()
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
