"""The search for launch configs: plan, session, race, promotion."""
