"""A tritonserver process: started on a run-time copy of a model repository, watched until ready, stopped cleanly."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from rich.console import Console

from orca_backend.config import SERVER_MARK, STOPPING, EngineConfig
from orca_backend.models.spec import ModelSpec
from orca_backend.server.activity import activity
from orca_backend.server.installation import STUB, Installation, ServerError
from orca_backend.server.log import ServerLog
from orca_backend.server.ports import free_ports, is_free, listening_ports
from orca_backend.server.repository import check_checkpoint, choose_models, copy_repository

POLL_SECONDS = 0.1
METRICS_SECONDS = 2  # models publish theirs twice a second; the first time after they are ready
EXIT_MARGIN_SECONDS = 10  # tritonserver's exit timeout above the longest drain; and ours above tritonserver's
USUAL_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
START_ATTEMPTS = 3  # with other ports each time: somebody may take one while the models load
START_GRACE_SECONDS = 5  # for a server that is given up before it was ready: it has no requests to finish
ENGINE_MODULE = "orca_backend.engine"
PORT_IN_USE = "already in use"  # in tritonserver's log


class PortTakenError(ServerError):
    """Somebody else listens on a port that was free when the server was started."""


class TritonServer:
    """A context manager around one tritonserver. Entering returns when every model is ready.

    `models` None loads `orca`, or every model where the repository has none of that name. A port of 0 is a free one,
    and None the usual one if it is free; these are chosen anew when somebody takes them while the models load.
    `overrides` maps dotted names of engine.yaml settings to values. `log` is a file, "-" our own output, and None is
    run/NAME.log, overwritten unless another running server writes there.
    Raises ConfigError for models and settings that do not exist, and on entering ServerError when the server does not
    become ready within `start_timeout` seconds, with the lines of the log that say why.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        models: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        http_port: int | None = 0,
        grpc_port: int | None = 0,
        metrics_port: int | None = 0,
        overrides: Mapping[str, Any] | None = None,
        log: str | Path | None = None,
        name: str = "tritonserver",
        start_timeout: float = 600.0,
        console: Console | None = None,
    ) -> None:
        self.repository = Path(repository)
        self.models = choose_models(self.repository, models)
        self.host = host
        self._wanted = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        self._ports: dict[str, int] = {}
        self._log = ServerLog(log, name)
        self._overrides = dict(overrides or {})
        self._start_timeout = start_timeout
        self._console = console or Console(stderr=True)
        self._exit_timeout = 0
        self._configs: dict[str, EngineConfig] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._choose_ports()

    # Where it is -----------------------------------------------------------------------------------------------------

    @property
    def http_port(self) -> int:
        """The port of the HTTP service."""
        return self._ports["http"]

    @property
    def grpc_port(self) -> int:
        """The port of the gRPC service."""
        return self._ports["grpc"]

    @property
    def metrics_port(self) -> int:
        """The port of the Prometheus metrics."""
        return self._ports["metrics"]

    @property
    def log_path(self) -> Path:
        """The file with the server's log, "-" if it is our own output."""
        return self._log.path

    @property
    def drain_seconds(self) -> int:
        """How long requests in flight may go on after the server was told to stop."""
        return self._exit_timeout - EXIT_MARGIN_SECONDS

    @property
    def _address(self) -> str:
        """The host for clients on this machine."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def http_url(self) -> str:
        """For curl and browsers: http://HOST:PORT."""
        return f"http://{self._address}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """For gRPC clients: HOST:PORT."""
        return f"{self._address}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """For Prometheus."""
        return f"http://{self._address}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """The process id of tritonserver. Raises ServerError if it was not started."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def stub_pids(self) -> list[int]:
        """The process ids of the Python backend's stubs (one per model instance)."""
        return [process.pid for process in self._descendants() if _names(process, STUB)]

    @property
    def engine_pids(self) -> list[int]:
        """The process ids of the engines (one per model)."""
        return [process.pid for process in self._descendants() if _names(process, ENGINE_MODULE)]

    def metadata(self) -> dict[str, Any]:
        """What the server says of itself: name, version, extensions."""
        with urllib.request.urlopen(f"{self.http_url}/v2", timeout=5) as response:
            return json.load(response)

    def token_limits(self) -> dict[str, tuple[int, int]]:
        """By model, the tokens in its attention K/V pool, and the most that one request (prompt and answer) may take.

        Models that publish no such pool are left out.
        """
        deadline = time.monotonic() + METRICS_SECONDS
        while True:
            with urllib.request.urlopen(self.metrics_url, timeout=5) as response:
                pools = kv_pools(response.read().decode())
            if all(pools.values()) or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        limits = {}
        for model in sorted(model for model in self._configs if pools.get(model)):
            config, pool = self._configs[model], pools[model]
            positions = ModelSpec.read(config.model).max_positions
            limits[model] = pool, min(config.limits.max_model_len or positions, positions, pool)
        return limits

    # Start -----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> TritonServer:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start()
                self._wait_ready()
                return self
            except PortTakenError as error:
                self.stop(START_GRACE_SECONDS)
                asked_for = any(self._wanted[service] == port for service, port in self._taken().items())
                if asked_for or attempt == START_ATTEMPTS:
                    raise
                self._console.print(f"{str(error).capitalize()}; starting again.", highlight=False, markup=False)
                self._choose_ports()
            except BaseException:
                self.stop(START_GRACE_SECONDS)
                raise
        raise AssertionError("the last attempt returns or raises")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _choose_ports(self) -> None:
        """Give every service the port that was asked for, or one that is free now."""
        free = iter(free_ports(len(self._wanted), self.host))
        for service, wanted in self._wanted.items():
            usual = USUAL_PORTS[service]
            if wanted is None and is_free(usual, self.host):
                self._ports[service] = usual
            else:
                self._ports[service] = wanted or next(free)
            if wanted is None and self._ports[service] != usual:
                self._console.print(f"Port {usual} is taken; {service} gets {self._ports[service]}.", highlight=False)

    def _taken(self) -> dict[str, int]:
        """The ports of ours, by service, on which nobody could listen now."""
        return {service: port for service, port in self._ports.items() if not is_free(port, self.host)}

    def _start(self) -> None:
        installation = Installation.find()
        for port in self._taken().values():
            raise ServerError(f"port {port} is taken: choose another one, or 0 for a free one")
        self._directory = Path(tempfile.mkdtemp(prefix="orca-"))
        repository = self._directory / "model_repository"
        self._configs = copy_repository(self.repository, repository, self.models, self._overrides)
        for config in self._configs.values():
            check_checkpoint(Path(config.model))
        drain = max((config.limits.drain_timeout for config in self._configs.values()), default=0.0)
        self._exit_timeout = math.ceil(drain) + EXIT_MARGIN_SECONDS
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={installation.assemble(self._directory / 'backends')}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self.models),
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={self._exit_timeout}",
            *(f"--{service}-address={self.host}" for service in ("http", "grpc", "metrics")),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
        ]
        with self._log.open() as log:
            # Its own session: Ctrl-C in the terminal reaches us, and we stop it in order.
            self._process = subprocess.Popen(
                command,
                env=installation.environment() | {SERVER_MARK: str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        with activity(f"Starting tritonserver with {', '.join(self.models) or 'no model'}", self._console):
            while not self._is_ready():
                if not self.is_alive():
                    taken = self._taken().values()
                    if taken and PORT_IN_USE in self._log.text():
                        ports = " and ".join(map(str, taken))
                        raise PortTakenError(f"port {ports} was taken while the models loaded")
                    raise ServerError(f"tritonserver ended before it was ready\n{self.explain()}")
                if time.monotonic() > deadline:
                    raise ServerError(f"tritonserver was not ready after {self._start_timeout:g} s\n{self.explain()}")
                time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        """Whether all ports are ours (another server may have taken one meanwhile), and answer."""
        if not set(self._ports.values()) <= listening_ports(self._descendants(itself=True)):
            return False
        try:
            for url in (f"{self.http_url}/v2/health/ready", self.metrics_url):
                urllib.request.urlopen(url, timeout=5).close()
            return self.is_alive()
        except (urllib.error.URLError, OSError):
            return False

    # While it runs ---------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Whether the tritonserver process runs."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait until the process ends by itself; its exit code."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.wait()

    def explain(self) -> str:
        """The lines of the log that tell what went wrong, or its last ones, after the log's path."""
        return self._log.explain()

    def _descendants(self, itself: bool = False) -> list[psutil.Process]:
        try:
            server = psutil.Process(self.pid)
            return [*([server] if itself else []), *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    # Stop ------------------------------------------------------------------------------------------------------------

    def stop(self, patience: float | None = None) -> int | None:
        """Ask the server to end, then make sure that nothing of it is left. Its exit code, None if it never started.

        Requests in flight get the models' drain timeout, or all of it `patience` seconds. A second interrupt while
        waiting ends everything at once.
        """
        try:
            if self._process is not None:
                try:
                    if self.is_alive():
                        if self._directory is not None:
                            (self._directory / STOPPING).touch()  # for the stubs: the server does not tell them
                        self._process.send_signal(signal.SIGTERM)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            self._process.wait(patience or self._exit_timeout + EXIT_MARGIN_SECONDS)
                finally:
                    self._kill()
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
        return None if self._process is None else self._process.returncode

    def _kill(self) -> None:
        """End what is left: of the server's process group, and what left that group."""
        assert self._process is not None
        psutil.wait_procs(self._family(), timeout=1)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(10):  # again, since one may have started another meanwhile
            if not (family := self._family()):
                break
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        """Every living process that carries this server's mark, the server included."""
        return [process for process in psutil.process_iter() if _mark(process) == str(self._directory)]


def kv_pools(metrics: str) -> dict[str, int]:
    """Every model's attention K/V pool in tokens, 0 where it is not published yet, from Prometheus text."""
    found = {}
    for labels, value in re.findall(r"^orca_kv_slots\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if label["state"] == "total":
            found[label["model"]] = int(float(value))
    return found


def _mark(process: psutil.Process) -> str | None:
    """Which server a process descends from."""
    try:
        return process.environ().get(SERVER_MARK)
    except psutil.Error:  # it has ended, or belongs to somebody else
        return None


def _names(process: psutil.Process, word: str) -> bool:
    """Whether `word` is in one of the process's arguments."""
    try:
        return any(word in argument for argument in process.cmdline())
    except psutil.Error:
        return False
