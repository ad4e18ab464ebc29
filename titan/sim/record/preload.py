"""Imports of the server that recording processes are forked from. It imports this module, and they find its modules imported."""

import gc
import os

# The collector of cycles would look many times through all that is imported, and forks would copy what it touches.
gc.disable()
# Nothing is compiled to the end, so no pool of compilers.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from titan.sim.record import fake_world, program, tracer  # noqa: E402, F401

gc.freeze()
gc.enable()
