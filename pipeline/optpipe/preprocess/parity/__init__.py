"""Whether DALI's output is the reference's: pixels, the model's outputs, and the proof that follows from them."""
