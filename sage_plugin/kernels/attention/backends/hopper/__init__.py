"""The Hopper backend, in Gluon."""
