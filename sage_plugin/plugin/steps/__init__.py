"""Forwards and denoising steps, counted once for policies, reports and recordings."""
