"""An S3 server on this machine (moto's), which can be stopped and started again with what it holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
import s3fs
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server

BUCKET = "runs"


class S3Server:
    """Serves the bucket `runs`. `seen` are its requests ("PUT", "/runs/first/..."), `before` is called with each."""

    def __init__(self) -> None:
        self._app, self._port, self._server = create_backend_app("s3"), 0, None
        self.seen: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, path: None
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], **names)
        get_backend("s3").reset()  # all servers of a process have one
        self.client.create_bucket(Bucket=BUCKET)

    def start(self) -> None:
        self._server: Any = make_server("127.0.0.1", self._port, self._answer, threaded=True)
        self._port = self._server.port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        self.stop()
        s3fs.S3FileSystem.clear_instance_cache()  # the next server has another port

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append(request)
        self.before(*request)
        return self._app(environ, start_response)

    def sent(self, beginning: str = "") -> list[str]:
        """The objects that were put, in order."""
        return [path for method, path in self.seen if method == "PUT" and path.startswith(f"/{BUCKET}/{beginning}")]
