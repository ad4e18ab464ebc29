"""Parts that everything else may use: what others wrote, the run folder, signals, failures. Imports nothing of titan outside this folder."""
