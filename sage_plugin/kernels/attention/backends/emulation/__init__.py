"""The exact emulation of every kernel in plain torch: CPU backend, yardstick, specification."""
