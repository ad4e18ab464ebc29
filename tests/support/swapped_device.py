"""Run tests/gpu on a CPU: a copy in which "cuda" is "cpu", sizes are small, and programs are traced and not compiled.

What only a GPU has ends such a test with an error that LISTED expects, and counts as skipped for that reason. Any other error, above
all that of a call whose signature has changed, is a failure. `copy_tests` makes the copy; pytest loads this file as a plugin for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copy

import pytest
import torch
import torch.distributed as dist

SWAPPED = {
    '"cpu:gloo,cuda:nccl"': '"gloo"',
    '"cuda:0"': '"cpu"',
    ".cuda()": ".cpu()",
    r'(?<!type == )"cuda"': '"cpu"',
    # No inductor: a minute of C++ for each program.
    'compile={"enable": True': 'compile={"enable": True, "backend": "aot_eager"',
    'compiled("inductor")': 'compiled("aot_eager")',
    "torch.accelerator.set_device_index(0)": "None",
    '@pytest.fixture(scope="module")\ndef group': "@pytest.fixture\ndef group",
    # Sizes.
    "4096, 4096": "64, 64",
    '"dim": 1024, "n_layers": 8, "n_heads": 16': '"dim": 64, "n_layers": 2, "n_heads": 4',
    '"ffn_dim": 3072': '"ffn_dim": 128',
    '"seq_len": 2048': '"seq_len": 64',
    "(4, 2049)": "(4, 65)",
    "torch.accelerator.reset_peak_memory_stats()": "None",
    "torch.accelerator.max_memory_allocated()": "0",
    "torch.accelerator.memory_allocated()": "0",
    "from tests.gpu import NEEDS_GPU as pytestmark": "import pytest; pytestmark = pytest.mark.gpu",
    r"pytest\.mark\.skipif\(.*(torch\.cuda|torch\.accelerator).*\n": "\n",
}
# Why a test cannot end on a CPU, how its name begins, and the error with which it ends there.
LISTED = [
    ("the kernel exists on GPUs only", "test_document_masks", "aten::_flash_attention_forward"),
    (
        "the kernel exists on GPUs only",
        "test_document_masks",
        "does not support backward on CPU",
    ),
    ("the kernel exists on GPUs only", "test_attention_kernels", "No viable backend"),
    *(
        ("the kernel exists on GPUs only", name, "has_kernel")
        for name in ("test_a_kernel", "test_documents_and", "test_the_map")
    ),
    ("products into fp32 exist on GPUs only", "test_the_loss_multiplies", "± 0.0028"),
    ("products into fp32 exist on GPUs only", "test_the_router_multiplies", "'IntoFp32' in"),
    ("no compiler, no float8", "test_measured_kernels", "mode"),
    ("no compiler, no float8", "test_float8_products", "CUDA|NVIDIA"),
    ("no compiler, no float8", "test_the_output_layer_in_float8", "CUDA|NVIDIA"),
    ("the host's memory is not counted", "test_modes_keep", "0 > 0"),
    ("the host's memory is not counted", "test_resume_is_bit", "'rss' == 'device'"),
    ("nothing is launched, pinned or waited for", "test_no_step_waits", "CUDA enabled"),
    ("nothing is launched, pinned or waited for", "test_more_parameters", "assert 0 < 0"),
    (
        "nothing is launched, pinned or waited for",
        "test_a_copy_beside",
        "accelerator|is_pinned",
    ),
    ("a trace of a CPU", "test_trace_and_snapshot", "'cpu' == 'gpu'"),
]
# Tests that start whole runs. Other tests start the same runs on a CPU.
PROCESSES = (
    "test_preflight",
    "test_layouts_equal_one_gpu",
    "test_an_async",
    "test_a_rank_that",
    "test_groups_have_one_backend",
)


def copy_tests(source: Path, target: Path) -> None:
    """Write the tests of a folder into another one, with the device swapped."""
    for file in source.glob("test_*.json"):
        copy(file, target)
    for file in {*source.glob("*.py")} - {source / "__init__.py"}:
        text = file.read_text(encoding="utf-8")
        for pattern, replacement in SWAPPED.items():
            is_regex = "(?" in pattern or "\\" in pattern
            text = re.sub(pattern if is_regex else re.escape(pattern), replacement, text)
        (target / file.name).write_text(text, encoding="utf-8")


def pytest_configure() -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(PROCESSES):
            item.add_marker(pytest.mark.skip(reason="starts processes"))


@pytest.fixture(autouse=True)
def _no_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    # Of a trainer that failed. A fixture of the test's own file ends its group itself.
    if "group" not in request.fixturenames and dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed and call.excinfo is not None:
        for reason, name, error in LISTED:
            if item.name.startswith(name) and re.search(error, str(call.excinfo.value)):
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
                break
    return report
