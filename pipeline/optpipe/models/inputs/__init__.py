"""Images and tensors that models are fed with: real ones first, synthetic ones said to be so."""
