"""Search of a policy: which kernel each layer can bear at which denoising steps, from captures."""
