"""What `sage tune` is asked for, and how it is followed."""
