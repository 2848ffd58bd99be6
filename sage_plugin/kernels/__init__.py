"""The kernels: what each computes, on what it runs, and with which launch config.

Every kernel has an exact emulation in plain torch (`reference.py`), a portable Triton variant and a
table of launch configs (`space.py`, data only). `dispatch.py` decides per call; `launches.py` finds
the config; `oracle.py` is what all of them are judged against. Nothing here knows about models.
"""
