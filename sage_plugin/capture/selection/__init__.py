"""Which calls, steps and heads of a run are kept."""
