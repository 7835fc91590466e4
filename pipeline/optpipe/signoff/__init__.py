"""Policy, evidence, criteria, verdict, dossier, and `verify`, which recomputes them."""
