"""Run `titan download`: fetch a model's weights and tokenizer, or a dataset, from the Hugging Face hub.

`huggingface_hub` fetches the files. It goes on where a connection was cut, keeps finished files from call to call, and takes
the token from `HF_TOKEN` or from `hf auth login`, and the hub's address from `HF_ENDPOINT`. titan then compares every file
with the hash that the hub gives.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from titan.config.options import add_quiet, is_quiet
from titan.data import DataError, require
from titan.untrusted import printable

TOKENIZER = (
    "tokenizer*",
    "*.tiktoken",
    "*tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# Never pickles (.bin, .pth), which titan does not open.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
PATTERNS = {
    "tokenizer": (*TOKENIZER, "config.json"),
    "weights": WEIGHTS,
    "all": (*TOKENIZER, *WEIGHTS),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when every file is there and whole, 1 if one is damaged, 2 if the hub has or gives no such files."""
    parser = argparse.ArgumentParser(
        prog="titan download",
        description="Fetch weights, tokenizers and datasets from the Hugging Face hub. Finished files are kept, so the same command continues.",
    )
    parser.add_argument("repo", metavar="OWNER/NAME", help="the model's or the dataset's id")
    parser.add_argument("--dataset", action="store_true", help="the id is a dataset's")
    parser.add_argument(
        "--only", choices=("tokenizer", "weights"), help="of a model; default: both"
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="choose files by their path; may be repeated",
    )
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: assets/NAME")
    add_quiet(parser)
    args = parser.parse_args(argv)
    target = args.output or Path("assets") / args.repo.split("/")[-1]
    patterns = args.include or (("*",) if args.dataset else PATTERNS[args.only or "all"])
    try:
        damaged = download(
            args.repo,
            kind="dataset" if args.dataset else "model",
            patterns=patterns,
            revision=args.revision,
            target=target,
        )
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    for name in damaged:
        print(
            f"{target / name}: differs from the hub's file and was deleted; run the command again",
            file=sys.stderr,
        )
    return 1 if damaged else 0


def download(
    repo: str, *, kind: str, patterns: Sequence[str], revision: str | None, target: Path
) -> list[str]:
    """Fetch the files of a repository that match a pattern. Return those whose content is wrong, which are deleted.

    Raises DataError if the hub cannot be reached, or has no such repository or files, or wants a token.
    """
    hub = require("huggingface_hub", purpose="`titan download`")
    what = {"repo_id": repo, "repo_type": kind}
    try:
        info = hub.HfApi().repo_info(**what, revision=revision, files_metadata=True)
        files = [
            file for file in info.siblings if any(fnmatch(file.rfilename, p) for p in patterns)
        ]
        _require(files, repo, [file.rfilename for file in info.siblings], patterns)
        size = sum(file.size or 0 for file in files)
        if is_quiet():
            hub.utils.disable_progress_bars()
        else:
            size_text = f"{len(files)} files, {size / 1e9:.2f} GB"
            print(f"{size_text}, of {repo} at {info.sha[:10]} into {target}", flush=True)
        names = [file.rfilename for file in files]
        # By commit, so that all files belong together even if the branch moves meanwhile.
        hub.snapshot_download(**what, revision=info.sha, allow_patterns=names, local_dir=target)
    except Exception as error:
        # The hub's own errors are OSError or ValueError; connections end in those of whatever library made them.
        library = type(error).__module__.startswith(("http", "requests", "urllib3"))
        if not library and not isinstance(error, OSError | ValueError):
            raise
        raise DataError(_explain(error, repo)) from error
    damaged = [file.rfilename for file in files if not is_whole(target / file.rfilename, file)]
    for name in damaged:
        (target / name).unlink(missing_ok=True)
    if not damaged:
        print("all files have the hashes that the hub gives")
    return damaged


def _require(files: list[Any], repo: str, names: list[str], patterns: Sequence[str]) -> None:
    if not files:
        some = ", ".join(printable(name, 60) for name in names[:8])
        raise DataError(
            f"{repo}: none of {len(names)} files matches {', '.join(patterns)}; there are {some}"
        )
    for file in files:
        path = PurePosixPath(file.rfilename)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{repo}: has a file with a path out of its folder: {file.rfilename}")


def is_whole(path: Path, file: Any) -> bool:
    """Return whether a file is the hub's: by SHA-256 if the hub stores it by that hash, else by git's hash of a blob."""
    if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
        return False
    wanted = file.lfs.sha256 if file.lfs else file.blob_id
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while block := stream.read(2**24):
            digest.update(block)
    return wanted is None or digest.hexdigest() == wanted


def _explain(error: Exception, repo: str) -> str:
    errors = require("huggingface_hub.errors", purpose="`titan download`")
    if isinstance(error, errors.GatedRepoError):
        return f"{repo}: its owner must let you in: accept the terms on its page, then set HF_TOKEN to your token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo}: the hub has no such repository, or it is private and needs HF_TOKEN; for a dataset add --dataset"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo}: has no such revision"
    if isinstance(error, errors.HFValidationError):
        return f"{repo}: is no id of the hub, such as meta-llama/Llama-3.2-1B"
    text = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{repo}: the hub cannot be reached ({text[0]}); on a machine without internet, run this elsewhere and copy "
        "the folder; HF_ENDPOINT names a mirror"
    )
