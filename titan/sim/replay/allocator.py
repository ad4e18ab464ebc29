"""CUDA's caching allocator as a model: the memory that a sequence of allocations reserves, and whether it fits.

As in PyTorch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (2.13):

    sizes are rounded up to 512 B; up to 1 MiB they come from the small pool, above from the large one; each stream has its own
    the smallest free block that is large enough is taken, the one at the lowest address among equals, and split
    freed blocks merge with free neighbours at once
    memory that is missing comes as a segment: 2 MiB for the small pool, 20 MiB for less than 10 MiB, else rounded to 2 MiB

With expandable segments (titan's default, `training.expandable_segments`), each pool of each stream
is one range of addresses, mapped by pages of 2 MiB (small) or 20 MiB (large) where it grows; a free
block at its end grows by the missing bytes. At the limit, cached blocks of all pools are given back
and the allocation is tried once more. Then it is out of memory. Not modelled: blocks that other
streams still use (record_stream), garbage collection below the limit. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

# kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge of
# c10/core/AllocatorConfig.h.
MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20
_ADDRESSES = LARGE_SEGMENT << 24
"""Of an expandable segment: more than any device has memory, so that a pool never needs a second one; whole pages of both sizes."""

_Pool = tuple[int, bool]
"""Stream, and whether it is the small pool."""


class OutOfMemory(Exception):
    """Failure of an allocation that does not fit even after the cache was given back."""

    def __init__(
        self, key: int, size_bytes: int, reserved_bytes: int, limit_bytes: int
    ) -> None:
        self.key, self.size_bytes, self.reserved_bytes = key, size_bytes, reserved_bytes
        self.limit_bytes = limit_bytes
        super().__init__(
            f"{size_bytes} bytes do not fit: {reserved_bytes} of {limit_bytes} are reserved"
        )


@dataclass(slots=True, eq=False)
class _Block:
    """Part of a segment.

    Attributes:
        mapped: whether memory backs it. Only expandable segments have parts without memory.
    """

    address: int
    size: int
    pool: _Pool
    mapped: bool = True
    free: bool = True
    # Neighbours by address within the segment: freed blocks merge with them.
    previous: _Block | None = None
    next: _Block | None = None


class Allocator:
    """Caching allocator of one device.

    Attributes:
        expandable: whether segments are expandable.
        limit_bytes: memory that may be reserved; None for any amount.
        active_bytes: memory of blocks in use, with its peak.
        reserved_bytes: memory taken from the device, with its peak.
        reserved_by_stream: the same by the stream whose pools have it.
        num_retries: number of times that the cache was given back.
    """

    def __init__(self, *, expandable: bool = True, limit_bytes: int | None = None) -> None:
        self.expandable, self.limit_bytes = expandable, limit_bytes
        self.active_bytes = self.peak_active_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.reserved_by_stream = Counter[int]()
        self.num_retries = 0
        # Free and backed blocks by (size, address), sorted for best fit.
        self.free_blocks: dict[_Pool, list[tuple[int, int, _Block]]] = defaultdict(list)
        # Free parts of expandable segments without memory, sorted by address.
        self._unmapped: dict[_Pool, list[tuple[int, _Block]]] = defaultdict(list)
        self.live_blocks: dict[int, _Block] = {}
        # Addresses only order blocks and align pages. They never overlap between segments.
        self._next_address = 0

    def allocate(self, key: int, size_bytes: int, *, stream: int = 0) -> int:
        """Begin to use a block, and return its size.

        Args:
            key: the caller's number for the block.
            size_bytes: requested size.
            stream: stream of the request.

        Raises:
            OutOfMemory: the block does not fit.
        """
        size = max(MIN_BLOCK, -(-size_bytes // MIN_BLOCK) * MIN_BLOCK)
        pool = (stream, size <= SMALL_SIZE)
        # As torch's malloc: the cache first, then the device, then once more after the cache was
        # given back.
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None and any(self.free_blocks.values()):
            self.num_retries += 1
            self.release_cached()
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemory(key, size, self.reserved_bytes, self.limit_bytes or 0)
        # The rest beyond the request goes back to the pool before the block counts as in use.
        self._split(block, size)
        block.free = False
        assert key not in self.live_blocks, f"block {key} is in use"
        self.live_blocks[key] = block
        self.active_bytes += block.size
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block.size

    def free(self, key: int) -> int:
        """End the use of a block, and return its size."""
        block = self.live_blocks.pop(key)
        size = block.size
        self.active_bytes -= size
        block.free = True
        self._insert(self._merged(block))
        return size

    # -- free blocks

    def _listed(self, block: _Block) -> tuple[list[Any], tuple[int, ...]]:
        """Return the list that a free block belongs into, and its sort key."""
        if block.mapped:
            return self.free_blocks[block.pool], (block.size, block.address)
        return self._unmapped[block.pool], (block.address,)

    def _insert(self, block: _Block) -> None:
        """Add a free block to its list."""
        blocks, key = self._listed(block)
        insort(blocks, (*key, block))

    def _remove(self, block: _Block) -> None:
        """Remove a free block from its list."""
        blocks, key = self._listed(block)
        blocks.pop(bisect_left(blocks, key))

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take out the smallest free block that is large enough.

        A block that can grow counts with its largest size.
        """
        blocks = self.free_blocks[pool]
        place = bisect_left(blocks, (size,))
        if place == len(blocks):
            return None
        # The block at the end of an expandable segment would otherwise win with its present size,
        # and later large requests would find no room to grow.
        if self.expandable:
            while place + 1 < len(blocks) and _grows_to(blocks[place + 1][2]) < _grows_to(
                blocks[place][2]
            ):
                place += 1
        return blocks.pop(place)[2]

    def _split(self, block: _Block, size: int) -> None:
        """Put the rest of a block beyond `size` back, unless it is too small."""
        rest = block.size - size
        # Blocks of the small pool and of expandable segments are split down to 512 B. A large
        # segment keeps rests up to 1 MiB in the block, to limit fragments.
        anything = block.pool[1] or self.expandable
        if rest < MIN_BLOCK if anything else rest <= SMALL_SIZE:
            return
        self._insert(self._cut(block, size))

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shorten a block to `size`. Return the rest, its new neighbour."""
        rest = _Block(block.address + size, block.size - size, block.pool, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _merged(self, block: _Block) -> _Block:
        """Join a block that is in no list with free neighbours in the same state (mapped or not)."""
        before = block.previous
        if before is not None and before.free and before.mapped == block.mapped:
            self._remove(before)
            block = self._join(before, block)
        after = block.next
        if after is not None and after.free and after.mapped == block.mapped:
            self._remove(after)
            block = self._join(block, after)
        return block

    def _join(self, first: _Block, second: _Block) -> _Block:
        """Join two neighbours."""
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        return first

    # -- memory of the device

    def _reserve(self, change: int, pool: _Pool) -> bool:
        """Take memory from the device, or give it back if `change` is negative.

        Return False if there is none left.
        """
        if self.limit_bytes is not None and self.reserved_bytes + change > self.limit_bytes:
            return False
        self.reserved_bytes += change
        self.reserved_by_stream[pool[0]] += change
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of at least `size` in memory new to the pool. It is in no list."""
        if self.expandable:
            return self._grow_segment(pool, size)
        if pool[1]:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(segment, pool):
            return None
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _grow_segment(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest address where adjacent free and unmapped parts make up `size`.

        Return the block.
        """
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        # The first hole that suffices together with the free block before it. The tail of the range
        # always does, so a second range is made only for the pool's first request.
        start = next(
            (b for _, b in self._unmapped[pool] if _room(_first_free(b)) >= size), None
        )
        if start is None:
            start = _Block(self._next_address, _ADDRESSES, pool, mapped=False)
            self._next_address += start.size
            self._insert(start)
        block = _first_free(start)
        # Map the hole page by page, and merge after each step, until one block is large enough.
        while not block.mapped or block.size < size:
            part = block if not block.mapped else block.next
            assert part is not None and not part.mapped
            # A free block before the hole contributes its own bytes. Only the rest must be mapped.
            request = size if part is block else size - block.size
            taken = min(part.size, -(-min(request, part.size) // page) * page)
            if not self._reserve(taken, pool):
                # Pages mapped so far stay in the pool, as cached memory.
                return None
            self._remove(part)
            if taken < part.size:
                self._insert(self._cut(part, taken))
            part.mapped = True
            block = self._merged(part)
            self._insert(block)
        # The caller gets the block in no list, as from `_best_fit`.
        self._remove(block)
        return block

    def release_cached(self) -> None:
        """Give back free segments; of expandable segments, all whole pages that are free."""
        for pool, blocks in self.free_blocks.items():
            page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
            for *_, block in list(blocks):
                if not self.expandable:
                    # torch returns a segment of fixed size only when all of it is free: one block
                    # without neighbours.
                    if block.previous is None and block.next is None:
                        self._remove(block)
                        self._reserve(-block.size, pool)
                    continue
                self._unmap(block, page)

    def _unmap(self, block: _Block, page: int) -> None:
        """Give back the whole pages of a free block."""
        # Only whole pages inside the free block can be unmapped: round its begin up and its end
        # down.
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        # Cut off the parts of pages at both ends, which stay free and backed.
        self._remove(block)
        if begin > block.address:
            rest = self._cut(block, begin - block.address)
            self._insert(block)
            block = rest
        if end < block.address + block.size:
            self._insert(self._cut(block, end - block.address))
        block.mapped = False
        self._reserve(-block.size, block.pool)
        self._insert(self._merged(block))


def _grows_to(block: _Block) -> int:
    """Return the largest size that a block can have."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _first_free(block: _Block) -> _Block:
    """Return the free block before an unmapped block, or the block itself if there is none."""
    before = block.previous
    return before if before is not None and before.free else block


def _room(block: _Block | None) -> int:
    """Return the bytes of free and unmapped parts from here on."""
    room = 0
    while block is not None and block.free:
        room += block.size
        block = block.next
    return room
