# To try `make demo` without installing anything: a small model, padded and packed, on two cores in a few minutes.
#
#   docker build -t vlpack-demo .
#   docker run --rm --shm-size=2g vlpack-demo
#
# Checked with hadolint, not built: its commands were run by hand in a plain Debian 12, except for the builds of torch
# for CPUs, which come from an index that could not be reached there.
FROM python:3.11-slim-bookworm

# Debian's packages are those of the release that is named above. The user has no rights but its own.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 someone

WORKDIR /home/someone/swift_vlpack
RUN chown someone: .
USER 1000

# The builds of torch for CUDA are gigabytes larger; the demo needs none.
ENV UV_TORCH_BACKEND=cpu
COPY --chown=1000 . .
RUN make .venv/.ready
CMD ["make", "demo"]
