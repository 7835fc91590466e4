"""The names of the files that more than one verb reads or writes."""

# an exported model
ONNX = "model.onnx"
CARD = "card.json"
REFERENCE = "reference.npz"
TOKENIZER = "tokenizer.json"
# a verification
OUTPUT_ERRORS = "errors.parquet"
"""One row for each output and sample."""
# a calibration
CALIBRATION_SET = "set.json"
MODELOPT_LOG = "modelopt.log"
"""What ModelOpt said while it worked; kept with the graph."""
# runs
PREDICTIONS = "predictions.parquet"
EVALUATION = "evaluate.json"
PREPROCESSING = "preprocess.json"
ROWS = "images.parquet"
"""One row for each image of a parity proof."""
END_TO_END = "end-to-end.json"
PROFILE = "profile.json"
# a dossier
REQUEST = "request.json"
POLICY = "policy.toml"
VERDICT = "verdict.json"
BUILDS = "builds"
