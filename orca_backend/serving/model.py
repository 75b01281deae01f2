"""`TritonPythonModel`: what Triton's Python backend calls. It parses, and hands over; it never blocks."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from orca_backend.config import SERVER_MARK, STOPPING, ConfigError, EngineConfig, load_config
from orca_backend.serving.drain import DrainWatcher
from orca_backend.serving.endpoint import BadRequest, read_request
from orca_backend.serving.engine_client import EngineStartError
from orca_backend.serving.metrics import Metrics
from orca_backend.serving.pipeline import Pipeline
from orca_backend.serving.session import Failure
from orca_backend.serving.triton import TritonReply


def engine_config(directory: Path, parameters: dict[str, dict[str, str]]) -> EngineConfig:
    """The engine's configuration of the model in `directory`, from the parameters of its config.pbtxt.

    `engine_config` names the file, relative to the directory. A parameter with a dotted name ("scheduler.max_bs"), or
    that of a setting at the top ("dtype"), wins over the file; its value is read as YAML. Raises ConfigError.
    """
    values = {name: parameter["string_value"] for name, parameter in parameters.items()}
    path = directory / values.pop("engine_config", "1/engine.yaml")
    try:
        overrides = {
            name: msgspec.yaml.decode(value)
            for name, value in values.items()
            if "." in name or name in EngineConfig.__struct_fields__
        }
    except msgspec.DecodeError as error:
        raise ConfigError(f"{directory}/config.pbtxt: parameters: {error}") from error
    return load_config(path, overrides)


class TritonPythonModel:
    """One model of the server, with its engine process."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine and wait until it is ready. Raises TritonModelException with the reason."""
        name = args["model_name"]

        def log(message: str) -> None:
            pb_utils.Logger.log_warn(f"[{name}] {message}")

        try:
            parameters = json.loads(args["model_config"]).get("parameters", {})
            config = engine_config(Path(args["model_repository"]), parameters)
            labels = {"model": name, "version": args["model_version"], "policy": config.scheduler.policy}
            self._metrics = Metrics(pb_utils.MetricFamily, labels, log)
            try:
                self._pipeline = Pipeline(config, self._metrics, log)
            except BaseException:
                self._metrics.close()  # a ticker that outlives a model that was not loaded crashes the stub
                raise
        except (ConfigError, EngineStartError, OSError, ValueError) as error:
            raise pb_utils.TritonModelException(f"{name} cannot be loaded: {error}") from error
        server = os.environ.get(SERVER_MARK)
        sign = Path(server, STOPPING) if server else None
        self._drain = DrainWatcher(os.getppid(), config.limits.drain_timeout, self._stop_serving, log, sign=sign)
        info = self._pipeline.info
        pb_utils.Logger.log_info(f"[{name}] serving {info.model_name} ({info.dtype}, {info.device}, {info.policy})")

    def execute(self, requests: list[Any]) -> None:
        """Take the requests and return at once; the responses come from the responder thread."""
        for request in requests:
            reply = TritonReply(request)
            try:
                self._pipeline.accept(read_request(request), reply)
            except BadRequest as error:
                self._pipeline.refuse(reply, Failure(error.code, error.message))
            except Exception as error:  # an exception out of execute would fail the neighbours too
                self._pipeline.refuse(reply, Failure("INTERNAL", f"{type(error).__name__}: {error}"))

    def finalize(self) -> None:
        """End the engine and every thread. Every request has its final response by now."""
        self._drain.close()
        self._pipeline.close()
        self._metrics.close()
        gc.collect()  # what still refers to Triton's objects would keep the stub alive

    def _stop_serving(self) -> None:
        self._pipeline.fail_all("the server is stopping; try again elsewhere")
