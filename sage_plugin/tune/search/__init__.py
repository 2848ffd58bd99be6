"""The search in numbers: what to try next, who leaves a race, what a loss of exactness buys."""
