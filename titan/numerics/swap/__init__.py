"""`titan swap`: a run goes on as another job, with proof that it is still the same run.

command.py     the command: what may differ, the proof, and the result for whoever signs it
trial.py       both jobs train the same steps from the newest checkpoint; what those steps say
handover.py    the new run folder, which appears in one rename
"""
