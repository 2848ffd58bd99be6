"""What every search shares: studies, trials, the ledger, the run folder, worker processes."""
