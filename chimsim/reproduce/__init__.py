"""Experiments: files that say what to run and what should hold, run, judged, and put beside the paper's figures."""
