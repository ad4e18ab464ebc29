"""Adam and AdamW with moments in bf16 or 8 bits, and bf16 weights without fp32 masters."""
