"""Check the settings of a job against each other, its ranks and its machine, before torch is imported."""
