"""Sizes of the Llama 3 family (arXiv:2407.21783 and the model cards of 3.1 and 3.2). Imports no torch."""

from __future__ import annotations

from titan.models.common.config import LlamaConfig, read_flavors

# titan's own:
#   "tiny"              8 layers, so that every pipeline schedule has a stage for each rank
#   "demo"              learns from bytes on two CPU cores in two minutes
#   "1M", "10M"         the first writes whole words after a minute on two CPU cores, with a vocabulary of its text
#   "125M", "350M"      for research on one GPU, as wide and deep as GPT-2 small and medium, with room for its tokenizer's 50,257 ids
# TorchTitan v0.2.2's: "debugmodel", which scales the frequencies, too. Llama 3.2: "1B", "3B". Llama 3.1 and, with
# rope_factor = 0 (the first release), 3: "8B", "70B", "405B".
FLAVORS = read_flavors(__file__, LlamaConfig)
