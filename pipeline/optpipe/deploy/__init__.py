"""Makes a deployment from a dossier and proves it on a running server: see README.md in this folder."""
