"""One implementation of each attention kernel per class of hardware."""
