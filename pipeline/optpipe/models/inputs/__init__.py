"""Inputs of models: images, texts and tensors. Synthetic ones are always reported."""
