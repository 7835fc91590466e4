"""Finds, lists and removes stored artifacts. Builds nothing."""
