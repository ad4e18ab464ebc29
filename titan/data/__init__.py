"""Text to batches: tokenizers, sources, the order of samples, packing, and the loader the trainer reads from.

The way of a document, one file a stop: sources.py reads text; tokenizer.py turns it into ids, framing.py marks where
it begins and ends; writer.py and shards.py keep finite text as memory-mapped token shards (cache.py shares them
between processes), streams.py packs endless text lane by lane; order.py says which sample comes when; samples.py
joins them into one endless numbered sequence; packing.py cuts a batch from it; loader.py does so ahead of time
in a background thread. Only the last two import torch. docs/data.md tells the same for users.
"""

from titan.data.errors import DataError

__all__ = ["DataError"]
