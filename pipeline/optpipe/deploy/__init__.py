"""From a dossier to a deployment, written out of its evidence and proven on a running server: see README.md beside this file."""
