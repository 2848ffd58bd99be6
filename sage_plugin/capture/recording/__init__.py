"""Recording a run: what is watched, counted and handed to the store."""
