"""Tuning: search launch configs on recorded inputs under an accuracy gate, and write the winners.

`inputs` and `plan` say what to tune, `session` drives it, `worker` and `trial` run candidates in a
child process (the only part that touches a device), `ledger` keeps every trial, `promote` decides
and `run_folder` writes. It never imports `bench`, `diffusers` or `transformers`, and never prints.
"""
