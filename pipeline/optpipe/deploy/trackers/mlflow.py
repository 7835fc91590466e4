"""MLflow: a run with figures, parameters, and the dossier as an artifact, and a version of the model with the verdict as a tag.

The store is MLflow's own choice: `MLFLOW_TRACKING_URI`, otherwise its local default.
Source: MLflow 3.17, `mlflow.tracking.client.MlflowClient`.
"""

import time
from contextlib import suppress
from typing import Any

from optpipe.deploy.trackers.contract import Export, Tracker


class MlflowTracker(Tracker):
    name = needs = "mlflow"
    install = "pip install 'mlflow>=3'"

    def send(self, export: Export) -> str:
        import mlflow
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        client: Any = mlflow.MlflowClient()
        record = export.verdict
        known = client.get_experiment_by_name("optpipe")
        experiment = known.experiment_id if known else client.create_experiment("optpipe")
        run = client.create_run(experiment, run_name=record.dossier_name)
        try:
            now = int(time.time() * 1000)
            client.log_batch(
                run.info.run_id,
                [Metric(name, value, now, 0) for name, value in export.figures.items()],
                [Param(name, value) for name, value in export.parameters.items()],
                [RunTag(name, value) for name, value in export.tags.items()],
            )
            client.log_artifacts(run.info.run_id, str(export.folder), "dossier")
            with suppress(MlflowException):  # it is there already
                client.create_registered_model(record.model)
            version = client.create_model_version(
                record.model,
                source=f"{run.info.artifact_uri}/dossier",
                run_id=run.info.run_id,
                tags=dict(export.tags),
            )
        except BaseException:
            client.set_terminated(run.info.run_id, "FAILED")
            raise
        client.set_terminated(run.info.run_id, "FINISHED")
        return f"run {run.info.run_id}, version {version.version} of {record.model}, in {mlflow.get_tracking_uri()}"
