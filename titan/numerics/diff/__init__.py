"""`titan diff` and `titan audit`: where two runs begin to differ, and whether a recorded step can be computed again.

compare.py  the first tensor that differs beyond rounding, and what its difference looks like
command.py  `titan diff`
audit.py    `titan audit`
"""
