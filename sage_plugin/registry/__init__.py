"""The registry: tuned configs on disk, and how one is found for a call.

`load` reads files strictly, `lookup` finds a config for a call key without touching a file twice,
`merge` is the only writer, `validate` says what is wrong with a file in sentences. It knows keys
and files, not kernels: whether a config is legal is asked through a callback. Standard library
only (`filelock` and `platformdirs` are imported inside the functions that use them).
"""
