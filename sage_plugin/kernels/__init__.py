"""The kernels: what each computes, on what it runs, and with which launch config.

Shared by all op families: the table of hardware (`support.py`), reasons to fall back
(`fallback.py`), launch configs and their look-up (`launch_config.py`), search spaces, recorded
launches (`launch_graph.py`) and quantizers. A family is a folder of its own, such as `attention`;
every kernel in it has an exact emulation in plain torch. Nothing here knows about models.
"""
