"""`titan preflight`: is everything there, equal and fast enough, and does a step of the job run? Before hour one rather than in it."""
