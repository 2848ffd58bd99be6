"""Tuning: search launch configs on recorded inputs under an accuracy gate, and write the winners.

`configs/` says what to tune and drives it (`plan`, `session`, `study_search`), compiles ahead
(`compile_pool`) and runs candidates in child processes, the only part that touches a device
(`trial`); `search/` decides in numbers what to try and who wins; `run/` has what every search
shares: studies, trials, the ledger, the run folder, workers; `policy/` searches policies. It never
imports `bench`, `diffusers` or `transformers`, and never prints.
"""
