"""Every command on every page runs, as a reader would run it: page by page, in order, in a folder of the page.

Commands that need GPUs, a cluster, the internet or hours have a stand-in in tests/page_commands.toml. `pytest -k PAGE`
runs one page, and `-m slow` whole pages with what takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT
from tests.support.pages import PRESENT, Block, blocks, commands, page_commands, runnable
from tests.support.ranks import Pool
from titan.cli import main
from titan.config.toml import read_toml

STAND_INS: dict[str, dict[str, Any]] = read_toml(
    Path(__file__).with_name("page_commands.toml")
)[0]
KEYS = {"why", "before", "replace", "append", "run", "slow", "quick", "prints"}
WITH_COMMANDS = [page for page in PRESENT if page_commands(page)]
SLOW = [
    page
    for page, rows in STAND_INS.items()
    if any({"slow", "quick"} & set(row) for row in rows.values() if isinstance(row, dict))
]
# sbatch and kubectl check that the files which they are given exist, and answer as they would.
STUBS = {
    "sbatch": """for word; do case $word in -*|[0-9]*) ;; *) [ -f "$word" ] || exit 1; echo "Submitted batch job 1"; exit; esac; done; exit 1""",
    "kubectl": """for word; do case $word in --from-file=*) [ -f "${word#*=}" ] || exit 1;; *.yaml) [ -f "$word" ] || exit 1;; esac; done""",
}
# What a shell knows: the checkout, and what docs/cluster.md names.
VARIABLES = {"ROOT": str(ROOT), "NODES": "1", "NODE": "0", "HEAD": "127.0.0.1"}


def entry_of(page: str, command: str) -> dict[str, Any]:
    """Return the stand-in whose text the command begins with: the longest one, as far as there is any."""
    rows = STAND_INS.get(page, {})
    matching = [text for text in rows if text != "given" and f"{command}\n".startswith(text)]
    return rows[max(matching, key=len)] if matching else {}


def run_titan(words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Be the process of a `titan` command; runs in a fork that has torch imported."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(words))


class Reader:
    """Somebody who works through a page in a new folder, which has the checkout's jobs, scripts and examples."""

    def __init__(self, page: str, folder: Path, cache: Path) -> None:
        self.page, self.folder = page, folder / "reader"
        self.folder.mkdir()
        for name in ("train_configs", "scripts", "examples"):
            (self.folder / name).symlink_to(ROOT / name)
        stubs = folder / "bin"
        stubs.mkdir()
        for name, text in STUBS.items():
            (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
            (stubs / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            **VARIABLES,
            "XDG_CACHE_HOME": str(cache),
            "COLUMNS": "120",  # of the terminal; some commands fold what they print
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
        }
        self.sessions: list[int] = []
        if given := STAND_INS.get(page, {}).get("given"):
            self.run(given, said="the page's given")

    def follow(self, block: Block, *, slow: bool) -> None:
        for command in commands(block):
            entry = entry_of(self.page, command)
            if entry.get("slow") and not slow:
                continue
            if entry.get("quick") and slow:
                entry = {}
            text = command
            for old, new in entry.get("replace", []):
                assert old in text, f"{self.page}: {command}: nothing to replace: {old}"
                text = text.replace(old, new)
            text = (
                f"{runnable(text)} {entry['append']}" if "append" in entry else runnable(text)
            )
            where = f"{self.page}:{block.line}: {command}"
            if "before" in entry:
                self.run(entry["before"], said=where)
            output = self.run(entry.get("run", text), said=where)
            expects = entry.get("prints", [])
            if block.language == "console":  # one command; all below it
                expects = [block.text.split("\n", 1)[1].strip()]
            for expected in expects:
                assert expected in output, f"{command}\nprints no {expected!r}:\n{output}"

    def run(self, script: str, *, said: str) -> str:
        """Run a script of bash and return what it prints; the pages' commands all succeed."""
        log, script = self.folder.parent / "output.txt", script.strip()
        # A shell would add nothing to most commands but the import of torch.
        is_plain = script.startswith("titan ") and not set(script) & set("|&;<>$`*\n")
        code = self.fork(script, log) if is_plain else self.shell(script, log)
        output = log.read_text(errors="replace")
        print(f"$ {script}\n{output}")  # `pytest -rP` shows what a reader sees
        assert code == 0, f"{said}\nexit code {code} of: {script}\n{output[-6000:]}"
        return output

    def shell(self, script: str, log: Path) -> int:
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-eo", "pipefail", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            self.sessions.append(process.pid)
            return process.wait()

    def fork(self, command: str, log: Path) -> int:
        arguments = (shlex.split(command)[1:], self.folder, self.environment, log)
        process = Pool().context.Process(target=run_titan, args=arguments)
        process.start()
        self.sessions.append(process.pid or 0)
        process.join()
        return process.exitcode or 0

    def leave(self) -> None:
        """End what still runs, and delete what can be large."""
        for session in self.sessions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache of data and of the simulator's traces for all pages: of a reader's home."""
    return tmp_path_factory.mktemp("cache")


def follow(page: str, folder: Path, cache: Path, *, slow: bool) -> None:
    reader = Reader(page, folder, cache)
    try:
        for block in blocks(page, "bash", "console"):
            reader.follow(block, slow=slow)
    finally:
        reader.leave()


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page: str, tmp_path: Path, cache: Path) -> None:
    follow(page, tmp_path, cache, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SLOW)
def test_slow_commands_run(page: str, tmp_path: Path, cache: Path) -> None:
    follow(page, tmp_path, cache, slow=True)


def test_stand_ins_are_needed() -> None:
    """Each belongs to one command of its page, says why, and has no key that nothing reads."""
    for page, rows in STAND_INS.items():
        written = page_commands(page)
        for text, row in rows.items():
            if text == "given":
                continue
            # Commands that occur twice share it.
            meant = {command for command in written if entry_of(page, command) is row}
            assert len(meant) == 1, f"{page}: {text}: it stands for {meant or 'no command'}"
            assert row["why"] and set(row) <= KEYS, f"{page}: {text}"
