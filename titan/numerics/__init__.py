"""Numbers of a run held against others: recorded steps, digests, replays, `titan diff`, `titan audit`, `titan certify`."""
