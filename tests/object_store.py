"""A local S3 server as a process of its own, which a test may kill and start again."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from ports import free_port

_PROGRAM = """
import sys, time
from moto.server import ThreadedMotoServer
ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False).start()
time.sleep(10**6)
"""
ACCESS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "tester"}


class ObjectStore:
    """The server; what it holds ends with its process."""

    def __init__(self, port: int):
        self._port, self._process = port, None
        self.url = f"http://127.0.0.1:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which s3:// addresses lead to this server."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1", **ACCESS}

    def start(self) -> None:
        """Starts the server, without any bucket."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 300
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url, timeout=60):
                return
            time.sleep(0.1)
        raise AssertionError("the object store did not start")

    def kill(self) -> None:
        """Ends the server, as an outage does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def make_bucket(self, name: str) -> None:
        """Makes an empty bucket."""
        self._client().create_bucket(Bucket=name)

    def buckets(self) -> list[str]:
        """Names of the buckets."""
        return [each["Name"] for each in self._client().list_buckets()["Buckets"]]

    def remove_bucket(self, name: str) -> None:
        """Removes a bucket and all in it."""
        from botocore.exceptions import ClientError

        while name in self.buckets():
            for key in self.keys(name):
                self._client().delete_object(Bucket=name, Key=key)
            with contextlib.suppress(ClientError):  # A request under way may have written.
                self._client().delete_bucket(Bucket=name)

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Names of the objects, sorted."""
        pages = self._client().get_paginator("list_objects_v2")
        listing = pages.paginate(Bucket=bucket, Prefix=prefix)
        return sorted(each["Key"] for page in listing for each in page.get("Contents", ()))

    def read(self, bucket: str, key: str) -> bytes:
        """Content of an object."""
        return self._client().get_object(Bucket=bucket, Key=key)["Body"].read()

    def write(self, bucket: str, key: str, content: bytes) -> None:
        """Writes an object."""
        self._client().put_object(Bucket=bucket, Key=key, Body=content)

    def download(self, bucket: str, prefix: str, folder) -> None:
        """Writes the objects below a prefix as files, with a library that is not ours."""
        for key in self.keys(bucket, prefix):
            path = folder / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(bucket, key))

    def _client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="tester",
            aws_secret_access_key="tester",
        )


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with the environment of this process set to it."""
    import s3fs

    store = ObjectStore(free_port())
    before = dict(os.environ)
    try:
        store.start()
        s3fs.S3FileSystem.clear_instance_cache()  # Those of another server's port.
        os.environ.update(store.environment)
        yield store
    finally:
        store.kill()
        for name in store.environment:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
