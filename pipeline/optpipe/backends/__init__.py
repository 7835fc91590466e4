"""One runtime per file behind one small protocol."""
