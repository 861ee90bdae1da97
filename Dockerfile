# docker build --tag paged-jax .                              for CPUs
# docker build --tag paged-jax --build-arg EXTRAS=serve,cuda13 .    for NVIDIA GPUs
FROM python:3.12-slim

# The server compiles the kernels for CPUs when it first runs.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=serve
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY paged_jax paged_jax
RUN pip install --no-cache-dir ".[$EXTRAS]" && rm -rf /build

RUN useradd --uid 10001 --create-home paged && install --directory --owner paged /cache
USER paged
WORKDIR /home/paged
# Folder of compiled programs. With a volume, later starts of the server are fast.
ENV XDG_CACHE_HOME=/cache
VOLUME /cache
EXPOSE 5000
# The first start compiles programs, which takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/ready')"]
ENTRYPOINT ["python", "-m", "paged_jax.serve", "--host", "0.0.0.0"]
