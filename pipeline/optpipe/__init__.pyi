from optpipe.api.bench import Bench as Bench
from optpipe.api.build import Build as Build
from optpipe.api.builds import Builds as Builds
from optpipe.api.data import Data as Data
from optpipe.api.history import History as History
from optpipe.api.history import history as history
from optpipe.api.metric import Metric as Metric
from optpipe.api.model import Model as Model
from optpipe.api.policy import Policy as Policy
from optpipe.api.verdict import Dossier as Dossier
from optpipe.api.verdict import Verdict as Verdict
from optpipe.api.verdict import load as load
from optpipe.api.workspace import Workspace as Workspace
from optpipe.core.errors import BadInputError as BadInputError
from optpipe.core.errors import GateError as GateError
from optpipe.core.errors import InconclusiveError as InconclusiveError
from optpipe.core.errors import MissingError as MissingError
from optpipe.core.errors import OptpipeError as OptpipeError
from optpipe.core.errors import StageError as StageError
from optpipe.core.events import Listener as Listener

__all__: list[str]
__version__: str
