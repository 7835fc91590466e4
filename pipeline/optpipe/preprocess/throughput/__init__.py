"""How fast preprocessing runs: DALI against a DataLoader, tuned, each job in a process of its own."""
