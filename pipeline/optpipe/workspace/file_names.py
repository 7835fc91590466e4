"""Names of files that several verbs read or write."""

# an exported model
ONNX = "model.onnx"
CARD = "card.json"
REFERENCE = "reference.npz"
TOKENIZER = "tokenizer.json"
# a verification
OUTPUT_ERRORS = "errors.parquet"
# a calibration
CALIBRATION_SET = "set.json"
MODELOPT_LOG = "modelopt.log"
# runs
PREDICTIONS = "predictions.parquet"
EVALUATION = "evaluate.json"
PREPROCESSING = "preprocess.json"
ROWS = "images.parquet"
END_TO_END = "end-to-end.json"
PROFILE = "profile.json"
# a dossier
REQUEST = "request.json"
POLICY = "policy.toml"
VERDICT = "verdict.json"
BUILDS = "builds"
