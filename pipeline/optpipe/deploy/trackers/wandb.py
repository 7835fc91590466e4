"""Weights & Biases: a run with the figures as its summary and the dossier as an artifact.

Offline unless `WANDB_MODE` says otherwise: `wandb sync` sends it. Source: wandb 0.31, `wandb.init`.
"""

import os
from typing import Any, cast

from optpipe.deploy.trackers.contract import Export, Tracker


class WandbTracker(Tracker):
    name = needs = "wandb"
    install = "pip install 'wandb>=0.20'"

    def send(self, export: Export) -> str:
        import wandb

        record = export.verdict
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        folder = None if export.output is None else str(export.output)
        if export.output is not None:
            export.output.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "optpipe"),
            name=record.dossier_name,
            config=dict(export.parameters),
            tags=[str(record.verdict)],
            dir=folder,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        with run:
            run.summary.update({**export.figures, **export.tags})
            artifact = wandb.Artifact(
                f"dossier-{export.seal[:12]}", type="dossier", metadata=dict(export.tags)
            )
            artifact.add_dir(str(export.folder))
            run.log_artifact(artifact)
            place = cast("str", run.dir)
        return f"{mode} run in {os.path.dirname(place)}"  # noqa: PTH120 - wandb gives text
