"""`optpipe signoff MODEL` and `optpipe run`: judge a build by a policy."""

import html
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import randbits
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome, path_from_text, word_from_text
from optpipe.cli.options import (
    BECAUSE,
    CalibrationOptions,
    DossierArgument,
    ModelArgument,
    ModelOptions,
    TargetOptions,
    build_plan_from_options,
    model_from_options,
)
from optpipe.core import params
from optpipe.core.bench_defaults import MAX_CV, ROUNDS
from optpipe.core.errors import BadInputError
from optpipe.core.params import Param
from optpipe.core.quantity import share_from_text, share_to_text
from optpipe.core.records import plain_from_record
from optpipe.core.verdict import is_reason
from optpipe.core.wording import Call

if TYPE_CHECKING:
    from optpipe.core.verdict import CriterionResult, Verdict, VerificationRecord
    from optpipe.report.progress import Terminal
    from optpipe.signoff.verify import VerifiedDossier
    from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class DossierOptions:
    waive: Annotated[
        tuple[str, ...], Param("Waive a criterion; requires --because.", metavar="CRITERION")
    ] = ()
    because: Annotated[
        tuple[str, ...],
        Param("Reason for the waiver: once for all, or once per --waive.", metavar="TEXT"),
    ] = ()
    output: Annotated[Path | None, Param("Folder for the dossier.", metavar="DIR")] = None
    sign: Annotated[Path | None, Param("Sign the dossier with this SSH key.", metavar="KEY")] = None
    timestamp: Annotated[
        str | None,
        Param(
            "Ask this RFC 3161 authority when the dossier was sealed.",
            metavar="URL",
            parse=params.text_from_text,
        ),
    ] = None
    max_cv: Annotated[float, params.MAX_CV] = MAX_CV
    export: Annotated[
        tuple[str, ...],
        Param(
            "Then send the dossier to this tracker: mlflow, wandb, or model-card.", metavar="NAME"
        ),
    ] = ()

    def require_trackers(self) -> None:
        """Raises BadInputError for an unknown tracker, MissingError without its library."""
        if self.export:
            from optpipe.deploy.trackers.registry import require_tracker

            for name in self.export:
                require_tracker(name)

    def export_dossier(self, verdict: "Verdict", folder: Path, terminal: "Terminal") -> None:
        """Warns if a tracker fails or hangs; the verdict is printed before it is sent."""
        if self.export:
            from optpipe.deploy.trackers.registry import export_after_signoff

            terminal.inform(f"{verdict}: the dossier is {folder}; now it is exported")
            for name, place in export_after_signoff(folder, self.export, terminal).items():
                terminal.inform(f"{name}: {place}")

    def read_waivers(self) -> dict[str, str]:
        """The reason by criterion: one for all, or one each. Raises BadInputError."""
        names, reasons = self.waive, self.because
        if reasons and not names:
            raise BadInputError("--because requires --waive CRITERION")
        given = reasons * len(names) if len(reasons) == 1 else reasons
        if len(given) != len(names) or not all(map(is_reason, given)):
            raise BadInputError(
                "--waive requires a one-line --because TEXT, once for all or once per --waive"
            )
        return dict(zip(names, given, strict=True))


def signoff(
    store: "Store",
    terminal: "Terminal",
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="As for `optpipe build`.",
            show_default=False,
            parser=word_from_text,
        ),
    ] = None,
    policy: Annotated[Path | None, Param("Release policy.", metavar="FILE")] = None,
    artifact: Annotated[
        str | None, Param("Artifact to judge.", metavar="ID", parse=params.text_from_text)
    ] = None,
    measure: Annotated[
        bool, Param("Run measurements that the policy requires and that are missing.")
    ] = True,
    since: Annotated[
        str | None,
        Param(
            "Judge only bench runs since this date or time (UTC); default: all.",
            metavar="TIME",
            parse=params.text_from_text,
        ),
    ] = None,
    figures: Annotated[bool, Param("Include figures in the report.")] = True,
    init: Annotated[bool, Param("Write a policy template and its JSON Schema, then exit.")] = False,
    how: DossierOptions = DossierOptions(),
) -> Outcome:
    """Judge a build against a policy and write a dossier.

    A build exactly on a limit wrongly passes in at most 2.5% of cases, and wrongly fails in at most 2.5%, however often it is
    judged, if its processes differ by chance or have a second speed at most 5% away. p90 and p99 pool all requests; other
    figures average processes. A verdict holds for this machine, not for others.
    """
    if init:
        return _write_policy_template(policy or Path("policy.toml"), how.output, model, store)
    from optpipe.signoff.collect import SignoffRequest
    from optpipe.signoff.dossier import since_from_text
    from optpipe.signoff.missing import measure_missing_evidence
    from optpipe.signoff.policy import policy_from_file
    from optpipe.signoff.release import require_possible, sign_off
    from optpipe.signoff.reports import document_from_verdict

    if model is None or policy is None:
        problem = "signoff requires MODEL and --policy FILE"
        raise BadInputError(f"{problem}; run optpipe signoff --init for a policy template")
    rules, waivers = policy_from_file(policy), how.read_waivers()
    typed = model
    model, by_id, exported = _find_named(typed, store)
    artifact = artifact or by_id
    begun = None if since is None else since_from_text(since)
    wanted = SignoffRequest(
        model, rules, artifact, waivers, begun, max_cv=how.max_cv, exported=exported
    )
    require_possible(wanted, store, how.output, how.sign, how.timestamp)
    how.require_trackers()
    try:
        if measure:
            measure_missing_evidence(
                wanted, lambda: model_from_options(typed, ModelOptions(), store), store, terminal
            )
        verdict, folder = sign_off(
            wanted,
            store,
            how.output,
            how.sign,
            terminal,
            figures=figures,
            authority=how.timestamp,
        )
    except KeyboardInterrupt:
        _tell_how_to_resume(terminal)
        raise
    how.export_dossier(verdict.verdict, folder, terminal)
    document = {**plain_from_record(verdict), "dossier": str(folder), "warnings": terminal.warnings}
    return Outcome(
        document, lambda _: document_from_verdict(verdict, folder), verdict.verdict.exit_status
    )


def _tell_how_to_resume(terminal: "Terminal") -> None:
    from optpipe.workspace.entry import get_command_line

    terminal.warn(f"what was measured is kept; this resumes it: {get_command_line()}")


def _find_named(model: str, store: "Store") -> tuple[str, str | None, str | None]:
    """The name of MODEL; if it is an ID, also the build of that ID, if it is a build's, and the stored model's ID."""
    from optpipe.models.artifacts.builds_by_name import find_builds
    from optpipe.models.artifacts.missing_builds import require_id
    from optpipe.models.artifacts.named import find_builds_by_id, find_model_by_id

    exported = find_model_by_id(model, store)
    if exported is None:
        if not find_builds(model, store):
            require_id(model, store)
        return model, None, None
    build = model if find_builds_by_id(model, store) else None
    return exported.info.name, build, exported.id


def _write_policy_template(
    policy: Path, output: Path | None, model: str | None, store: "Store"
) -> Outcome:
    """The template limits the accuracy, or the outputs if the newest build of `model` has no labels."""

    from optpipe.models.artifacts.builds_by_name import find_builds
    from optpipe.models.artifacts.lookup import find_artifacts
    from optpipe.signoff.policy import POLICY_SCHEMA, read_policy_template
    from optpipe.workspace.places import require_writable_file

    if output is not None:
        problem = "--output is for the dossier"
        raise BadInputError(
            f"{problem}; signoff --init --policy {quote(str(output))} writes the template there"
        )
    if policy.exists():
        raise BadInputError(f"{policy} already exists; choose another name with --policy")
    require_writable_file(policy, "policy")
    schema = policy.with_name("policy.schema.json")
    policy.parent.mkdir(parents=True, exist_ok=True)
    labeled = True
    if model is not None and find_builds(model, store):
        newest = find_artifacts(model, store)[-1]
        labeled = newest.entry.info.weights.trained and "validation" in newest.card.data
    policy.write_text(read_policy_template(labeled=labeled), encoding="utf-8")
    shutil.copyfile(POLICY_SCHEMA, schema)
    then = f"optpipe signoff MODEL --policy {quote(str(policy))}"
    text = f"wrote {policy} and {schema}; edit the limits, then run {then}"
    return Outcome({"policy": str(policy), "schema": str(schema)}, lambda _: text)


def run(
    model: ModelArgument,
    policy: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Release policy.", show_default=False, parser=path_from_text
        ),
    ],
    store: "Store",
    terminal: "Terminal",
    targets: TargetOptions = TargetOptions(),
    shapes: ModelOptions = ModelOptions(),
    ranges: CalibrationOptions = CalibrationOptions(),
    data: Annotated[
        Path | None, Param("Labeled images or texts to evaluate on.", metavar="DIR")
    ] = None,
    images: Annotated[
        Path | None, Param("Images to verify outputs and preprocessing on.", metavar="DIR")
    ] = None,
    min_time: Annotated[
        float,
        Param("Minimum measurement time per load and process.", metavar="SECONDS", setting=True),
    ] = 0.6,
    preprocess: Annotated[bool, Param("Derive and verify the DALI pipeline.")] = True,
    profile: Annotated[bool, Param("Profile the judged build with nsys.")] = True,
    how: DossierOptions = DossierOptions(),
) -> Outcome:
    """Run the pipeline from model to verdict, or resume it.

    Builds, evaluates, preprocesses, benchmarks, profiles, and signs off as the policy requires. By default it builds the
    policy's precision and backend, and FP32 for comparison.
    """
    from optpipe.signoff.collect import SignoffRequest
    from optpipe.signoff.pipeline import run_pipeline
    from optpipe.signoff.policy import policy_from_file
    from optpipe.signoff.release import require_possible, sign_off
    from optpipe.signoff.reports import document_from_pipeline_run

    rules = policy_from_file(policy)
    waivers, judged = how.read_waivers(), rules.build.get("precision")
    name, build, exported = _find_named(model, store)
    if build is not None:
        again = Call("signoff", build, policy=policy)
        problem = f"{build} is a build, and run makes the builds that the policy needs"
        raise BadInputError(problem + "\ngive the MODEL, or judge this build: `" + again + "`")
    wanted = SignoffRequest(
        name,
        rules,
        None,
        waivers,
        min_seconds=min_time,
        max_cv=how.max_cv,
        exported=exported,
    )
    precisions = targets.precision or ",".join(
        dict.fromkeys(["fp32", *([judged] if judged else [])])
    )
    targets = replace(
        targets, precision=precisions, backend=targets.backend or rules.build.get("backend")
    )
    plan = build_plan_from_options(targets, ranges, images=images)
    left_out = [
        name for name, asked in (("preprocess", preprocess), ("profile", profile)) if not asked
    ]
    require_possible(wanted, store, how.output, how.sign, how.timestamp)
    how.require_trackers()
    source = model_from_options(model, shapes, store)
    try:
        steps, notes = run_pipeline(source, wanted, plan, data, left_out, store, terminal)
        verdict, folder = sign_off(
            wanted, store, how.output, how.sign, terminal, authority=how.timestamp
        )
    except KeyboardInterrupt:
        _tell_how_to_resume(terminal)
        raise
    notes.unlink(missing_ok=True)
    how.export_dossier(verdict.verdict, folder, terminal)
    document = {**plain_from_record(verdict), "dossier": str(folder), "warnings": terminal.warnings}
    shown = document_from_pipeline_run(steps, verdict, folder)
    return Outcome(
        document | {"steps": plain_from_record(tuple(steps))},
        lambda _: shown,
        verdict.verdict.exit_status,
    )


def verify(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    allowed_signers: Annotated[
        Path | None,
        Param("Require a signature by one of these signers (ssh-keygen format).", metavar="FILE"),
    ] = None,
    timestamp_roots: Annotated[
        Path | None,
        Param("Require a timestamp that leads to one of these certificates (PEM).", metavar="FILE"),
    ] = None,
    attestations: Annotated[
        Path | None,
        Param("Also check what signoff attest wrote; needs --public-key.", metavar="DIR"),
    ] = None,
    public_key: Annotated[Path | None, Param("Public key in PEM.", metavar="FILE")] = None,
    badge: Annotated[
        Path | None,
        Param(
            "Write the verdict as an SVG badge, or as FILE.html the report with who signed and approved it.",
            metavar="FILE",
        ),
    ] = None,
    audit: Annotated[
        str | None,
        Param(
            "Then measure this many criteria again, drawn at random; needs the build.",
            metavar="COUNT[:SEED]",
        ),
    ] = None,
) -> Outcome:
    """Recompute every number and the verdict of a dossier, offline.

    Exit status: 2 if any byte changed, 1 if a number does not match the raw files, otherwise that of the verdict. With --audit: 0
    if every drawn criterion agrees with the dossier, 1 if one differs, 5 if one is undecided.
    """
    from optpipe.core.verdict import VerificationRecord, combine_verdicts
    from optpipe.signoff.audit import audit_dossier
    from optpipe.signoff.reports import document_from_verification
    from optpipe.signoff.verify import verify_dossier

    if badge is not None:
        _require_badge_place(badge, dossier)
    if (attestations is None) != (public_key is None):
        raise BadInputError("--attestations DIR and --public-key FILE belong together")
    count, seed = (0, None) if audit is None else _read_audit(audit)
    with terminal.step("verify"):
        checked = verify_dossier(dossier, allowed_signers, timestamp_roots)
        if attestations is not None and public_key is not None:
            checked = _check_attestations(attestations, public_key, checked)
    status = checked.exit_status
    audited: tuple[CriterionResult, ...] = ()
    if seed is not None:
        name = checked.require_intact()[1].model
        source = partial(model_from_options, name, ModelOptions(), store)
        audited = tuple(audit_dossier(checked, count, seed, source, store, terminal))
        status = combine_verdicts(criterion.verdict for criterion in audited).exit_status
    verdict, sizes = checked.verdict if checked.intact else None, checked.list_sizes()
    record = VerificationRecord(
        dossier=str(dossier),
        intact=verdict is not None,
        as_sealed=checked.as_sealed,
        problems=checked.problems,
        unbacked=checked.unbacked,
        not_compared=checked.not_compared,
        verdict=verdict.verdict if verdict else None,
        recomputed=verdict,
        signature=_describe_signature(checked.signature, public_key),
        files=len(sizes),
        size_bytes=sum(sizes),
        audit=audited,
        audit_seed=seed,
    )
    if badge is not None:
        _write_badge(badge, checked, record)
    return Outcome(record, document_from_verification, status)


def _require_badge_place(badge: Path, dossier: Path) -> None:
    from optpipe.workspace.places import require_writable_file

    if badge.resolve().is_relative_to(dossier.resolve()):
        raise BadInputError(
            f"--badge {badge}: a file in the dossier would break its seal; write it elsewhere"
        )
    require_writable_file(badge, "badge")


def _read_audit(text: str) -> tuple[int, int]:
    """The number of criteria and the seed; without one, a seed is drawn."""
    count, _, seed = text.partition(":")
    if not count.isdecimal() or int(count) < 1 or not (seed or "0").isdecimal():
        raise BadInputError(f"--audit {text}: expected COUNT or COUNT:SEED, such as 3 or 3:17")
    return int(count), int(seed) if seed else randbits(32)


def _check_attestations(
    attestations: Path, public_key: Path, checked: "VerifiedDossier"
) -> "VerifiedDossier":
    """A wrong signature counts as a changed byte."""
    from optpipe.deploy.attestation import find_attestation_problems

    wrong = tuple(find_attestation_problems(attestations, checked, public_key))
    sealed = checked.as_sealed and not wrong
    return replace(checked, problems=(*checked.problems, *wrong), as_sealed=sealed)


def _describe_signature(signature: str, public_key: Path | None) -> str:
    if public_key is None:
        return signature
    known = "" if signature == "not signed" else f", {signature.removeprefix('not signed; ')}"
    return f"attested with {public_key}{known}"


def _write_badge(badge: Path, checked: "VerifiedDossier", record: "VerificationRecord") -> None:
    """Writes the verdict as SVG, or the dossier's page with the signature below its heading."""
    from optpipe.report.html import render_badge
    from optpipe.signoff.reports import HTML
    from optpipe.workspace.files import write_bytes

    if badge.suffix != ".html":
        write_bytes(badge, render_badge(record.verdict or "NOT INTACT").encode())
        return
    checked.require_intact()
    page = checked.files.read(HTML).decode()
    line = f'<p class="identity"><span>{html.escape(record.signature)}</span></p>'
    write_bytes(badge, page.replace("</h1>", f"</h1>\n{line}", 1).encode())


def approve(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    because: Annotated[str | None, BECAUSE] = None,
    by: Annotated[
        str | None,
        Param(
            "The person who approves; needs --role and --sign.",
            metavar="NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    role: Annotated[
        str | None, Param("That person's role.", metavar="ROLE", parse=params.text_from_text)
    ] = None,
    sign: Annotated[Path | None, Param("That person's SSH key.", metavar="KEY")] = None,
) -> Outcome:
    """Set a verified dossier as the baseline for later sign-offs.

    With --by, --role, and --sign it also writes a signed approval of the dossier's hash, which `optpipe verify` shows.
    """
    from optpipe.models.artifacts.builds_by_name import find_content_id
    from optpipe.signoff.verify import require_pass, verify_dossier
    from optpipe.workspace.seal import approve_folder, require_key, store_baseline

    if len({given is None for given in (by, role, sign)}) > 1:
        raise BadInputError("--by NAME, --role ROLE, and --sign KEY belong together")
    if sign is not None:
        require_key(sign)
    with terminal.step("verify"):
        checked = verify_dossier(dossier)
    _, judged, _ = checked.require_intact()
    require_pass(dossier, judged, because, "set it as baseline")
    if by is not None and role is not None and sign is not None:
        approve_folder(dossier, sign, by, role, because)
    content = find_content_id(judged.artifact.id, store)
    target = store_baseline(checked.files, store.workspace, because, content)
    document = {
        "model": judged.model,
        "baseline": str(target),
        "verdict": judged.verdict,
        "because": because,
    }
    return Outcome(
        document, lambda _: f"{dossier} is now the baseline for {judged.model} ({target})"
    )


def stamp(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    timestamp: Annotated[str, typer.Option(metavar="URL", help="RFC 3161 authority.")],
) -> Outcome:
    """Ask an RFC 3161 authority for a timestamp of a dossier.

    It signs the hash of the dossier and the time. `optpipe verify DOSSIER --timestamp-roots FILE` checks it offline.
    """
    from optpipe.signoff.verify import verify_dossier
    from optpipe.workspace.seal import TIMESTAMP
    from optpipe.workspace.timestamp import require_authority, stamp_folder

    require_authority(timestamp)
    with terminal.step("verify"):
        verify_dossier(dossier).require_intact()
    with terminal.step("ask for a timestamp"):
        time = stamp_folder(dossier, timestamp)
    document = {"dossier": str(dossier), "file": TIMESTAMP, "time_utc": time.isoformat()}
    return Outcome(document, lambda _: f"{dossier} existed at {time:%Y-%m-%d %H:%M:%S} UTC")


def export(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    to: Annotated[
        str, typer.Option(metavar="NAME", help="Tracker: mlflow, wandb, model-card, or a plug-in.")
    ],
    output: Annotated[
        Path | None,
        Param("File of the model card, or folder of the offline run.", metavar="PATH"),
    ] = None,
) -> Outcome:
    """Send a dossier to a tracker: figures with intervals, parameters, the verdict, and the dossier itself.

    MLflow goes to MLFLOW_TRACKING_URI, and Weights & Biases stays offline unless WANDB_MODE says otherwise.
    """
    from optpipe.deploy.trackers.registry import export_dossier

    with terminal.step(f"export to {to}"):
        place = export_dossier(dossier, to, output)
    return Outcome({"dossier": str(dossier), "tracker": to, "place": place}, lambda _: place)


def attest(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Private key in PEM (P-256, P-384, or P-521), without a passphrase.",
            parser=path_from_text,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where to write the signed model.", parser=path_from_text),
    ],
) -> Outcome:
    """Write the engine, its dossier, and a CycloneDX ML-BOM with an OpenSSF model signature.

    `optpipe verify DOSSIER --attestations DIR --public-key FILE` checks them, as any tool for OMS does.
    """
    from optpipe.deploy.attestation import attest_dossier

    with terminal.step("attest"):
        signed = attest_dossier(dossier, key, output, store)
    return Outcome(
        signed,
        lambda _: f"{signed['verdict']}  {signed['file']} signs the engine and its dossier",
    )


def recheck(
    dossier: DossierArgument,
    store: "Store",
    terminal: "Terminal",
    python: Annotated[
        Path,
        typer.Option(
            metavar="ENV", help="Environment to compare with this one.", parser=path_from_text
        ),
    ],
    rounds: Annotated[
        int, Param("Rounds, 8 or more; up to three times as many if noise hides a 4% difference.")
    ] = ROUNDS,
    max_slowdown: Annotated[
        float,
        Param(
            "Slowdown that must be excluded for a PASS.", parse=share_from_text, show=share_to_text
        ),
    ] = 0.05,
) -> Outcome:
    """Measure a signed-off build in a new environment."""
    from optpipe.deploy.recheck import recheck as run_recheck
    from optpipe.deploy.records import document_from_recheck
    from optpipe.deploy.signed_build import open_signed_build

    with terminal.step("verify the dossier"):
        build = open_signed_build(dossier, store, because="to measure it again")
    record = run_recheck(build, python, rounds, max_slowdown, store, terminal)
    return Outcome(record, document_from_recheck, record.verdict.exit_status)
