"""What the plug-in knows of each host library."""
