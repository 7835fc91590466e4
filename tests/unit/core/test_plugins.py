"""Plug-ins: what another distribution registers is loaded, and one that fails leaves the rest as it was."""

import re
import sys
import tomllib
from importlib import invalidate_caches
from pathlib import Path

import pytest
from tests.fakes.extensions.optpipe_spread import Spread
from tests.fakes.extensions.optpipe_toy import Toy
from tests.unit.evaluate.test_evaluate import BRIGHTNESS, CARD, decode

from optpipe.backends import registry
from optpipe.build.doctor import diagnose_machine
from optpipe.core import plugins
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.metrics import registry as metrics
from optpipe.core.metrics.sampled import read_score_plugin
from optpipe.evaluate.tasks import user_file
from optpipe.workspace.environment import list_packages

ROOT = Path(__file__).parents[3]
MODULE = """
from tests.fakes.extensions.optpipe_toy import Toy

class Other(Toy):
    name = "other"

class Nameless(Toy):
    name = "nameless"
    packages = ()

class Unfinished(Toy):
    name = "unfinished"
    load = None

text = "not a backend"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution `strangers` with these entry points, and forgets what was loaded before."""

    def write(entries, variable=None, module=MODULE, group="optpipe.backends"):
        (tmp_path / "strangers_module.py").write_text(module)
        folder = tmp_path / "strangers-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.5\n")
        lines = [f"{name} = strangers_module:{attribute}" for name, attribute in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.setenv(plugins.VARIABLE, ",".join(entries) if variable is None else variable)
        forget()
        if group != "optpipe.backends":
            return {}
        return plugins.load_plugins(group, tuple(registry.BACKENDS), registry.read_backend_plugin)

    def forget():
        invalidate_caches()
        plugins.list_entry_points.cache_clear()
        plugins.list_distributions.cache_clear()
        list_packages.cache_clear()
        sys.modules.pop("strangers_module", None)

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "FAILURES", failures := [])
    monkeypatch.setattr(registry, "FAILURES", failures)
    monkeypatch.setattr("optpipe.build.doctor.FAILURES", failures)
    monkeypatch.setattr(user_file, "FAILURES", failures)
    yield write
    monkeypatch.undo()
    forget()


def test_a_stranger_s_backend_is_loaded_and_its_version_recorded(install):
    loaded = install({"other": "Other"})
    assert isinstance(loaded["other"], Toy)
    assert list_packages()["strangers"] == "1.5"


@pytest.mark.parametrize(
    ("entries", "module", "reason"),
    [
        ({"other": "Other"}, "import nothing_of_that_name", "nothing_of_that_name"),
        ({"other": "Other"}, "raise SystemError('no driver')", "no driver"),
        ({"other": "Missing"}, MODULE, "Missing"),
        ({"other": "text"}, MODULE, "Backend"),
        ({"another": "Other"}, MODULE, "other"),
        ({"onnxruntime": "Other"}, MODULE, "already taken"),
        ({"nameless": "Nameless"}, MODULE, "packages"),
    ],
)
def test_a_plugin_that_fails_is_named_and_the_rest_goes_on(install, entries, module, reason):
    (name,) = entries
    assert install(entries, module=module) == {}
    (failure,) = plugins.FAILURES
    assert (failure.name, failure.distribution) == (name, "strangers")
    assert reason in failure.reason
    assert failure.reason in [tool.note for tool in diagnose_machine()]
    if name not in registry.BACKENDS:
        with pytest.raises(MissingError, match="strangers"):
            registry.backends_from_text(name, None)
        with pytest.raises(MissingError, match="strangers"):
            registry.BACKENDS[name]
    assert registry.backends_from_text("onnxruntime", None)


@pytest.mark.parametrize(("variable", "names"), [("", set()), ("other", {"other"}), ("x", set())])
def test_only_allowed_plugins_are_imported(install, variable, names):
    entries = {"other": "Other", "broken": "Missing"}
    assert set(install(entries, variable=variable)) == names
    assert plugins.FAILURES == []


def test_an_artifact_of_a_backend_that_is_not_here_names_what_to_install():
    with pytest.raises(MissingError, match="distribution"):
        registry.BACKENDS["from-another-machine"]


def test_a_stranger_s_task_is_found_by_its_name(install):
    install({"brightness": "Brightness"}, module=BRIGHTNESS, group="optpipe.tasks")
    task = user_file.find_user_task("brightness")
    assert task.name == "user:brightness"
    assert "strangers_module.py" in task.describe_scoring(CARD)
    assert len(decode(task, 0.0)[1]) == 8


@pytest.mark.parametrize("attribute", ["Missing", "Empty"])
def test_a_stranger_s_task_that_fails_is_named(install, attribute):
    module = BRIGHTNESS + "class Empty:\n    name = 'empty'\n"
    install({"brightness": attribute}, module=module, group="optpipe.tasks")
    with pytest.raises(MissingError, match="strangers"):
        user_file.find_user_task("brightness")


def test_a_task_that_nobody_brings_is_refused(install):
    install({}, group="optpipe.tasks")
    with pytest.raises(BadInputError, match="--task"):
        user_file.find_user_task("brightness")


SPREAD = """
from tests.fakes.extensions.optpipe_spread import Spread

class Chosen(Spread):
    judges_peak = True
"""


def test_a_stranger_s_metric_is_loaded_with_its_version(install):
    install({"spread": "Spread"}, module=SPREAD, group="optpipe.metrics")
    loaded = plugins.load_plugins("optpipe.metrics", (), metrics.read_metric_plugin)
    assert isinstance(loaded["spread"], Spread)
    assert metrics.name_distribution("optpipe.metrics", "spread") == "strangers 1.5"


@pytest.mark.parametrize(
    ("attribute", "module", "reason"),
    [
        ("Missing", SPREAD, "Missing"),
        ("Chosen", SPREAD, "judges_peak"),
        ("Spread", "raise SystemError('no driver')", "no driver"),
        ("Spread", "Spread = 3", "not an optpipe"),
    ],
)
def test_a_stranger_s_metric_that_fails_is_named(install, attribute, module, reason):
    install({"spread": attribute}, module=module, group="optpipe.metrics")
    assert plugins.load_plugins("optpipe.metrics", (), metrics.read_metric_plugin) == {}
    assert reason in plugins.FAILURES[0].reason
    assert "strangers" in metrics.METRICS.explain_missing("spread")
    assert plugins.FAILURES[0].reason in [tool.note for tool in diagnose_machine()]


@pytest.mark.parametrize(
    ("page", "group"),
    [
        ("add-a-backend", "optpipe.backends"),
        ("add-a-metric", "optpipe.metrics"),
        ("add-a-score", "optpipe.scores"),
        ("add-a-task", "optpipe.tasks"),
    ],
)
def test_the_files_of_a_page_for_contributors_are_a_plug_in(install, page, group):
    """The page's pyproject.toml registers a class of the module that the page shows first."""
    text = (ROOT / "docs" / "contributing" / f"{page}.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"\{literalinclude\} \.\./\.\./(\S+)", text)
    (project,) = re.findall(r"```toml\n(\[project\].+?)```", text, flags=re.DOTALL)
    named = tomllib.loads(project)["project"]["entry-points"][group]
    targets = {name: target.partition(":") for name, target in named.items()}
    assert {module for module, _, _ in targets.values()} == {(ROOT / shown).stem}

    code = (ROOT / shown).read_text(encoding="utf-8")
    entries = {name: attribute for name, (_, _, attribute) in targets.items()}
    install(entries, module=code, group=group)
    readers = {
        "optpipe.backends": registry.read_backend_plugin,
        "optpipe.metrics": metrics.read_metric_plugin,
        "optpipe.scores": read_score_plugin,
        "optpipe.tasks": user_file.UserTask.from_plugin,
    }
    assert plugins.load_plugins(group, (), readers[group]).keys() == named.keys()
    assert plugins.FAILURES == []
