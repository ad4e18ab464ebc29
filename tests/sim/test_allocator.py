"""The caching allocator's model against sequences worked out by hand from its rules."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from titan.sim.replay.allocator import Allocator, OutOfMemory

MIB = 2**20


def test_sizes_are_rounded() -> None:
    allocator = Allocator()
    assert [allocator.allocate(n, size) for n, size in enumerate((1, 512, 513, 0))] == [
        512, 512, 1024, 512,
    ]  # fmt: skip
    assert allocator.active_bytes == 2560


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB)],
)
def test_segments(size: int, reserved: int, expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    allocator.allocate(0, size)
    assert allocator.reserved_bytes == reserved


def test_large_segments_are_rounded_to_2_mib_or_mapped_by_20() -> None:
    for expandable, reserved in ((False, 26 * MIB), (True, 40 * MIB)):
        allocator = Allocator(expandable=expandable)
        allocator.allocate(0, 25 * MIB)
        assert allocator.reserved_bytes == reserved


def test_small_pool_packs_and_merges() -> None:
    allocator = Allocator(expandable=False)
    for number in range(4):
        allocator.allocate(number, MIB // 2)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(1)
    allocator.free(2)  # merges with 1: room for a whole MiB
    allocator.allocate(4, MIB)
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.active_bytes == 2 * MIB


def test_best_fit_is_the_smallest() -> None:
    allocator = Allocator(expandable=False)
    for number, size in enumerate((60, 30, 40)):
        allocator.allocate(number, size * MIB)
    for number in range(3):
        allocator.free(number)
    allocator.allocate(3, 35 * MIB)  # the 40, of which 5 MiB are split off
    allocator.allocate(4, 5 * MIB)  # those
    allocator.allocate(5, 30 * MIB)
    allocator.allocate(6, 60 * MIB)
    assert allocator.reserved_bytes == 130 * MIB
    assert allocator.active_bytes == 130 * MIB


def test_large_blocks_keep_a_rest_of_up_to_a_mib() -> None:
    allocator = Allocator(expandable=False)
    allocator.allocate(0, 20 * MIB)
    allocator.free(0)
    assert allocator.allocate(1, 19 * MIB) == 20 * MIB  # a rest of 1 MiB is not split off
    expandable = Allocator()
    expandable.allocate(0, 20 * MIB)
    expandable.free(0)
    assert expandable.allocate(1, 19 * MIB) == 19 * MIB


def test_streams_do_not_share() -> None:
    allocator = Allocator(expandable=False)
    allocator.allocate(0, 20 * MIB, stream=0)
    allocator.free(0)
    allocator.allocate(1, 20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_expandable_segments_grow_at_the_end() -> None:
    """What fixed segments fragment: 100, then 60 free, then 100 again."""
    for expandable, reserved in ((False, 200 * MIB), (True, 140 * MIB)):
        allocator = Allocator(expandable=expandable)
        allocator.allocate(0, 40 * MIB)
        allocator.allocate(1, 60 * MIB)
        allocator.free(1)
        allocator.allocate(2, 100 * MIB)  # grows the free 60 by 40
        assert allocator.reserved_bytes == reserved


def test_expandable_blocks_leave_the_growing_one_for_last() -> None:
    """Of two free blocks that fit, the one with unmapped room behind it counts as large."""
    allocator = Allocator()
    for number, size in enumerate((80, 20, 60)):
        allocator.allocate(number, size * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 50 * MIB)  # the 80 in front, not the 60 at the end
    allocator.allocate(4, 100 * MIB)  # the 60 grows by 40
    assert allocator.reserved_bytes == 200 * MIB


def test_cache_is_given_back_at_the_limit() -> None:
    for expandable in (True, False):
        allocator = Allocator(expandable=expandable, limit_bytes=100 * MIB)
        allocator.allocate(0, 80 * MIB, stream=1)
        allocator.free(0)
        allocator.allocate(1, 60 * MIB, stream=0)
        assert allocator.num_retries == 1
        assert allocator.reserved_bytes == 60 * MIB
        assert allocator.peak_reserved_bytes <= 100 * MIB


def test_whole_pages_of_expandable_segments_are_given_back() -> None:
    """50 of 120 MiB in use: of the 70 behind it, the 60 in whole pages of 20."""
    allocator = Allocator(limit_bytes=120 * MIB)
    allocator.allocate(0, 50 * MIB)
    allocator.allocate(1, 70 * MIB)
    allocator.free(1)
    allocator.allocate(2, 60 * MIB, stream=1)
    assert allocator.num_retries == 1
    assert allocator.reserved_bytes == 120 * MIB
    allocator.allocate(3, 10 * MIB)  # the page that is half free
    assert allocator.reserved_bytes == 120 * MIB


def test_out_of_memory() -> None:
    for expandable in (True, False):
        allocator = Allocator(expandable=expandable, limit_bytes=100 * MIB)
        allocator.allocate(0, 60 * MIB)
        with pytest.raises(OutOfMemory, match="reserved") as error:
            allocator.allocate(1, 60 * MIB)
        assert error.value.size_bytes == 60 * MIB
        allocator.allocate(2, 40 * MIB)  # what was mapped in vain is still there to use
        assert allocator.active_bytes == 100 * MIB


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_invariants(seed: int, expandable: bool) -> None:
    """Live blocks never overlap, free ones are merged, and everything adds up."""
    draw = random.Random(seed)
    allocator = Allocator(expandable=expandable)
    alive: list[int] = []
    for number in range(600):
        if alive and draw.random() < 0.48:
            allocator.free(alive.pop(draw.randrange(len(alive))))
        else:
            size = int(2 ** draw.uniform(0, 27))
            allocator.allocate(number, size, stream=draw.choice([0, 0, 1]))
            alive.append(number)
    blocks = list(allocator.live_blocks.values())
    cached = [block for pool in allocator.free_blocks.values() for *_, block in pool]
    for block in cached:
        for near in (block.previous, block.next):
            assert near is None or not near.free or near.mapped != block.mapped
    spans = sorted((block.address, block.address + block.size) for block in (*blocks, *cached))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert sum(block.size for block in blocks) == allocator.active_bytes
    assert (
        allocator.active_bytes + sum(block.size for block in cached) == allocator.reserved_bytes
    )
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for number in alive:
        allocator.free(number)
    assert allocator.active_bytes == 0
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
