# To try `make demo` without installing anything: a small model, padded and packed, on two cores in a few minutes.
#
#   docker build -t vlpack-demo .
#   docker run --rm --shm-size=2g vlpack-demo
#
# Checked with hadolint, and its commands were run in a plain Debian by hand; it was never built: no Docker was there.
FROM python:3.11-slim-bookworm

# The Makefile sets everything up. Versions of Debian's packages are those of the release that is named above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home someone

USER someone
WORKDIR /home/someone/swift_vlpack

# What decides about the environment comes first, so that a change of code installs nothing anew.
COPY --chown=someone Makefile pyproject.toml LICENSE ./
COPY --chown=someone docs/_package docs/_package
COPY --chown=someone swift_vlpack/__init__.py swift_vlpack/__init__.py
RUN make environment

COPY --chown=someone . .
CMD ["make", "demo"]
