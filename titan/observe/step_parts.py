"""Parts of a step's time, as `titan profile` and the simulator name them, and the names of modules in a trace."""

from __future__ import annotations

MODULE = "titan: "  # prefix of a module's name in its range
COMMUNICATION, HOST = "communication_exposed", "host_idle"
PARTS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise, norms, casts, reductions",
    "copies": "copies, memory",
    "optimizer": "optimizer",
    COMMUNICATION: "communication, exposed",
    HOST: "host, idle",
}
