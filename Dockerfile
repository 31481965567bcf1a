# docker build -t jaxhal .                                   runs on the CPU
# docker build -t jaxhal:cuda --build-arg EXTRAS=all,cuda .  on NVIDIA GPUs: run it with --gpus all
# docker run --rm -v "$PWD:/data" -v jaxhal:/cache jaxhal detect --input answers.jsonl
FROM python:3.13-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
ARG EXTRAS=all
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[$EXTRAS]"
# Models and compiled programs are kept in a volume, files are read and written in another.
ENV JAXHAL_CACHE=/cache HF_HOME=/cache/huggingface NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home jaxhal && install -d -o jaxhal /cache /data
USER jaxhal
VOLUME /cache
WORKDIR /data
ENTRYPOINT ["jaxhal"]
CMD ["--help"]
