"""The proof of a policy: whole clips by the host's attention, by each kernel, and by the policy.

Knows pipelines only as things that `patch` takes, and drawing only as a function that tells the
latents of each step, so that any pipeline can be proved on.
"""
