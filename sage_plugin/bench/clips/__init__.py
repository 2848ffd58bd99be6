"""Whole clips of any pipeline: drawn with the baseline, each kernel and a policy, compared, timed.

Knows pipelines only as things that `patch` takes, and drawing only as a function that reports the
latents of each step. The demo, `sage policy` and the examples draw their clips here.
"""
