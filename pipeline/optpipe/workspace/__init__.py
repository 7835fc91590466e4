"""What lies on disk: store, runs, manifests, seals, baselines, the names of files, the environment. Nothing of any verb."""
