from __future__ import annotations

import asyncio
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orca_client import AsyncOrcaClient, OrcaClient

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


class ReadyForTheAuthorized(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Ready if the client has a certificate and sends its header."""

    def ServerReady(self, request, context):
        known = context.auth_context().get("x509_common_name") == [b"localhost"]
        token = dict(context.invocation_metadata()).get("authorization")
        return service_pb2.ServerReadyResponse(ready=known and token == "Bearer secret")


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Files of a certificate that signs itself, for both sides, and of its key."""
    directory = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    files = directory / "certificate.pem", directory / "key.pem"
    subprocess.run([*new, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def url(pem):
    certificate, key = (path.read_bytes() for path in pem)
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ReadyForTheAuthorized(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], certificate, True))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def options(pem):
    certificate, key = map(str, pem)
    tls = {"root_certificates": certificate, "private_key": key, "certificate_chain": certificate}
    return {"ssl": True, "headers": {"authorization": "Bearer secret"}, **tls}


@pytest.mark.parametrize("missing", [None, "ssl", "private_key", "root_certificates", "headers"])
def test_tls_options_and_headers_are_used(url, options, missing):
    options.pop(missing, None)
    if missing == "private_key":
        del options["certificate_chain"]
    with OrcaClient(url, **options) as client:
        assert client.server_ready(timeout=2) is (missing is None)


def test_tls_with_asyncio(url, options):
    async def ready(**options):
        async with AsyncOrcaClient(url, **options) as client:
            return await client.server_ready(timeout=2)

    assert asyncio.run(ready(**options))
    assert not asyncio.run(ready())
