"""The verdict: policy, evidence, criteria, dossier, and `verify`, which recomputes it. Measures only what evidence lacks."""
