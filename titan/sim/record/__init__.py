"""Recorder: traces of the ranks of a job."""
