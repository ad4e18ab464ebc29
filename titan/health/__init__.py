"""Health of a run: heartbeats, signals, recovery from bad steps, and reports of failures."""
