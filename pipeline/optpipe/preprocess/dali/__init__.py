"""DALI's pipeline from a transform: decoding, resizing, cropping, arithmetic. The only code that knows DALI's operators."""
