"""Checkpoints and token files of Megatron-LM."""
