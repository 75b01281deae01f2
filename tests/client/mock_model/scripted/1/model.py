"""A model that does what its prompt says, to test clients with behaviour no language model shows on demand.

The prompt is a JSON object:
- "tokens": list of strings, sent one per response, "delay" seconds before each; the last one carries FINAL.
- "fail_at": answer with an error instead of the token with this index; "message" is its text, and "times" how many
  tries of the same request id fail (default: all).
- "hang_at": at this index stop answering until the request is cancelled.
- "bare_final": end with a FINAL flag alone, after all tokens.
- "report": answer at once with one token, a JSON object of what is known about the request with this id, or with the
  id "" about the latest.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}
        self.threads = []

    def execute(self, requests):
        for request in requests:
            raw = {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}
            inputs = {name: value.decode() if isinstance(value, bytes) else bool(value) for name, value in raw.items()}
            args = (request, request.request_id(), inputs, request.timeout(), request.get_response_sender())
            thread = threading.Thread(target=self.serve, args=args)
            self.threads = [t for t in self.threads if t.is_alive()] + [thread]
            thread.start()

    def finalize(self):
        for thread in self.threads:
            thread.join()

    def serve(self, request, request_id, inputs, timeout_us, sender):
        script = json.loads(inputs["text_input"])
        if inputs.get("apply_chat_template"):
            script = json.loads(script[-1]["content"])
        if "report" in script:
            known = json.dumps(self.seen.get(script["report"], {}))
            sender.send(self.response([known], "stop", 1), FINAL)
            return
        seen = self.seen[""] = self.seen.setdefault(request_id, {"tries": 0})
        seen["tries"] += 1
        seen.update(state="running", inputs=inputs, timeout_us=timeout_us)
        seen["state"] = self.play(script, request, inputs.get("stream", False), seen["tries"], sender)

    def play(self, script, request, stream, tries, sender):
        tokens = script["tokens"]
        fails = "fail_at" in script and tries <= script.get("times", tries)
        held = []
        for index in range(len(tokens) + 1):
            if fails and index == script["fail_at"]:
                sender.send(pb.InferenceResponse(error=pb.TritonError(script["message"])), FINAL)
                return "failed"
            until = time.monotonic() + (float("inf") if index == script.get("hang_at") else script.get("delay", 0))
            while True:
                if request.is_cancelled():
                    sender.send(flags=FINAL)
                    return "cancelled"
                if time.monotonic() >= until:
                    break
                time.sleep(min(0.02, max(0, until - time.monotonic())))
            if index == len(tokens):
                break
            held.append(tokens[index])
            last = index == len(tokens) - 1 and not fails
            if stream or last:
                bare = script.get("bare_final", False)
                response = self.response(held, "length" if last else "None", len(held))
                sender.send(response, FINAL if last and not bare else 0)
                held = []
                if last:
                    if bare:
                        sender.send(flags=FINAL)
                    return "done"

    def response(self, tokens, finish_reason, count):
        return pb.InferenceResponse(
            [
                pb.Tensor("text_output", np.array(["".join(tokens).encode()], dtype=object)),
                pb.Tensor("finish_reason", np.array([finish_reason.encode()], dtype=object)),
                pb.Tensor("num_input_tokens", np.array([7], dtype=np.uint32)),
                pb.Tensor("num_output_tokens", np.array([count], dtype=np.uint32)),
            ]
        )
