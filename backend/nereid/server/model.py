"""TritonPythonModel: what the server's Python backend calls. Each `1/model.py` is an import of this class.

Heavy imports wait for `initialize`: the server runs `auto_complete_config` in a process of its own first.
"""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereid.errors import ConfigError, shorten
from nereid.server.tensors import INPUTS, OUTPUTS, declared

if TYPE_CHECKING:
    from nereid.server.arrays import OutputShape
    from nereid.server.housekeeper import Housekeeper
    from nereid.server.metrics import EngineMetrics
    from nereid.server.service import Service
    from nereid.server.tracing import Tracer
    from nereid.server.unload_watch import UnloadWatch

_LOG_LEVEL = "NEREID_LOG_LEVEL"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_COUNTS_INTERVAL_S = 1.0  # no scrape comes more often


class TritonPythonModel:
    """One instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Supply every tensor, so that a config.pbtxt may leave them out; what it says itself stays."""
        said = config.as_dict()
        batched = bool(said.get("max_batch_size"))
        known = {tensor["name"] for tensor in (*said.get("input", ()), *said.get("output", ()))}
        for spec in declared(INPUTS, batched=batched):
            if spec.name not in known:
                config.add_input(spec.as_config(optional=True))
        for spec in declared(OUTPUTS, batched=batched):
            if spec.name not in known:
                config.add_output(spec.as_config(optional=False))
        if not batched:
            config.set_max_batch_size(0)
        if "model_transaction_policy" not in said:
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model. An error here is the reason that the server shows for a model that did not load."""
        # Before torch is loaded. Its threads wait for each other hundreds of times a step; where they spin for long,
        # and a client or a second model wants the processor too, a step takes twenty times as long. Never to spin
        # costs half a step more on a quiet machine; this is some microseconds.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        from nereid.config import SETTINGS_FILE, EngineConfig
        from nereid.server.arrays import output_shapes
        from nereid.server.housekeeper import Housekeeper, at_most_every
        from nereid.server.metrics import EngineMetrics
        from nereid.server.parent_arguments import parent_arguments
        from nereid.server.parent_watch import ParentWatch
        from nereid.server.request_parser import Deployment
        from nereid.server.service import Service
        from nereid.server.tracing import make_tracer
        from nereid.server.triton_io import to_failure
        from nereid.server.unload_watch import UnloadWatch, parent_address

        name, version = args["model_name"], args["model_version"]
        _log_to_stderr(name)
        folder = Path(args["model_repository"]) / version
        triton_config = json.loads(args["model_config"])
        config = EngineConfig.load(folder / SETTINGS_FILE)
        deployment = Deployment.of(triton_config, config)
        self._shapes: dict[str, OutputShape] = output_shapes(triton_config)
        tracer = make_tracer(name, version, config.otlp_traces_endpoint, parent_arguments())
        self._tracer: Tracer | None = tracer
        try:
            self._service: Service = Service(config, folder, deployment, to_failure, tracer)
        except ConfigError as error:
            raise ConfigError(f"{folder / SETTINGS_FILE}: {error}") from error
        self._metrics: EngineMetrics = EngineMetrics(name, version, self._service.loaded)
        self._watch: UnloadWatch = UnloadWatch(name, parent_address(), self._service.drain)
        # The parent first: to publish metrics to a server that is gone would wait for ever, and lock the interpreter.
        counts = at_most_every(_COUNTS_INTERVAL_S, self._add_counts)
        tasks = [ParentWatch().check, self._show_state, counts, self._watch.check]
        self._housekeeper: Housekeeper = Housekeeper([*tasks, tracer.export] if tracer else tasks)
        self._housekeeper.start()

    def _show_state(self) -> None:
        self._metrics.show(self._service.engine.stats)

    def _add_counts(self) -> None:
        self._metrics.add(self._service.engine.take_report(), self._service.outcomes.take())

    def execute(self, requests: list[Any]) -> None:
        """Take requests and return at once; every answer goes by the request's response sender."""
        from nereid.server.triton_io import TritonReplyChannel, read_request

        self._watch.saw_ready()
        for request in requests:
            self._service.accept(partial(read_request, request), TritonReplyChannel(request, self._shapes))

    def is_ready(self) -> bool:
        """Asked by newer servers; 2.51 does not ask."""
        return self._service.engine.alive

    def finalize(self) -> None:
        """Drain and free everything."""
        self._housekeeper.close()
        self._service.close()
        self._metrics.close()
        if self._tracer:
            self._tracer.close()
        del self._service, self._metrics, self._housekeeper


def _log_to_stderr(model_name: str) -> None:
    """As much as the environment says. Raises ConfigError where it says no level."""
    level = os.environ.get(_LOG_LEVEL, "INFO")
    if level not in _LOG_LEVELS:
        allowed = f"{', '.join(_LOG_LEVELS)}, in the server's environment"
        raise ConfigError(f"{_LOG_LEVEL}: got {shorten(level)}; allowed: {allowed}")
    # The server passes its stub's stderr on; basicConfig does nothing where logging is set up already.
    logging.basicConfig(format=f"%(asctime)s {model_name} %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("nereid").setLevel(level)
