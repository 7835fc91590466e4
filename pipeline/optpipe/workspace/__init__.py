"""Files of the workspace: store, runs, manifests, seals, baselines. Knows no verbs."""
