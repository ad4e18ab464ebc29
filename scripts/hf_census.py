"""Compare transformers' causal language models on titan's layouts with transformers alone.

    python scripts/hf_census.py --write docs/zoo.md     # all families: the page, for the transformers that is installed
    python scripts/hf_census.py qwen3 phi3 -v           # some of them, with each gradient that differs
    python scripts/hf_census.py qwen3 --read FILE --json FILE --write docs/zoo.md   # once more, into the results of an earlier run

Each family is made small. Its reference is transformers' own model with its own attention, masks and experts, in one process. Each
layout takes three steps of AdamW on gloo ranks, and its loss, each gradient of the first step and each updated weight are compared
with the reference's. `resumed`, `exported`: a checkpoint of another layout, and a Hugging Face folder there and back. `speed`: the
simulator, on the sizes that the class has by default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hf_families import LAYOUTS, PROOFS, families, is_equal, row_of  # noqa: E402
from tests.support.ranks import Pool  # noqa: E402

RANKS, TOKENS, HARDWARE = 8, 4096, "h100-sxm"
# The formula is within a fifth of the simulator: with more, the simulator need not look.
MOST_GIB = 100


def speed_of(architecture: str, *, limit_s: int) -> dict[str, Any]:
    """Return the parameters of a class with its default sizes, and its tokens/s and memory as simulated, or why there are none."""
    from titan.checks.rules import check_to_run
    from titan.config.model import resolve_model
    from titan.config.schema import JobConfig
    from titan.observe.estimate import estimate_memory
    from titan.sim.price.profiles import load_profile
    from titan.sim.simulate import simulate

    def job(**keys: Any) -> JobConfig:
        parts: dict[str, Any] = {
            "training": {"seq_len": keys.get("tokens", TOKENS), "local_batch_size": 1},
            "loss": {"chunk_output": keys.get("chunk_output", True)},
            "activation_checkpoint": {"mode": "selective"},
            "parallelism": {"data_parallel_shard_degree": RANKS},
            "model": {"name": "transformers", "architecture": architecture},
        }
        return JobConfig.model_validate(parts).on_device("cuda")

    row: dict[str, Any] = {}
    try:
        with _limit(limit_s):
            sizes, problems = resolve_model(job().model)
            if problems:
                return row | {"why": problems[0][1]}
            most = json.loads(sizes.source.hf).get("max_position_embeddings") or TOKENS
            row |= {"parameters": sizes.num_params, "active": sizes.num_active_params}
            row["tokens"] = min(TOKENS, most)
            config = job(tokens=row["tokens"])
            layout = check_to_run(config, world_size=RANKS)
            needed = estimate_memory(config, sizes, layout)["total"]
            if needed > MOST_GIB:
                return row | {"why": f"needs {needed:,.0f} GiB, by formula"}
            options = {"world_size": RANKS, "profile": load_profile(HARDWARE), "processes": 1}
            try:
                found = simulate(config, **options)
            except Exception as error:
                if "chunk_output" not in str(error):
                    raise
                found = simulate(job(tokens=row["tokens"], chunk_output=False), **options)
            row["gib"] = found.fullest.needed_bytes / 2**30
            if not found.runs:
                return row | {"why": f"needs {row['gib']:.0f} GiB"}
            return row | {"speed": found.tokens_per_s_per_gpu * RANKS}
    except TimeoutError:
        return row | {"why": f"not simulated within {limit_s} s"}
    except Exception as error:
        return row | {"why": " ".join(str(error).split())[:200]}


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def page(results: dict[str, Any]) -> str:
    """Return docs/zoo.md: families that train on every layout, on some, and on none, with the reasons."""
    import transformers

    names = [*LAYOUTS, *PROOFS]
    known = families()
    lines, sizes, refused, counts = [], [], [], {"all": 0, "some": 0}
    for kind in sorted(results.keys() & known.keys()):
        row = results[kind]
        why = row.get("refused") or row.get("error") or row.get("reference")
        if why:
            refused.append(f"| `{kind}` | {_cell(why)} |")
            continue
        cells, notes = [], []
        for name in names:
            text = row.get(name, "not run")
            lacks = text == "not run" and name == "EP" and not row.get("experts")
            cells.append(text if is_equal(text) else "-" if lacks else "no")
            if cells[-1] == "no":
                notes.append(f"{name}: {text.removeprefix('refused: ')}")
        counts["some" if notes else "all"] += 1
        note = _cell("; ".join(dict.fromkeys(notes)))
        lines.append(f"| `{known[kind]}` | {' | '.join(cells)} | {note} |")
        sizes.append(_sizes_line(known[kind], row.get("speed", {})))
    shares = len(_mapping()) - len(known)
    return "\n".join(
        [
            "# The zoo",
            "",
            f'Causal language models of transformers {transformers.__version__} as `model.name = "transformers"`. For another version, install it and run',
            "`python scripts/hf_census.py --write docs/zoo.md`, which writes this page (about an hour on two idle cores).",
            "",
            f"**{counts['all']} classes are equal in all columns, and {counts['some']} in some.** The other {len(refused)} are refused. A class counts once:",
            f"{shares} more model types share one of them (InternLM 3 is a `LlamaForCausalLM`).",
            "",
            "Each class is made small, and trains three steps of AdamW in fp32 on each layout. A cell is the largest relative difference of a",
            "loss, a gradient of the first step or an updated weight from transformers alone, with its own attention and experts, in one",
            "process. At most 1e-5 is equal. `draw 2`: with other weights and tokens, since rounding flipped a ReLU or the choice of an expert",
            "with the first ones.",
            "",
            "- **resumed**: two steps on FSDP2 (with EP, if there are experts), and the third from titan's checkpoint on TP+SP (on CP where TP+SP is",
            "  refused). It is compared with the third step of one process that was not interrupted.",
            "- **exported**: a folder that transformers wrote is read on FSDP2 x TP, saved as titan's checkpoint, loaded and exported. `equal`: the same",
            "  names, each tensor the same bits, the same config.json, and transformers misses nothing.",
            "",
            f"| class | {' | '.join(names)} | why not |",
            "|---|" + "---|" * (len(names) + 1),
            *lines,
            "",
            "## Sizes and speed",
            "",
            f"With the sizes that a class has by default, simulated: FSDP2 on {RANKS} H100 (`--hardware {HARDWARE}`), bf16, selective recomputation, one sequence",
            f"of {TOKENS:,} tokens a GPU, or of the model's maximum if that is less. A sequence a GPU is little work: many of them run faster.",
            "",
            "| class | parameters (active) | tokens/s | GiB of a GPU | |",
            "|---|--:|--:|--:|---|",
            *sizes,
            "",
            "## Refused",
            "",
            "| model type | reason |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def _sizes_line(architecture: str, row: dict[str, Any]) -> str:
    numbers = ["-", "-", "-"]
    if "parameters" in row:
        numbers[0] = _billions(row["parameters"])
        if row["active"] < row["parameters"]:
            numbers[0] += f" ({_billions(row['active'])})"
    if "speed" in row:
        numbers[1:] = f"{row['speed']:,.0f}", f"{row['gib']:.0f}"
    note = row.get("why", "" if row else "not simulated")
    if row.get("tokens", TOKENS) < TOKENS:
        note = "; ".join(filter(None, (f"{row['tokens']:,} tokens", note)))
    return f"| `{architecture}` | {' | '.join(numbers)} | {_cell(note)} |"


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _mapping() -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model types; all, if there is no --read")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results, after each family")
    parser.add_argument(
        "--read", type=Path, help="results of an earlier run, to which this one adds"
    )
    parser.add_argument("--write", type=Path, help="write the page")
    columns = [*LAYOUTS, *PROOFS, "speed"]
    parser.add_argument("--columns", default=",".join(columns), help="default: %(default)s")
    parser.add_argument("--limit", type=int, default=120, help="most seconds of a simulation")
    args = parser.parse_args()
    known = families()
    kinds = args.families or ([] if args.read else [*known])
    names = args.columns.split(",")
    chosen = {k: v for k, v in (LAYOUTS | PROOFS).items() if k in names}
    results = json.loads(args.read.read_text()) if args.read else {}

    preload = ("tests.support.hf_warm", "torch.distributed.checkpoint")
    preload += ("titan.sim.record.fake_world", "titan.sim.record.tracer")
    pool = Pool(preload)
    for kind in kinds:
        row = row_of(pool, kind, chosen, verbose=args.verbose) if chosen else {}
        # What refused the family before may be repaired.
        before = results.get(kind, {})
        stale = {"refused", "error", "reference"} if chosen else set()
        row = {k: v for k, v in before.items() if k not in stale} | row
        if "speed" in names and not row.keys() & {"refused", "error", "reference"}:
            row["speed"] = speed_of(known[kind], limit_s=args.limit)
        results[kind] = row
        print(f"{kind:22s} {row}", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    for kind, row in results.items():
        print(kind)
        for name, text in row.items():
            print(f"    {name:14s} {text}")
    if args.write:
        args.write.write_text(page(results))


if __name__ == "__main__":
    main()
