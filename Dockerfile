# An image with Python, torch and Lockstep: a host of a run (docs/ray.md).
#
#   docker build -t lockstep .                                                                    torch's default build: CUDA
#   docker build -t lockstep --build-arg TORCH="torch==2.13.0 --index-url URL-OF-YOUR-WHEELS" .   another build: CPU
#
#   --build-arg EXTRAS="[text,store,hub]"  optional packages of pyproject.toml: recipes (the default), object store, Hugging Face data;
#                                       ray for a Ray cluster; "" for scripts with a Session
#   --build-arg APT=g++                 Debian packages: torch.compile needs a compiler
#
# CUDA needs no other base: torch's wheels contain its libraries, and the container runtime brings the driver.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH="torch==2.13.0"
RUN python3 -m venv /opt/lockstep
ENV PATH=/opt/lockstep/bin:$PATH
# torch comes first and alone: a later change of Lockstep reuses this layer, and pip cannot choose another build.
RUN pip install --no-cache-dir ${TORCH}
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY recipes recipes
COPY src src
ARG EXTRAS="[text]"
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt && pip install --no-cache-dir -c /tmp/constraints.txt ".${EXTRAS}"

# The result has neither the sources nor the tools of the build.
FROM ${BASE}
ARG APT=
RUN [ -z "${APT}" ] || { apt-get update && apt-get install -y --no-install-recommends ${APT} && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/lockstep /opt/lockstep
ENV PATH=/opt/lockstep/bin:$PATH
# Mount the shared disk here: relative run folders then outlive the container.
WORKDIR /shared
# The agent is process 1. SIGTERM saves and stops the run: give `docker stop` more than ten seconds.
ENTRYPOINT ["lockstep"]
