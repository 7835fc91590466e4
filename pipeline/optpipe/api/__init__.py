"""The library: the objects that `import optpipe` offers, and the pytest plug-in.

    workspace     Workspace: where everything is stored, and who listens
    model         Model: a module in memory, a name, an ONNX file, a card
    data          Data: drawn once, hashed whatever its order
    metric        Metric: a callable that scores samples
    build         Builds and Build: what was built, callable
    bench         Bench: figures with their intervals and verdicts
    evaluation    Evaluation: scores on paired predictions
    history       History and history: a model's runs in order, and the changes of its figures
    policy        Policy: limits, as canonical TOML
    verdict       Verdict, Dossier, and load
    door          what every call passes: one at a time, the caller's state given back, errors in arguments
    progress      bars in a terminal or notebook
    pytest_plugin the fixture `optpipe`

Each object calls the rooms below and holds no logic about models, artifacts, or measurement; the command line calls the
same functions. The top level imports these names at their first use: see `optpipe/__init__.py`.
"""
