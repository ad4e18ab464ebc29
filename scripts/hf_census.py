"""Compare transformers' causal language models on titan's layouts with transformers alone.

    python scripts/hf_census.py --write docs/zoo.md     # all families: the page, for the transformers that is installed
    python scripts/hf_census.py --missing --minutes 30  # what has no result yet, for half an hour
    python scripts/hf_census.py qwen3 phi3 -v           # some of them, with each gradient that differs
    python scripts/hf_census.py --columns "" --write docs/zoo.md   # the page alone

The results are in docs/zoo.json, which is written after each family. Each family is made small, in three ways. Its reference is transformers' own model with its own attention, masks and experts, in one process. Each
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
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.hf_branches import branches, verdict  # noqa: E402
from tests.support.hf_families import LAYOUTS, PROOFS, is_equal, row_of  # noqa: E402
from tests.support.hf_sizes import SETTINGS, families  # noqa: E402
from tests.support.ranks import Pool  # noqa: E402

RESULTS = ROOT / "docs/zoo.json"
VARIANTS = ("0", "1", "2")
COLUMNS = [*LAYOUTS, *PROOFS]
TEMPLATE = """\
# The zoo

Causal language models of transformers {version} as `model.name = "transformers"`. The results are in zoo.json, and
`python scripts/hf_census.py --missing --minutes 30 --write docs/zoo.md` runs what it lacks and writes this page. For another version of
transformers, install it and leave out `--missing` (some hours on two idle cores).

**{whole} classes are equal in all columns, and {some} in some.** The other {refused} are refused. A class counts once:
{shares} more model types share one of them (InternLM 3 is a `LlamaForCausalLM`).

Each class is made small in three ways, and trains three steps of AdamW in fp32 on each layout. A cell is the largest relative difference of a
loss, a gradient of the first step or an updated weight from transformers alone, with its own attention and experts, in one
process. At most 1e-5 is equal. `draw 2`: with other weights and tokens, since rounding flipped a ReLU or the choice of an expert
with the first ones.

- **sizes**: with how many sizes the class is equal in all columns, of how many that were run. Sizes 0 are the same for all classes. Sizes 1 and
  2 are drawn by the name of the class: 4 or 8 query heads and 1 to 8 for keys and values, another head_dim, 4 to 6 layers, of different
  kinds where the class has them, 4 or 6 experts, tied embeddings, biases, a vocabulary of 131. Of the classes that are equal, {thrice} were run with
  all three.
- **PP** is run with untied embeddings: titan refuses tied ones.
- **resumed**: two steps on FSDP2 (with EP, if there are experts), and the third from titan's checkpoint on TP+SP (on CP where TP+SP is
  refused). It is compared with the third step of one process that was not interrupted.
- **exported**: a folder that transformers wrote is read on FSDP2 x TP, saved as titan's checkpoint, loaded and exported. `equal`: the same
  names, each tensor the same bits, the same config.json, and transformers misses nothing.
- **notes**: settings that the class needs in its config.json (its default config has others, and `titan check` refuses them), and why a
  column is not equal.

| class | sizes | {columns} | notes |
|{rule}
{lines}

## Sizes and speed

With the sizes that a class has by default, simulated: FSDP2 on {ranks} H100 (`--hardware {hardware}`), bf16, selective recomputation, one sequence
of {tokens} tokens a GPU, or of the model's maximum if that is less. A sequence a GPU is little work: many of them run faster.

| class | parameters (active) | tokens/s | GiB of a GPU | |
|---|--:|--:|--:|---|
{speeds}

## Branches

What a class computes depends on fields beside its sizes: kinds of layers, booleans of its config, activations, rotary
embeddings. Each was changed alone, and one process compared with transformers itself, made of the same words (the first row of
`titan certify`): logits, losses, each gradient. **{equal} are equal, {declined} are refused, {different} differ, {untold} could not be compared.**
Only branches that are listed were run.

| class | equal (largest difference) | refused, or not compared | differ |
|---|---|---|---|
{branches}

## Refused

With the default config of the class.

| model type | reason |
|---|---|
{reasons}
"""
RANKS, TOKENS, HARDWARE = 8, 4096, "h100-sxm"
# The formula is within a fifth of the simulator: with more, the simulator need not look.
MOST_GIB = 100


def speed_of(architecture: str, *, limit_s: int) -> dict[str, Any]:
    """Return the parameters of a class with its default sizes, and its tokens/s and memory as simulated, or why there are none."""
    from titan.checks.rules import check_to_run
    from titan.config.schema import JobConfig
    from titan.sim.estimate import estimate_memory
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
            sizes, problems = job().model.resolved
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


def is_missing(row: dict[str, Any], name: str) -> bool:
    """Return whether a column of a class was not run and can be."""
    return name not in row and (name != "EP" or bool(row.get("experts", 1)))


def is_built(row: dict[str, Any]) -> bool:
    """Return whether titan builds a class, with the sizes of a row."""
    return not row.keys() & {"refused", "error", "reference"}


def holds(row: dict[str, Any]) -> bool:
    """Return whether a class is equal in all columns, with the sizes of a row."""
    names = [n for n in COLUMNS if n in row or is_missing(row, n)]
    return is_built(row) and all(is_equal(row.get(n, "not run")) for n in names)


def is_whole(row: dict[str, Any]) -> bool:
    """Return whether all columns of a class were run, with the sizes of a row."""
    return not is_built(row) or not any(is_missing(row, n) for n in COLUMNS)


def line_of(kind: str, rows: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """Return the line of a class in the table, and whether it is equal in all columns with all sizes that were run.

    Args:
        kind: model type.
        rows: results with each variant of the sizes that was run.
    """
    cells, why = [], defaultdict[str, list[tuple[str, str]]](list)
    built = {variant: row for variant, row in rows.items() if is_built(row)}
    for name in COLUMNS:
        texts = {
            variant: row.get(name, "not run")
            for variant, row in built.items()
            if name in row or is_missing(row, name)
        }
        for variant, text in texts.items():
            if not is_equal(text):
                why[text.removeprefix("refused: ")].append((variant, name))
        if not texts:
            cells.append("-")
        elif all(map(is_equal, texts.values())):
            cells.append(max(texts.values(), key=_difference))
        else:
            cells.append("no")
    for variant, row in rows.items():
        if variant not in built:
            why[_failure(row)].append((variant, "all"))
    notes = [f"{key} = {json.dumps(value)}" for key, value in SETTINGS.get(kind, {}).items()]
    for text, places in why.items():
        names = ", ".join(dict.fromkeys(name for _, name in places))
        sizes = ", ".join(sorted({v for v, _ in places}))
        of = f" (sizes {sizes})" if len(sizes) < len(", ".join(rows)) else ""
        notes.append(f"{names}{of}: {_cell(text, 140)}")
    good = sum(map(holds, rows.values()))
    line = f"| `{families()[kind]}` | {good} of {len(rows)} | {' | '.join(cells)} | {'; '.join(notes)} |"
    return line, good == len(rows)


def _difference(text: str) -> float:
    return 0 if text == "equal" else float(text.split(",")[0])


def _failure(row: dict[str, Any]) -> str:
    return row.get("refused") or row.get("error") or row["reference"]


def page(results: dict[str, Any]) -> str:
    """Return docs/zoo.md: families that train on every layout, on some, and on none, with the reasons."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = families()
    lines, speeds, refused, some, whole = [], [], [], 0, []
    for kind in sorted(kind for kind in known if "0" in results.get(kind, {})):
        found = results[kind]
        first = found["0"]
        if not is_built(first):
            refused.append(f"| `{kind}` | {_cell(_failure(first))} |")
            continue
        rows = {
            v: found[v] for v in VARIANTS if v in found and (v == "0" or is_whole(found[v]))
        }
        line, is_good = line_of(kind, rows)
        lines.append(line)
        whole += [len(rows)] if is_good else []
        some += not is_good
        speeds.append(_sizes_line(known[kind], found.get("speed", {})))
    return TEMPLATE.format(
        version=transformers.__version__,
        columns=" | ".join(COLUMNS),
        rule="---|" * (len(COLUMNS) + 3),
        whole=len(whole),
        thrice=whole.count(len(VARIANTS)),
        some=some,
        refused=len(refused),
        shares=len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - len(known),
        ranks=RANKS,
        hardware=HARDWARE,
        tokens=f"{TOKENS:,}",
        lines="\n".join(lines),
        speeds="\n".join(speeds),
        reasons="\n".join(refused),
        **branch_figures(results),
    )


def branch_figures(results: dict[str, Any]) -> dict[str, Any]:
    """Return the rows and counts of the page's table of branches."""
    lines, counts = [], dict.fromkeys(("equal", "declined", "different", "untold"), 0)
    for kind, row in sorted(results.items()):
        cells: dict[str, list[str]] = {what: [] for what in counts}
        for name, text in row.get("branches", {}).items():
            word = text.partition(":")[0]
            words = {"refused": "declined", "DIFFERS": "different"}
            what = words.get(word, "equal" if is_equal(text) else "untold")
            counts[what] += 1
            shown = f"{name} ({text})" if what == "equal" else f"{name}: {_cell(text, 120)}"
            cells[what].append(shown)
        if row.get("branches"):
            parts = cells["equal"], cells["declined"] + cells["untold"], cells["different"]
            columns = " | ".join("; ".join(part).replace("|", "/") for part in parts)
            lines.append(f"| `{families().get(kind, kind)}` | {columns} |")
    return {**counts, "branches": "\n".join(lines)}


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


def _cell(text: str, longest: int = 200) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def save(results: dict[str, Any], file: Path) -> None:
    """Write the results, a line for each class."""
    lines = [
        f"{json.dumps(k)}: {json.dumps(results[k], sort_keys=True)}" for k in sorted(results)
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model types; default: all")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--write", type=Path, help="write the page")
    columns = [*COLUMNS, "speed", "branches"]
    parser.add_argument("--columns", default=",".join(columns), help="default: %(default)s")
    parser.add_argument(
        "--variants", default="0,1,2", help="of the sizes; default: %(default)s"
    )
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no class after them")
    parser.add_argument("--limit", type=int, default=120, help="most seconds of a simulation")
    args = parser.parse_args()
    known, begun = families(), time.monotonic()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    names = args.columns.split(",")
    preload = ("tests.support.hf_warm", "torch.distributed.checkpoint")
    preload += ("titan.sim.record.fake_world", "titan.sim.record.tracer")
    pool = Pool(preload)
    kinds = sorted(
        args.families or known,
        key=lambda kind: not holds(results.get(kind, {}).get("0", {"error": ""})),
    )
    for variant in args.variants.split(",") if names else ():
        for kind in kinds:
            if time.monotonic() - begun > 60 * args.minutes:
                break
            run_class(pool, kind, variant, results, args)
    if args.write:
        args.write.write_text(page(results))


def run_class(
    pool: Pool, kind: str, variant: str, results: dict[str, Any], args: argparse.Namespace
) -> None:
    """Run columns of a class with one variant of its sizes, and save the results.

    A class that titan does not build with the first variant is not tried with the others.
    """
    found = results.setdefault(kind, {})
    before, names = found.get(variant, {}), args.columns.split(",")
    if variant != "0" and not is_built(found.get("0", {})):
        return
    if args.missing and not is_built(before):
        return
    chosen = {k: v for k, v in (LAYOUTS | PROOFS).items() if k in names}
    if args.missing:
        chosen = {k: v for k, v in chosen.items() if is_missing(before, k)}
    if chosen:
        row = row_of(pool, kind, chosen, verbose=args.verbose, variant=int(variant))
        # What refused the class before may be repaired.
        stale = {"refused", "error", "reference"}
        found[variant] = {k: v for k, v in before.items() if k not in stale} | row
        save(results, args.json)
        print(f"{kind:22s} {variant} {row}", file=sys.stderr, flush=True)
    if "branches" in names and variant == "0":
        run_branches(pool, kind, found, results, args)
    wanted = "speed" in names and not (args.missing and "speed" in found)
    if wanted and variant == "0" and is_built(found.get("0", {})):
        found["speed"] = speed_of(families()[kind], limit_s=args.limit)
        save(results, args.json)


def run_branches(
    pool: Pool,
    kind: str,
    found: dict[str, Any],
    results: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Run the branches of a class through the first row of `titan certify`, and save the results.

    Classes that are refused are tried, too: a branch may be what titan refuses, or what it does not.
    """
    architecture, before = families()[kind], found.get("branches", {})
    try:
        each = {"as the small config has them": {}, **branches(architecture)}
    except Exception as error:  # of transformers' classes
        each = {}
        before = {"-": f"refused: transformers does not build it: {_cell(str(error))}"}
    row = {k: v for k, v in before.items() if k in each or k == "-"} if args.missing else {}
    for name, fields in each.items():
        if name not in row:
            row[name] = verdict(architecture, fields, pool)
            print(f"{kind:22s} {name}: {row[name]}", file=sys.stderr, flush=True)
    found["branches"] = row or before
    save(results, args.json)


if __name__ == "__main__":
    main()
