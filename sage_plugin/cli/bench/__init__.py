"""`sage bench`: the command, how its tables look, what they come to, what a CPU leaves out."""
