"""The builds of `build --precision auto`, made in an order that spares those that cannot win."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from optpipe.build.build import build_model
from optpipe.build.candidates import NARROW, BuildOrder, SparedBuilds
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.build.slowdowns import (
    measure_gain,
    measure_slowdowns,
    rule_out_backend,
    rule_out_precision,
)
from optpipe.core.card import ModelCard
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.models.artifacts.decisions import Omission
from optpipe.models.export.exported import Model
from optpipe.workspace.store import Store

Judge = Callable[[Sequence[BuiltArtifact]], tuple[list[BuiltArtifact], str]]
"""Gives every build with its accuracy, and a description of the data."""


@dataclass
class CandidateSearch:
    """The candidates of a choice: those that were built and judged, and those that were left out."""

    model: Model
    card: ModelCard
    """The card of the exported model."""
    sizes: tuple[int, ...]
    """The batch sizes at which builds compete."""
    judge: Judge
    store: Store
    listener: Listener
    omitted: tuple[Omission, ...] = ()
    build: ModelBuild = field(init=False)
    judged: list[BuiltArtifact] = field(init=False)
    judged_on: str = field(init=False)
    _times_s: dict[str, list[float]] = field(default_factory=dict)
    _gains: dict[Precision, float] = field(default_factory=dict)

    def run(self, order: BuildOrder) -> None:
        """Builds the plans of `order`; each group is built if what was built before it does not rule it out."""
        first, *more = order.first
        self.build = build_model(self.model, first, self.store, self.listener)
        self._build_more(*more)

        for bounded in order.bounded:
            self._build_bounded(bounded)

        half = self._find_half_builds()
        for backend, spared in order.spared.items():
            self._build_spared(spared, is_spared=backend in half)

        for doubtful in order.doubtful:
            self._build_doubtful(doubtful)

    def list_able(self) -> list[BuiltArtifact]:
        """The builds that stay within the accuracy budget."""
        return [build for build in self.judged if build.keeps_budget]

    def measure_slowdowns(self, builds: Sequence[BuiltArtifact]) -> dict[str, float]:
        """The time of each build over that of the fastest; a build is timed once."""
        return measure_slowdowns(builds, self.sizes, self.card, self._times_s)

    def _build_more(self, *plans: BuildPlan) -> None:
        for plan in plans:
            self.build.add(build_model(self.model, plan, self.store, self.listener))
        self.judged, self.judged_on = self.judge(self.build.artifacts)

    def _build_bounded(self, plan: BuildPlan) -> None:
        """Builds one backend in TF32, and its other precisions if they may win."""
        self._build_more(replace(plan, precisions=(Precision.TF32,)))
        (backend,) = plan.backends
        able = [
            build
            for build in self.judged
            if build.keeps_budget or build.entry.info.backend == backend.name
        ]
        reason = rule_out_backend(backend, able, self.measure_slowdowns(able))
        if reason is None:
            self._build_more(plan)
        else:
            self.omitted += (Omission(backend.name, "", reason),)

    def _find_half_builds(self) -> set[str]:
        """The backends whose FP16 build stays within the accuracy budget, and the empty name if there is any."""
        half = (build.entry.info for build in self.list_able())
        return {
            name for info in half if info.precision is Precision.FP16 for name in ("", info.backend)
        }

    def _build_spared(self, spared: SparedBuilds, *, is_spared: bool) -> None:
        if is_spared:
            self.omitted += spared.omissions
        else:
            self._build_more(spared.plan)

    def _build_doubtful(self, plans: Sequence[BuildPlan]) -> None:
        """Builds those `plans`, of one backend each, that may win on this CPU."""
        able = self.list_able()
        slowdowns = self.measure_slowdowns(able)
        promising: list[BuildPlan] = []
        for plan in plans:
            (backend,), kinds = plan.backends, plan.precisions
            precision = Precision.FP32 if Precision.FP32 in kinds else kinds[0]
            gain = self._find_gain(precision)
            reason = rule_out_precision(backend, precision, able, slowdowns, gain)
            if reason is None:
                promising.append(plan)
            else:
                named = precision if len(kinds) == 1 else ""
                self.omitted += (Omission(backend.name, named, reason),)
        if promising:
            self._build_more(*promising)

    def _find_gain(self, precision: Precision) -> float:
        """How many times as fast as in FP32 torch computes the model; types of 32 bits gain nothing."""
        if precision not in NARROW:
            return 1.0
        if precision not in self._gains:
            with self.listener.step(f"try {precision} on this CPU"):
                gain = measure_gain(self.model.fresh_module, self.card, precision, self.sizes)
            self._gains[precision] = gain
        return self._gains[precision]
