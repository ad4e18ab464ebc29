"""`titan certify`: the proof that a job computes the same on every layout as on one process, on CPU with gloo ranks.

    command.py  the command: its layouts, rows and certificates
    shrink.py   a job that is small enough for a CPU, with the rules and ratios of the user's
    steps.py    what a rank computes, how two runs are compared, and which module differs first
    ranks.py    warm processes that are gloo ranks

The parity tests of titan run steps.py and ranks.py on layouts of their own.
"""
