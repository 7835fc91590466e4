"""Task accuracy of the source model and of each artifact, and its recomputation from stored predictions. No timing."""
