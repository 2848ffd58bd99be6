"""The kernels: what each computes, on what it runs, and with which launch config.

Shared by all op families: the table of hardware (`support.py`), reasons to fall back (`fallback.py`),
launch configs and their look-up, search spaces, recorded launches, quantizers. A family is a folder
of its own, such as `attention`; every kernel in it has an exact emulation in plain torch. `dispatch.py` decides per call; `launches.py` finds
the config; `oracle.py` is what all of them are judged against. Nothing here knows about models.
"""
