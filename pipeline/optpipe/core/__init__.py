"""Frozen values and the store: what every other layer speaks in. Imports nothing heavy."""
