"""`TritonReply`: responses as Triton's Python backend wants them. Imported only inside a stub."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orca_backend.serving.endpoint import Generation
from orca_backend.serving.session import Failure, Parcel

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonReply:
    """The way back to one client (`session.Reply`): its response sender, used by one thread."""

    def __init__(self, request: Any) -> None:
        """Take the sender; the request itself may then be forgotten."""
        self._sender = request.get_response_sender()

    def send(self, generation: Generation, parcel: Parcel, *, num_input_tokens: int) -> None:
        """Send one response, the last one if the parcel is final."""
        if parcel.failure is None:
            outputs = _outputs(generation, parcel, num_input_tokens)
            self._sender.send(pb_utils.InferenceResponse(outputs), flags=_FINAL if parcel.is_final else 0)
            return
        try:
            if generation.stream and parcel.text:  # text that was there before the error is the client's
                unfinished = Parcel(text=parcel.text, num_tokens=parcel.num_tokens)
                self._sender.send(pb_utils.InferenceResponse(_outputs(generation, unfinished, num_input_tokens)))
        finally:
            self.refuse(parcel.failure)

    def refuse(self, failure: Failure) -> None:
        """Send an error as the last response. Its text begins with the code: a gRPC stream carries no other."""
        code = getattr(pb_utils.TritonError, failure.code, pb_utils.TritonError.INTERNAL)
        error = pb_utils.TritonError(f"[{failure.code}] {failure.message}", code)
        self._sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)

    def acknowledge(self) -> None:
        """Send one response with empty text as the last one."""
        self._sender.send(pb_utils.InferenceResponse([_strings("text_output", "")]), flags=_FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client has gone: a round trip to the server."""
        return bool(self._sender.is_cancelled())


def _outputs(generation: Generation, parcel: Parcel, num_input_tokens: int) -> list[Any]:
    """The output tensors; text_output is the first, since some clients read only the first."""
    outputs = [_strings("text_output", parcel.text)]
    if generation.return_finish_reason:
        outputs.append(_strings("finish_reason", parcel.finish_reason or "None"))
    if generation.return_num_input_tokens:
        outputs.append(pb_utils.Tensor("num_input_tokens", np.array([num_input_tokens], np.uint32)))
    if generation.return_num_output_tokens:
        outputs.append(pb_utils.Tensor("num_output_tokens", np.array([parcel.num_tokens], np.uint32)))
    return outputs


def _strings(name: str, text: str) -> Any:
    """A string tensor [1]. The object dtype keeps trailing NULs, which numpy's own bytes would lose."""
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
