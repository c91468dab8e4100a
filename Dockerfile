# The suite with its locked packages, and a command in it:
#   docker build -t capmoe-eval .                          # --build-arg TORCH=gpu for NVIDIA's GPUs
#   docker run -v "$PWD/results:/suite/results/mine" capmoe-eval run method=score gamma=1.0 tasks=obqa results_dir=results/mine
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm
ARG TORCH=cpu
# Bubblewrap confines programs that models write. The packages are Debian's, whose older versions leave its archive.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /suite
COPY Makefile constraints.txt ./
COPY lock lock
RUN make .venv/.locked TORCH=${TORCH}
COPY . .
RUN make install TORCH=${TORCH}
ENV PATH=/suite/.venv/bin:$PATH
ENTRYPOINT ["capmoe-eval"]
CMD ["--help"]
