"""A decoupled model: says about itself what it is asked, or streams the words of its prompt."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

STUBBORN = """
import signal, time
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(s, signal.SIG_IGN)
time.sleep(600)
"""


class TritonPythonModel:
    def initialize(self, args):
        self.settings = (Path(args["model_repository"]) / "1" / "engine.yaml").read_text()
        # An engine that left the process group and does not listen to signals. It must not outlive the server.
        self.child = subprocess.Popen([sys.executable, "-c", STUBBORN, "orca_backend.engine"], start_new_session=True)

    def about(self):
        import orca_backend
        import orca_kernels

        return json.dumps(
            {
                "executable": sys.executable,
                "path": sys.path,
                "modules": [orca_backend.__file__, orca_kernels.__file__],
                "child": self.child.pid,
                "settings": self.settings,
            }
        )

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            *words, last = [self.about()] if text == "about" else text.split()
            for word in words:
                sender.send(self.response(word))
            sender.send(self.response(last), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))])
